"""A row of weight 0 has no influence on what methods learn and send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.engines.plans.plan import Plan
from fedgist.methods import METHODS
from fedgist.testing.small_worlds import blobs, trace, world

#: They count rows of classes, those of weight 0 as well.
COUNTING = {"fedrod", "fedgen"}
POOLS = {name: {"model": "mlp", "hidden": [5]} for name in ("small", "large")}


def state(method: str, data: Dataset) -> dict[str, Tensor]:
    pooled: dict[str, Any] = {"clients": {"pools": POOLS}, "model": None}
    about: dict[str, Any] = {"data": {"normalize": "none"}, "train": {"sample_weights": "w"}}
    about |= pooled if "codist" in method else {}
    return trace(world(method, given={"data": data}, **about), Plan(5), rounds=2).state


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_weight_zero_has_none(method: str) -> None:
    # rejects terms of losses, and sums of rows, that read the rows but not their weights
    plain = blobs()
    out = torch.arange(len(plain.y)) % 3 == 1
    data = replace(
        plain, annotations={"w": torch.where(out, 0.0, torch.linspace(0.3, 2, len(out)))}
    )
    x, y = plain.x.clone(), plain.y.clone()
    x[out] += 5 * torch.randn(x[out].shape, generator=torch.Generator().manual_seed(0))
    y[out] = (y[out] + 1) % plain.num_classes
    other = replace(data, x=x) if method in COUNTING else replace(data, x=x, y=y)
    first, second = state(method, data), state(method, other)
    for name, array in first.items():
        assert torch.equal(array, second[name]), name
