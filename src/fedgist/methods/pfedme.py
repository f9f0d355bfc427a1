"""PFedMe: personal models within a Moreau envelope around the shared one.

Dinh, Tran, Nguyen 2020, "Personalized federated learning with Moreau envelopes", algorithm 1
(NeurIPS 2020, https://arxiv.org/abs/2006.08848). See docs/methods/pfedme.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.bounds import Positive, PositiveInt
from fedgist.core.losses import proximal
from fedgist.core.method import Batch, Context, Method, Net, Part, Phase, Task
from fedgist.core.nets.inner_gradient import gradient_and_value, landing
from fedgist.core.nets.second_net import SecondNet
from fedgist.core.training import Optimizer
from fedgist.core.tree import tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Averaging, Weights


@tree
class Personal:
    """A client's personal model, theta."""

    theta: SecondNet


@dataclass(frozen=True)
class PFedMe(Method):
    """Shared weights that follow personal ones, ``argmin F_k(theta) + lam / 2 |theta - w|^2``."""

    lam: Positive = 15.0
    """Pull of the personal models toward the shared one, lambda."""
    inner_steps: PositiveInt = 5
    """Gradient steps of the personal model in each local step, K."""
    inner_lr: Positive = 0.01
    """Learning rate of these steps. The paper takes 0.005 to 0.1."""
    server_rate: Positive = 1.0
    """How far the server moves toward the clients' mean, beta. The paper takes 1 to 4."""

    keeps: ClassVar[Part] = "none"

    @property
    def exchange(self) -> Averaging:
        """The plain mean of the clients' weights."""
        return Averaging(equal=True, rate=self.server_rate)

    def check(self, task: Task) -> None:
        """Raise MethodError unless local steps are plain steps."""
        training = task.training
        for key, value, only in (
            ("optimizer", training.optimizer, "sgd"),
            ("clip_norm", training.clip_norm, 0.0),
        ):
            if value != only:
                raise MethodError(
                    f"train.{key} = {value!r}: pFedMe's local steps are w - eta lam (w - theta), "
                    f"so it must be {only!r}"
                )
        if task.privacy is not None and task.privacy.steps is not None:
            raise MethodError(
                f"privacy.unit = {task.privacy.unit!r}: pFedMe's local steps are not sums of rows' "
                "gradients; use unit = 'client'"
            )

    def init_client(self, net: Net, ctx: Context) -> Personal:
        """Return a personal model with the net's first weights."""
        return Personal(SecondNet.of(net))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train both models; weight decay is in the loss of the personal one."""
        plain = Optimizer("sgd", lr=ctx.task.training.lr)
        return (Phase(("all", "own.theta.params"), optimizer=plain),)

    def loss(self, net: Net, batch: Batch, own: Personal, down: Weights, ctx: Context) -> Tensor:
        """Return ``lam / 2 |w - theta|^2``, whose step is ``w - eta lam (w - theta)``, ().

        ``batch.x`` is ``(batch, *input)``. theta is the result of K steps from w; a second term
        moves the client's personal model to it in one step of the same rate. The value is
        ``F_k(theta)``.
        """
        theta = self.near(net, batch, ctx)
        with torch.no_grad():  # running statistics of both models, and the value
            if net.buffers:
                net(batch.x)
            other = SecondNet(theta, own.theta.buffers).beside(net, "theta")
            value = ctx.task.objective.loss(other(batch.x), batch)
        shared = self.lam * proximal(net.params, theta)
        return value + (shared - shared.detach()) + landing(own.theta.params, theta, ctx.rate)

    def near(self, net: Net, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """Return the parameters after K steps on ``F_k(theta) + lam / 2 |theta - w|^2`` from w."""
        decay = ctx.task.training.weight_decay
        w = {name: p.detach() for name, p in net.params.items()}
        theta = w
        for _ in range(self.inner_steps):
            slope, _ = gradient_and_value(functools.partial(_loss, batch, ctx), net, theta)
            theta = {
                name: p - self.inner_lr * (slope[name] + decay * p + self.lam * (p - w[name]))
                for name, p in theta.items()
            }
        return theta

    def predict(self, net: Net, own: Personal, down: Weights, x: Tensor, ctx: Context) -> Tensor:
        """Return the personal model's logits (batch, classes) of ``x``, ``(batch, *input)``."""
        return own.theta.beside(net, "theta")(x)


def _loss(batch: Batch, ctx: Context, net: Net) -> Tensor:
    return ctx.task.objective.loss(net(batch.x), batch)
