"""What protects that which clients send: clipped terms, clipped messages, Gaussian noise.

A *release* is one message of a client that adds to a total. It is protected at two seams and at no
others: at the client, between its upload and the gate (clipping, and noise if it is *local*), and
once on the total (noise if it is *central*), before the method sees it. Everything here is one
Gaussian mechanism: numbers whose joint change is at most the *sensitivity*, in L2, get independent
normal noise of one deviation (Dwork and Roth 2014, appendix A).

``unit`` says who the neighbours are. ``"record"``: data sets that differ by one row; a method whose
sum is made of terms of single rows bounds each of them, inside the sum (:func:`bounded`), and says
so (``Method.record_terms``). ``"client"``: federations in which one client sends its message or a
zero; the whole message is clipped.

Noise of the seed is what a simulation repeats. Noise of the system is a whole number of a *grid*,
and so is every term before it is bounded: sums of such terms are exact in float32, so no rounding
moves a total further than the sensitivity (docs/decisions/0038-noise-on-a-grid.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fedgist.core import random, system_noise
from fedgist.core.counts import CountRange
from fedgist.core.replies import Replies
from fedgist.core.tree import build, leaves, map_leaves, named
from fedgist.errors import MethodError

Unit = Literal["record", "client"]
Where = Literal["central", "local"]
# where noise and the draws that privacy rests on come from: a simulation's seed, which its server
# knows, or the operating system
Source = Literal["seed", "system"]
M = TypeVar("M")  # a message

# rounding may not carry a clipped norm above its bound
_BELOW = 1.0 - 1e-6


@dataclass(frozen=True)
class PrivateSteps:
    """How bodies learn in private (DP-SGD; Abadi et al. 2016, algorithm 1).

    Each row takes part in a step with chance ``rate``; its gradient is clipped to ``clip``; the sum
    of the gradients gets noise of ``deviation`` and is divided by the public batch size. ``grid``
    is as that of :class:`Privacy`.
    """

    clip: float
    deviation: float
    rate: float
    grid: float = 0.0

    def count(self, epochs: int) -> int:
        """Return how many steps take the place of so many passes over the rows."""
        return math.ceil(epochs / self.rate)


@dataclass(frozen=True)
class Privacy:
    """How releases are protected: whose presence they hide, by which bound and how much noise.

    ``clip`` bounds the norm of a row's features, or of a client's message; ``deviation`` is that of
    the noise on every number of a release. With ``steps``, bodies learn in private, too; without,
    a promise to records holds for bodies that do not depend on them. ``grid`` is that of noise of
    the system, a power of two; 0: noise comes from the seed.
    """

    unit: Unit
    where: Where
    clip: float
    deviation: float
    steps: PrivateSteps | None = None
    grid: float = 0.0

    @property
    def source(self) -> Source:
        """Where noise comes from, and the draws that privacy rests on."""
        return "system" if self.grid else "seed"


def grid_of(largest: float, digits: int) -> float:
    """Return the finest power of two of which sums up to ``largest`` have so many binary digits."""
    return 2.0 ** (math.ceil(math.log2(largest)) - digits)


def sensitivity(unit: Unit, clip: float) -> float:
    """Return by how much a total can change, in L2, when one neighbour comes or goes.

    A row's term is the constant 1 and its features (FedLog, theorem 4, where ``clip`` is b times
    the root of the number of features).
    """
    return math.sqrt(1.0 + clip**2) if unit == "record" else clip


def bounded(z: Tensor, privacy: Privacy | None) -> Tensor:
    """Return features (batch, m) whose norms are at most the clip, where records are protected."""
    if privacy is None or privacy.unit != "record":
        return z
    fine = on_grid(z, privacy.grid)
    norm = torch.linalg.vector_norm(fine, dim=1, keepdim=True)
    # a number that is not finite stays one, for the gate to refuse
    factor = torch.where(norm > privacy.clip * _BELOW, privacy.clip * _BELOW / norm, 1.0)
    return shrunk(fine, factor, privacy.grid).to(z.dtype)


def clipped(message: M, privacy: Privacy) -> M:
    """Return a message whose norm over all its numbers is at most the clip."""
    most = privacy.clip * _BELOW
    fine = [on_grid(leaf, privacy.grid) for leaf in leaves(message)]
    norm = torch.stack([leaf.square().sum() for leaf in fine]).sum().sqrt()
    factor = torch.where(norm > most, most / norm, torch.ones_like(norm))

    def bound(leaf: Tensor) -> Tensor:
        return shrunk(on_grid(leaf, privacy.grid), factor, privacy.grid).to(leaf.dtype)

    return map_leaves(bound, message)


def on_grid(values: Tensor, grid: float) -> Tensor:
    """Return the multiples of the grid that are nearest, float64; with grid 0 the values."""
    return torch.round(values.double() / grid) * grid if grid else values


def shrunk(values: Tensor, factor: Tensor, grid: float) -> Tensor:
    """Return values times a factor of at most 1, rounded towards 0 on the grid.

    Rounding to the nearest could carry a norm above its bound.
    """
    return torch.trunc(values * factor / grid) * grid if grid else values * factor


def noised(message: M, deviation: float, key: Tensor, grid: float = 0.0) -> M:
    """Return a message with independent normal noise on each of its numbers.

    The message is one client's, or stacked as the keys are. With a grid the noise is the system's.
    """
    arrays = {
        name: noised_array(values, deviation, random.fold(key, "noise", place), grid)
        for place, (name, values) in enumerate(named(message).items())
    }
    noisy: M = build(type(message), arrays)
    return noisy


def noised_array(values: Tensor, deviation: float, key: Tensor, grid: float = 0.0) -> Tensor:
    """Return numbers with noise; a key that has dimensions is of as many first ones of them."""
    if grid:
        noise = system_noise.discrete_gaussian(deviation / grid, tuple(values.shape))
        # whole numbers below 2^53: their sum is exact
        whole = (values.double() / grid).round_().add_(noise.to(values.device))
        return whole.mul_(grid).to(values.dtype)
    clients, own = key.shape, values.shape[key.ndim :]
    keys = key.view((*clients, *(1 for _ in own)))
    noise = random.normal(keys, (*(1 for _ in clients), *own))
    return values + deviation * noise.to(values.dtype)


def check_weights(
    annotations: Mapping[str, tuple[float, float]], name: str, privacy: Privacy | None
) -> None:
    """Raise MethodError unless rows have an annotation of this name, whose range is in [0, 1].

    A row whose terms are multiplied by w moves a release by w times as much at most: noise hides it
    as noise 1/w times as large would hide another.
    """
    if name not in annotations:
        known = ", ".join(annotations) or "none"
        raise MethodError(
            f"method.release_weight = {name!r}: rows have no such annotation; they have: {known}"
        )
    least, most = annotations[name]
    if least < 0.0 or most > 1.0:
        raise MethodError(
            f"method.release_weight = {name!r}: it goes from {least:g} to {most:g}; a row weighs "
            "from 0, which is never released, to 1"
        )
    if privacy is not None and privacy.grid:
        raise MethodError(
            f"method.release_weight = {name!r} takes rows off the grid of privacy.noise = "
            "'system': use 'seed', or no weights"
        )


def noise_floor(privacy: Privacy | None) -> float:
    """Return what a client's count must exceed to be taken for rows: two deviations of its noise.

    Where clients add no noise it is 0.
    """
    return 0.0 if privacy is None or privacy.where == "central" else 2.0 * privacy.deviation


def count_range(privacy: Privacy | None, max_rows: int) -> CountRange:
    """Return which counts a client may send: those of rows, plus the noise that it adds itself."""
    rows = CountRange(most=max_rows)
    if privacy is None or privacy.where == "central":
        return rows
    noise = system_noise.FARTHEST * privacy.deviation  # that of the seed reaches 8.6 deviations
    return CountRange(rows.least - noise, rows.most + noise)


def with_central_noise(replies: Replies, privacy: Privacy, key: Tensor) -> Replies:
    """Return replies whose totals have their noise: the second seam, passed once a stage.

    A client adds to one total of a stage, so each total is a release of its own clients alone.
    """
    totals = tuple(
        replace(
            total,
            message=noised(
                total.message,
                privacy.deviation,
                random.fold(key, total.architecture),
                privacy.grid,
            ),
        )
        for total in replies.totals
    )
    return replace(replies, totals=totals)
