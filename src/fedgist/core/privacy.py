"""Differential privacy for uploads: clipping of rows or messages, and Gaussian noise.

A *release* is one message of a client that adds to a total. A release is protected at exactly two
points. The client clips its upload, and adds *local* noise, before the upload is validated. The
server adds *central* noise to the total, once, before the method sees the total. Both are one
Gaussian mechanism: numbers whose joint change is at most the *sensitivity*, in L2, get independent
normal noise of one standard deviation (Dwork and Roth 2014, appendix A).

``unit`` defines neighbours. ``"record"``: neighbouring data sets differ by one row. A method whose
upload is a sum over rows bounds each term inside the sum (:func:`bounded`), and declares the number
of such sums (``Method.record_terms``). ``"client"``: in neighbouring federations one client sends
its message or a zero. The whole message is clipped.

Noise from the seed makes a simulation repeatable. Noise from the operating system is a multiple of
a *grid*, and so is every term before it is bounded. Sums of such terms are exact in float32, so
rounding never moves a total further than the sensitivity (docs/decisions/0038-noise-on-a-grid.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fedgist.core import random, system_noise
from fedgist.core.batch import Batch
from fedgist.core.counts import CountRange
from fedgist.core.replies import Replies
from fedgist.core.tree import build, leaves, map_leaves, named
from fedgist.errors import MethodError

PrivacyUnit = Literal["record", "client"]
Where = Literal["central", "local"]
# the source of noise and of the draws that privacy depends on: a simulation's seed, which the
# server knows, or the operating system
Source = Literal["seed", "system"]
M = TypeVar("M")  # a message

# a margin, so that rounding cannot lift a clipped norm above its bound
_BELOW = 1.0 - 1e-6
LEAST_WEIGHT = 1e-30  # the smallest sum of weights that divides a sum of rows, in float32


@dataclass(frozen=True)
class PrivateSteps:
    """Private local steps of bodies (DP-SGD; Abadi et al. 2016, algorithm 1).

    Each row is sampled independently with probability ``rate``. Its gradient is clipped to
    ``clip``. The sum of the gradients gets noise of standard deviation ``deviation`` and is divided
    by the public batch size. ``grid`` is the grid of :class:`Privacy`.
    """

    clip: float
    deviation: float
    rate: float
    grid: float = 0.0

    def count(self, epochs: float) -> int:
        """Return the number of steps that replace ``epochs`` passes over the rows."""
        return math.ceil(epochs / self.rate)


@dataclass(frozen=True)
class Privacy:
    """The protection of releases: the neighbours, the clipping bound and the noise.

    ``clip`` bounds the norm of a row's features, or of a client's message. ``deviation`` is the
    standard deviation of the noise on every number of a release. With ``steps``, bodies are trained
    privately as well. Without ``steps``, a guarantee for records holds only for bodies that do not
    depend on the records. ``grid`` is the grid of the system's noise, a power of two; 0 means that
    noise comes from the seed. ``epsilon`` is the budget of the whole run.
    """

    unit: PrivacyUnit
    where: Where
    clip: float
    deviation: float
    steps: PrivateSteps | None = None
    grid: float = 0.0
    epsilon: float = math.inf

    @property
    def source(self) -> Source:
        """The source of noise and of the draws that privacy depends on."""
        return "system" if self.grid else "seed"


def of_records(privacy: Privacy | None) -> bool:
    """Return whether single rows are protected."""
    return privacy is not None and privacy.unit == "record"


def grid_of(largest: float, digits: int) -> float:
    """Return the finest power of two that represents sums up to ``largest`` in ``digits`` bits."""
    return 2.0 ** (math.ceil(math.log2(largest)) - digits)


def sensitivity(unit: PrivacyUnit, clip: float) -> float:
    """Return the largest change of a total, in L2, when one neighbour is added or removed.

    A row's term is the constant 1 and its features (FedLog, theorem 4, with ``clip`` equal to b
    times the root of the number of features).
    """
    return math.sqrt(1.0 + clip**2) if unit == "record" else clip


def bounded(z: Tensor, privacy: Privacy | None) -> Tensor:
    """Return features (batch, m) with norms at most the clip, if records are protected.

    Features that are not finite become 0: a refused upload would tell that there is such a row.
    """
    if privacy is None or privacy.unit != "record":
        return z
    z = torch.where(_is_finite(z, privacy).unsqueeze(1), z, 0.0)
    fine = on_grid(z, privacy.grid)
    norm = torch.linalg.vector_norm(fine, dim=1, keepdim=True)
    return shrunk(fine, clip_factor(norm, privacy.clip), privacy.grid).to(z.dtype)


def counted(z: Tensor, batch: Batch, privacy: Privacy | None) -> Batch:
    """Return a batch without the rows whose features ``z`` (batch, ...) are not finite.

    So such a row adds nothing to a sum, its count included. Without privacy of records the batch is
    unchanged.
    """
    if privacy is None or privacy.unit != "record":
        return batch
    return replace(batch, mask=batch.mask & _is_finite(z, privacy))


def _is_finite(z: Tensor, privacy: Privacy) -> Tensor:
    """Return whether a row's norm is finite, (batch,), for features (batch, ...)."""
    fine = z.flatten(1).to(torch.float64 if privacy.grid else z.dtype)
    return torch.isfinite(torch.linalg.vector_norm(fine, dim=1))


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """Return the factor that brings a norm to just below the clip, or 1.

    ``norm`` has any shape, such as () for a message or (batch, 1) for rows. The factor has the
    same.
    """
    most = clip * _BELOW
    return torch.where(norm > most, most / norm, 1.0)


def clipped_message(message: M, privacy: Privacy) -> M:
    """Return a message whose L2 norm over all its numbers is at most the clip.

    A message that is not finite becomes zeros: a refused one would tell that the client is there.
    """
    fine = [on_grid(leaf, privacy.grid) for leaf in leaves(message)]
    norm = torch.stack([leaf.square().sum() for leaf in fine]).sum().sqrt()
    whole, factor = norm.isfinite(), clip_factor(norm, privacy.clip)

    def bound(leaf: Tensor) -> Tensor:
        values = torch.where(whole, on_grid(leaf, privacy.grid), 0.0)
        return shrunk(values, factor.nan_to_num(), privacy.grid).to(leaf.dtype)

    return map_leaves(bound, message)


def on_grid(values: Tensor, grid: float) -> Tensor:
    """Return the nearest multiples of the grid, float64, in the shape of ``values``.

    With grid 0 the values are unchanged.
    """
    return torch.round(values.double() / grid) * grid if grid else values


def shrunk(values: Tensor, factor: Tensor, grid: float) -> Tensor:
    """Return values times a factor of at most 1, rounded toward 0 on the grid.

    ``factor`` broadcasts over ``values``. Rounding to the nearest multiple could lift a norm above
    its bound.
    """
    return torch.trunc(values * factor / grid) * grid if grid else values * factor


def noised(message: M, deviation: float, key: Tensor, grid: float = 0.0) -> M:
    """Return a message with independent normal noise on each of its numbers.

    ``key`` is () for one client's message, or (clients,) for a stack ``(clients, ...)``. With a
    grid, the noise comes from the operating system.
    """
    arrays = {
        name: noised_array(values, deviation, random.fold(key, "noise", place), grid)
        for place, (name, values) in enumerate(named(message).items())
    }
    noisy: M = build(type(message), arrays)
    return noisy


def noised_array(values: Tensor, deviation: float, key: Tensor, grid: float = 0.0) -> Tensor:
    """Return ``values`` with noise; ``key`` () or of the shape of the leading dimensions."""
    if grid:
        noise = system_noise.discrete_gaussian(deviation / grid, tuple(values.shape))
        # integers below 2^53: their sum is exact
        whole = (values.double() / grid).round_().add_(noise.to(values.device))
        return whole.mul_(grid).to(values.dtype)
    clients, shape = key.shape, values.shape[key.ndim :]
    keys = key.view((*clients, *(1 for _ in shape)))
    noise = random.normal(keys, (*(1 for _ in clients), *shape))
    return values + deviation * noise.to(values.dtype)


def check_weights(
    annotations: Mapping[str, tuple[float, float]], name: str, privacy: Privacy | None
) -> None:
    """Raise MethodError unless rows have an annotation of this name with a range in [0, 1].

    A row whose terms are multiplied by w moves a release by at most w times as much. The noise then
    protects this row like noise 1/w times as large.
    """
    if name not in annotations:
        choices = ", ".join(annotations) or "none"
        raise MethodError(
            f"method.release_weight = {name!r}: rows have no such annotation; they have: {choices}"
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
    """Return the bound that a client's count must exceed to count as rows: 2 deviations of noise.

    The bound is 0 if clients add no noise.
    """
    return 0.0 if privacy is None or privacy.where == "central" else 2.0 * privacy.deviation


def total_floor(privacy: Privacy | None, clients: int) -> float:
    """Return the bound that a count in a total must exceed to count as rows: 2 deviations of noise.

    The total is of so many ``clients``, each of whom may have added noise.
    """
    if privacy is not None and privacy.where == "central":
        return 2.0 * privacy.deviation
    return noise_floor(privacy) * math.sqrt(max(clients, 1))


def least_count(privacy: Privacy | None) -> float:
    """Return the smallest number of rows by which sums are divided: 1, if noise is in it.

    Without noise a small number is a sum of weights, or of what a memory has discounted.
    """
    return LEAST_WEIGHT if privacy is None else 1.0


def count_range(privacy: Privacy | None, max_rows: int) -> CountRange:
    """Return the range of counts that a client may send: numbers of rows, plus its own noise.

    Where the server adds noise for single rows, no client may be left out because of one row.
    """
    if privacy is None:
        return CountRange(most=max_rows)
    if privacy.where == "central":
        return CountRange() if privacy.unit == "record" else CountRange(most=max_rows)
    rows = CountRange(most=max_rows)
    noise = system_noise.FARTHEST * privacy.deviation  # noise from the seed reaches 8.6 deviations
    return CountRange(rows.least - noise, rows.most + noise)


def with_central_noise(replies: Replies, privacy: Privacy, key: Tensor) -> Replies:
    """Return replies with noise on their totals: central privacy, applied once a stage.

    A client adds to one total of a stage, so each total is a release of its own clients only.
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
