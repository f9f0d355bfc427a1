"""Check labels: their form, their range, and the number of classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedgist.core.objectives.target import IN_WORDS, NUMERIC, Target, places
from fedgist.errors import DataError, listed

if TYPE_CHECKING:
    from fedgist.data.dataset import Dataset

MissingLabels = Literal["refuse", "mask"]  # the treatment of missing labels
MissingClients = Literal["refuse", "drop"]  # the treatment of rows without a client
MANY_CLASSES = 1000  # up to this number is plausible for any number of rows
_TYPES: Mapping[Target, torch.dtype] = MappingProxyType(
    {
        "class": torch.int64,
        "words": torch.int32,
        "numbers": torch.float32,
        "labels": torch.float32,
        "pixels": torch.int16,
    }
)


def check_classes(data: Dataset) -> None:
    """Raise DataError if the names of classes do not fit, or there are too many classes."""
    if data.target not in _TYPES:
        raise DataError(
            f"{data.name}: target is {data.target!r:.80}; it must be {' or '.join(_TYPES)}"
        )
    if data.classes and len(data.classes) != data.num_classes:
        raise DataError(
            f"{data.name} has {data.num_classes} classes and {len(data.classes)} names of classes"
        )
    rows = len(data.y) + len(data.y_test)
    if not data.classes and data.num_classes > max(MANY_CLASSES, rows):
        raise DataError(
            f"{data.name} has {data.num_classes} classes for {rows} rows; number the labels from 0 "
            "on without gaps, or name the classes"
        )


def check_among(name: str, labels: Iterable[str], classes: Sequence[str], *, stated: bool) -> None:
    """Raise DataError if a label is not among the classes of a recipe or of the training rows."""
    if not (new := sorted(set(labels) - set(classes))):
        return
    which = ("label", "classes") if stated else ("test label", "training labels")
    same = [one for one in classes if _number(one) == _number(new[0]) is not None]
    cure = f"; labels of digits are read as numbers: {new[0]!r} for {same[0]!r}" if same else ""
    raise DataError(
        f"{name}: the {which[0]} {new[0]!r:.80} is not among the {which[1]}: "
        f"{listed(classes)}{cure}"
    )


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None


def check_none_is_missing(data: Dataset, split: str, y: Tensor) -> None:
    """Raise DataError if a number, a label or a pixel's class is missing, in labels (rows, ...)."""
    missing = y.isnan() if data.target in NUMERIC else y < 0
    if data.target == "words" or not bool(missing.any()):
        return
    row = int(missing.nonzero()[0, 0])
    raise DataError(
        f"{data.name}: {split} row {row} (counted from 0) lacks a label; with data.missing_labels "
        "= 'mask' missing labels count nowhere"
    )


def check_labels(data: Dataset, split: str, y: Tensor, input_shape: tuple[int, ...]) -> None:
    """Raise DataError unless labels ``y`` (rows, ...) have the form of the data's target."""
    many = (data.num_classes,) if data.target in NUMERIC else places(data.target, input_shape)
    # numbers stay in float64 if float32 does not hold their spread
    precise = y.dtype == torch.float64 and data.target == "numbers"
    if (torch.float32 if precise else y.dtype) != _TYPES[data.target] or tuple(y.shape[1:]) != many:
        if data.target == "class":
            raise DataError(f"{data.name}: {split} labels must be one whole number per row")
        kind = str(_TYPES[data.target]).removeprefix("torch.")
        raise DataError(
            f"{data.name}: {split} labels must be {IN_WORDS[data.target]}, {kind} numbers of shape "
            f"{['rows', *many]}, not {y.dtype} of shape {list(y.shape)}".replace("'rows'", "rows")
        )
    if not len(y):
        return
    if data.target in NUMERIC:
        _check_numbers(data, split, y)
        return
    least = 0 if data.target == "class" else -1
    if not (int(y.min()) >= least and int(y.max()) < data.num_classes):
        raise DataError(
            f"{data.name}: {split} labels reach {int(y.min())}..{int(y.max())}, outside "
            f"{least}..{data.num_classes - 1}"
        )
    if many and bool((empty := (y < 0).flatten(1).all(1)).any()):
        row, content = int(empty.nonzero()[0]), "word" if data.target == "words" else "label"
        raise DataError(f"{data.name}: {split} row {row} (counted from 0) has no {content}")


def _check_numbers(data: Dataset, split: str, y: Tensor) -> None:
    """Check numbers or labels (rows, outputs); NaN stands for a missing one."""
    wrong = y.isinf() if data.target == "numbers" else (y != 0) & (y != 1) & ~y.isnan()
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        allowed = "a finite number" if data.target == "numbers" else "0 or 1"
        raise DataError(
            f"{data.name}: {data.names[column]} of {split} row {row} is {y[row, column]:g}; it "
            f"must be {allowed}, or NaN where it is missing"
        )
    if bool((empty := y.isnan().all(1)).any()):
        row = int(empty.nonzero()[0])
        raise DataError(f"{data.name}: {split} row {row} (counted from 0) has no label")
