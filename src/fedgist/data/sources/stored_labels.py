"""Labels in arrays: texts of classes, numbers, several labels, or the classes of pixels."""

from __future__ import annotations

import numpy as np

from fedgist.core.objectives.target import IN_WORDS, NUMERIC, Target
from fedgist.data.sources.splits import Values, as_texts
from fedgist.errors import DataError

_NUMBERS = "biuf"  # NumPy's kinds of types
_COLUMN_DIMS, _PIXEL_DIMS = 2, 3  # rows and outputs; rows, height, width
_MOST = 2**15  # classes of pixels


def label_columns(label: str | list[str], target: Target) -> list[str]:
    """Return the columns of labels; only numbers and several labels may have more than one."""
    columns = [label] if isinstance(label, str) else label
    if not columns or (len(columns) > 1 and target not in NUMERIC):
        raise DataError(
            f"data.label = {columns}: a class is in one column; the objectives regression and "
            "multilabel read several"
        )
    return columns


def stored_labels(values: Values, subject: str, target: Target) -> Values:
    """Return an array of labels (rows, ...) in the form of the target.

    Classes become texts (rows,), numbers and labels float64 (rows, outputs), pixels int16 (rows,
    height, width).
    """
    if target in NUMERIC:
        return _columns(values, subject)
    if target == "pixels":
        return _pixels(values, subject)
    if target != "class":
        raise DataError(f"{subject} cannot be {IN_WORDS[target]}")
    return as_texts(values, subject)


def _columns(values: Values, subject: str) -> Values:
    columns = values.reshape(-1, 1) if values.ndim == 1 else values
    if columns.dtype.kind not in _NUMBERS or columns.ndim != _COLUMN_DIMS:
        raise DataError(
            f"{subject} must be numbers (rows,) or (rows, outputs), not {values.dtype} of shape "
            f"{list(values.shape)}"
        )
    return columns.astype(np.float64)


def _pixels(values: Values, subject: str) -> Values:
    if values.dtype.kind not in "biu" or values.ndim != _PIXEL_DIMS:
        raise DataError(
            f"{subject} must be the classes of pixels, whole numbers (rows, height, width), not "
            f"{values.dtype} of shape {list(values.shape)}"
        )
    if values.size and not (values.min() >= -1 and values.max() < _MOST):
        raise DataError(f"{subject} reach {values.min()}..{values.max()}, outside -1..{_MOST - 1}")
    return values.astype(np.int16)
