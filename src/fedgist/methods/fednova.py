"""FedNova: clients' updates are divided by their local steps before they are averaged.

Wang, Liu, Liang, Joshi, Poor 2020, "Tackling the objective inconsistency problem in heterogeneous
federated optimization", eq. 7 to 9 (NeurIPS 2020, https://arxiv.org/abs/2007.07481). See
docs/methods/fednova.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.counts import COUNTS
from fedgist.core.message import message
from fedgist.core.method import Context, Count, Method, Net, Order, Part, Replies, Task
from fedgist.core.tree import Tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Averages, Averaging, Weights, moved

STEPS = ("sgd", "momentum")  # the optimizers whose steps are sums of gradients


@message(reduce="sum", over="architecture")
class Normalized:
    """Of n rows: ``n (w_k - w) / |a_k|`` by name, ``n |a_k|`` () and n ().

    Buffers, such as running statistics, are ``n (b_k - b)``.
    """

    arrays: dict[str, Tensor]
    steps: Tensor
    rows: Tensor = field(metadata=COUNTS)


@dataclass(frozen=True)
class FedNova(Method):
    """Federated averaging of updates per local step, times the mean number of steps."""

    keeps: ClassVar[Part] = "none"
    averaging: ClassVar[Averaging] = Averaging()

    def check(self, task: Task) -> None:
        """Raise MethodError unless local steps are sums of gradients."""
        training = task.training
        if training.optimizer not in STEPS:
            raise MethodError(
                f"train.optimizer = {training.optimizer!r}: FedNova divides by the weights of the "
                f"gradients in a client's update, which are known for {' and '.join(STEPS)}"
            )
        if training.optimizer != STEPS[0] and training.optimizer_memory != "round":
            raise MethodError(
                f"train.optimizer_memory = {training.optimizer_memory!r}: FedNova's weights are "
                "those of a momentum that begins anew in each round: use 'round'"
            )
        if task.privacy is not None:
            raise MethodError(
                f"privacy.unit = {task.privacy.unit!r}: method fednova sends numbers of local "
                "steps, which tell of rows"
            )

    def init_server(self, ctx: Context) -> Averages:
        """Return the common initial weights of every architecture."""
        return self.averaging.init_server(ctx)

    def download(self, server: Averages, order: Order, ctx: Context) -> Weights:
        """Return the weights of the client's architecture."""
        return self.averaging.download(server, order, ctx)

    def receive(self, net: Net, own: Tree, down: Weights, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with the global weights."""
        return self.averaging.receive(net, own, down, ctx)

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Normalized, Tree]:
        """Return the update per weighted step, and the number of weighted steps ``|a_k|``."""
        steps = ctx.local_steps(sums.rows)
        weight = steps
        if ctx.task.training.optimizer != STEPS[0]:
            momentum = ctx.task.training.local_optimizer.momentum
            left = momentum * (1 - momentum**steps) / (1 - momentum)
            weight = (steps - left) / (1 - momentum)
        arrays = {
            name: sums.rows * (step / weight.clamp(min=1.0) if name in net.params else step)
            for name, step in moved(net.state(), down).items()
        }
        rows = torch.where(steps > 0, sums.rows, 0.0)
        return Normalized(arrays, rows * weight, rows), own

    def server_update(self, server: Averages, replies: Replies, ctx: Context) -> Averages:
        """Return ``w + tau_eff sum(p_k d_k)``, with ``tau_eff = sum(p_k |a_k|)``; p_k by rows."""
        weights = dict(server.weights)
        for name in replies.architectures:
            old, total = weights[name].arrays, replies.by(name).total()
            parameters, rows = ctx.task.starts[name].params, total.rows.clamp(min=1.0)
            effective = total.steps / rows
            new = dict(old)
            for key, step in total.arrays.items():
                times = effective if key in parameters else 1.0
                new[key] = old[key] + times * step / rows
            weights[name] = Weights(new)
        return Averages(weights)

    def models(self, server: Averages, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture."""
        return self.averaging.models(server, ctx)
