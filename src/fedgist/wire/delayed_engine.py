"""Simulated late replies: some uploads reach the server one round later.

The delayed engine wraps another engine. Late clients are drawn by key, so that a run can be
repeated. Late replies that have not arrived are saved in the checkpoint.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.message import reduction
from fedgist.core.method import Context, Order, Reply
from fedgist.core.replies import Subtotal
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer, Engine, Scores, Simulation, Split, upload_bytes
from fedgist.wire.envelope import Header, seal, unseal

UNDER_WAY = "delayed"
LATE = "delayed: its reply comes a round late"


@dataclass
class DelayedEngine:
    """An engine with late replies: ``is_late`` marks the late ones in a list of orders."""

    engine: Engine
    is_late: Callable[[Context, Sequence[Order]], Sequence[bool]]
    under_way: list[Subtotal | Reply] = field(default_factory=list)

    def start(self) -> None:
        """Start the engine's workers, if it has any."""
        if callable(start := getattr(self.engine, "start", None)):
            start()

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Return the replies that are in time, and late replies of earlier rounds."""
        late = self.is_late(ctx, orders)
        arriving = [p for p in self.under_way if p.stage == ctx.stage and p.round < ctx.round]
        taken = {id(part) for part in arriving}
        self.under_way = [part for part in self.under_way if id(part) not in taken]
        prompt = [i for i in range(len(orders)) if not late[i]]
        answer = Answer()
        if prompt:
            answer = self.engine.ask(ctx, [orders[i] for i in prompt], [downs[i] for i in prompt])
        for i in range(len(orders)):
            if late[i]:  # one by one: a sum holds replies in time, or one late reply
                alone = self.engine.ask(ctx, [orders[i]], [downs[i]])
                self.under_way += [*alone.subtotals, *alone.each]
                answer = replace(
                    answer,
                    refused=tuple(sorted((*answer.refused, *alone.refused))),
                    absent=tuple(sorted((*answer.absent, *alone.absent, (orders[i].asked, LATE)))),
                )
        return replace(
            answer,
            subtotals=(*answer.subtotals, *(p for p in arriving if isinstance(p, Subtotal))),
            each=(*answer.each, *(p for p in arriving if isinstance(p, Reply))),
            upload_bytes=upload_bytes(arriving) + Counter(answer.upload_bytes),
        )

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Score as the wrapped engine does: evaluation waits for all clients."""
        return self.engine.score(ctx, orders, downs, split)

    def client(self, ctx: Context, order: Order, down: Tree) -> Any:
        return self._simulation().client(ctx, order, down)

    def state(self) -> dict[str, Tensor]:
        """Return the clients' state by name, and the late replies, uint8 (bytes,) each."""
        sealed = {f"{UNDER_WAY}/{i}": _sealed(part) for i, part in enumerate(self.under_way)}
        return self._simulation().state() | sealed

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the clients' state and the late replies from a checkpoint.

        ``arrays`` are those of :meth:`state`: of any shape, by name.
        """
        start = f"{UNDER_WAY}/"
        places = sorted(int(n.removeprefix(start)) for n in arrays if n.startswith(start))
        self.under_way = [_unsealed(arrays[f"{start}{place}"]) for place in places]
        kept = {name: array for name, array in arrays.items() if not name.startswith(start)}
        self._simulation().restore(kept)

    def forget(self, client: int) -> bool:
        """Drop a client's late replies; return whether there were any."""
        before = len(self.under_way)
        self.under_way = [part for part in self.under_way if _sender(part).client != client]
        return len(self.under_way) < before

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _simulation(self) -> Simulation:
        assert isinstance(self.engine, Simulation)  # delays are simulated
        return self.engine


def by_chance(seed: int, chance: float) -> Callable[[Context, Sequence[Order]], Sequence[bool]]:
    """Return a function that draws late clients independently for every round and stage."""

    def is_late(ctx: Context, orders: Sequence[Order]) -> list[bool]:
        key = random.key(seed, "delay", ctx.round, ctx.stage)
        clients = torch.tensor([order.client for order in orders], dtype=torch.int64)
        draws = random.uniform(random.fold(key, clients).unsqueeze(1), (1,))
        return [draw < chance for draw in draws[:, 0].tolist()]

    return is_late


def _sender(part: Subtotal | Reply) -> Order:
    return part.order if isinstance(part, Reply) else Order(part.clients[0], part.architecture)


def _sealed(part: Subtotal | Reply) -> Tensor:
    """Return a late reply as bytes, uint8, for a checkpoint."""
    order = _sender(part)
    header = Header(
        purpose="reply",
        run=UNDER_WAY,
        round=part.round,
        stage=part.stage,
        client=order.client,
        architecture=order.architecture,
    )
    return torch.frombuffer(bytearray(seal(header, {"upload": part.message})), dtype=torch.uint8)


def _unsealed(blob: Tensor) -> Subtotal | Reply:
    header, messages = unseal(blob.numpy().tobytes(), sys.maxsize)
    upload = messages["upload"]
    if reduction(type(upload)) == "sum":
        clients = (header.client,)
        return Subtotal(header.architecture, clients, header.round, header.stage, upload)
    order = Order(header.client, header.architecture)
    return Reply(order, header.round, header.stage, upload)
