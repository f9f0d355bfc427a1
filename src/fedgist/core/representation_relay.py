"""The relay of representation sharing: what clients release, and what others get of it.

Berdoz, Singh, Jaggi, Raskar 2022, "Scalable collaborative learning via representation sharing",
algorithm 1. It keeps each client's newest release, averages, and draws; it trains nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedgist.core import random
from fedgist.core.counts import COUNTS
from fedgist.core.linear_head import class_means
from fedgist.core.message import message
from fedgist.core.newest import Newest
from fedgist.core.privacy import noise_floor
from fedgist.core.replies import Order
from fedgist.core.task import Context
from fedgist.core.tree import take, tree
from fedgist.core.wire_form import FLAGS, NONZERO, rows_where

Draw = Literal["client", "class", "nearest"]
LEAST = 1e-6  # of what the rows of a class may weigh together


@dataclass(frozen=True)
class Release:
    """What a client sets for itself: what it releases, and what it wants to receive."""

    m_up: int | None = None
    """Number of observations per class that the client releases, at most the method's ``m_up``."""
    classes: tuple[int, ...] = ()
    """Numbers of the classes that the client releases anything of. The default is all."""
    m_down: int | None = None
    """Number of observations per class that the client receives, at most the method's ``m_down``.
    """
    hears: tuple[int, ...] = ()
    """Numbers of the clients whose observations the client receives. The default is all others."""


@message(reduce="each")
class Released:
    """What a client releases: sums of features by class, and how many rows they are over.

    ``total`` (1 + M_up, classes, m) and ``rows`` (1 + M_up, classes): first over all of its rows,
    then over those of each observation. A class without rows is not sent. Where the method asks for
    wishes, ``gets`` (1,) is the number of observations that the client wants, and ``hears``
    (clients,) says of whom.
    """

    total: Tensor = field(metadata=rows_where("rows"))
    rows: Tensor = field(metadata=NONZERO | COUNTS)
    gets: Tensor
    hears: Tensor = field(metadata=FLAGS)


@message(reduce="each")
class Representations:
    """What a client gets: the global mean of each class, and others' observations.

    ``mean`` (classes, m) and ``known`` (classes,); ``seen`` (M_down, classes, m) and ``there``
    (M_down, classes). The flags are 1 or 0.
    """

    mean: Tensor = field(metadata=rows_where("known"))
    known: Tensor = field(metadata=FLAGS)
    seen: Tensor = field(metadata=rows_where("there"))
    there: Tensor = field(metadata=FLAGS)

    def targets(self) -> tuple[Tensor, Tensor]:
        """Return to what mean each class is pulled (classes, m), and to which there is one.

        Where there is no global mean, as among peers, that of the observations stands in for it.
        """
        total = (self.seen * self.there.unsqueeze(2)).sum(0)
        stand_in, some = class_means(total, self.there.sum(0))
        known = self.known.unsqueeze(1) > 0
        return torch.where(known, self.mean, stand_in), torch.maximum(self.known, some)


@tree
class Relay:
    """Server state: what each client released last, and the mean of each class over all."""

    newest: Newest
    mean: Tensor
    known: Tensor

    @staticmethod
    def of(newest: Newest, ctx: Context) -> Relay:
        """Return the state with the mean of each class, by clients' numbers of rows."""
        total, rows = (newest.arrays[name][:, 0].sum(0) for name in ("total", "rows"))
        floor = noise_floor(ctx.task.privacy) * math.sqrt(ctx.task.num_clients)
        return Relay(newest, *class_means(total, rows, floor, LEAST))

    @property
    def released(self) -> Released:
        """What each client released last, stacked."""
        stack: Released = self.newest.messages(Released)
        return stack

    def of_client(self, client: int) -> Released | None:
        """Return what a client released last, if there is anything."""
        one: Released = take(self.released, client)
        return one if bool(one.rows.any()) else None


def download(
    relay: Relay, order: Order, m_down: int, draw: Draw, key: Tensor, floor: float = 0.0
) -> Representations:
    """Return what a client gets: the global means, and ``m_down`` observations of others.

    ``draw``: each observation is of one other client, or drawn class by class, or is among those
    nearest to the client's own means. Where the order names the client's neighbors, it hears these
    alone, and gets no global mean. Observations whose counts are at most ``floor`` are taken for
    noise.
    """
    released = relay.released
    there = _audible(released, relay, order, floor)
    wanted = m_down
    if len(released.gets[order.client]) and bool(relay.newest.round[order.client] >= 0):
        wanted = int(released.gets[order.client])
    places = _places(released, there, order.client, draw, key)[: min(wanted, m_down)]
    seen, flags = _observations(released, there, places)
    missing = m_down - len(flags)
    seen, flags = pad(seen, (0, 0, 0, 0, 0, missing)), pad(flags, (0, 0, 0, missing))
    if order.hears is None:
        return Representations(relay.mean, relay.known, seen, flags)
    nothing = torch.zeros_like(relay.known)
    return Representations(torch.zeros_like(relay.mean), nothing, seen, flags)


def _audible(released: Released, relay: Relay, order: Order, floor: float) -> Tensor:
    """Return which observations a client may hear, (clients, M_up, classes)."""
    there = released.rows[:, 1:] > floor
    there[order.client] = False  # never its own
    heard = torch.ones(len(there), dtype=torch.bool, device=there.device)
    if order.hears is not None:
        peers = torch.tensor(order.hears, dtype=torch.int64, device=heard.device)
        heard = torch.zeros_like(heard).index_fill(0, peers, True)
    if released.hears.shape[1] and bool(relay.newest.round[order.client] >= 0):
        heard &= released.hears[order.client].bool()
    return there & heard[:, None, None]


def _places(released: Released, there: Tensor, client: int, draw: Draw, key: Tensor) -> Tensor:
    """Return in which order a client gets observations: (clients * M_up, 1 or classes).

    Observations are numbered through all clients. Those that are there come first.
    """
    flat = there.flatten(0, 1)
    lines = flat.T if draw == "class" else flat.any(1).unsqueeze(0)
    keys = random.fold(key, torch.arange(len(lines), device=key.device).unsqueeze(1))
    order = random.order(keys, lines)
    if draw == "nearest":
        far = torch.where(lines[0], _distances(released, client), torch.inf)
        order = order[:, torch.argsort(far[order[0]], stable=True)]
    return order.T


def _distances(released: Released, client: int) -> Tensor:
    """Return how far each observation is from a client's own means: (clients * M_up,).

    It is the mean square over features and over the classes that both have.
    """
    own, has = class_means(released.total[client, 0], released.rows[client, 0], least=LEAST)
    theirs, have = class_means(released.total[:, 1:], released.rows[:, 1:], least=LEAST)
    both = have * has
    far = ((theirs - own).square().mean(3) * both).sum(2) / both.sum(2)
    return far.nan_to_num(torch.finfo(far.dtype).max).flatten()


def _observations(released: Released, there: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the observations at these places, (..., classes, m), and of which classes they are."""
    _, m_up, classes = there.shape
    if not len(places):
        shape = (0, classes, released.total.shape[-1])
        return released.total.new_zeros(shape), released.rows.new_zeros(shape[:2])
    column = torch.arange(classes, device=there.device)
    at = (places // m_up, 1 + places % m_up, column)
    present = there.flatten(0, 1)[places, column]
    return class_means(released.total[at], released.rows[at] * present, least=LEAST)
