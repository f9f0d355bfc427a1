"""Data source for a user's NumPy arrays in one .npz file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.label_check import MissingClients, MissingLabels
from fedgist.data.sources.array_file import features, no_array, read_arrays
from fedgist.data.sources.labelled_rows import (
    LabelledRows,
    Missing,
    Values,
    as_clients,
    as_mask,
    dataset,
    refuse_fraction,
    split_rows,
)
from fedgist.data.sources.locations import existing
from fedgist.data.sources.stored_labels import stored_labels
from fedgist.errors import DataError

# "clients" is an older name of "client"
_ARRAYS = ("x", "y", "client", "clients", "test", "x_test", "y_test", "client_test", "clients_test")
_NOT_BOTH = (("client", "clients"), ("client_test", "clients_test"), ("test", "x_test"))


def npz(
    *,
    path: str | Path,
    test_fraction: float | None = None,
    missing: Missing = "refuse",
    classes: Sequence[str] = (),
    target: Target = "class",
    missing_labels: MissingLabels = "refuse",
    missing_clients: MissingClients = "refuse",
) -> Dataset:
    """Read the arrays x and y of a .npz file, and optional arrays such as client and x_test.

    Parameters
    ----------
    path
        The file.
    test_fraction
        Fraction of each class held out as test rows. Default 0.2. Not with an array ``test`` or
        ``x_test``.
    missing
        What to do with a missing number (NaN). ``"refuse"``: it is an error. ``"mean"``: the mean
        of its column over the training rows replaces it.

    classes
        Names of the classes in the order of their numbers.

    Notes
    -----
    These arrays of the file are read; all others are ignored:

    ``x``
        The examples, a row each: columns of numbers (rows, columns); images of bytes (uint8) with
        their channels, 1 or 3 of them, first or last, or without; or numbers of any other shape.
    ``y``
        The labels (rows,): whole numbers or texts. They are numbered in sorted order. For the
        objective ``regression`` they are numbers, for ``multilabel`` 1 and 0, (rows,) or (rows,
        outputs), and NaN if missing; for ``segmentation`` the class of each pixel, (rows, height,
        width), and -1 if missing.
    ``client``
        Whose each row is (rows,): whole numbers or texts, which the clients are called. (Also
        ``clients``.) For ``partition.name = "natural"``.
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
    file = existing(path)

    def wanted(stored: list[str]) -> list[str]:
        for name in ("x", "y", *(("y_test",) if "x_test" in stored else ())):
            if name not in stored:
                raise no_array(file, name, stored)
        for array, other in _NOT_BOTH:
            if array in stored and other in stored:
                raise DataError(
                    f"{file.name} has an array {array!r} and an array {other!r}: only one may be"
                )
        return [name for name in stored if name in _ARRAYS]

    arrays = read_arrays(file, wanted)
    train, test = _train_and_test(file.name, arrays, test_fraction, target)
    return dataset(
        file.name,
        train,
        test,
        classes=classes,
        missing=missing,
        target=target,
        missing_labels=missing_labels,
        missing_clients=missing_clients,
    )


def _train_and_test(
    file_name: str, arrays: Mapping[str, Values], test_fraction: float | None, target: Target
) -> tuple[LabelledRows, LabelledRows]:
    rows = _labelled_rows(file_name, arrays, "", target)
    for name in ("test", "x_test"):
        if name in arrays:
            refuse_fraction(test_fraction, f"{file_name} has an array {name!r}")
    if "x_test" in arrays:
        return rows, _labelled_rows(file_name, arrays, "_test", target)
    if "test" not in arrays:
        return split_rows(rows, test_fraction)
    mask = as_mask(arrays["test"], f"{file_name}: the array 'test'")
    _check_length(file_name, "x", len(rows.x), "test", len(mask))
    return rows.take(~mask), rows.take(mask)


def _labelled_rows(
    file_name: str, arrays: Mapping[str, Values], suffix: str, target: Target
) -> LabelledRows:
    x_name, y_name = f"x{suffix}", f"y{suffix}"
    x = features(arrays[x_name], f"{file_name}: {x_name}")
    labels = stored_labels(arrays[y_name], f"{file_name}: the labels {y_name}", target)
    _check_length(file_name, x_name, len(x), y_name, len(labels))
    for name in (f"client{suffix}", f"clients{suffix}"):
        if name in arrays:
            clients = as_clients(arrays[name], f"{file_name}: {name}")
            _check_length(file_name, x_name, len(x), name, len(clients))
            return LabelledRows(x, labels, clients)
    return LabelledRows(x, labels)


def _check_length(file_name: str, x_name: str, rows: int, name: str, length: int) -> None:
    if length != rows:
        raise DataError(f"{file_name}: {x_name} has {rows} rows but {name} has {length}")
