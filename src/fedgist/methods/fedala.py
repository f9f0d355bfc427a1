"""FedALA: each client learns how much of the shared model to take, number by number.

Zhang, Hua, Wang, Song, Xue, Ma, Guan 2023, "FedALA: adaptive local aggregation for personalized
federated learning", algorithm 1 (AAAI 2023, https://arxiv.org/abs/2212.01197). See
docs/methods/fedala.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.bounds import Fraction, NonNegative, PositiveInt
from fedgist.core.method import Batch, Context, Count, Exchange, Method, Net, Part, Phase, Task
from fedgist.core.nets.inner_gradient import gradient_and_value, landing
from fedgist.core.nets.parts import check_depth
from fedgist.core.training import Optimizer
from fedgist.core.tree import Tree, tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Averaging, Weights

FIRST = 2  # the first round in which the shared model is not the client's own


@tree
class Mixed:
    """A client's upper layers after its last round, and how much of the shared ones it takes.

    ``mix`` has the shapes of ``arrays``, and numbers from 0 to 1. ``trained`` is false until the
    client has trained once, ().
    """

    arrays: dict[str, Tensor]
    mix: dict[str, Tensor]
    trained: Tensor


@dataclass(frozen=True)
class FedALA(Method):
    """Federated averaging; a client begins a round between its own upper layers and the shared."""

    layers: PositiveInt = 1
    """Number of upper layers, head included, that are mixed, p. The others are the shared ones."""
    mix_lr: NonNegative = 1.0
    """Learning rate of the mixture. 0 takes the shared model as it is: FedAvg."""
    mix_rows: Fraction = 0.8
    """Part of the client's rows by which the mixture learns in a round, s, drawn anew each time."""
    first_passes: PositiveInt = 10
    """Passes over these rows in round 2, the first with a mixture. Later there is one."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def check(self, task: Task) -> None:
        """Raise MethodError unless the nets have these layers and local steps are sums of rows."""
        nets = {name: arch.layers for name, arch in task.architectures.items()}
        check_depth(nets, "method.layers", self.layers)
        if self.mix_lr and task.training.clip_norm:
            raise MethodError(
                f"train.clip_norm = {task.training.clip_norm}: it would cut the steps of FedALA's "
                "mixture as well, so it must be 0"
            )
        if task.privacy is not None and task.privacy.steps is not None:
            raise MethodError(
                f"privacy.unit = {task.privacy.unit!r}: FedALA's mixture learns by steps without "
                "noise; use unit = 'client'"
            )

    def init_client(self, net: Net, ctx: Context) -> Mixed:
        """Return the first upper layers, and a mixture that is all of the shared ones."""
        arrays = net.part(self._upper)
        mix = {name: torch.ones_like(array) for name, array in arrays.items()}
        return Mixed(arrays, mix, torch.zeros((), dtype=torch.bool, device=ctx.key.device))

    def receive(self, net: Net, own: Mixed, down: Weights, ctx: Context) -> tuple[Net, Mixed]:
        """Return the shared net with mixed upper layers (eq. 3)."""
        net = net.with_arrays(down.arrays)
        return net.with_arrays(_between(own, down, own.mix)), own

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Learn the mixture, from round 2 on; then train the net."""
        if ctx.round < FIRST or not self.mix_lr:
            return (Phase(),)
        passes = self.mix_rows * (self.first_passes if ctx.round == FIRST else 1)
        plain = Optimizer("sgd", lr=ctx.task.training.lr)
        learned = (self._upper, "own.mix")
        return Phase(learned, passes, loss=self.mixing, optimizer=plain), Phase()

    def mixing(self, net: Net, batch: Batch, own: Mixed, down: Weights, ctx: Context) -> Tensor:
        """Return the loss of the mixture, (); its step is eq. 4, and the net takes the result.

        ``batch.x`` is ``(batch, *input)``. Eq. 4 is ``W <- W - eta grad L (w - w_i)``, cut to 0
        and 1.
        """
        at = _between(own, down, own.mix)
        slope, value = gradient_and_value(functools.partial(_loss, batch, ctx), net, at)
        mix = {
            k: (m.detach() - self.mix_lr * slope[k] * (down.arrays[k] - own.arrays[k])).clamp(0, 1)
            for k, m in own.mix.items()
        }
        mix = {k: torch.where(own.trained, m, 1.0) for k, m in mix.items()}
        upper = {name: net.params[name] for name in at}
        new = _between(own, down, mix)
        return value + landing(own.mix, mix, ctx.rate) + landing(upper, new, ctx.rate)

    def upload(
        self, net: Net, own: Mixed, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Tree, Mixed]:
        """Return FedAvg's message, and the trained upper layers for the next round."""
        message, _ = self.exchange.upload(net, own, sums, down, ctx)
        return message, Mixed(net.part(self._upper), own.mix, torch.ones_like(own.trained))

    @property
    def _upper(self) -> Part:
        return f"last:{self.layers}"


def _between(own: Mixed, down: Weights, mix: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``w_i + (w - w_i) mix`` by name; the shared ``w`` until the client has trained.

    It is exactly w where the mixture is 1.
    """
    shared = {name: down.arrays[name] for name in own.arrays}
    mixed = {name: torch.lerp(own.arrays[name], w, mix[name]) for name, w in shared.items()}
    return {name: torch.where(own.trained, mixed[name], w) for name, w in shared.items()}


def _loss(batch: Batch, ctx: Context, net: Net) -> Tensor:
    return ctx.task.objective.loss(net(batch.x), batch)
