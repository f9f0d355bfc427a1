"""The server's own test sets: all test rows, parts of them, a user's, and rows held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.batch import Batch, RowSet
from fedgist.core.objectives.metrics import ALL_ROWS, HELD_OUT
from fedgist.data.dataset import Dataset
from fedgist.data.examples import Examples
from fedgist.data.lazy_rows import Inputs
from fedgist.data.sources.in_memory import labelled_like
from fedgist.errors import RecipeError
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import TestSet
from fedgist.world.client_lists import named_like


@dataclass(frozen=True)
class PartialTestSet:
    """A part of the test rows: ``rows`` (rows,) are positions in ``whole``.

    Its predictions are taken from the predictions of all test rows.
    """

    whole: Examples
    rows: Tensor

    @property
    def x(self) -> Inputs:
        """The examples (rows, *shape): a tensor, or lazy rows."""
        return self.whole.x[self.rows]

    @property
    def y(self) -> Tensor:
        """The labels of the examples (rows, ...)."""
        return self.whole.y[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def seen(self, rows: Tensor) -> Tensor:
        """Return the inputs ``(rows, *input)`` of row numbers (rows,), without augmentation."""
        return self.whole.seen(self.rows.to(rows.device)[rows])

    def batch(self, rows: Tensor, keys: Tensor | None = None) -> Batch:
        """Return one batch per client, with leaves (clients, batch, ...).

        ``rows`` (clients, batch) are row numbers, or -1 for absent rows. ``keys`` (clients,) draw
        the augmentation, as in :meth:`~fedgist.data.examples.Examples.batch`.
        """
        own = self.rows.to(rows.device)
        return self.whole.batch(torch.where(rows >= 0, own[rows], rows), keys)


def server_sets(
    setup: Setup, data: Dataset, on_test: Examples, held_out: Examples
) -> dict[str, RowSet]:
    """Return the server's test sets by name: those of the recipe, and a user's own."""
    sets: dict[str, RowSet] = {ALL_ROWS: on_test}
    if len(held_out):
        sets[HELD_OUT] = held_out
    for name, part in setup.recipe.evaluate.sets.items():
        chosen = _rows_of(part, f"evaluate.sets.{name}", data, on_test)
        sets[name] = PartialTestSet(on_test, chosen.nonzero().squeeze(1))
    for name, (x, y) in (setup.given.test_sets or {}).items():
        sets[name] = on_test.others(*labelled_like(data, x, y, f"test_sets[{name!r}]"))
    if empty := [name for name, rows in sets.items() if name != ALL_ROWS and not len(rows)]:
        raise RecipeError(f"evaluate.sets.{empty[0]} has no rows")
    return sets


def _rows_of(part: TestSet, key: str, data: Dataset, on_test: Examples) -> Tensor:
    """Return a mask (rows,) of the test rows that belong to a part."""
    if part.clients is not None:
        if data.clients_test is None:
            raise RecipeError(
                f"{key}.clients needs test rows whose clients are known; {data.name} has none"
            )
        chosen = named_like(part.clients, data.client_names, f"{key}.clients")
        return torch.isin(data.clients_test, torch.tensor(chosen)).to(on_test.y.device)
    classes = part.classes or ()
    if strange := [c for c in classes if c >= data.num_classes]:
        raise RecipeError(
            f"{key}.classes names class {strange[0]}; the data have classes "
            f"0..{data.num_classes - 1}"
        )
    return torch.isin(on_test.y, torch.tensor(classes, device=on_test.y.device))
