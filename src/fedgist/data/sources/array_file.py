"""Reads .npz and .npy files, and turns their arrays into examples."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.data.sources.labelled_rows import Values
from fedgist.errors import DataError, first_line

CHANNELS = (1, 3)
_IMAGES = 4  # dimensions of a stack of images
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
)


def read_arrays(file: Path, wanted: Callable[[list[str]], list[str]]) -> dict[str, Values]:
    """Return arrays of a file by name; the one array of an .npy file has the name ''.

    ``wanted`` takes the names of all arrays in the file and returns those to read, or raises.

    Raises
    ------
    DataError
        If the file, or one of the wanted arrays, cannot be read.
    """
    name = ""
    try:
        with file.open("rb") as opened:  # np.load would leave a broken file open
            content = np.load(opened, allow_pickle=False)
            stored = {"": content} if isinstance(content, np.ndarray) else content
            arrays = {}
            for name in wanted(list(stored)):
                # asarray: a member of the archive that is not an array comes as plain bytes
                arrays[name] = np.asarray(stored[name])
            return arrays
    except DataError:
        raise
    except _BROKEN as error:
        place = f"{file.name}: the array {name!r}" if name else file.name
        msg = f"{place} cannot be read: {first_line(error)}"
        raise DataError(msg) from error


def no_array(file: Path, name: str, stored: list[str]) -> DataError:
    """Return the error that says which array is missing, and which are there."""
    names = ", ".join(filter(None, stored)) or ("one array without a name" if stored else "nothing")
    return DataError(f"{file.name} has no array {name!r}; it holds {names}")


def features(x: Values, what: str) -> Tensor:
    """Return images of bytes as uint8 (rows, channels, height, width), all else as float32.

    Images may come with their channels last (recognised where only the last dimension is 1 or 3),
    and images of bytes without a dimension of channels. Other shapes stay as they are.

    Raises
    ------
    DataError
        If ``x`` does not hold numbers, or has fewer than two dimensions; ``what`` begins the
        message.
    """
    if x.dtype.kind not in "iufb" or x.ndim < 2:  # noqa: PLR2004 - rows and columns
        msg = (
            f"{what} must be numbers of at least two dimensions, not {x.dtype} of shape "
            f"{list(x.shape)}"
        )
        raise DataError(msg)
    if x.dtype == np.uint8 and x.ndim == _IMAGES - 1:
        x = x[:, None]
    if x.ndim == _IMAGES and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    kind = np.uint8 if x.dtype == np.uint8 and x.ndim == _IMAGES else np.float32
    # a number too large becomes infinite, which the check of the data set reports
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(x, dtype=kind, order="C"))
