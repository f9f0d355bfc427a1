"""FedLog: clients share class sums of features, the server solves for one linear head exactly.

Yu, Zhang, Poupart, "FedLog: Personalized federated classification with less communication and more
flexibility". See docs/methods/fedlog.md.

=========  =======================================================================================
paper      here
=========  =======================================================================================
phi        features with the constant 1 put first, m + 1 numbers
eta        the head: row y of (classes, m + 1); its first column is the bias
S, n       sum_i phi_i (x) e_{y_i} over all clients (eq. 2), and how many terms: S's first column
chi, nu    the prior's pseudo-sum (0, as in the paper) and pseudo-count
A(eta)     ``ln sum_y exp(|eta_y|^2 / 4)``, the log-partition (eq. 11)
=========  =======================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import NonNegative, Positive, PositiveInt
from fedgist.core.linear_head import LinearHead, class_sums, one_feature_width, with_constant
from fedgist.core.message import Nothing, message
from fedgist.core.method import Batch, Context, Life, Method, Net, Order, Part, Phase, Replies, Task
from fedgist.core.optim import init, step
from fedgist.core.optimizer import Optimizer


@message(reduce="sum")
class Sums:
    """S, (classes, m + 1): class sums of features, class counts in the first column."""

    total: Tensor


@dataclass(frozen=True)
class FedLog(Method):
    """FedLog with the exact head; the defaults are the paper's.

    ``head_start`` says what the first head is: normal numbers, or the result of one exchange with
    the untrained bodies.
    """

    nu: NonNegative = 1.0  # the prior's pseudo-count; 0 is a flat prior
    head_start: Literal["random", "exchange"] = "random"
    optimizer_memory: Life = "round"  # how long a body's optimizer remembers
    solver: Literal["exact", "gradient"] = "exact"
    head_lr: Positive = 1e-2  # of the gradient solver, which is Adam
    head_steps: PositiveInt = 1000  # of the gradient solver

    keeps: ClassVar[Part] = "body"

    def check(self, task: Task) -> None:
        """Raise MethodError unless all bodies have one feature width and all heads a bias."""
        one_feature_width(task, "fedlog")

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"``; in round 0 ``"exchange"``, if ``head_start`` asks for it."""
        if ctx.round == 0:
            return ("exchange",) if self.head_start == "exchange" else ()
        return ("train",)

    def init_server(self, ctx: Context) -> LinearHead:
        """Return a random head (Alg. 1)."""
        width = one_feature_width(ctx.task, "fedlog")
        return LinearHead(random.normal(ctx.draw("head"), (ctx.task.num_classes, width + 1)))

    def download(self, server: LinearHead, order: Order, ctx: Context) -> LinearHead | Nothing:
        """Return the head; in the exchange before training, nothing."""
        return Nothing() if ctx.stage == "exchange" else server

    def receive(
        self, net: Net, own: Nothing, down: LinearHead | Nothing, ctx: Context
    ) -> tuple[Net, Nothing]:
        """Return the net with the head installed."""
        return (net if isinstance(down, Nothing) else net.with_head(down.weight, down.bias)), own

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one phase in which only the body learns (eq. 12)."""
        if ctx.stage == "exchange":
            return ()
        epochs = ctx.task.training.local_epochs
        return (Phase(("body",), epochs=epochs, remembers=self.optimizer_memory),)

    def summarize(
        self, net: Net, batch: Batch, own: Nothing, down: LinearHead | Nothing, ctx: Context
    ) -> Sums:
        """Return S over a batch (eq. 2)."""
        phi = with_constant(net.features(batch.x))
        return Sums(class_sums(phi, batch.y, batch.mask, ctx.task.num_classes))

    def upload(
        self, net: Net, own: Nothing, sums: Sums, down: LinearHead | Nothing, ctx: Context
    ) -> tuple[Sums, Nothing]:
        """Return S over all local rows."""
        return sums, own

    def server_update(self, server: LinearHead, replies: Replies, ctx: Context) -> LinearHead:
        """Return the MAP head (eq. 14)."""
        s = replies.total().total.to(torch.float64)
        if self.solver == "exact":
            eta = map_head(s, self.nu)
        else:
            start = server.eta.to(torch.float64)
            eta = gradient_head(start, s, self.nu, self.head_lr, self.head_steps)
        return LinearHead(eta.to(server.eta.dtype))


def log_posterior(eta: Tensor, s: Tensor, nu: float) -> Tensor:
    """Return <eta, chi + S> - (nu + n) A(eta), the objective of eq. 14, with chi = 0."""
    a = torch.logsumexp(eta.square().sum(1) / 4, dim=0)  # eq. 11
    return (eta * s).sum() - (nu + s[:, 0].sum()) * a


def map_head(s: Tensor, nu: float) -> Tensor:
    """Return the exact solution of eq. 14: eta for ``s``, both (classes, m + 1), double precision.

    With T = nu + n, ``c_y = |S_y|^2 / T^2`` and ``p = softmax(|eta|^2 / 4)``, stationarity says
    eta_y = 2 S_y / (T p_y), so ln p_y - c_y / p_y^2 = -L with one L = A(eta) for all classes. Its
    solution is p_y^2 = 2 c_y / w_y, where w_y + ln w_y = ln(2 c_y) + 2 L (w is Lambert's W of
    2 c_y e^{2L}, which overflows); and L is the root of sum_y p_y = 1, whose left side falls as L
    grows. So ``|eta_y|^2 = 2 w_y``; classes without rows get eta_y = 0.
    """
    t = nu + s[:, 0].sum()
    if t <= 0:
        return torch.zeros_like(s)
    ln_2c = torch.log(2 * s.square().sum(1) / t**2)  # -inf for an empty class

    def log_p(level: Tensor) -> tuple[Tensor, Tensor]:
        w = _omega(ln_2c + 2 * level)
        # the same number written twice: the first cancels for large w, the second is undefined for
        # an empty class
        return torch.where(w < 1, w / 2 - level, (ln_2c - torch.log(w.clamp(min=1.0))) / 2), w

    low = torch.tensor(math.log(len(s)), dtype=s.dtype)  # A(0): the least value of A
    high = low + 1
    while torch.logsumexp(log_p(high)[0], dim=0) > 0:
        low, high = high, 2 * high
    level = high
    for _ in range(200):  # Newton's method, kept inside the bracket by bisection
        ln_p, w = log_p(level)
        excess = torch.logsumexp(ln_p, dim=0)
        low, high = (level, high) if excess > 0 else (low, level)
        new = level + excess / (torch.softmax(ln_p, dim=0) / (1 + w)).sum()
        new = new if low <= new <= high else (low + high) / 2
        if new == level:
            break
        level = new
    return F.normalize(s, dim=1, eps=1e-300) * (2 * log_p(level)[1]).sqrt().unsqueeze(1)


def gradient_head(eta: Tensor, s: Tensor, nu: float, lr: float, steps: int) -> Tensor:
    """Return eta after ascending eq. 14, divided by nu + n, by Adam from ``eta``, as the paper."""
    adam = Optimizer("adam", lr=lr)
    params = {"eta": eta.unsqueeze(0).clone()}
    state = init(adam, params)
    t = nu + s[:, 0].sum()
    for _ in range(steps):
        now = params["eta"][0]
        p = torch.softmax(now.square().sum(1) / 4, dim=0).unsqueeze(1)
        gradient = t * p * now / 2 - s  # of minus the objective
        step(adam, params, {"eta": (gradient / t.clamp(min=1.0)).unsqueeze(0)}, state)
    return params["eta"][0]


def _omega(z: Tensor) -> Tensor:
    """Solve w + ln w = z for w > 0 (Wright's omega function), z in double precision.

    The result is 0 where z is -inf.
    """
    w = torch.where(z > 1, z - torch.log(z.clamp(min=1.0)), torch.exp(z.clamp(max=1.0)))
    for _ in range(8):  # Newton's method on f(ln w) = w + ln w - z: quadratic from this start
        ln_w = torch.log(w)
        w = torch.where(w > 0, torch.exp(ln_w - (w + ln_w - z) / (1 + w)), w)
    return w
