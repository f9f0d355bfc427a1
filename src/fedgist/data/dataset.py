"""The ``Dataset`` that every data source returns: all examples and labels of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedgist.core.objectives.target import Target
from fedgist.data.facts import DataFacts
from fedgist.data.label_check import (
    MissingLabels,
    check_among,
    check_classes,
    check_labels,
    check_none_is_missing,
)
from fedgist.data.lazy_rows import Inputs, LazyRows, lazy_or_none, outline
from fedgist.data.table_columns import TABLE_FORM, Column, TableForm
from fedgist.data.vocabulary import Vocabulary
from fedgist.errors import DataError, listed

_LEAST_DIMS = 2  # rows, and the numbers in each row
_TEXT_DIMS = 2  # dimensions of labels of texts: rows and positions


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples and labels of a task.

    ``x`` and ``x_test`` are ``(rows, *shape)``, uint8 for images (channels first) or float32, or
    float64 if float32 does not hold the spread of a column (``core/far_numbers.py``). ``y``
    and ``y_test`` are (rows,), int64 labels 0..num_classes-1. Models see
    ``(x / scale - mean) / std``, with ``mean`` and ``std`` per channel or column. ``classes`` are
    names of the labels. ``columns`` describe the encoding of a table as ``x``. ``fill``
    ``(*shape)`` replaced missing numbers, if these were allowed.

    ``target`` says what the labels are. ``"class"``: one class per row, as above. ``"numbers"``:
    numbers per row, float32 (rows, num_classes), NaN for a missing one. ``"labels"``: 1 for each
    label that a row has and 0 for the others, in the same form. ``"pixels"``: the class of each
    pixel, int16 (rows, height, width), or -1 for a pixel that is not scored. ``"words"``: the next
    word at each place of a text, int32 (rows, length), or -1 at places that are not scored.
    ``num_classes`` is the number of classes, numbers, labels or words, and ``classes`` their names.

    Texts are int32 word numbers ``x`` (rows, length), and ``vocabulary`` encodes them.

    If the source knows them, ``clients`` and ``clients_test`` are (rows,), the client number of
    each row, and ``client_names`` are the source's names of the clients. ``groups`` (rows,) are the
    group of each training row, such as a patient, if rows are held out by groups.
    ``annotations`` are additional numbers of each training row, float32 (rows,) by name, that are
    not inputs, such as a weight in what its client releases. ``superclasses`` are the superclass of
    each class, if classes form groups. ``measured`` lists the parts that were computed from the
    training rows and reveal information about them: ``"moments"``, ``"fill"``, ``"categories"``,
    ``"vocabulary"``.

    Rows may be read when they are used (:func:`fedgist.lazy`). Then ``lazy`` and ``lazy_test`` read
    them. ``x`` and ``x_test`` are then tensors on the device ``meta``, which have only a shape and
    a type. ``how_read`` tells the user how the rows are read. ``notes`` tell what was
    left out, cut or changed, and what may be a mistake; a run records them. ``form`` is how the
    text of a table is read.
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    classes: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    fill: Tensor | None = field(default=None, repr=False)
    clients: Tensor | None = field(default=None, repr=False)
    clients_test: Tensor | None = field(default=None, repr=False)
    client_names: tuple[str, ...] = field(default=(), repr=False)
    groups: Tensor | None = field(default=None, repr=False)
    annotations: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    vocabulary: Vocabulary | None = field(default=None, repr=False)
    superclasses: tuple[int, ...] = field(default=(), repr=False)
    target: Target = "class"
    measured: frozenset[str] = field(default=frozenset(), repr=False)
    lazy: LazyRows | None = field(default=None, repr=False)
    lazy_test: LazyRows | None = field(default=None, repr=False)
    how_read: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    form: TableForm = TABLE_FORM

    @property
    def inputs(self) -> Inputs:
        """The training examples ``(rows, *shape)``: a tensor, or lazy rows."""
        return self.x if self.lazy is None else self.lazy

    @property
    def inputs_test(self) -> Inputs:
        """The test examples ``(rows, *shape)``: a tensor, or lazy rows."""
        return self.x_test if self.lazy_test is None else self.lazy_test

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.x.shape[1:])

    @property
    def text(self) -> bool:
        """Whether examples are texts: numbers of words."""
        return self.x.dtype == torch.int32

    @property
    def words(self) -> int:
        """Number of words in the vocabulary of texts; 0 for other examples."""
        if not self.text:
            return 0
        return len(self.vocabulary.words) if self.vocabulary else self.num_classes

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each class, or its number if classes have no names."""
        return self.classes or tuple(str(label) for label in range(self.num_classes))

    @property
    def facts(self) -> DataFacts:
        """The form of the rows, without the rows."""
        return DataFacts(
            self.name,
            self.input_shape,
            self.num_classes,
            str(self.x.dtype).removeprefix("torch."),
            self.target,
            self.words,
            self.scale,
            self.mean,
            self.std,
            self.classes,
            self.columns,
            {n: (float(v.min()), float(v.max())) for n, v in self.annotations.items()},
            self.label_moments,
        )

    @property
    def label_moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each predicted number over the training rows, or empty."""
        if self.target != "numbers":
            return (), ()
        y = self.y.to(torch.float64)
        mean = y.nanmean(0).nan_to_num()  # 0 for a number that no row has
        std = (y - mean).square().nanmean(0).sqrt()
        return tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())

    def only(self, rows: Tensor | slice) -> Dataset:
        """Return the same data with only these training rows: row numbers (rows,), or a slice."""
        clients, groups = (v if v is None else v[rows] for v in (self.clients, self.groups))
        beside = {name: values[rows] for name, values in self.annotations.items()}
        some = replace(self, y=self.y[rows], clients=clients, groups=groups, annotations=beside)
        return some.with_inputs(self.inputs[rows], self.inputs_test)

    def with_inputs(self, x: Inputs, x_test: Inputs) -> Dataset:
        """Return the data with these examples ``(rows, *shape)``, tensors or lazy rows."""
        whole = replace(self, x=outline(x), x_test=outline(x_test))
        return replace(whole, lazy=lazy_or_none(x), lazy_test=lazy_or_none(x_test))


def check(data: Dataset, missing_labels: MissingLabels = "mask") -> Dataset:
    """Return ``data`` if it is valid for training.

    With ``missing_labels = "refuse"`` no number, label or pixel's class may be missing.

    Raises
    ------
    DataError
        If there are no training rows, rows and labels disagree, a label is out of range, a number
        is not finite, training and test rows have different shapes, there are more unnamed classes
        than rows, or moments or clients do not fit the rows.
    """
    check_classes(data)
    _check_split(data, "training", data.x, data.y)
    _check_split(data, "test", data.x_test, data.y_test)
    _check_clients(data, "training", data.clients, len(data.y))
    _check_clients(data, "test", data.clients_test, len(data.y_test))
    if missing_labels == "refuse":
        check_none_is_missing(data, "training", data.y)
        check_none_is_missing(data, "test", data.y_test)
    for name, values in data.annotations.items():
        if values.shape != data.y.shape[:1] or not bool(torch.isfinite(values).all()):
            raise DataError(
                f"{data.name}: the annotation {name!r} is not a finite number for each row"
            )
    if len(data.x) == 0:
        raise DataError(f"{data.name} has no training rows")
    if data.x.shape[1:] != data.x_test.shape[1:]:
        raise DataError(
            f"{data.name}: training rows have shape {list(data.x.shape[1:])}, test rows "
            f"{list(data.x_test.shape[1:])}"
        )
    _check_moments(data)
    return data


def with_classes(data: Dataset, classes: Sequence[str]) -> Dataset:
    """Return the data with labels numbered in the order of ``classes``, or unchanged if empty.

    So sites that hold different classes number them in the same way.

    Raises
    ------
    DataError
        If ``classes`` names one twice, or a label of the data is not among them.
    """
    stated = tuple(classes)
    if twice := [name for i, name in enumerate(stated) if name in stated[:i]]:
        raise DataError(f"data.classes names {twice[0]!r:.80} twice")
    if not stated or stated == data.classes:
        return data
    names = data.classes or tuple(str(number) for number in range(data.num_classes))
    if data.target == "words":
        raise DataError(
            f"{data.name}: data.classes cannot name the words of texts; its vocabulary does"
        )
    if data.target != "class":
        return _with_names(data, stated)
    held = [name for i, name in enumerate(names) if _holds(data, i)]
    check_among(data.name, held, stated, stated=True)
    number = torch.tensor([stated.index(name) if name in stated else -1 for name in names])
    y, y_test = number[data.y], number[data.y_test]
    above = data.superclasses
    groups = tuple(above[names.index(name)] for name in stated if name in names) if above else ()
    kept = groups if len(groups) == len(stated) else ()  # an added class has no known superclass
    return replace(
        data, y=y, y_test=y_test, num_classes=len(stated), classes=stated, superclasses=kept
    )


def _with_names(data: Dataset, stated: tuple[str, ...]) -> Dataset:
    """Return data of numbers, labels or pixels with stated names, in the stated order."""
    if not data.classes or data.target == "pixels":
        return check(replace(data, classes=stated))
    if lost := [name for name in data.classes if name not in stated]:
        raise DataError(f"{data.name}: {lost[0]!r:.80} is not among data.classes: {listed(stated)}")
    kept = [data.classes.index(name) if name in data.classes else -1 for name in stated]

    def arranged(y: Tensor) -> Tensor:
        return torch.where(torch.tensor(kept) >= 0, y[:, kept], torch.nan)

    y, y_test = arranged(data.y), arranged(data.y_test)
    return replace(data, y=y, y_test=y_test, num_classes=len(stated), classes=stated)


def _holds(data: Dataset, label: int) -> bool:
    return bool((data.y == label).any() or (data.y_test == label).any())


def _check_moments(data: Dataset) -> None:
    """Check mean, std and scale: one number for all, or one per channel or column."""
    for name, values in (("mean", data.mean), ("std", data.std), ("scale", (data.scale,))):
        if len(values) not in {1, data.input_shape[0]}:
            raise DataError(
                f"{data.name}: {name} has {len(values)} numbers; it needs {data.input_shape[0]}, "
                "or 1 for all"
            )
        if not all(math.isfinite(value) and (value > 0 or name == "mean") for value in values):
            raise DataError(
                f"{data.name}: {name} is {list(values)!s:.80}; finite numbers are needed"
                + (", greater than 0" if name != "mean" else "")
            )


def _check_clients(data: Dataset, split: str, clients: Tensor | None, rows: int) -> None:
    if clients is None:
        return
    if clients.dtype != torch.int64 or clients.shape != (rows,):
        raise DataError(
            f"{data.name}: clients of the {split} rows must be one whole number per row"
        )
    most = len(data.client_names) or len(data.y)
    if rows and not (int(clients.min()) >= 0 and int(clients.max()) < most):
        raise DataError(
            f"{data.name}: clients of the {split} rows reach {int(clients.min())}.."
            f"{int(clients.max())}, outside 0..{most - 1}"
        )


def _check_split(data: Dataset, split: str, x: Tensor, y: Tensor) -> None:
    if len(x) != len(y):
        raise DataError(f"{data.name}: {len(x)} {split} rows but {len(y)} labels")
    if x.dim() < _LEAST_DIMS or x.is_complex():
        raise DataError(
            f"{data.name}: {split} rows must be real numbers of shape (rows, ...), not {x.dtype} "
            f"of shape {list(x.shape)}"
        )
    check_labels(data, split, y, tuple(x.shape[1:]))
    if x.is_meta:  # each row is checked when it is read
        return
    if x.dtype == torch.int32:
        _check_texts(data, split, x)
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        flat = x.flatten(1)
        row, column = (~torch.isfinite(flat)).nonzero()[0].tolist()
        raise DataError(
            f"{data.name}: {split} row {row} holds a number that is not finite: "
            f"{flat[row, column]:g} in column {column} (counted from 0)"
        )


def _check_texts(data: Dataset, split: str, x: Tensor) -> None:
    """Check word numbers (rows, length)."""
    if x.dim() != _TEXT_DIMS:
        raise DataError(f"{data.name}: {split} texts must be (rows, length), not {list(x.shape)}")
    if len(x) and not (int(x.min()) >= 0 and int(x.max()) < data.words):
        raise DataError(
            f"{data.name}: words of the {split} texts reach {int(x.min())}..{int(x.max())}, "
            f"outside 0..{data.words - 1}"
        )
