"""Server optimizers: the clients' mean update is their gradient.

The pseudo-gradient of a round is ``g = w - mean``: the old weights minus the clients' average
(Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan 2021, "Adaptive federated
optimization", algorithm 2, whose Delta is -g; https://arxiv.org/abs/2003.00295). FedAvg is plain
SGD with learning rate 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedgist.core.bounds import NonNegative, PerPool, Positive, Share, of_pool
from fedgist.core.training import Schedule
from fedgist.core.tree import tree
from fedgist.errors import MethodError

ServerRule = Literal["sgd", "momentum", "adagrad", "adam", "yogi"]


@dataclass(frozen=True)
class ServerOptimizer:
    """A server's optimizer and its settings; the defaults are FedAdam's, as Reddi et al. print it.

    ``momentum`` is FedAvgM (Hsu, Qi, Brown 2019). ``adagrad``, ``adam`` and ``yogi`` are
    FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021, algorithm 2), with ``eps`` for tau. With
    ``bias_correction``, ``adam`` is the Adam of Kingma and Ba (2015, algorithm 1), as in
    ``torch.optim.Adam``.
    """

    rule: ServerRule = "adam"
    """The server's optimizer: FedAvgM (``momentum``), FedAdagrad, FedAdam, FedYogi, or plain SGD.
    """
    lr: PerPool[Positive] = 0.01
    """Learning rate of the server, or a table with one rate per pool."""
    beta1: Share = 0.9
    """Decay of the first moment. Not used by ``sgd``."""
    beta2: Share = 0.99
    """Decay of the second moment. Used by ``adam`` and ``yogi``."""
    eps: Positive = 1e-3
    """Number added to the root of the second moment (tau in the paper)."""
    start: NonNegative = 1e-6
    """First value of the second moment."""
    bias_correction: bool = False
    """Whether ``adam`` corrects its moments for their start, as ``torch.optim.Adam`` does."""
    final_factor: Share = 1.0
    """Final learning rate as a fraction of the first. 1 keeps the rate constant."""

    def check(self, pools: Iterable[str]) -> None:
        """Raise InputError if a pool has no learning rate, or a setting has no effect."""
        if self.bias_correction and self.rule != "adam":
            raise MethodError(
                f"method.server.bias_correction: rule = {self.rule!r} has none, 'adam' does"
            )
        for pool in pools:
            of_pool(self.lr, pool, "method.server.lr")

    def rate(self, pool: str, number: int, num_rounds: int) -> float:
        """Return the learning rate of a pool in round ``number``."""
        falling = Schedule(name="linear", min_factor=self.final_factor)
        return of_pool(self.lr, pool, "method.server.lr") * falling.factor(number, num_rounds)


@tree
class ServerMoments:
    """Moments by parameter, if the rule has them, and the number of steps, ()."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    count: Tensor


def init(optimizer: ServerOptimizer, params: Mapping[str, Tensor]) -> ServerMoments:
    """Return the moments before the first step; ``params`` are the trained weights by name.

    Weights have any shape. A moment has the shape of its weight, and the count of steps is ().
    """
    has_second = optimizer.rule in {"adagrad", "adam", "yogi"}
    start = 0.0 if optimizer.bias_correction else optimizer.start
    return ServerMoments(
        {n: torch.zeros_like(p) for n, p in params.items() if optimizer.rule != "sgd"},
        {n: torch.full_like(p, start) for n, p in params.items() if has_second},
        torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device),
    )


def step(
    optimizer: ServerOptimizer,
    lr: float,
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    moments: ServerMoments,
) -> tuple[dict[str, Tensor], ServerMoments]:
    """Return the parameters and the moments after a step; the arguments are not changed.

    ``params`` and ``grads`` are arrays of any shape, with the same names and shapes.
    """
    o, count = optimizer, moments.count + 1.0
    if o.rule == "sgd":
        moved = {n: p - lr * grads[n] for n, p in params.items()}
        return moved, ServerMoments({}, {}, count)
    if o.rule == "momentum":
        first = {n: o.beta1 * m + grads[n] for n, m in moments.first.items()}
        moved = {n: p - lr * first[n] for n, p in params.items()}
        return moved, ServerMoments(first, {}, count)
    first = {n: o.beta1 * m + (1.0 - o.beta1) * grads[n] for n, m in moments.first.items()}
    second = {n: _second(o, v, grads[n].square()) for n, v in moments.second.items()}
    scale = 1.0 - o.beta1**count if o.bias_correction else 1.0
    spread = 1.0 - o.beta2**count if o.bias_correction else 1.0
    moved = {
        n: p - lr * (first[n] / scale) / ((second[n] / spread).sqrt() + o.eps)
        for n, p in params.items()
    }
    return moved, ServerMoments(first, second, count)


def _second(o: ServerOptimizer, v: Tensor, square: Tensor) -> Tensor:
    if o.rule == "adagrad":
        return v + square
    if o.rule == "yogi":
        return v - (1.0 - o.beta2) * square * (v - square).sign()
    return o.beta2 * v + (1.0 - o.beta2) * square
