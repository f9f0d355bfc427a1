"""Data source for a user's NumPy arrays in .npy files, which may be larger than memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.label_check import MissingClients, MissingLabels
from fedgist.data.lazy_rows import LazyRows, outline
from fedgist.data.sources.array_file import features, read_arrays
from fedgist.data.sources.file_formats import NPY, expect_format
from fedgist.data.sources.file_identity import identity_of
from fedgist.data.sources.file_sizes import fits
from fedgist.data.sources.labelled_rows import (
    LabelledRows,
    Values,
    as_clients,
    as_mask,
    dataset,
    refuse_fraction,
    split_rows,
)
from fedgist.data.sources.locations import existing
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.stored_labels import stored_labels
from fedgist.errors import DataError, first_line


def npy(
    *,
    path: str | Path,
    test_fraction: float | None = None,
    classes: Sequence[str] = (),
    target: Target = "class",
    missing_labels: MissingLabels = "refuse",
    missing_clients: MissingClients = "refuse",
    read: Read = "auto",
) -> Dataset:
    """Read a folder with x.npy, y.npy, and optional arrays such as client.npy and x_test.npy.

    Parameters
    ----------
    path
        The folder.
    test_fraction
        Fraction of each class held out as test rows. Default 0.2. Not with ``test.npy`` or
        ``x_test.npy``.
    classes
        Names of the classes in the order of their numbers.

    Notes
    -----
    The arrays are those of the source ``npz``, a file each: ``x``, ``y``, ``client``, ``test``,
    ``x_test``, ``y_test``, ``client_test``. ``x`` and ``x_test`` are mapped into memory, and only
    the rows of a batch are read, if ``data.read`` is ``"lazy"`` or they would fill more than half
    of the memory. Missing numbers are refused.

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
    has_test = (folder / "x_test.npy").exists()
    train = _rows(folder, "", target, read)
    mask_file = folder / "test.npy"
    if has_test or mask_file.exists():
        refuse_fraction(test_fraction, f"{folder.name} has test rows")
    if has_test:
        parts = train, _rows(folder, "_test", target, read)
    elif mask_file.exists():
        mask = as_mask(_array(mask_file), f"{folder.name}: test.npy")
        _check_length(folder.name, "test", len(mask), len(train.labels))
        parts = train.take(~mask), train.take(mask)
    else:
        parts = split_rows(train, test_fraction)
    return dataset(
        folder.name,
        *parts,
        classes=classes,
        target=target,
        missing_labels=missing_labels,
        missing_clients=missing_clients,
    )


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


def _rows(folder: Path, suffix: str, target: Target, read: Read) -> LabelledRows:
    labels = stored_labels(
        _array(folder / f"y{suffix}.npy"), f"{folder.name}: the labels y{suffix}", target
    )
    client_file = folder / f"client{suffix}.npy"
    clients = None
    if client_file.exists():
        clients = as_clients(_array(client_file), f"{folder.name}: client{suffix}")
        _check_length(folder.name, f"client{suffix}", len(clients), len(labels))
    file = folder / f"x{suffix}.npy"
    array = _mapped(file)
    _check_length(folder.name, f"x{suffix}", len(array), len(labels))
    if read == "once" or (read == "auto" and fits(4 * array.size)):
        return LabelledRows(features(_array(file), f"{folder.name}: x{suffix}"), labels, clients)
    lazy = LazyRows.of(MappedRows(folder.name, file, array))
    return LabelledRows(outline(lazy), labels, clients, lazy)


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


def _check_length(folder: str, name: str, length: int, rows: int) -> None:
    if length != rows:
        raise DataError(f"{folder}: {name}.npy has {length} rows, and there are {rows} labels")
