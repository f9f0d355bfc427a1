"""A data set of the user's own, as NumPy arrays in one .npz file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.assembly import Examples, Values, dataset, names, split
from fedgist.data.sources.locations import existing, first_line
from fedgist.errors import DataError

_ARRAYS = ("x", "y", "x_test", "y_test", "clients", "clients_test")
CHANNELS = (1, 3)
_IMAGES = 4  # dimensions of a stack of images


def npz(*, path: str | Path, test_fraction: float = 0.2) -> Dataset:
    """Read the arrays x and y, and x_test, y_test, clients, clients_test where they are there."""
    file = existing(path)
    found = read_arrays(file, lambda held: [name for name in held if name in _ARRAYS])
    for name in ("x", "y", *(("y_test",) if "x_test" in found else ())):
        if name not in found:
            msg = f"{file.name} has no array {name!r}; it holds {', '.join(found) or 'nothing'}"
            raise DataError(msg)
    rows = _rows(file.name, found, "")
    parts = (
        (rows, _rows(file.name, found, "_test"))
        if "x_test" in found
        else split(rows, test_fraction)
    )
    return dataset(file.name, *parts)


def features(x: Values, what: str) -> Tensor:
    """Return images as bytes (rows, channels, height, width), others as float32 (rows, *shape)."""
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
    with np.errstate(
        over="ignore"
    ):  # a number too large becomes infinite, which the check of the data set reports
        return torch.from_numpy(np.array(x, dtype=kind, order="C"))


def read_arrays(file: Path, wanted: Callable[[list[str]], list[str]]) -> dict[str, Values]:
    """Return the arrays of an .npz that ``wanted`` names when told all, or an .npy's as ''."""
    name = ""
    try:
        with file.open("rb") as opened:  # here, because np.load leaves a broken file open
            found = np.load(opened, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {"": found}
            arrays = {}
            for name in wanted(found.files):
                arrays[name] = np.asarray(
                    found[name]
                )  # what is no array is bytes, and then one of no dimensions
            return arrays
    except DataError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
    ) as error:
        place = f"{file.name}: the array {name!r}" if name else file.name
        msg = f"{place} cannot be read: {first_line(error)}"
        raise DataError(msg) from error


def _rows(name: str, found: dict[str, Values], end: str) -> Examples:
    x = features(found[f"x{end}"], f"{name}: x{end}")
    labels = names(found[f"y{end}"], f"{name}: the labels y{end}")
    clients = (
        names(found[f"clients{end}"], f"{name}: clients{end}") if f"clients{end}" in found else None
    )
    for what, values in ((f"y{end}", labels), (f"clients{end}", clients)):
        if values is not None and len(values) != len(x):
            msg = f"{name}: x{end} has {len(x)} rows but {what} {len(values)}"
            raise DataError(msg)
    return Examples(x, labels, clients)
