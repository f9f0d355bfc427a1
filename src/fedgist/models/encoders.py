"""Pretrained encoders of images and texts of the library transformers, with their own preparation.

``model.name = "transformers:FOLDER"`` reads a folder that ``save_pretrained`` wrote, or names a
repository of the Hugging Face hub. Weights are read from safetensors alone, and code of a
repository is never run. Images are from 0 to 1 (``data.normalize = "none"``). Texts are split by
the tokenizer of the same folder (``data.words.tokenizer``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedgist.core.objectives.next_word import SPECIAL
from fedgist.errors import first_line
from fedgist.models import PREFIX

NEED = "model.name = 'transformers:...' needs transformers: pip install 'fedgist[encoders]'"
CONFIG = "preprocessor_config.json"
HUB_S = 5.0  # seconds in which the hub must answer
COLORS = 3
#: How PIL numbers the ways to resize that are known here, and torch's names of them.
RESAMPLE = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}
WHOLE = 384  # from this size on, ConvNeXt's preparation crops nothing
KINDS = ("ViT", "DeiT", "Bit", "CLIP", "ConvNext")  # of image processors
PLACES, MAPS = 3, 4  # dimensions of features of patches, and of maps of features


@dataclass(frozen=True)
class Preparation:
    """What an encoder does to an image: its size, a crop of its center, and its normalization.

    ``size`` is (height, width), or the shorter edge alone; None keeps the image.
    """

    size: tuple[int, int] | int | None
    resample: int
    crop: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(config: Mapping[str, object]) -> Preparation:
        """Return the preparation of a ``preprocessor_config.json``.

        Raises
        ------
        ValueError
            If it is of a kind that is not known here.
        """
        kind = str(config.get("image_processor_type") or config.get("feature_extractor_type", ""))
        for ending in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(ending)
        if kind not in KINDS:
            raise ValueError(f"{CONFIG} is of the kind {kind!r}; known: {', '.join(KINDS)}")
        resample = int(_number(config, "resample", 3))
        if resample not in RESAMPLE:
            raise ValueError(f"{CONFIG}: resample = {resample}; known: {sorted(RESAMPLE)}")
        size, crop = _size(config.get("size")), _size(config.get("crop_size"))
        if not config.get("do_resize", True):
            size = None
        if not config.get("do_center_crop", kind in {"Bit", "CLIP"}):
            crop = None
        if kind == "ConvNext" and isinstance(size, int):
            size, crop = _of_convnext(size, _number(config, "crop_pct", 224 / 256))
        mean, std = _colors(config, "image_mean", 0.0), _colors(config, "image_std", 1.0)
        if not config.get("do_normalize", True):
            mean, std = (0.0,) * COLORS, (1.0,) * COLORS
        square = (crop, crop) if isinstance(crop, int) else crop
        return Preparation(size, resample, square, mean, std)

    def __call__(self, x: Tensor) -> Tensor:
        """Return images (batch, 3, height, width) for the encoder, of images from 0 to 1.

        ``x`` is (batch, 1 or 3, height, width).
        """
        if x.shape[1] == 1:
            x = x.expand(-1, COLORS, -1, -1)
        size = self.size
        if isinstance(size, int):
            short, long = sorted(x.shape[-2:])
            other = int(size * long / short)
            size = (size, other) if x.shape[-2] <= x.shape[-1] else (other, size)
        if size is not None and tuple(x.shape[-2:]) != size:
            # PIL resizes rows, and then columns, of bytes
            for shape in ((x.shape[-2], size[1]), size):
                x = _resized(x, shape, RESAMPLE[self.resample])
        if self.crop is not None:
            x = _cropped(x, self.crop)
        mean, std = (torch.tensor(v, dtype=x.dtype, device=x.device) for v in (self.mean, self.std))
        return (x - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) else default


def _colors(config: Mapping[str, object], key: str, default: float) -> tuple[float, ...]:
    """Return a number for each color, as a configuration states them."""
    value = config.get(key)
    if not isinstance(value, list | tuple) or len(value) != COLORS:
        return (default,) * COLORS
    return tuple(float(number) for number in value)


def _size(value: object) -> tuple[int, int] | int | None:
    """Return (height, width), or the shorter edge, as a configuration states it."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        if value.get("shortest_edge"):
            return int(value["shortest_edge"])
        if value.get("height") and value.get("width"):
            return int(value["height"]), int(value["width"])
    raise ValueError(f"{CONFIG}: size = {value!r} is neither height and width nor shortest_edge")


def _of_convnext(size: int, share: float) -> tuple[tuple[int, int] | int, tuple[int, int] | None]:
    """Return ConvNeXt's size and crop: small images are resized to more, and cropped."""
    return (int(size / share), (size, size)) if size < WHOLE else ((size, size), None)


def _resized(x: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    if tuple(x.shape[-2:]) == size:
        return x
    smooth = mode in {"bilinear", "bicubic"}
    resized = functional.interpolate(x * 255, size, mode=mode, antialias=smooth)
    return resized.round().clamp(0, 255) / 255


def _cropped(x: Tensor, crop: tuple[int, int]) -> Tensor:
    """Return the center of images, with zeros beside images that are smaller."""
    lack = [max(0, c - have) for c, have in zip(crop, x.shape[-2:], strict=True)]
    if any(lack):
        (top, left) = ((each + 1) // 2 for each in lack)
        x = functional.pad(x, (left, lack[1] - left, top, lack[0] - top))
    (top, left) = ((have - c) // 2 for c, have in zip(crop, x.shape[-2:], strict=True))
    return x[..., top : top + crop[0], left : left + crop[1]]


class ImageEncoder(nn.Module):
    """An encoder with its preparation of images, and a linear head on its features.

    Features of maps are their mean, features of patches those of the first token.
    """

    def __init__(self, prepare: Preparation, encoder: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.prepare, self.encoder = prepare, encoder
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, outputs) of images (batch, 1 or 3, height, width) from 0 to 1."""
        out: Tensor = self.head(features_of(self.encoder, self.prepare(x)))
        return out


def features_of(encoder: nn.Module, x: Tensor) -> Tensor:
    """Return an encoder's features (batch, m) of prepared images."""
    out = encoder(pixel_values=x, return_dict=True)
    hidden: Tensor = out.last_hidden_state
    if hidden.dim() == MAPS:
        pooled: Tensor | None = out.pooler_output
        return hidden.mean((2, 3)) if pooled is None else pooled.flatten(1)
    if hidden.dim() != PLACES:
        raise ValueError(f"the encoder returns features of shape {list(hidden.shape[1:])}")
    return hidden[:, 0]


class TextEncoder(nn.Module):
    """An encoder of texts, whose features are the mean over tokens, and a linear head on them."""

    def __init__(self, encoder: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, outputs) of token numbers (batch, length), after a begin token."""
        numbers = x[:, 1:] - len(SPECIAL)
        there = numbers >= 0
        given = {"input_ids": numbers.clamp(min=0), "attention_mask": there.long()}
        hidden: Tensor = self.encoder(**given, return_dict=True).last_hidden_state
        total = (hidden * there.unsqueeze(-1)).sum(1)
        out: Tensor = self.head(total / there.sum(1, keepdim=True).clamp(min=1))
        return out


def encoder_of(name: str) -> Callable[..., nn.Module]:
    """Return the factory of models with an encoder, by folder or by name on the hub."""

    def factory(input_shape: Sequence[int], num_classes: int, *, words: int = 0) -> nn.Module:
        if words:
            return _of_texts(name, input_shape[0], num_classes, words)
        return _of_images(name, input_shape, num_classes)

    return factory


def _of_texts(name: str, length: int, outputs: int, words: int) -> nn.Module:
    encoder, tokens = _loaded_for_texts(name)
    if words != len(SPECIAL) + tokens:
        raise ValueError(
            f"{PREFIX}{name} has {tokens} tokens, and the texts have {words - len(SPECIAL)} words: "
            f"state data.words.tokenizer = '{PREFIX}{name}'"
        )
    width: int = attrgetter("config.hidden_size")(encoder)
    most = getattr(encoder.config, "max_position_embeddings", None)
    if isinstance(most, int) and length - 1 > most:
        raise ValueError(
            f"{PREFIX}{name} reads {most} tokens at most: state data.words.length = {most + 1} or "
            "less"
        )
    return TextEncoder(copy.deepcopy(encoder), width, outputs)


def _of_images(name: str, input_shape: Sequence[int], outputs: int) -> nn.Module:
    if len(input_shape) != PLACES or input_shape[0] not in {1, COLORS}:
        raise ValueError(
            f"{PREFIX}{name} takes images of 1 or 3 colors, not inputs of {list(input_shape)}"
        )
    prepare, encoder = _loaded(name)
    with torch.no_grad():
        width = features_of(encoder, prepare(torch.zeros(1, *input_shape))).shape[1]
    return ImageEncoder(prepare, copy.deepcopy(encoder), width, outputs)


def encoder_width(name: str) -> int:
    """Return the number of features of an encoder of images."""
    prepare, encoder = _loaded(name)
    with torch.no_grad():
        width: int = features_of(encoder, prepare(torch.zeros(1, COLORS, 64, 64))).shape[1]
    return width


def encoder_digest(name: str) -> str:
    """Return the SHA-256 of an encoder's weights and of its preparation, in hexadecimal digits."""
    prepare, encoder = _loaded(name)
    digest = hashlib.sha256(repr(prepare).encode())
    for array_name, array in sorted(encoder.state_dict().items()):
        digest.update(f"{array_name} {array.dtype} {list(array.shape)}".encode())
        digest.update(array.contiguous().numpy().tobytes())
    return digest.hexdigest()


@functools.lru_cache(maxsize=2)
def _loaded(name: str) -> tuple[Preparation, nn.Module]:
    """Return an encoder of images and its preparation; they are read once in a process.

    Raises
    ------
    ValueError
        If there is no such encoder, or it has code of its own, or no weights as safetensors.
    """
    with _reading(name) as (library, place):
        file = importlib.import_module("transformers.utils").cached_file(place, CONFIG)
        prepare = Preparation.of(json.loads(Path(file).read_text(encoding="utf-8")))
        return prepare, _weights(library, place)


@functools.lru_cache(maxsize=2)
def _loaded_for_texts(name: str) -> tuple[nn.Module, int]:
    """Return an encoder of texts, and the number of its tokenizer's tokens."""
    with _reading(name) as (library, place):
        tokens = len(library.AutoTokenizer.from_pretrained(place, trust_remote_code=False))
        return _weights(library, place), tokens


def _weights(library: ModuleType, place: str) -> nn.Module:
    encoder: nn.Module = library.AutoModel.from_pretrained(
        place, use_safetensors=True, trust_remote_code=False, dtype=torch.float32
    )
    return encoder.eval()


@contextlib.contextmanager
def _reading(name: str) -> Iterator[tuple[ModuleType, str]]:
    """Give the library and a folder or a repository; an error in this context is one line."""
    library, local = _transformers(), Path(name).expanduser()
    if not local.is_dir() and (local.is_absolute() or name.startswith((".", "~"))):
        raise ValueError(f"there is no folder {name}")
    try:
        with _quiet(library), torch.device("cpu"):
            yield library, str(local) if local.is_dir() else _on_hub(name)
    except (OSError, ValueError, ImportError) as error:
        first = " ".join(str(error).split())
        raise ValueError(f"{PREFIX}{name} cannot be read: {first[:300]}") from error


def _on_hub(name: str) -> str:
    """Return a repository's name, or its folder in the cache if the hub cannot be reached.

    The library itself would try again and again, for half a minute for each file.
    """
    hub = importlib.import_module("huggingface_hub")
    try:
        hub.model_info(name, timeout=HUB_S)
    except hub.errors.HfHubHTTPError:  # it has answered: the library's own error says more
        return name
    except Exception as error:  # of the package that sends its requests
        with contextlib.suppress(OSError):
            return str(hub.snapshot_download(name, local_files_only=True))
        raise ValueError(
            f"it is no folder, and the hub cannot be reached ({first_line(error)})"
        ) from error
    return name


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(NEED) from error


@contextlib.contextmanager
def _quiet(library: ModuleType) -> Iterator[None]:
    """Keep the library from printing bars and advice, inside this context."""
    logs = library.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()
