"""A data set of the user's own, as NumPy arrays in one .npz file."""

from __future__ import annotations

from pathlib import Path

from fedgist.data.dataset import Dataset
from fedgist.data.sources.array_file import features, no_array, read_arrays
from fedgist.data.sources.labelled_rows import LabelledRows, Values, as_texts, dataset, split
from fedgist.data.sources.locations import existing
from fedgist.errors import DataError

_ARRAYS = ("x", "y", "x_test", "y_test", "clients", "clients_test")


def npz(*, path: str | Path, test_fraction: float = 0.2) -> Dataset:
    """Read the arrays x and y, and x_test, y_test, clients and clients_test where there are any.

    Without x_test, ``test_fraction`` of each class is held out as test rows.

    Raises
    ------
    DataError
        If an array is missing, or arrays cannot be read or do not fit each other.
    """
    file = existing(path)

    def wanted(stored: list[str]) -> list[str]:
        for name in ("x", "y", *(("y_test",) if "x_test" in stored else ())):
            if name not in stored:
                raise no_array(file, name, stored)
        return [name for name in stored if name in _ARRAYS]

    arrays = read_arrays(file, wanted)
    rows = _labelled_rows(file.name, arrays, "")
    if "x_test" in arrays:
        return dataset(file.name, rows, _labelled_rows(file.name, arrays, "_test"))
    return dataset(file.name, *split(rows, test_fraction))


def _labelled_rows(file_name: str, arrays: dict[str, Values], suffix: str) -> LabelledRows:
    x_name, y_name, clients_name = (f"{name}{suffix}" for name in ("x", "y", "clients"))
    x = features(arrays[x_name], f"{file_name}: {x_name}")
    labels = as_texts(arrays[y_name], f"{file_name}: the labels {y_name}")
    clients = None
    if clients_name in arrays:
        clients = as_texts(arrays[clients_name], f"{file_name}: {clients_name}")
    for name, values in ((y_name, labels), (clients_name, clients)):
        if values is not None and len(values) != len(x):
            msg = f"{file_name}: {x_name} has {len(x)} rows but {name} has {len(values)}"
            raise DataError(msg)
    return LabelledRows(x, labels, clients)
