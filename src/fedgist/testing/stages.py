"""Iteration over the stages of a small run, with access to the messages of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.core.message import Form
from fedgist.core.method import Context, Order, Replies
from fedgist.core.replies import gather
from fedgist.core.tree import Tree, take
from fedgist.engines.engine import Answer
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.message_form import upload_form
from fedgist.runs.round import Federation
from fedgist.training import inference, local_training

ROUNDS = (0, 1, 2)  # before training, the first round, and a later round


@dataclass(frozen=True)
class Stage:
    """A stage with clients, before it has run."""

    fed: Federation
    ctx: Context
    orders: Sequence[Order]
    downs: Sequence[Tree]

    def ask(self, places: Sequence[int] | None = None) -> Answer:
        """Run the clients at these indices of ``orders``, by default all."""
        chosen = range(len(self.orders)) if places is None else places
        orders, downs = [self.orders[i] for i in chosen], [self.downs[i] for i in chosen]
        return self.fed.engine.ask(self.ctx, orders, downs)

    def update(self, answer: Answer) -> Any:
        """Return the server's state after this answer."""
        replies = gather(answer.subtotals, answer.each)
        return self.fed.method.server_update(self.fed.server, replies, self.ctx)

    def uploads(self) -> list[tuple[Order, Any]]:
        """Return each client's own upload, also of messages that are summed.

        The clients' new state is not stored.
        """
        engine = self.fed.engine
        assert isinstance(engine, LocalEngine)  # for the type checker
        uploads = []
        for order, down in zip(self.orders, self.downs, strict=True):
            cohort, clients = engine.trial(self.ctx, [order], [down])
            phases = self.fed.method.phases(cohort.ctx)
            clients, _ = local_training.train(cohort, clients, phases)
            message, _ = inference.upload(cohort, clients)
            uploads.append((order, take(message, 0)))
        return uploads

    def form(self, place: int) -> Form:
        """Return the form of a valid upload of the client at this index of ``orders``."""
        order, down = self.orders[place], self.downs[place]
        return upload_form(self.fed.method, self.ctx, order.architecture, down)


def stages(fed: Federation, rounds: Sequence[int] = ROUNDS) -> Iterator[Stage]:
    """Yield all stages of these rounds with clients; each runs after it is yielded."""
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
            downs = [method.download(fed.server, order, ctx) for order in orders]
            stage = Stage(fed, ctx, orders, downs)
            yield stage
            fed.server = stage.update(stage.ask())
