"""Data sources for a user's NumPy arrays: in one .npz file, or a folder of .npy files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import Inputs, LazyRows
from fedgist.data.sources.array_file import features, no_array, read_arrays
from fedgist.data.sources.file_formats import NPY, expect_format
from fedgist.data.sources.file_identity import identity_of
from fedgist.data.sources.file_sizes import fits
from fedgist.data.sources.locations import existing
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.splits import (
    RowOptions,
    Split,
    Values,
    as_clients,
    as_mask,
    dataset,
    division_of,
)
from fedgist.data.sources.stored_labels import stored_labels
from fedgist.errors import DataError, first_line

NAMES = ("x", "y", "client", "group", "test", "x_test", "y_test", "client_test")


def npz(*, path: str | Path, **options: Unpack[RowOptions]) -> Dataset:
    """Read the arrays x and y of a .npz file, and optional arrays such as client and x_test.

    Parameters
    ----------
    path
        The file.

    Notes
    -----
    These arrays of the file are read; all others are named in a note:

    ``x``
        The examples, a row each: columns of numbers (rows, columns); images of bytes (uint8) with
        their channels, 1 or 3 of them, first or last, or without; or numbers of any other shape.
    ``y``
        The labels (rows,): whole numbers or texts. They are numbered in sorted order. For the
        objective ``regression`` they are numbers, for ``multilabel`` 1 and 0, (rows,) or (rows,
        outputs), and NaN if missing; for ``segmentation`` the class of each pixel, (rows, height,
        width), and -1 if missing.
    ``client``
        Whose each row is (rows,): whole numbers or texts, which the clients are called. For
        ``partition.name = "natural"``.
    ``group``
        What stays together when test or validation rows are chosen (rows,), such as the patient
        of each row.
    ``test``
        1 or true for the rows that are held out as test rows (rows,), 0 or false for the others.
    ``x_test``, ``y_test``, ``client_test``
        The test rows, if they have arrays of their own.

    Pooled normalization: mean and deviation of each column or channel over all training rows, those
    held out for validation included; images of bytes are 0 to 1 before.

    Examples
    --------
    A recipe's section, for a file with the arrays x, y, client and test::

        [data]
        name = "npz"
        path = "patients.npz"
        classes = ["benign", "malignant"]
    """
    file, others = existing(path), list[str]()

    def wanted(stored: list[str]) -> list[str]:
        for name in ("x", "y", *(("y_test",) if "x_test" in stored else ())):
            if name not in stored:
                raise no_array(file, name, stored)
        others.extend(name for name in stored if name not in NAMES)
        return [name for name in stored if name in NAMES]

    arrays = read_arrays(file, wanted)

    def examples(name: str) -> Inputs:
        return features(arrays[name], f"{file.name}: {name}")

    data = _dataset(_Arrays(file.name, arrays, arrays.__getitem__, examples), options)
    unread = f"arrays of {file.name} that are not read: {', '.join(others)}"
    return replace(data, notes=(*data.notes, unread)) if others else data


def npy(*, path: str | Path, read: Read = "auto", **options: Unpack[RowOptions]) -> Dataset:
    """Read a folder with x.npy, y.npy, and optional arrays such as client.npy and x_test.npy.

    Parameters
    ----------
    path
        The folder.

    Notes
    -----
    The arrays are those of the source ``npz``, a file each: ``x``, ``y``, ``client``, ``group``,
    ``test``, ``x_test``, ``y_test``, ``client_test``. ``x`` and ``x_test`` are mapped into memory,
    and only the rows of a batch are read, if ``data.read`` is ``"lazy"`` or they would fill more
    than half of the memory. Missing numbers of such rows are refused.

    Pooled normalization: mean and deviation of each column or channel over all training rows, or
    over a sample of at most 2,048 rows if they are read lazily.

    Examples
    --------
    A recipe's section::

        [data]
        name = "npy"
        path = "scans"
        read = "lazy"
    """
    folder = existing(path, folder=True)

    def array(name: str) -> Values:
        return _array(folder / f"{name}.npy")

    def examples(name: str) -> Inputs:
        file = folder / f"{name}.npy"
        mapped = _mapped(file)
        if read == "once" or (read == "auto" and fits(4 * mapped.size)):
            return features(_array(file), f"{folder.name}: {name}")
        return LazyRows.of(MappedRows(folder.name, file, mapped))

    present = [name for name in NAMES if (folder / f"{name}.npy").exists()]
    return _dataset(_Arrays(folder.name, present, array, examples), options)


@dataclass(frozen=True)
class _Arrays:
    """Arrays by name, of a file or a folder: which there are, and how each is read."""

    source: str
    present: Collection[str]
    array: Callable[[str], Values]
    examples: Callable[[str], Inputs]

    def check_length(self, name: str, length: int, rows: int, x_name: str) -> None:
        """Raise DataError if an array has another length than the examples."""
        if length != rows:
            raise DataError(f"{self.source}: {x_name} has {rows} rows but {name} has {length}")

    def split(self, suffix: str, target: Target) -> Split:
        """Return the training rows, or with the suffix ``_test`` the test rows."""
        x_name, y_name, owner = f"x{suffix}", f"y{suffix}", f"client{suffix}"
        x = self.examples(x_name)
        subject = f"{self.source}: the labels {y_name}"
        labels = stored_labels(self.array(y_name), subject, target)
        self.check_length(y_name, len(labels), len(x), x_name)
        clients = self._names(owner, len(x), x_name)
        return Split(x, labels, clients, None if suffix else self._names("group", len(x), x_name))

    def _names(self, name: str, rows: int, x_name: str) -> Values | None:
        """Return an array of clients or groups as text (rows,), or None if there is none."""
        if name not in self.present:
            return None
        names = as_clients(self.array(name), f"{self.source}: {name}")
        self.check_length(name, len(names), rows, x_name)
        return names


def _dataset(arrays: _Arrays, options: RowOptions) -> Dataset:
    target, source = options.get("target", "class"), arrays.source
    own = [name for name in ("test", "x_test") if name in arrays.present]
    if len(own) > 1:
        raise DataError(f"{source} has an array 'test' and an array 'x_test': only one may be")
    train, test = arrays.split("", target), None
    for name in own:
        division_of(options).refuse(f"{source} has an array {name!r}")
    if "x_test" in own:
        test = arrays.split("_test", target)
    elif own:
        mask = as_mask(arrays.array("test"), f"{source}: the array 'test'")
        arrays.check_length("test", len(mask), len(train.labels), "x")
        train, test = train.take(~mask), train.take(mask)
    return dataset(source, train, test, **options)


@dataclass(frozen=True, eq=False)
class MappedRows:
    """A reader of the rows of an array that is mapped into memory."""

    name: str
    file: Path
    array: Values = field(repr=False)
    draws: bool = False

    def __len__(self) -> int:
        return len(self.array)

    def __call__(self, row: int) -> object:
        """Return a row, as :func:`features` returns all of them."""
        return features(self.array[row : row + 1], self.name)[0]

    def file_of(self, row: int) -> str:
        """Return the file."""
        return self.file.name if row < len(self) else ""

    def identity(self) -> Sequence[str]:
        """Return the name, size and time of the file."""
        return tuple(identity_of([str(self.file)]))


def _array(file: Path) -> Values:
    expect_format(file, NPY, NPY)
    [array] = read_arrays(file, lambda names: names).values()
    return array


def _mapped(file: Path) -> Values:
    expect_format(file, NPY, NPY)
    try:
        mapped: Values = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file.name} cannot be read: {first_line(error)}") from error
    if not isinstance(mapped, np.ndarray) or not mapped.ndim:
        raise DataError(f"{file.name} holds no array of rows")
    return mapped
