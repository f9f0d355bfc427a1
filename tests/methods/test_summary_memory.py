"""The memory of a summary: rows or statistics, but never the statistics of every row at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.message import Nothing
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import federation, world_of
from small_tasks import FEATURES, OUTPUTS, SIDE, TASKS, recipe_of

CLIENTS, WIDTH = 3, 47
WIDE = {"name": "mlp", "hidden": [WIDTH]}
MASKED = {"missing_labels": "mask"}
CASES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = MappingProxyType(
    {
        "numbers": ("fedlog", "regression", {"model": WIDE}),
        "numbers, some missing": ("fedlog", "regression", {"model": WIDE, "data": MASKED}),
        "labels": ("fedlog", "multilabel", {"model": WIDE}),
        "labels, some missing": ("fedlog", "multilabel", {"model": WIDE, "data": MASKED}),
        "classes": ("fedlog", "classes", {"model": WIDE}),
        "pixels": ("fedproto", "segmentation", {}),
    }
)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has none
        self.most: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        self.most = max([self.most, *sizes])
        return made


def largest(case: str, rows: int) -> int:
    """The largest tensor of the summary of stacked clients with ``rows`` rows each."""
    method, objective, sections = CASES[case]
    recipe = make(recipe_of(objective, method={"name": method}, **sections))
    fed = federation(world_of(recipe, Overrides(data=TASKS[objective][0]())))
    [start] = fed.task.starts.values()
    ctx, pixels = fed.context("train", 1), objective == "segmentation"
    shape = (1, SIDE, SIDE) if pixels else (FEATURES,)
    x = random.normal(random.key(0), (CLIENTS, rows, *shape))
    y = torch.zeros(CLIENTS, rows, *((SIDE, SIDE) if pixels else (OUTPUTS,)))
    if objective in {"classes", "segmentation"}:
        y = (y if pixels else y[..., 0]).long()
    mask = torch.ones(CLIENTS, rows, dtype=torch.bool)

    def summarize(x: Tensor, y: Tensor, mask: Tensor) -> Any:
        return fed.method.summarize(start, Batch(x, y, mask), Nothing(), Nothing(), ctx)

    with Largest() as noted:
        torch.func.vmap(summarize)(x, y, mask)
    return int(noted.most)


@pytest.mark.parametrize("case", CASES)
def test_the_memory_of_a_summary_grows_with_rows_but_not_with_the_statistics_of_each(
    case: str,
) -> None:
    # a wrong formula: m^2 / 2 products of each row, and then their sum; a worker died of it
    few, many = 16, 256
    places = SIDE * SIDE if case == "pixels" else 1
    of_a_row = places * (WIDTH + 1 + OUTPUTS)
    assert many * of_a_row < many * (WIDTH + 1) ** 2 / 10 or case == "pixels"
    assert largest(case, many) <= max(largest(case, few), CLIENTS * many * of_a_row)
    assert largest(case, few) <= CLIENTS * max(few * of_a_row, OUTPUTS * (WIDTH + 1 + OUTPUTS) ** 2)
