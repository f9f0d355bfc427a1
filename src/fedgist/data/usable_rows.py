"""Rows that a private site can use: what it leaves out, it leaves out row by row.

Under differential privacy an error must not tell that one row holds an unlisted class or category,
or a number that is not finite. Such a category is none of the listed ones, and such a row is left
out. Only the site's owner sees how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import Inputs
from fedgist.data.usual_values import unusual_values

#: What is done about rows with an unlisted class, category or an unusable number: an error, or they
#: are left out, or they stay as they are (with NaN for a number), for facts about them.
Unlisted = Literal["refuse", "none", "keep"]


def usable(data: Dataset, classes: Sequence[str]) -> Dataset:
    """Return the rows with finite numbers and one of the ``classes``, with a note on the others.

    Moments that were measured are left out: they would have to be those of the rows that stay.
    """
    kept = _is_usable(data, data.inputs, data.y, classes)
    for values in data.annotations.values():
        kept &= values.isfinite()
    kept_test = _is_usable(data, data.inputs_test, data.y_test, classes)
    count = int((~kept).sum()) + int((~kept_test).sum())
    some = data.only(kept.nonzero().squeeze(1))
    tested = None if data.clients_test is None else data.clients_test[kept_test]
    some = replace(some, y_test=data.y_test[kept_test], clients_test=tested)
    some = some.with_inputs(some.inputs, data.inputs_test[kept_test])
    left_out = f"rows that are left out, of no listed class or with a number missing: {count}"
    notes = [*([left_out] if count else []), *_notes_on_categories(some)]
    some = replace(some, notes=(*some.notes, *notes))
    return replace(some, mean=(0.0,), std=(1.0,)) if "moments" in data.measured else some


def _notes_on_categories(data: Dataset) -> list[str]:
    """Return a note for each column with unlisted categories, which are none of the listed ones."""
    counts = {column.name: 0 for column in data.columns}
    for x in (data.x, data.x_test):
        if counts and not x.is_meta:  # lazy rows are not read for a note
            for column, rows in unusual_values(data.columns, x).items():
                counts[column.name] += int(rows.sum())
    return [
        f"cells of {name} that hold no listed category: {count}"
        for name, count in counts.items()
        if count
    ]


def _is_usable(data: Dataset, x: Inputs, y: Tensor, classes: Sequence[str]) -> Tensor:
    """Return Booleans (rows,): lazy rows are finite, or an error when they are read."""
    good = torch.ones(len(y), dtype=torch.bool)
    if isinstance(x, Tensor) and x.is_floating_point():
        good &= x.isfinite().flatten(1).all(1)
    if data.target == "class" and classes:
        good &= torch.tensor([name in classes for name in data.names])[y]
    return good
