"""Labels of texts: one class each, or several labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedgist.core.objectives.target import IN_WORDS, Target
from fedgist.data.label_check import check_among
from fedgist.data.sources.splits import codes, in_order
from fedgist.errors import DataError, listed

Labels = Sequence[Sequence[str]] | None


def label_names(name: str, target: Target, labels: Labels) -> tuple[str, ...]:
    """Return the names of the classes or labels of training texts, in sorted order."""
    if target not in {"class", "labels"}:
        raise DataError(f"{name} has labels of texts, and none of {IN_WORDS[target]}")
    names = in_order(label for text_labels in labels or () for label in text_labels)
    if not names:
        raise DataError(f"{name} has no text with a label")
    return names


def label_numbers(name: str, target: Target, labels: Labels, names: tuple[str, ...]) -> Tensor:
    """Return class numbers (texts,), or 1 and 0 for each label, float32 (texts, labels)."""
    labels = labels or ()
    check_among(name, {label for one in labels for label in one}, names, stated=False)
    if target == "class":
        if several := [text_labels for text_labels in labels if len(text_labels) != 1]:
            raise DataError(
                f"{name}: a text has the labels {listed(several[0])}; objective text_classes needs "
                "one, multilabel reads several"
            )
        return codes(np.array([label for (label,) in labels], dtype=object), names)
    y = torch.zeros(len(labels), len(names))
    position = {label: number for number, label in enumerate(names)}
    for row, text_labels in enumerate(labels):
        y[row, [position[label] for label in text_labels]] = 1.0
    return y
