"""A method whose clients count their local steps by training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.method import Batch, Context, Method, Net, Phase
from fedgist.core.tree import Tree, tree


@tree
class Taken:
    """A number that grows by the learning rate in each step, and the steps that are expected."""

    so_far: Tensor
    expected: Tensor


@dataclass(frozen=True)
class CountsSteps(Method):
    """A method whose clients count their steps by training, without an optimizer's memory."""

    def init_client(self, net: Net, ctx: Context) -> Taken:
        return Taken(torch.zeros(()), torch.zeros(()))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(("own.so_far",)),)

    def loss(self, net: Net, batch: Batch, own: Taken, down: Tree, ctx: Context) -> Tensor:
        return -own.so_far

    def upload(
        self, net: Net, own: Taken, sums: Any, down: Tree, ctx: Context
    ) -> tuple[Tree, Tree]:
        message, _ = super().upload(net, own, sums, down, ctx)
        steps = ctx.local_steps(sums.rows.long())
        return message, replace(own, expected=own.expected + steps)


def batches(size: int) -> int:
    """Return the batches of a client with so many rows."""
    return -(-size // 4)  # small_worlds.TRAIN
