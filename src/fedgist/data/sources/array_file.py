"""Read .npz and .npy files, and turn their arrays into examples."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

import numpy as np
import torch
from numpy.lib import format as array_format
from torch import Tensor

from fedgist.data.sources.file_formats import NPY, ZIP, expect_format
from fedgist.data.sources.file_sizes import check_memory, check_packing, read_up_to
from fedgist.data.sources.splits import Values
from fedgist.errors import DataError, first_line, listed

ENDINGS = (".npz", ".npy")
CHANNELS = (1, 3)
_WITH_ALPHA = (2, 4)
_IMAGES = 4  # dimensions of a stack of images
_Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]  # shape, column-major or not, type
_HEADERS: Mapping[tuple[int, int], Callable[[IO[bytes]], _Header]] = MappingProxyType(
    {
        (1, 0): array_format.read_array_header_1_0,
        (2, 0): array_format.read_array_header_2_0,
    }
)
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    SyntaxError,
    TypeError,
    ArithmeticError,
    MemoryError,  # from Python's parser, for a header that is nested too deeply
    RuntimeError,  # from zipfile, for an archive with a password; includes RecursionError
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,  # from NumPy's repair of old headers
)


def read_arrays(file: Path, wanted: Callable[[list[str]], list[str]]) -> dict[str, Values]:
    """Return arrays of a file by name; the single array of an .npy file has the name ''.

    ``wanted`` takes the names of all arrays in the file, and returns the names to read or raises.
    """
    try:
        form = expect_format(file, "an .npz or .npy file", ZIP, NPY)
        with file.open("rb") as opened:
            if form == NPY:
                size = file.stat().st_size
                return {name: _array(opened, size, file.name) for name in wanted([""])}
            with zipfile.ZipFile(opened) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.filelist}
                names = wanted(list(members))
                size = sum(members[name].file_size for name in names)
                check_memory(size, f"{file.name} with the arrays {', '.join(names)}")
                return {name: _member(archive, members[name], file.name) for name in names}
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(f"{file.name} cannot be read: {first_line(error)}") from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file_name: str) -> Values:
    subject = f"{file_name}: the array {info.filename.removesuffix('.npy')!r}"
    try:
        if info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise ValueError("it is packed by a method that NumPy does not use")
        check_packing(
            info.compress_size, info.file_size, subject, "save it by numpy.savez, unpacked"
        )
        with archive.open(info) as stream:
            return _array(stream, info.file_size, subject)
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(f"{subject} cannot be read: {first_line(error)}") from error


def _array(stream: IO[bytes], size: int, subject: str) -> Values:
    """Read an array in NumPy's format of ``size`` bytes, including its header."""
    version = array_format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"NumPy's format {version[0]}.{version[1]} is not known here")
    shape, by_columns, kind = _HEADERS[version](stream)
    if kind.hasobject:
        raise ValueError("Object arrays cannot be loaded: they may hold code")
    promised, held = math.prod(shape) * kind.itemsize, size - stream.tell()
    if min(shape, default=0) < 0 or promised != held:
        raise ValueError(
            f"its header says {kind} of shape {list(shape)}, {promised} bytes, but it has {held}"
        )
    check_memory(promised, subject)
    content = read_up_to(stream, promised)
    return np.frombuffer(content, kind).reshape(shape, order="F" if by_columns else "C")


def no_array(file: Path, name: str, stored: list[str]) -> DataError:
    """Return the error that names the missing array and the existing ones."""
    names = "one array without a name" if stored == [""] else listed(filter(None, stored))
    return DataError(f"{file.name} has no array {name!r}; it holds {names}")


def exact_type(kind: np.dtype[np.generic]) -> type[np.float32 | np.float64]:
    """Return the type that holds numbers of a type exactly: float32, or float64 for long ones."""
    short = kind.itemsize <= (2 if kind.kind in "iu" else 4)
    return np.float32 if short else np.float64


def features(x: Values, subject: str) -> Tensor:
    """Return byte images as uint8 (rows, channels, height, width), and all else as numbers.

    Numbers are float32, or float64 if they are stored in more than 24 bits.

    Images may have their channels last (recognised if only the last dimension is 1 or 3), and
    byte images may have no channel dimension. Other shapes are kept.
    """
    if x.dtype.kind not in "iufb" or x.ndim < 2:  # noqa: PLR2004 - rows and columns
        raise DataError(
            f"{subject} must be numbers of at least two dimensions, not {x.dtype} of shape "
            f"{list(x.shape)}"
        )
    if x.dtype == np.uint8 and x.ndim == _IMAGES - 1:
        x = x[:, None]
    if x.ndim == _IMAGES and x.shape[1] not in CHANNELS:
        if x.dtype == np.uint8 and x.shape[3] in _WITH_ALPHA:
            raise DataError(
                f"{subject} are images with {x.shape[3]} channels, the last of which is alpha: "
                f"leave it out, x[..., :{x.shape[3] - 1}]"
            )
        if x.shape[3] in CHANNELS:
            x = x.transpose(0, 3, 1, 2)
    kind = np.uint8 if x.dtype == np.uint8 and x.ndim == _IMAGES else exact_type(x.dtype)
    check_memory(x.size * np.dtype(kind).itemsize, subject)
    # numbers that are too large become infinite, which the check of the data set reports
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.require(x, kind, ["C", "W"]))
