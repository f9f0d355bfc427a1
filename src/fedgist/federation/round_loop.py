"""The round loop: select, ask, aggregate, evaluate, record; checkpoint and go on.

It knows the vocabulary of methods and the verb of engines, and neither any method nor any engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedgist.core import random
from fedgist.core.message import payload_bytes
from fedgist.core.method import Context, Method, Order, Replies, Task
from fedgist.core.tree import build, named
from fedgist.engines.engine import Answer, Engine
from fedgist.engines.worker_pool import one_thread
from fedgist.errors import TooFewRepliesError
from fedgist.federation import evaluation as evaluate
from fedgist.federation.checkpoint import Checkpoint
from fedgist.federation.record import Line
from fedgist.federation.world import World

EVALUATE = "evaluate"  # the stage in which models are downloaded to be tested


class Observer(Protocol):
    """Who wants to know how a run goes."""

    def began(self, world: World, folder: str, done: int) -> None:
        """The run starts, or goes on after ``done`` rounds."""

    def finished_round(self, line: Line) -> None:
        """A round is in the record."""

    def note(self, text: str) -> None:
        """Something worth a line."""


@dataclass
class Federation:
    """A run's state: the server's, and the engine that reaches the clients."""

    world: World
    engine: Engine
    server: Any
    round: int = 0

    @property
    def method(self) -> Method:
        """The method."""
        return self.world.method

    @property
    def task(self) -> Task:
        """The task."""
        return self.world.task

    def context(self, stage: str, number: int | None = None) -> Context:
        """Return the server's context."""
        return context(self.world, self.round if number is None else number, stage)

    def advance(self) -> tuple[Line, list[Line]]:
        """Do the next round; return its line and the clients' lines of its evaluation."""
        self.round += 1
        return self.do_round(self.round)

    # the server's sums do not depend on the cores, and a waiting thread of torch's takes a worker's
    # core
    @one_thread()
    def do_round(self, number: int) -> tuple[Line, list[Line]]:
        """Do one round (0: what a method does before training)."""
        begin = time.perf_counter()
        line: Line = {"round": number}
        answers, down_bytes, refused = [], 0, []
        online = self.world.online(number)
        for stage in self.method.stages(self.context("", number)):
            ctx = self.context(stage, number)
            orders = self.method.select(self.server, online, ctx) if online else []
            downs = [self.method.download(self.server, order, ctx) for order in orders]
            sizes = {
                id(down): payload_bytes(down)
                for down in {id(down): down for down in downs}.values()
            }
            down_bytes += sum(sizes[id(down)] for down in downs)
            answer = self.engine.ask(ctx, orders, downs) if orders else None
            if answer is not None:
                answers.append(answer)
                refused += [
                    {"client": client, "reason": reason} for client, reason in answer.refused
                ]
            self._update(ctx, answer, asked=bool(orders), nobody=not online, line=line)
        line["clients/asked"] = sum(len(a.replies) + len(a.refused) for a in answers)
        line["clients/replied"] = sum(len(a.replies) for a in answers)
        if refused:
            line["refused"] = refused
        losses = [loss for a in answers for loss in a.losses.values()]
        if losses and any(losses):
            line["train/loss"] = sum(losses) / len(losses)
        line["comm/up_bytes"] = sum(a.upload_bytes for a in answers)
        line["comm/down_bytes"] = down_bytes
        line["time/train_s"] = time.perf_counter() - begin
        details = self._evaluate(number, line) if self._due(number) else []
        line["time/round_s"] = time.perf_counter() - begin
        return line, details

    def _update(
        self, ctx: Context, answer: Answer | None, *, asked: bool, nobody: bool, line: Line
    ) -> None:
        """Let the server learn from the replies; no reply changes nothing."""
        if nobody or (asked and (answer is None or len(answer.replies) == 0)):
            return
        replies = answer.replies if answer else Replies()
        try:
            self.server = self.method.server_update(self.server, replies, ctx)
        except TooFewRepliesError as error:
            line.setdefault("events", []).append(str(error))

    def _due(self, number: int) -> bool:
        last = self.task.training.num_rounds
        return number > 0 and (number % self.world.recipe.evaluate.every == 0 or number == last)

    def _evaluate(self, number: int, line: Line) -> list[Line]:
        settings = self.world.recipe.evaluate
        orders, downs, ctx = self.downloads(number)
        scores = self.engine.score(ctx, orders, downs, settings.on)
        line |= evaluate.columns(scores, "client")
        details = evaluate.per_client(scores, number, "client")
        if settings.train:
            line |= evaluate.columns(self.engine.score(ctx, orders, downs, "train"), "train")
        if len(self.world.partition.validation.rows):
            held_out = self.engine.score(ctx, orders, downs, "validation")
            line |= evaluate.columns(held_out, "validation")
            details += evaluate.per_client(held_out, number, "validation")
        return details

    def downloads(self, number: int) -> tuple[list[Order], list[Any], Context]:
        """Return what every client would receive now."""
        ctx = self.context(EVALUATE, number)
        orders = [Order(c.id, c.architectures[0]) for c in self.world.population.clients]
        return orders, [self.method.download(self.server, order, ctx) for order in orders], ctx

    def checkpoint(self) -> Checkpoint:
        """Return everything that is needed to go on."""
        return Checkpoint(self.round, named(self.server), self.engine.state())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint."""
        self.server = build(type(self.server), checkpoint.server)
        self.engine.restore(checkpoint.clients)
        self.round = checkpoint.round


def context(world: World, number: int, stage: str) -> Context:
    """Return the server's context of a stage.

    Its key depends on the seed, the round and the stage.
    """
    key = random.key(world.recipe.seed, "server", number, stage)
    return Context(key.to(world.recipe.engine.device), world.task, number, stage)


def start_server(world: World) -> Any:
    """Return the server's state before round 1."""
    return world.method.init_server(context(world, 0, "init"))


def loop(
    federation: Federation,
    keep: Callable[[Line, Sequence[Line]], None],
    save: Callable[[], None],
    stop: Callable[[], bool],
) -> bool:
    """Go through the remaining rounds; return False if asked to stop before the last one.

    ``keep`` takes each round's lines, ``save`` writes a checkpoint: every so many rounds, when
    stopped, and at the end.
    """
    recipe = federation.world.recipe
    last = federation.task.training.num_rounds
    if federation.round == 0 and federation.method.stages(federation.context("", 0)):
        keep(*federation.do_round(0))
    while federation.round < last:
        keep(*federation.advance())
        ending = stop() and federation.round < last
        if (
            ending
            or federation.round == last
            or federation.round % recipe.engine.checkpoint_every == 0
        ):
            save()
        if ending:
            return False
    return True


def totals(rounds: Iterable[Line]) -> dict[str, int]:
    """Add up what was sent: the ledger's last line."""
    lines = list(rounds)
    up, down = (sum(line.get(f"comm/{way}_bytes", 0) for line in lines) for way in ("up", "down"))
    return {"up_bytes": up, "down_bytes": down, "total_bytes": up + down}
