"""Pretrained weights: a model starts with the arrays of a file that fit it.

Files are .safetensors or .pt, and are read without running code. A torch file is a pickle in a zip
archive. torch reads it in the mode that only builds tensors and plain containers. Even this mode
calls functions that can be made to run for hours, so the names in the pickle are checked first:
only names that a state dict needs are allowed.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedgist.core.nets.net import head_of
from fedgist.core.nets.projection import head_and_projection
from fedgist.data.sources.file_formats import PICKLE, SAFETENSORS, ZIP, format_of
from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.data.sources.locations import existing
from fedgist.errors import DataError, InputError, RecipeError, first_line, listed, printable
from fedgist.recipe.overrides import Build
from fedgist.world.model_sizes import Sizes

_MOST_NAMES = 2 << 20  # largest size of the pickle, which holds names of arrays and no numbers
_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_CALLED = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(f"torch {kind}Storage" for kind in _KINDS),
    }
)
_NESTED = ("state_dict", "model_state_dict", "model")  # keys of arrays in training checkpoints
# the largest size of a weights file in sizes of its model: checkpoints keep moments in float64
_TIMES = 8
_SLACK = 64 << 20  # bytes that it may have beside
_COUNTER = "num_batches_tracked"  # of torch's batch norm: nothing here reads it
_SHOWN, _LONGEST = 5, 80  # names in a message, and how much of each


def read_weights(file: Path, limit: int) -> dict[str, Tensor]:
    """Return the arrays of a file, of any shape, by name.

    Parameters
    ----------
    limit
        Largest unpacked size of the file in bytes: a few times the size of the model.
    """
    size = regular(file).stat().st_size
    _check_size(size, limit, file.name)
    check_memory(2 * size, file.name)
    try:
        return _arrays_of(_load(file, limit))
    except Exception as error:  # a file may be broken in any way
        raise DataError(f"{file.name} cannot be read as weights: {first_line(error)}") from error


def classes_of(file: Path) -> tuple[str, ...]:
    """Return the class names that ``fedgist export`` wrote into a ``.safetensors`` file."""
    try:
        with safetensors.safe_open(file, "pt") as opened:
            names = json.loads((opened.metadata() or {}).get("classes", "[]"))
    except (safetensors.SafetensorError, ValueError, RecursionError):
        return ()
    are_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if are_texts else ()


def _check_size(size: int, limit: int, subject: str) -> None:
    if size > limit:
        raise DataError(
            f"{subject} has {size:,} bytes; weights of this model have at most {limit:,}"
        )


def _load(file: Path, limit: int) -> object:
    """Return the content of a file; a torch file must have the archive that torch writes."""
    form = format_of(file)
    if form == SAFETENSORS:
        return safetensors.torch.load_file(file)
    if form == PICKLE:  # also a file of torch before 1.6
        raise DataError(
            "it is a bare pickle: load it where it is trusted, and save it by torch.save or "
            "safetensors"
        )
    if form != ZIP:
        raise DataError(
            f"by its content it is {form}; a .safetensors file or one of torch.save is needed"
        )
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise DataError("its archive is packed, which torch.save never does")
        _check_size(sum(e.file_size for e in archive.infolist()), limit, "its archive")
        names = archive.namelist()
        pickles = [name for name in names if name.endswith("data.pkl")]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise DataError("its archive is not one of torch.save")
        _check_size(archive.getinfo(pickles[0]).file_size, _MOST_NAMES, "its list of arrays")
        _check_names(archive.read(pickles[0]))
    with file.open("rb") as opened:  # of a path, torch would read the format from its name
        return torch.load(opened, map_location="cpu", weights_only=True)


def _check_names(content: bytes) -> None:
    """Raise DataError if a pickle names something that a state dict does not contain."""
    for opcode, named, _ in pickletools.genops(content):
        # a state dict names its functions only by the opcode GLOBAL
        if opcode.name in {"STACK_GLOBAL", "INST"} or (
            opcode.name == "GLOBAL" and named not in _CALLED
        ):
            code = f" ({named!s:.80})" if named else ""
            raise DataError(f"it holds more than arrays{code}, and code in a file is never run")


def _arrays_of(loaded: object) -> dict[str, Tensor]:
    """Return the arrays of a state dict, which a checkpoint may hold under a known key."""
    for key in _NESTED:
        inner = loaded.get(key) if isinstance(loaded, Mapping) else None
        if isinstance(inner, Mapping):
            return _arrays_of(inner)
    if not isinstance(loaded, Mapping):
        raise DataError(f"it holds a {type(loaded).__name__}, not arrays by name")
    arrays = {str(key): value for key, value in loaded.items() if isinstance(value, Tensor)}
    for key, array in arrays.items():
        if array.layout != torch.strided or array.is_quantized or array.device.type != "cpu":
            raise DataError(f"{key} is not a plain array")
    return {key: array.detach() for key, array in arrays.items()}


def pretrained(build: Build, path: str, sizes: Sizes, head: str | None) -> tuple[Build, str]:
    """Return a builder of modules with a file's arrays, and a note on arrays not taken from it.

    The names in the file may share a prefix (``module.``) that the model's names do not have. The
    head keeps its random start if the file has no head, a head of another shape, or other classes.
    A file made by ``fedgist export`` contains the names of its classes.

    Parameters
    ----------
    head
        Name of the linear layer that is the head. None means the last linear layer.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            whole = build()
        state = whole.state_dict()
        layer = head_of(whole, sizes.outputs, type(whole).__name__, head)[0]
        layer = head_and_projection(whole, layer)
        size = sum(array.numel() * array.element_size() for array in state.values())
        file = existing(path)
        file_arrays = read_weights(file, _TIMES * size + _SLACK)
        others = _other_classes(classes_of(file), sizes)
        arrays, note = _fitting(_renamed(file_arrays, state), state, layer, others)
    except (InputError, ValueError, TypeError, RuntimeError) as error:
        raise RecipeError(f"model.weights = {path!r}: {first_line(error)}") from error

    def loaded() -> nn.Module:
        module = build()
        module.load_state_dict(arrays, strict=False)
        return module

    return loaded, f"{Path(path).name}: {note}" if note else ""


def _renamed(
    arrays: Mapping[str, Tensor], model_arrays: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the arrays without shared name prefixes, until some name is one of the model's."""
    while arrays and not any(name in model_arrays for name in arrays):
        firsts = {name.partition(".")[0] for name in arrays}
        if len(firsts) > 1 or not all("." in name for name in arrays):
            break
        arrays = {name.partition(".")[2]: array for name, array in arrays.items()}
    return arrays


def _fitting(
    arrays: Mapping[str, Tensor], state: Mapping[str, Tensor], head: str, others: str
) -> tuple[dict[str, Tensor], str]:
    """Return the arrays that fit the model, and a note on the head and on unused arrays.

    ``others`` describes how the file's classes differ from the data's. Unless it is empty, the
    file's head does not fit.
    """
    fitting, random = {}, []
    in_head = f"{head}." if head else ""  # a linear layer alone is all head
    for name, own in state.items():
        problem = _problem(name, arrays.get(name), own)
        if others and name.startswith(in_head):
            problem = others
        if not problem:
            fitting[name] = arrays[name]
        elif name.startswith(in_head):
            random.append(problem)
        elif not name.endswith(_COUNTER):
            hint = "" if name in arrays else f"; it has {_listed(arrays)}"
            raise ValueError(problem + hint)
    over = [n for n in arrays if n not in state and not n.endswith(_COUNTER)]
    notes = [f"the head keeps its random start: {random[0]}"] if random else []
    notes += [f"not used: {_listed(over)}"] if over else []
    return fitting, "; ".join(notes)


def _other_classes(file_classes: tuple[str, ...], sizes: Sizes) -> str:
    """Return how a file's classes differ from the data's; empty if they agree or have no names."""
    own = sizes.classes
    unnamed = [tuple(map(str, range(len(names)))) for names in (file_classes, own)]
    if sizes.projects or file_classes == own or file_classes in unnamed or own in unnamed:
        return ""
    of_words = sizes.target == "words"
    kind, kinds = ("word", "words") if of_words else ("class", "classes")
    problem = f"the file has {len(file_classes)} names of {kinds}, the data {len(own)}"
    if len(file_classes) == len(own):
        place = next(i for i, name in enumerate(file_classes) if name != own[i])
        theirs, ours = (printable(names[place][:_LONGEST]) for names in (file_classes, own))
        problem = f"{kind} {place} is {theirs!r} in the file, {ours!r} in the data"
    if of_words:
        raise ValueError(problem)
    return problem


def _problem(name: str, array: Tensor | None, own: Tensor) -> str:
    """Return why a file's array cannot replace the model's array; empty if it can."""
    if array is None:
        return f"the file has no {name}"
    if array.shape != own.shape:
        return f"{name} is {list(array.shape)} in the file, {list(own.shape)} in the model"
    if array.is_floating_point() != own.is_floating_point() or array.is_complex():
        return f"{name} is of type {array.dtype} in the file, {own.dtype} in the model"
    if array.is_floating_point() and not bool(torch.isfinite(array.to(own.dtype)).all()):
        return f"{name} holds numbers that are not finite"
    return ""


def _listed(names: Iterable[str]) -> str:
    """Return names from an untrusted file for a message: shortened, and printable only."""
    return listed((printable(name[:_LONGEST]) for name in names), _SHOWN)
