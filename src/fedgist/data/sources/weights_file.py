"""Read a trained model's arrays from .safetensors and .pt files without running code.

A torch file is a pickle in a zip archive. torch reads it in the mode that only builds tensors and
plain containers. Even this mode calls functions that can be made to run for hours, so the names in
the pickle are checked first: only names that a state dict needs are allowed.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedgist.data.sources.file_formats import PICKLE, SAFETENSORS, ZIP, format_of
from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.errors import DataError, first_line

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
