"""The first recipe for a table of one's own, in which each decision has its reason beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedgist.data.sources.table_look import RARE, ColumnLook, TableLook
from fedgist.errors import listed

SMALL_SITE = 30  # test rows of a client, below which folds are proposed
WIDE = 90  # characters of a line
TWO = 2


def first_recipe(look: TableLook, *, private: bool = False) -> str:
    """Return a recipe as TOML, with comments; if ``private``, one with differential privacy.

    Under privacy nothing may be measured on the rows: columns with missing numbers are ignored, and
    columns, classes, means and deviations are stated.
    """
    if private:
        look = replace(look, columns=tuple(map(_without_gaps, look.columns)))
    lines = [
        f"# Made by fedgist init from {look.path.name}: {look.rows} rows. Read each line with a #.",
        *(f"# found by its name, and perhaps not what you mean: {text}" for text in look.guessed),
        "",
        *_data(look, private=private),
        "",
        *_partition(look),
        "",
        "[model]",
        'name = "mlp"',
        "hidden = [32]  # one hidden layer; a wider one needs more rows",
        "",
        "[method]",
        'name = "fedlog"  # others: fedgist list methods; which one: docs/which-method.md',
        "",
        *_objective(look),
        "[train]",
        "num_rounds = 20",
        "batch_size = 16",
        "lr = 0.01",
        "",
        *(_private(look) if private else ()),
    ]
    return "\n".join(lines)


def _without_gaps(column: ColumnLook) -> ColumnLook:
    if column.use == "ignore" or not column.missing:
        return column
    reason = f"{column.missing} missing numbers, and privacy knows no mean to replace them by"
    return replace(column, use="ignore", reason=reason)


def _private(look: TableLook) -> Iterator[str]:
    yield "[privacy]"
    yield 'unit = "record"  # one row more or less is hidden in the noisy sums'
    yield from _comment(
        "what a body learned from a row is not covered, unless bodies = 'dp_sgd', with "
        "sampling_rate and gradient_clip"
    )
    yield "epsilon = 3.0  # fedgist privacy says what this means"
    yield f"delta = {10.0 ** -math.ceil(math.log10(look.rows + 1)):g}  # below 1 / {look.rows} rows"
    yield "clip = 1.0  # largest norm of a row's features; do not measure it on private rows"
    yield ""
    yield "[data.columns]"
    for column in look.inputs:
        kind = _texts(column.categories) if column.use == "categories" else '"number"'
        yield f"{_text(column.name)} = {kind}"
    yield ""


def _moments(look: TableLook) -> Iterator[str]:
    """Yield the means and deviations of the inputs that are numbers."""
    numbers = [column for column in look.inputs if column.use == "number"]
    yield from _comment(
        "mean and std of each number, in the order of the columns. THESE ARE MEASURED ON THE ROWS, "
        "rounded: good enough for a simulation. Before a release replace them by published values "
        "(mean: the middle of the usual range; std: a quarter of the range)"
    )
    for key in ("mean", "std") if numbers else ():
        yield f"{key} = [{', '.join(f'{_rounded(getattr(c, key)):g}' for c in numbers)}]"


def _rounded(value: float) -> float:
    """Return a number with two digits."""
    return float(f"{value:.2g}")


def _data(look: TableLook, *, private: bool) -> Iterator[str]:
    yield "[data]"
    yield 'name = "table"'
    yield f"path = {_text(str(look.path))}"
    if look.sep is not None:
        yield f"sep = {_text(look.sep)}"
    if look.classes:
        yield f"label = {_text(look.label)}  # what is predicted"
        counts = ", ".join(f"{name}: {count}" for name, count in look.classes)
        yield from _comment(f"rows of each class: {counts}")
        yield f"classes = {_texts([name for name, _ in look.classes])}"
    else:
        yield f"label = {_text(look.label)}  # what is predicted: a number"
    if look.missing_labels:
        yield f'missing_labels = "mask"  # {look.missing_labels} rows have no label: left out'
    if look.client is not None:
        yield f"client = {_text(look.client)}  # whose a row is"
    if look.missing_clients:
        yield f'missing_clients = "drop"  # {look.missing_clients} rows have no client: left out'
    if look.group is not None:
        yield f"group = {_text(look.group)}  # its rows are all tested, or all trained on"
    yield from _columns(look, private=private)
    yield from _rows(look, private=private)
    if private:
        yield from _moments(look)


def _rows(look: TableLook, *, private: bool) -> Iterator[str]:
    """Yield which cells are missing, and which rows are tested and validated on."""
    if look.signs:
        where = ", ".join(f"{json.dumps(sign)} in {name}" for sign, name in look.signs.items())
        yield f"missing_signs = {_texts([*look.signs])}"
        yield from _comment(f"texts among numbers, taken as missing: {where}")
    how = (
        "each row with this chance, by content"
        if private
        else "of the rows of each client and class"
    )
    yield f"test_fraction = 0.2  # {how}"
    if len(look.classes) == TWO and not private:
        yield "validation = 0.2  # of each client's training rows: thresholds are chosen on them"
    few = [name for name, count in look.clients if 0.2 * count < SMALL_SITE]
    if few or not look.clients:
        yield from _comment(
            f"few test rows at {listed(few, 8) if few else 'each client'}: for a result, put "
            "folds = 5 in place of test_fraction and run fedgist sweep, which tests every row once"
        )


def _columns(look: TableLook, *, private: bool) -> Iterator[str]:
    if look.ignored and not private:
        yield "ignore = ["
        for column in look.ignored:
            yield f"    {_text(column.name)},  # {_one_line(column.reason)}"
        yield "]"
    for column in look.ignored if private else ():  # [data.columns] says which are used
        yield from _comment(f"not used: {column.name}: {column.reason}")
    numbers = [column for column in look.inputs if column.use == "number"]
    categories = [f"{c.name} ({c.reason})" for c in look.inputs if c.use == "categories"]
    yield from _comment(f"inputs that are numbers: {listed((c.name for c in numbers), 40)}")
    if categories:
        yield from _comment(f"inputs that are categories: {listed(categories, 40)}")
    if gaps := [column for column in numbers if column.missing]:
        counts = listed((f"{column.name} ({column.missing})" for column in gaps), 40)
        yield from _comment(
            f"missing numbers: {counts}; each is replaced by the mean of its column over the "
            "training rows. 'refuse' makes them an error"
        )
        yield 'missing = "mean"'


def _partition(look: TableLook) -> Iterator[str]:
    yield "[partition]"
    if look.client is not None:
        yield f'name = "natural"  # {len(look.clients)} clients, those of the column above'
        return
    yield from _comment(
        "no column says whose a row is (--client names one): three clients are drawn, to try"
    )
    if look.classes:
        yield 'name = "dirichlet"'
        yield "alpha = 1.0"
    else:  # others need a class of each row
        yield 'name = "iid"'
    yield ""
    yield "[clients]"
    yield "num_clients = 3"


def _objective(look: TableLook) -> Iterator[str]:
    two, rare = len(look.classes) == TWO, look.rarest < RARE
    if not look.classes or two or rare:
        yield "[objective]"
    if not look.classes:
        yield 'name = "regression"'
    if two:
        rarer = min(look.classes, key=lambda item: item[1])[0]
        yield f"positive = {_text(rarer)}  # what is looked for: here the rarer class"
    if rare:
        yield from _comment(
            f"the rarest class has {100 * look.rarest:.0f} % of the rows: whoever always says the "
            "other is often right, so accuracy is not the first metric"
        )
        yield 'metrics = ["balanced_accuracy", "auroc", "accuracy", "macro_f1"]'
    if not look.classes or two or rare:
        yield ""


def _comment(text: str) -> Iterator[str]:
    """Yield a comment in lines of a screen."""
    line = "#"
    for word in _one_line(text).split(" "):
        if len(line) + len(word) + 1 > WIDE:
            yield line
            line = "#"
        line += f" {word}"
    yield line


def _one_line(text: str) -> str:
    """Return a text as a comment can hold it."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _texts(values: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def default_place(table: Path) -> Path:
    """Return where the recipe of a table is written: beside you, named like the table."""
    return Path(table.name.split(".")[0] + ".toml")
