"""The target of a task: what a model predicts for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

#: What is predicted. ``views``: nothing, encoders learn from views of rows without labels. ``own``:
#: defined by the user's objective.
Target = Literal["class", "words", "numbers", "labels", "pixels", "views", "own"]

#: What each target is, in the words of error messages.
IN_WORDS: Mapping[Target, str] = MappingProxyType(
    {
        "class": "one class for each row",
        "words": "the next word at each place of a text",
        "numbers": "numbers for each row",
        "labels": "several labels for each row",
        "pixels": "a class for each pixel",
        "views": "views of rows without labels",
        "own": "an objective of your own",
    }
)
#: The form of the labels that each objective reads, by the objective's name.
LABELS_OF: Mapping[str, Target] = MappingProxyType(
    {
        "classes": "class",
        "text_classes": "class",
        "next_word": "words",
        "regression": "numbers",
        "multilabel": "labels",
        "segmentation": "pixels",
        "simclr": "class",
    }
)
#: All targets: those of a method that reads rows only through the task's loss.
EVERY_TARGET = frozenset(IN_WORDS)
#: Targets with one vector of features for each row.
OF_ROWS: frozenset[Target] = frozenset({"class", "numbers", "labels", "views", "own"})
#: Targets whose labels are numbers, with NaN for a missing one.
NUMERIC: frozenset[Target] = frozenset({"numbers", "labels"})


def places(target: Target, input_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the places of a row at which something is predicted, () for a row.

    >>> places("class", (3, 32, 32)), places("words", (20,)), places("pixels", (3, 32, 32))
    ((), (20,), (32, 32))
    """
    if target == "words":
        return tuple(input_shape)
    return tuple(input_shape[1:]) if target == "pixels" else ()
