"""SCAFFOLD: control variates correct each local step for the drift of its client.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020, "SCAFFOLD: stochastic controlled averaging for
federated learning", algorithm 1 with option II (ICML 2020, https://arxiv.org/abs/1910.06378). See
docs/methods/scaffold.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.bounds import Positive
from fedgist.core.message import message
from fedgist.core.method import Batch, Context, Count, Method, Net, Order, Part, Replies, Task
from fedgist.core.tree import tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Weights, mean_of, moved

PLAIN = "sgd"  # the optimizer whose steps are gradients


@message(reduce="sum")
class Controlled:
    """The weights x by name, parameters and buffers, and the server's control variate c."""

    arrays: dict[str, Tensor]
    control: dict[str, Tensor]


@message(reduce="sum", over="architecture")
class Drift:
    """``y_i - x`` and ``c_i+ - c_i`` by name: what a client changed."""

    arrays: dict[str, Tensor]
    control: dict[str, Tensor]


@tree
class Controls:
    """The server's weights and control variate of each architecture."""

    by_architecture: dict[str, Controlled]


@tree
class Control:
    """A client's control variate c_i, by the names of parameters."""

    variate: dict[str, Tensor]


@dataclass(frozen=True)
class Scaffold(Method):
    """Federated averaging whose local steps follow ``g_i(y) - c_i + c``."""

    server_lr: Positive = 1.0
    """Step of the server's weights toward the clients' mean, eta_g of the paper."""

    keeps: ClassVar[Part] = "none"
    needs_every_upload: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        """Raise MethodError unless local steps are plain gradients."""
        if task.training.optimizer != PLAIN:
            raise MethodError(
                f"train.optimizer = {task.training.optimizer!r}: SCAFFOLD's control variates are "
                f"means of gradients, so local steps must be plain: use {PLAIN!r}"
            )

    def init_server(self, ctx: Context) -> Controls:
        """Return the common initial weights, and c = 0."""
        starts = ctx.task.starts.items()
        return Controls({k: Controlled(net.state(), _zeros(net.params)) for k, net in starts})

    def init_client(self, net: Net, ctx: Context) -> Control:
        """Return c_i = 0."""
        return Control(_zeros(net.params))

    def download(self, server: Controls, order: Order, ctx: Context) -> Controlled:
        """Return x and c of the client's architecture."""
        return server.by_architecture[order.architecture]

    def receive(
        self, net: Net, own: Control, down: Controlled, ctx: Context
    ) -> tuple[Net, Control]:
        """Return the net with the weights x."""
        return net.with_arrays(down.arrays), own

    def loss(self, net: Net, batch: Batch, own: Control, down: Controlled, ctx: Context) -> Tensor:
        """Return the task's loss, (), whose gradient is ``g_i(y) - c_i + c``.

        ``batch.x`` is ``(batch, *input)``. The correction adds nothing to the value.
        """
        correction = torch.stack(
            [((down.control[k] - own.variate[k]) * w).sum() for k, w in net.params.items()]
        ).sum()
        value = ctx.task.objective.loss(net(batch.x), batch)
        return value + (correction - correction.detach())

    def upload(
        self, net: Net, own: Control, sums: Count, down: Controlled, ctx: Context
    ) -> tuple[Drift, Control]:
        """Return ``y_i - x`` and ``c_i+ - c_i``, with ``c_i+ = c_i - c + (x - y_i) / (K eta)``.

        A client without a step keeps its control variate.
        """
        steps = ctx.local_steps(sums.rows)
        gone = {k: down.arrays[k] - w for k, w in net.params.items()}
        change = {
            k: torch.where(steps > 0, d / (steps.clamp(min=1) * ctx.rate) - down.control[k], 0.0)
            for k, d in gone.items()
        }
        variate = {k: own.variate[k] + d for k, d in change.items()}
        return Drift(moved(net.state(), Weights(down.arrays)), change), Control(variate)

    def server_update(self, server: Controls, replies: Replies, ctx: Context) -> Controls:
        """Return ``x + eta_g mean(y_i - x)``, and ``c + sum(c_i+ - c_i) / N``.

        Buffers, such as running statistics, move to the clients' mean.
        """
        new = dict(server.by_architecture)
        for name in replies.architectures:
            old, some = new[name], replies.by(name)
            total = some.total()
            parameters = old.control.keys()
            arrays = dict(old.arrays)
            for key, step in mean_of(total.arrays, some, ctx).items():
                rate = self.server_lr if key in parameters else 1.0
                arrays[key] = old.arrays[key] + rate * step
            everyone = ctx.task.clients_with[name]
            control = {k: c + total.control[k] / everyone for k, c in old.control.items()}
            new[name] = Controlled(arrays, control)
        return Controls(new)

    def models(self, server: Controls, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture."""
        starts = ctx.task.starts
        return {k: starts[k].with_arrays(s.arrays) for k, s in server.by_architecture.items()}


def _zeros(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(array) for name, array in arrays.items()}
