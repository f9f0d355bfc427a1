"""The columns of a Hugging Face split: which are inputs, labels and clients, by name or by type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedgist.core.objectives.target import Target
from fedgist.data.sources.hub_splits import HubPart
from fedgist.data.sources.splits import Missing
from fedgist.data.sources.stored_labels import label_columns
from fedgist.errors import DataError, listed

USUAL_LABELS = ("label", "labels", "target", "y")  # in the order of preference
Kind = Literal["image", "number", "array", "bytes", "class", "other"]
_NUMBER = re.compile(r"u?int\d+|b?float\d+|bool|decimal\d+\(.*")
_BYTES_DIMS = 2  # an array of bytes with rows and columns is an image
_SHORT = 40  # characters of a type in an error message


@dataclass(frozen=True)
class HubOptions:
    """Options of data that are given in Python: the columns and splits of Hugging Face data sets.

    They mean what they mean in the source ``huggingface``. Arrays have only ``test_fraction``.
    """

    label: str | list[str] | None = None
    image: str | None = None
    features: list[str] | None = None
    client: str | None = None
    image_size: int | list[int] | None = None
    train: str = "train"
    test: str | None = None
    test_fraction: float | None = None
    missing: Missing = "refuse"
    group: str | None = None


NONE_STATED = HubOptions()


@dataclass(frozen=True)
class HubColumns:
    """The columns of inputs, labels, clients and groups; ``unused`` are all others, with types."""

    inputs: tuple[str, ...]
    kind: Kind
    labels: tuple[str, ...]
    client: str | None = None
    group: str | None = None
    unused: tuple[str, ...] = ()

    @property
    def aside(self) -> list[str]:
        """The columns that are no inputs: labels, and if named clients and groups."""
        return [*self.labels, *(name for name in (self.client, self.group) if name is not None)]

    @staticmethod
    def of(part: HubPart, options: HubOptions, target: Target) -> HubColumns:
        """Return the columns that are named, or the usual ones.

        Raises
        ------
        DataError
            If a column does not exist, has a wrong type, or must be named.
        """
        kinds = part.kinds()
        labels = _labels(part, kinds, options.label, target)
        beside = (options.client, options.group)
        aside = [*labels, *(name for name in beside if name is not None)]
        _expect(part.name, kinds, aside)
        inputs = _inputs(part.name, kinds, aside, options)
        if both := [name for name in inputs if name in aside]:
            raise DataError(
                f"{part.name}: the column {both[0]!r} is an input, and the label, client or group "
                "as well"
            )
        used = {*inputs, *aside}
        unused = [f"{name} ({_words(kind)})" for name, kind in kinds.items() if name not in used]
        first = _kind(kinds[inputs[0]]) if len(inputs) == 1 else "number"
        return HubColumns(tuple(inputs), first, tuple(labels), *beside, tuple(unused))

    @property
    def notes(self) -> tuple[str, ...]:
        """A note for the user on columns that are not used."""
        text = f"inputs: {listed(self.inputs)}; columns that are neither input nor label: "
        return (text + listed(self.unused),) if self.unused else ()

    def expect(self, part: HubPart) -> None:
        """Raise DataError if a part lacks a column, or has images where others have numbers."""
        kinds = part.kinds()
        _expect(part.name, kinds, [*self.inputs, *self.aside])
        for name in self.inputs:
            if (_kind(kinds[name]) == "image") != (self.kind == "image"):
                words = "images" if self.kind == "image" else "numbers"
                raise DataError(
                    f"{part.name}: the column {name!r} holds {_words(kinds[name])}, and {words} in "
                    "the first split"
                )


def _labels(
    part: HubPart, kinds: Mapping[str, object], label: str | list[str] | None, target: Target
) -> list[str]:
    """Return the columns of labels: the named ones, a usual name, or the only column of classes."""
    if label is not None:
        return label_columns(label, target)
    usual = [name for name in USUAL_LABELS if name in kinds]
    classes = [name for name, kind in kinds.items() if _kind(kind) == "class"]
    if usual or len(classes) == 1:
        return [(usual or classes)[0]]
    raise DataError(
        f"{part.name} has the columns {listed(kinds)}, and none of them is named "
        f"{listed(USUAL_LABELS)}: name the column of labels by label"
    )


def _inputs(
    name: str, kinds: Mapping[str, object], aside: Sequence[str], options: HubOptions
) -> list[str]:
    """Return the columns of inputs: the named ones, the only one of images, or those of numbers."""
    image, features = options.image, options.features
    if image is not None and features is not None:
        raise DataError(
            f"{name}: name either the column of images (image) or the columns of numbers "
            "(features); both are given"
        )
    if image is not None:
        _expect(name, kinds, [image])
        _refuse(name, kinds, image, {"image"}, "images")
        return [image]
    if features is not None:
        _expect(name, kinds, features)
        for column in features:
            _refuse(name, kinds, column, {"number", "array", "bytes", "class"}, "numbers")
        if features:
            return features
        raise DataError(f"{name}: features names no column")
    return _usual_inputs(name, kinds, aside)


def _usual_inputs(name: str, kinds: Mapping[str, object], aside: Sequence[str]) -> list[str]:
    """Return the only column of images, or without images all columns of numbers."""
    others = {column: kind for column, kind in kinds.items() if column not in aside}
    images = [column for column, kind in others.items() if _kind(kind) == "image"]
    if len(images) > 1:
        raise DataError(
            f"{name} has {len(images)} columns of images, {listed(images)}: name the one to use by "
            "image"
        )
    numeric = ("number", "array", "bytes")
    if inputs := images or [column for column, kind in others.items() if _kind(kind) in numeric]:
        return inputs
    types = [f"{column} ({_words(kind)})" for column, kind in others.items()]
    raise DataError(
        f"{name} has no column of images or numbers beside {listed(aside)}; it has "
        f"{listed(types) or 'no other'}: make numbers of a column with map"
    )


def _expect(name: str, kinds: Mapping[str, object], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in kinds:
            raise DataError(f"{name} has no column {column!r}; it has {listed(kinds)}")


def _refuse(
    name: str, kinds: Mapping[str, object], column: str, allowed: set[str], words: str
) -> None:
    """Raise DataError if a named column is of another kind."""
    if _kind(kinds[column]) in allowed:
        return
    cure = "flatten() makes a column of each of its entries" * isinstance(kinds[column], Mapping)
    raise DataError(
        f"{name}: the column {column!r} holds {_words(kinds[column])}, not {words}; "
        f"{cure or f'name another column, or make {words} of it with map'}"
    )


def _kind(kind: object) -> Kind:
    """Return what inputs a column can be, by its type, or by a value if there is no type."""
    if hasattr(kind, "convert") or getattr(kind, "dtype", "") == "PIL.Image.Image":
        return "image"
    if hasattr(kind, "str2int"):
        return "class"
    dims, dtype = _form(kind)
    if not _NUMBER.fullmatch(dtype):
        return "other"
    if dims >= _BYTES_DIMS and dtype == "uint8":
        return "bytes"
    return "array" if dims else "number"


def _form(kind: object) -> tuple[int, str]:
    """Return the number of dimensions and the type of the numbers in a cell, by type or value."""
    if isinstance(kind, bool | int | float):
        return 0, "float64"
    inner = getattr(kind, "feature", None)
    if isinstance(kind, list | tuple) and kind:  # a value, or an old form of a type
        inner = kind[0]
    if inner is not None:
        dims, dtype = _form(inner)
        return dims + 1, dtype
    dtype = "" if hasattr(kind, "str2int") else getattr(kind, "dtype", "")
    return len(getattr(kind, "shape", ())), str(dtype).removeprefix("torch.")


def _words(kind: object) -> str:
    """Return what a column holds, in a few words."""
    if isinstance(kind, Mapping):
        return "a mapping"
    dtype = getattr(kind, "dtype", None)
    if isinstance(dtype, str) and not getattr(kind, "shape", ()):
        return dtype
    text = repr(kind) if hasattr(kind, "feature") or dtype else type(kind).__name__
    return text if len(text) <= _SHORT else text[:_SHORT] + "..."
