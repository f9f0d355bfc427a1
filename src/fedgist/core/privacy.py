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
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.replies import Replies
from fedgist.core.tree import Tree, build, leaves, map_leaves, named
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
    of the gradients gets noise of ``deviation`` and is divided by the public batch size.
    """

    clip: float
    deviation: float
    rate: float

    def count(self, epochs: int) -> int:
        """Return how many steps take the place of so many passes over the rows."""
        return math.ceil(epochs / self.rate)


@dataclass(frozen=True)
class Privacy:
    """How releases are protected: whose presence they hide, by which bound and how much noise.

    ``clip`` bounds the norm of a row's features, or of a client's message; ``deviation`` is that of
    the noise on every number of a release. With ``steps``, bodies learn in private, too; without,
    a promise to records holds for bodies that do not depend on them.
    """

    unit: Unit
    where: Where
    clip: float
    deviation: float
    steps: PrivateSteps | None = None


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
    norm = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    # a number that is not finite stays one, for the gate to refuse
    return z * torch.where(norm > privacy.clip, privacy.clip * _BELOW / norm, 1.0)


def clipped(message: M, most: float) -> M:
    """Return a message whose norm over all its numbers is at most ``most``."""
    norm = torch.stack([leaf.square().sum() for leaf in leaves(message)]).sum().sqrt()
    scale = torch.where(norm > most, most * _BELOW / norm, torch.ones_like(norm))
    return map_leaves(lambda leaf: leaf * scale, message)


def noised(message: M, deviation: float, key: Tensor) -> M:
    """Return a message with independent normal noise on each of its numbers."""

    def array(place: int, values: Tensor) -> Tensor:
        noise = random.normal(random.fold(key, "noise", place), tuple(values.shape))
        return values + deviation * noise.to(values.dtype)

    arrays = {name: array(i, values) for i, (name, values) in enumerate(named(message).items())}
    noisy: M = build(type(message), arrays)
    return noisy


def check_weights(annotations: Mapping[str, tuple[float, float]], name: str) -> None:
    """Raise MethodError unless rows have an annotation of this name, whose range is in [0, 1].

    A row whose terms are multiplied by w moves a release by w times as much at most: noise hides it
    as noise 1/w times as large would hide another.
    """
    if name not in annotations:
        known = ", ".join(annotations) or "none"
        msg = f"method.release_weight = {name!r}: rows have no such annotation; they have: {known}"
        raise MethodError(msg)
    least, most = annotations[name]
    if least < 0.0 or most > 1.0:
        msg = f"method.release_weight = {name!r}: it goes from {least:g} to {most:g}; a row weighs "
        raise MethodError(msg + "from 0, which is never released, to 1")


def noise_floor(privacy: Privacy | None) -> float:
    """Return what a client's count must exceed to be taken for rows: two deviations of its noise.

    Where clients add no noise it is 0.
    """
    return 0.0 if privacy is None or privacy.where == "central" else 2.0 * privacy.deviation


def protected(message: Tree, privacy: Privacy, key: Tensor) -> Tree:
    """Return a client's message as it may leave the client: the first seam."""
    if privacy.unit == "client":
        message = clipped(message, privacy.clip)
    return noised(message, privacy.deviation, key) if privacy.where == "local" else message


def with_central_noise(replies: Replies, privacy: Privacy, key: Tensor) -> Replies:
    """Return replies whose totals have their noise: the second seam, passed once a stage.

    A client adds to one total of a stage, so each total is a release of its own clients alone.
    """
    totals = tuple(
        replace(
            total,
            message=noised(total.message, privacy.deviation, random.fold(key, total.architecture)),
        )
        for total in replies.totals
    )
    return replace(replies, totals=totals)


def fresh_keys(count: int) -> Tensor:
    """Return keys (count,) from the operating system: nobody can draw the same again."""
    return torch.tensor([secrets.randbits(63) for _ in range(count)], dtype=torch.int64)
