"""Data sets from Python objects: arrays, data frames, or a torch data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedgist.core.far_numbers import narrowed
from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset, check
from fedgist.data.division import Division
from fedgist.data.held_out_rows import held_out
from fedgist.data.label_check import check_labels
from fedgist.data.lazy_rows import Inputs, LazyRows, outline
from fedgist.data.row_seeds import own_draws
from fedgist.data.sources.python_objects import (
    are_texts,
    array,
    categories,
    columns_of,
    example_values,
    index_of,
    is_frame,
    label_values,
    table_of,
)
from fedgist.data.sources.splits import (
    Values,
    codes,
    in_order,
    moments,
)
from fedgist.data.sources.stored_labels import stored_labels
from fedgist.data.sources.tabular import encode, with_columns
from fedgist.data.sources.unlabelled import fitted_rows
from fedgist.data.table_columns import Column
from fedgist.errors import DataError, did_you_mean

_NAMES = ("x", "y", "x_test", "y_test")
_FORMS = (
    "(x, y), (x, y, x_test, y_test), a map-style torch data set of pairs, two of them "
    "(train, test), Hugging Face splits, or a fedgist.Dataset"
)
_WHITE = 255.0
X = TypeVar("X", Tensor, LazyRows)
_BELIEVED = 1000  # largest plausible number of classes, or ten times the classes that occur


def in_memory(data: object) -> Dataset:
    """Return a user's objects as a data set: see :func:`split_in_memory`."""
    return split_in_memory(data, None)[0]


def split_in_memory(
    data: object,
    division: Division | None,
    target: Target = "class",
    clients_of: Callable[[int], Values | None] = lambda _: None,
) -> tuple[Dataset, Values | None]:
    """Return a user's objects as a data set; errors name the argument ``data``.

    With a ``division`` test rows are held out, the same rows as of a file; ``clients_of`` returns
    the client of each of that many rows, if they are given beside. Booleans (rows,) then say which
    rows these are. They are None otherwise.

    Arrays keep their shape. A data frame is encoded like a table: texts and categories become 0/1
    columns. Mean and std are those of the training rows. Labels are whole numbers from 0 on, or
    texts, which are numbered in sorted order; a pandas categorical keeps its own order. Other
    targets have labels (rows, ...) in the form of :class:`~fedgist.data.dataset.Dataset`.
    """
    if isinstance(data, Dataset):
        if division is not None:
            division.refuse("data= is a Dataset, which has its own test rows")
        return _checked(data), None
    parts: object = data
    if isinstance(data, torch.utils.data.Dataset):
        parts = _pairs(data, "data")
    elif isinstance(data, tuple) and len(data) in {1, 2} and all(map(_is_map_style, data)):
        sets = zip(data, ("data: train", "data: test"), strict=False)
        parts = tuple(part for rows, subject in sets for part in _pairs(rows, subject))
    if not isinstance(parts, tuple) or len(parts) not in {2, 4}:
        kind = f"a tuple of {len(data)}" if isinstance(data, tuple) else type(data).__name__
        raise DataError(f"data is {kind}; it must be {_FORMS}")
    held = None
    if division is not None:
        if len(parts) == len(_NAMES):
            division.refuse("data= has test rows")
        parts, held = _with_test_rows(parts[0], parts[1], division, target, clients_of)
    return _from_arrays(parts, target), held


def _with_test_rows(
    x: Any,
    y: Any,
    division: Division,
    target: Target,
    clients_of: Callable[[int], Values | None],
) -> tuple[tuple[object, ...], Values]:
    """Return ``(x, y, x_test, y_test)``, and Booleans (rows,) that are true for test rows."""
    labels = label_values(y, "data: y") if target == "class" else np.zeros(len(y))
    texts = labels.astype(str)  # in this order a file's labels are dealt into folds
    held = held_out(division, texts, clients_of(len(labels)))
    if len(x) != len(held):
        raise DataError(f"data: x has {len(x)} rows, but y has {len(held)}")
    train, test = np.flatnonzero(~held), np.flatnonzero(held)
    return tuple(_picked(part, rows) for rows in (train, test) for part in (x, y)), held


def _picked(values: Any, rows: Values) -> object:
    """Return some rows of an array, a tensor, a data frame, or a list."""
    if hasattr(values, "iloc"):
        return values.iloc[rows]
    if isinstance(values, list | tuple):
        return [values[row] for row in rows]
    is_rows = isinstance(values, Tensor | LazyRows)
    return values[torch.from_numpy(rows)] if is_rows else values[rows]


def _from_arrays(parts: tuple[object, ...], target: Target) -> Dataset:
    names = [f"data: {name}" for name in _NAMES[: len(parts)]]
    for x, y, name in zip(parts[::2], parts[1::2], names[::2], strict=True):
        _same_index(x, y, name)
    xs, columns, notes = _all_examples(parts[::2], names[::2])
    if target == "class":
        ys, num_classes, classes = _all_labels(parts[1::2], names[1::2])
    else:
        ys, num_classes, classes = _all_outputs(parts[1::2], names[1::2], target)
    for x, y, x_name, y_name in zip(xs, ys, names[::2], names[1::2], strict=True):
        _same_length(x, y, x_name, y_name)
    x, y, x_test, y_test = xs[0], ys[0], (*xs, xs[0][:0])[1], (*ys, ys[0][:0])[1]
    scale = _WHITE if x.dtype == torch.uint8 else 1.0
    mean, std = moments(outline(x), scale) if len(x) else ((0.0,), (1.0,))
    about = num_classes, scale, mean, std, classes
    data_set = Dataset("your data", outline(x), y, outline(x_test), y_test, *about, target=target)
    data_set = replace(data_set, measured=frozenset({"moments"}), notes=notes)
    data_set = data_set.with_inputs(x, x_test)
    return check(with_columns(data_set, columns) if columns and len(x) else data_set)


def labelled_like(data: Dataset, x: object, y: object, subject: str) -> tuple[Tensor, Tensor]:
    """Return new examples ``x`` and labels (rows,) in the form of a data set.

    ``subject`` begins error messages.
    """
    rows, numbers = examples_like(data, x, f"{subject}: x"), labels_like(data, y, f"{subject}: y")
    _same_length(rows, numbers, f"{subject}: x", f"{subject}: y")
    return rows, numbers


def examples_like(data: Dataset, x: object, subject: str) -> Tensor:
    """Return new examples ``(rows, *input)`` in the form of ``data.x``.

    ``x`` is an array or a data frame.
    """
    if data.text:
        raise DataError(
            f"{subject}: texts cannot be given so; name a file of them (data.name = 'text_file')"
        )
    if not is_frame(x):
        return fitted_rows(example_values(x, subject), subject, data.facts, data.fill)
    table = table_of(x, subject)
    columns = data.columns or tuple(Column(name) for name in table.frame.columns)
    return fitted_rows(encode(table, columns), subject, data.facts, data.fill)


def labels_like(data: Dataset, y: object, subject: str) -> Tensor:
    """Return new labels (rows, ...), class names or numbers, in the form of ``data.y``.

    A number is read as a class name if the class names are numbers.
    """
    if data.target != "class":
        labels = torch.from_numpy(stored_labels(array(y, subject), subject, data.target))
        labels = labels.to(data.y.dtype)
        check_labels(data, "new", labels, data.input_shape)
        return labels
    names = data.names
    numbered = [name for name in names if name.lstrip("-").isdecimal()]
    values = label_values(y, subject, signed=any(name.startswith("-") for name in numbered))
    if not are_texts(values):
        if not numbered:
            names = tuple(str(number) for number in range(data.num_classes))
        values = np.array([str(value) for value in values], dtype=object)
    return _codes(values, names, subject)


def _checked(data: Dataset) -> Dataset:
    for name in _NAMES:
        if not isinstance(getattr(data, name), Tensor):
            kind = type(getattr(data, name)).__name__
            raise DataError(
                f"data: {name} of a Dataset must be a tensor, not {kind}; arrays go as (x, y)"
            )
    return check(data)


def _is_map_style(value: object) -> bool:
    """Return whether an object has rows by number and is no array, table or Python sequence."""
    if isinstance(value, torch.utils.data.Dataset):
        return True
    plain = isinstance(value, Sequence | Mapping | Tensor) or hasattr(value, "__array__")
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not plain


def _pairs(data: Any, subject: str) -> tuple[Tensor, list[object]]:
    """Return the examples and the labels of a map-style torch data set."""
    if not hasattr(data, "__len__"):
        raise DataError(
            f"{subject}: a {type(data).__name__} has no length; a map-style data set is needed"
        )
    xs, ys = [], []
    with own_draws(draws=True) as seed:
        for row in range(len(data)):
            seed(row)  # of random transforms
            pair = data[row]
            if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004
                raise DataError(f"{subject}: row {row} of the torch data set is not a pair (x, y)")
            xs.append(_tensor(pair[0], row, subject))
            ys.append(pair[1].tolist() if isinstance(pair[1], Tensor) else pair[1])
            if xs[row].shape != xs[0].shape:
                shapes = f"{list(xs[row].shape)}, row 0 {list(xs[0].shape)}"
                raise DataError(f"{subject}: x of row {row} has shape {shapes}")
    return torch.stack(xs) if xs else torch.zeros(0, 1), ys


def _tensor(x: object, row: int, subject: str) -> Tensor:
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{subject}: x of row {row} is a {type(x).__name__}, not a tensor or an array"
        ) from error


def _all_examples(
    values: Sequence[object], names: Sequence[str]
) -> tuple[list[Inputs], tuple[Column, ...], tuple[str, ...]]:
    """Return training and test examples, and the columns of the training rows with notes."""
    lazy = [value for value in values if isinstance(value, LazyRows)]
    if len(lazy) == len(values):
        return [*_alike(lazy)], (), ()
    if len({is_frame(value) for value in values}) > 1:
        raise DataError("data: one of x and x_test is a data frame, the other is not")
    if is_frame(values[0]):
        tables = [table_of(value, name) for value, name in zip(values, names, strict=True)]
        columns, notes = columns_of(tables[0])
        if not columns:
            raise DataError(f"{names[0]} has no columns")
        return [*narrowed(*(encode(table, columns) for table in tables))], columns, notes
    xs = [example_values(value, name) for value, name in zip(values, names, strict=True)]
    widest = torch.float64 if any(x.dtype == torch.float64 for x in _alike(xs)) else xs[0].dtype
    return [*narrowed(*(x.to(widest) for x in xs))], (), ()


def _alike(xs: Sequence[X]) -> Sequence[X]:
    """Return training and test examples if they have the same type."""
    if len({x.dtype == torch.uint8 for x in xs}) > 1:
        raise DataError("data: one of x and x_test holds bytes (uint8), the other does not")
    return xs


def _all_labels(
    values: Sequence[object], names: Sequence[str]
) -> tuple[list[Tensor], int, tuple[str, ...]]:
    """Return training and test labels as numbers, the number of classes, and their names."""
    label_arrays = [label_values(value, name) for value, name in zip(values, names, strict=True)]
    if len({are_texts(y) for y in label_arrays if len(y)}) > 1:
        raise DataError("data: one of y and y_test holds texts, the other numbers")
    if are_texts(label_arrays[0]):
        classes = categories(values[0]) or in_order(label_arrays[0])
        ys = [_codes(y, classes, name) for y, name in zip(label_arrays, names, strict=True)]
        return ys, len(classes), classes
    present = np.unique(np.concatenate(label_arrays))
    num_classes = int(present.max(initial=-1)) + 1
    if num_classes > max(_BELIEVED, 10 * len(present)):
        raise DataError(
            f"{names[0]} reaches {num_classes - 1}, but has {len(present)} different labels: "
            f"number them 0..{len(present) - 1}, or give them as texts"
        )
    return [torch.from_numpy(y) for y in label_arrays], num_classes, ()


def _all_outputs(
    values: Sequence[object], names: Sequence[str], target: Target
) -> tuple[list[Tensor], int, tuple[str, ...]]:
    """Return training and test labels that are no classes of rows, their number and their names.

    The names are those of the columns of a data frame, if it is one.
    """
    titles = tuple(map(str, getattr(values[0], "columns", ())))
    arrays = [
        stored_labels(array(value, name), name, target)
        for value, name in zip(values, names, strict=True)
    ]
    if target == "pixels":
        count = max(int(y.max(initial=0)) for y in arrays) + 1
    else:
        count = arrays[0].shape[1]
    return [*narrowed(*(torch.from_numpy(y) for y in arrays))], count, titles


def _codes(values: Values, names: tuple[str, ...], subject: str) -> Tensor:
    classes = set(names)
    for value in values:
        if value not in classes:
            raise DataError(f"{subject}: unknown label {value!r}{did_you_mean(value, names)}")
    return codes(values, names)


def _same_index(x: object, y: object, x_name: str) -> None:
    """Raise DataError if x and y are of pandas and their rows have different names."""
    of_x, of_y = index_of(x), index_of(y)
    if of_x is None or of_y is None or len(of_x) != len(of_y) or of_x.equals(of_y):
        return
    raise DataError(
        f"{x_name} and {'y' + x_name.partition('x')[2]} have different indexes, so their rows may "
        "not belong together: align them by y.loc[x.index], or call reset_index(drop=True) on both"
    )


def _same_length(x: Inputs, y: Tensor, x_name: str, y_name: str) -> None:
    if len(x) != len(y):
        raise DataError(f"{x_name} has {len(x)} rows, but {y_name.partition(': ')[2]} has {len(y)}")
