"""Encoders of transformers: features, images, and what is refused; without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image

import fedgist
from fedgist.errors import InputError
from fedgist.models.encoders import Preparation, _loaded, encoder_digest, encoder_width, features_of

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MAPS: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
PIL: dict[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True}
MEAN_STD = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
#: An encoder with random weights, and how it prepares images, by its kind.
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "vit": (
        lambda: transformers.ViTModel(
            transformers.ViTConfig(**SMALL, intermediate_size=32, image_size=32, patch_size=8)
        ),
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
        | {"resample": 2},
    ),
    "dinov2": (
        lambda: transformers.Dinov2Model(
            transformers.Dinov2Config(**SMALL, mlp_ratio=2, image_size=28, patch_size=7)
        ),
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 32}}
        | {"do_center_crop": True, "crop_size": {"height": 28, "width": 28}, "resample": 3},
    ),
    "convnext": (
        lambda: transformers.ConvNextModel(transformers.ConvNextConfig(**MAPS)),
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}}
        | {"crop_pct": 0.875, "resample": 3},
    ),
    "resnet": (
        lambda: transformers.ResNetModel(
            transformers.ResNetConfig(embedding_size=8, layer_type="basic", **MAPS)
        ),
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}}
        | {"crop_pct": 0.875, "resample": 3},
    ),
}


def saved(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write an encoder with random weights, as ``save_pretrained`` does."""
    torch.manual_seed(seed)
    make, prepares = KINDS[kind]
    made, path = make(), folder / f"{kind}-{seed}"
    made.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PIL | MEAN_STD | prepares))
    return path


@pytest.fixture(autouse=True)
def quiet() -> None:
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()


def images(count: int, *shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(32, 32), (50, 40), (20, 64), (28, 28)])
def test_images_are_prepared_as_the_library_does_with_pil(
    kind: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    """To two levels of a byte, of which PIL's integers may round one in each of two passes."""
    path = saved(tmp_path, kind)
    prepare = Preparation.of(json.loads((path / "preprocessor_config.json").read_text()))
    processors: Any = transformers.AutoImageProcessor
    library = processors.from_pretrained(path, backend="pil")
    (image,) = images(1, *shape, 3)
    expected = library(images=Image.fromarray(image), return_tensors="pt")["pixel_values"]
    found = prepare(torch.as_tensor(image).permute(2, 0, 1).unsqueeze(0).float() / 255)
    assert found.shape == expected.shape
    levels = (found - expected).abs() * torch.tensor(MEAN_STD["image_std"]).view(3, 1, 1) * 255
    assert float(levels.max()) < 2.01
    assert float(levels.mean()) < 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    path = saved(tmp_path, kind)
    prepare, encoder = _loaded(str(path))
    x = torch.as_tensor(images(5, 3, 32, 32)).float() / 255
    with torch.no_grad():
        plain = transformers.AutoModel.from_pretrained(path).eval()(pixel_values=prepare(x))
        z = features_of(encoder, prepare(x))
    maps = plain.last_hidden_state.dim() == 4
    expected = plain.pooler_output.flatten(1) if maps else plain.last_hidden_state[:, 0]
    assert torch.equal(z, expected)


def recipe_of(path: Path | str, **sections: Any) -> dict[str, Any]:
    return {
        "data": {"normalize": "none"},
        "model": {"name": f"transformers:{path}", "frozen": True},
        "method": {"name": "analytic"},
        "clients": {"num_clients": 3},
        "partition": {"name": "iid"},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1},
    } | sections


def rows(colors: int = 3) -> Any:
    x, y = torch.as_tensor(images(60, colors, 32, 32)), torch.arange(60) % 3
    return x, y, x, y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["analytic", "fedavg"])
def test_a_run_over_an_encoder(kind: str, method: str, tmp_path: Path) -> None:
    path = saved(tmp_path, kind)
    result: Any = fedgist.run(recipe_of(path, method={"name": method}), data=rows())
    assert [*result.server_run.engine.host.features] == [f"{kind}-0"]
    prepare, encoder = _loaded(str(path))
    x, model = rows()[0], result.model(0)
    run = result.server_run
    (net,) = run.method.models(run.server, run.context("evaluate")).values()
    weight, bias = net.head
    with torch.no_grad():
        expected = features_of(encoder, prepare(x.float() / 255)) @ weight.mT + bias
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_gray_images_have_three_equal_colors(tmp_path: Path) -> None:
    path = saved(tmp_path, "vit")
    gray = images(60, 1, 32, 32)
    both = [torch.as_tensor(x) for x in (gray, np.repeat(gray, 3, 1))]
    y = torch.arange(60) % 3
    runs = [fedgist.run(recipe_of(path), data=(x, y, x, y)) for x in both]
    lines = [{k: v for k, v in r.rounds[0].items() if "accuracy" in k} for r in runs]
    assert lines[0] == lines[1]


def without(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def with_code(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoModel": "own.Own"}}
    config["auto_map"]["AutoConfig"] = "own.Config"
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text("raise SystemExit('code was run')\n")


def as_pickle(path: Path) -> None:
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")


def of_kind(kind: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        file = path / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"image_processor_type": kind}))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("config.json"), "cannot be read"),
        (without("preprocessor_config.json"), "cannot be read"),
        (without("model.safetensors"), "cannot be read"),
        (as_pickle, "cannot be read"),
        (with_code, "cannot be read"),
        (of_kind("DetrImageProcessor"), "of the kind 'Detr'; known: ViT, DeiT, Bit"),
    ],
)
def test_what_is_no_encoder_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    path = saved(tmp_path, "vit")
    change(path)
    with pytest.raises(InputError, match=says):
        fedgist.run(recipe_of(path), data=rows())


def test_a_hub_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the cache is read, or the error says so."""
    path, asked = saved(tmp_path, "vit"), []

    def nobody(name: str, *, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("nobody listens")

    def in_cache(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        if name != "somebody/kept":
            raise FileNotFoundError(name)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "model_info", nobody)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", in_cache)
    assert encoder_width("somebody/kept") == encoder_width(str(path))
    says = r"it is no folder, and the hub cannot be reached \(nobody listens\)"
    with pytest.raises(ValueError, match=says):
        encoder_width("somebody/new")
    assert asked == [("somebody/kept", 5.0), ("somebody/new", 5.0)]


def test_mistakes_in_a_recipe_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path, "vit")
    x = torch.randn(60, 5)
    y = torch.arange(60) % 3
    for recipe, data, says in (
        (recipe_of(tmp_path / "nowhere"), rows(), "there is no folder"),
        (recipe_of(path, data={}), rows(), "has its own normalization: use 'none'"),
        (recipe_of(path), (x, y, x, y), "takes images of 1 or 3 colors"),
    ):
        with pytest.raises(InputError, match=says):
            fedgist.run(recipe, data=data)


def test_the_digest_is_of_weights_and_of_the_preparation(tmp_path: Path) -> None:
    path = saved(tmp_path, "vit")
    first = encoder_digest(str(path))
    assert encoder_digest(str(shutil.copytree(path, tmp_path / "copy"))) == first
    assert encoder_digest(str(saved(tmp_path, "vit", 1))) != first
    other = shutil.copytree(path, tmp_path / "other")
    file = other / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resample": 3}))
    assert encoder_digest(str(other)) != first


TEXTS = [
    text.format(a, b)
    for a in ("red", "green", "blue", "old")
    for b in ("dog", "cat", "fox", "hen")
    for text in ("the {} {} runs", "a {} {} and the hen sleep", "{} {}")
]


def saved_for_texts(folder: Path) -> Path:
    """Write a small encoder of texts, with its tokenizer, as ``save_pretrained`` does."""
    path = folder / "texts"
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=70, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast: Any = transformers.PreTrainedTokenizerFast
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast(tokenizer_object=made, **names).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SMALL, vocab_size=made.get_vocab_size(), intermediate_size=32, max_position_embeddings=16
    )
    transformers.BertModel(config).save_pretrained(path)
    return path


def text_recipe(path: Path, **words: Any) -> dict[str, Any]:
    table = path.parent / "texts.csv"
    labels = ["run" if "runs" in text else "rest" for text in TEXTS]
    lines = [f"{text},{label}" for text, label in zip(TEXTS, labels, strict=True)]
    table.write_text("\n".join(["text,label", *lines]) + "\n")
    data: dict[str, Any] = {
        "name": "text_file",
        "file": str(table),
        "text": "text",
        "label": "label",
    }
    data |= {"test_fraction": 0.3, "words": {"tokenizer": f"transformers:{path}"} | words}
    return recipe_of(path, data=data, objective={"name": "text_classes"})


def test_texts_have_the_librarys_tokens_and_the_mean_of_their_features(tmp_path: Path) -> None:
    path = saved_for_texts(tmp_path)
    result: Any = fedgist.run(text_recipe(path))
    data, model = result.world.data, result.model(0)
    auto: Any = transformers.AutoTokenizer
    tokenizer = auto.from_pretrained(path)
    encoder = transformers.AutoModel.from_pretrained(path).eval()
    run = result.server_run
    (net,) = run.method.models(run.server, run.context("evaluate")).values()
    weight, bias = net.head
    whole = {tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS}
    for row in data.x[:6]:
        ids = [number - 4 for number in row.tolist() if number >= 4]
        assert tokenizer.decode(ids) in whole
        with torch.no_grad():
            hidden = encoder(input_ids=torch.tensor([ids])).last_hidden_state
            expected = hidden.mean(1) @ weight.mT + bias
            found = model(row.unsqueeze(0))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_mistakes_with_texts_are_named(tmp_path: Path) -> None:
    path = saved_for_texts(tmp_path)
    for words, says in (
        ({"tokenizer": "words"}, "state data.words.tokenizer = 'transformers:"),
        ({"length": 40}, "reads 16 tokens at most: state data.words.length = 17 or less"),
        ({"file": "words.txt"}, "the tokenizer of an encoder has its own words"),
        ({"tokenizer": f"transformers:{tmp_path}/nowhere"}, "cannot be read"),
    ):
        with pytest.raises(InputError, match=says):
            fedgist.run(text_recipe(path, **words))
