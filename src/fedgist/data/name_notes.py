"""Notes on names of classes and clients that may be mistakes of the data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from fedgist.data.dataset import Dataset
from fedgist.errors import listed


def notes_on_names(data: Dataset, stated: Sequence[str] = ()) -> list[str]:
    """Return notes on classes and clients that look like others, or like no name.

    Named are names that differ by white space or case only, classes that no row has, and classes
    whose name is a sign of a missing value. ``stated`` are the classes that a recipe lists.
    """
    notes = [] if stated else _similar("labels", data.classes)
    notes += _similar("clients", data.client_names)
    if data.target != "class":
        return notes
    counts = torch.bincount(torch.cat([data.y, data.y_test]), minlength=data.num_classes).tolist()
    for name, count in zip(data.classes, counts, strict=False):
        if count and name.strip().lower() in data.form.signs:
            notes.append(f"rows with the label {name!r}, which is a class here: {count}")
    if empty := [name for name, count in zip(data.names, counts, strict=True) if not count]:
        notes.append(f"classes that no row has: {listed(map(repr, empty))}")
    return notes


def _similar(kind: str, names: Sequence[str]) -> list[str]:
    groups = defaultdict(list)
    for name in names:
        groups[" ".join(name.split()).casefold()].append(name)
    return [
        f"{kind} that differ by white space or case only are different {kind} here: "
        f"{listed(map(repr, group))}"
        for group in groups.values()
        if len(group) > 1
    ]
