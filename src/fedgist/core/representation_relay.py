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
from fedgist.core.linear_head import class_means
from fedgist.core.message import message
from fedgist.core.newest import Newest
from fedgist.core.privacy import noise_floor
from fedgist.core.replies import Order
from fedgist.core.task import Context
from fedgist.core.tree import take, tree
from fedgist.core.wire_form import FLAGS, NONZERO, rows_where

Draw = Literal["client", "class"]


@dataclass(frozen=True)
class Release:
    """What a client sets for itself: what it releases, and what it wishes to hear.

    ``m_up``: observations of each class, at most the method's; ``classes``: those that it releases,
    all if empty. ``m_down``: observations that it gets, at most the method's; ``hears``: the
    clients that it hears, all others if empty. None: as the method has it.
    """

    m_up: int | None = None
    classes: tuple[int, ...] = ()
    m_down: int | None = None
    hears: tuple[int, ...] = ()


@message(reduce="each")
class Released:
    """What a client releases: sums of features by class, and how many rows they are over.

    ``total`` (1 + M_up, classes, m) and ``rows`` (1 + M_up, classes): first over all of its rows,
    then over those of each observation. A class without rows is not sent. Where the method asks for
    wishes, ``gets`` (1,) is the number of observations that the client wants, and ``hears``
    (clients,) says of whom.
    """

    total: Tensor = field(metadata=rows_where("rows"))
    rows: Tensor = field(metadata=NONZERO)
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
        return Relay(newest, *class_means(total, rows, floor))

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

    ``draw``: each observation is of one other client, or drawn class by class. Where the order
    names the client's neighbours, it hears these alone, and gets no global mean. Observations whose
    counts are at most ``floor`` are taken for noise.
    """
    released = relay.released
    there = _audible(released, relay, order, floor)
    wanted = m_down
    if len(released.gets[order.client]) and bool(relay.newest.round[order.client] >= 0):
        wanted = int(released.gets[order.client])
    seen, flags = _drawn(released, there, min(wanted, m_down), draw, key)
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
        heard = torch.zeros_like(heard).index_fill(0, _places(order.hears, heard), True)
    if released.hears.shape[1] and bool(relay.newest.round[order.client] >= 0):
        heard &= released.hears[order.client].bool()
    return there & heard[:, None, None]


def _places(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)


def _drawn(
    released: Released, there: Tensor, count: int, draw: Draw, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Return up to ``count`` observations (..., classes, m), and of which classes they are there.

    They are drawn without replacement; those that are there come first.
    """
    _, m_up, classes = there.shape
    there = there.flatten(0, 1)
    lines = there.any(1).unsqueeze(0) if draw == "client" else there.T
    keys = random.fold(key, torch.arange(len(lines), device=key.device).unsqueeze(1))
    places = random.order(keys, lines)[:, :count]
    place, found = places.T, lines.gather(1, places).T
    if not len(place):
        shape = (0, classes, released.total.shape[-1])
        return released.total.new_zeros(shape), released.rows.new_zeros(shape[:2])
    column = torch.arange(classes, device=key.device)
    at = (place // m_up, 1 + place % m_up, column)
    return class_means(released.total[at], released.rows[at] * (there[place, column] & found))
