"""The server's own test sets: all test rows, parts of them, a user's, and rows held out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedgist.core.batch import RowSet
from fedgist.data.dataset import Dataset
from fedgist.data.examples import Examples
from fedgist.data.sources.in_memory import labelled_like
from fedgist.errors import RecipeError
from fedgist.federation.client_lists import named_like
from fedgist.federation.columns import ALL_ROWS, HELD_OUT
from fedgist.federation.recipe import Recipe
from fedgist.federation.recipe_sections import TestSet

TestSets = Mapping[str, tuple[object, object]]


def server_sets(
    recipe: Recipe, data: Dataset, given: TestSets | None, on_test: Examples, held_out: Examples
) -> dict[str, RowSet]:
    """Return the server's test sets by name; ``given`` are a user's, x and y by name.

    Raises
    ------
    InputError
        If a set is of classes or clients that do not exist, has no rows, or does not fit.
    """
    sets: dict[str, RowSet] = {ALL_ROWS: on_test}
    if len(held_out):
        sets[HELD_OUT] = held_out
    for name, part in recipe.evaluate.sets.items():
        rows = _rows_of(part, f"evaluate.sets.{name}", data, on_test)
        sets[name] = on_test.others(on_test.x[rows], on_test.y[rows])
    for name, (x, y) in (given or {}).items():
        sets[name] = on_test.others(*labelled_like(data, x, y, f"test_sets[{name!r}]"))
    if empty := [name for name, rows in sets.items() if name != ALL_ROWS and not len(rows)]:
        msg = f"evaluate.sets.{empty[0]} has no rows"
        raise RecipeError(msg)
    return sets


def _rows_of(part: TestSet, where: str, data: Dataset, on_test: Examples) -> Tensor:
    """Return which test rows are in a part, (rows,) of truth values."""
    if part.clients is not None:
        if data.clients_test is None:
            msg = f"{where}.clients needs test rows whose clients are known; {data.name} has none"
            raise RecipeError(msg)
        chosen = named_like(part.clients, data.client_names, f"{where}.clients")
        return torch.isin(data.clients_test, torch.tensor(chosen)).to(on_test.y.device)
    classes = part.classes or ()
    if strange := [c for c in classes if c >= data.num_classes]:
        msg = f"{where}.classes names class {strange[0]}; the data have classes "
        raise RecipeError(msg + f"0..{data.num_classes - 1}")
    return torch.isin(on_test.y, torch.tensor(classes, device=on_test.y.device))
