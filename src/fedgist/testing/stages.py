"""Iteration over the stages of a small run, with access to the messages of each."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedgist.core.message import Form
from fedgist.core.method import Context, Order, Replies
from fedgist.core.replies import gather
from fedgist.core.tree import Tree, take
from fedgist.engines.engine import Answer, Engine, Simulation
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.message_form import upload_form
from fedgist.runs.round import ServerRun
from fedgist.training import inference, local_training

ROUNDS = (0, 1, 2)  # before training, the first round, and a later round


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage with clients: ``server`` and ``own`` are the states before it."""

    fed: ServerRun
    ctx: Context
    orders: Sequence[Order]
    downs: Sequence[Tree]
    server: Tree
    own: Mapping[str, Tensor]

    def ask(self) -> Answer:
        """Run all clients, with the state that the engine holds now."""
        return self.fed.engine.ask(self.ctx, self.orders, self.downs)

    @functools.cached_property
    def answer(self) -> Answer:
        """The answer of all clients; they run when it is first read."""
        return self.ask()

    def ask_some(self, places: Sequence[int]) -> Answer:
        """Run the clients at these indices of ``orders``, with their state before the stage."""
        _hosts_clients(self.fed.engine).restore(self.own)
        orders, downs = [self.orders[i] for i in places], [self.downs[i] for i in places]
        return self.fed.engine.ask(self.ctx, orders, downs)

    def update(self, answer: Answer) -> Any:
        """Return the server's state after this answer."""
        replies = gather(answer.subtotals, answer.each)
        return self.fed.method.server_update(self.server, replies, self.ctx)

    @functools.cached_property
    def uploads(self) -> list[tuple[Order, Any]]:
        """Each client's own upload, also of messages that are summed, from its state before.

        The clients' new state is not stored.
        """
        engine = self.fed.engine
        assert isinstance(engine, LocalEngine)  # for the type checker
        engine.restore(self.own)
        uploads = []
        for order, down in zip(self.orders, self.downs, strict=True):
            cohort, clients = engine.trial(self.ctx, [order], [down])
            phases = self.fed.method.phases(cohort.ctx)
            clients, *_ = local_training.train(cohort, clients, phases)
            message, _ = inference.upload(cohort, clients)
            uploads.append((order, take(message, 0)))
        return uploads

    def form(self, place: int) -> Form:
        """Return the form of a valid upload of the client at this index of ``orders``."""
        order, down = self.orders[place], self.downs[place]
        return upload_form(self.fed.method, self.ctx, order.architecture, down)


def _hosts_clients(engine: Engine) -> Simulation:
    assert isinstance(engine, Simulation)  # for the type checker
    return engine


def stages(fed: ServerRun, rounds: Sequence[int] = ROUNDS) -> Iterator[Stage]:
    """Yield all stages of these rounds with clients; each has run when the next is yielded."""
    method = fed.method
    for number in rounds:
        names = method.stages(fed.context("", number))
        selected: Sequence[Order] = []
        for name in names:
            ctx = fed.context(name, number)
            if name == names[0]:
                selected = method.select(fed.server, fed.side.online(number), ctx)
            orders = method.orders(fed.server, selected, ctx)
            if orders is None:
                fed.server = method.server_update(fed.server, Replies(), ctx)
                continue
            if not orders:  # nobody is asked, and nothing changes
                continue
            downs = [method.download(fed.server, order, ctx) for order in orders]
            own = {n: array.clone() for n, array in _hosts_clients(fed.engine).state().items()}
            stage = Stage(fed, ctx, orders, downs, fed.server, own)
            yield stage
            fed.server = stage.update(stage.answer)
