"""One round: select clients, let them train, aggregate, evaluate, and make the record's line.

This module depends on the interfaces of methods and engines, but on no particular method or engine.
It never reads the rows or the state of clients. Central noise is added to the totals of a stage
before the method sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgist.core import random
from fedgist.core.message import scope
from fedgist.core.method import Context, Method, Order, Replies, Reply, Task
from fedgist.core.privacy import with_central_noise
from fedgist.core.replies import EVERYBODY, Asked, Subtotal, gather
from fedgist.core.sampling import missing
from fedgist.core.tree import Tree, build, named
from fedgist.engines.engine import (
    EVALUATE,
    Answer,
    Engine,
    Simulation,
    Split,
    SpreadSimulation,
)
from fedgist.engines.message_form import upload_form
from fedgist.engines.method_check import broken, check_returned, check_state, kind_of
from fedgist.engines.process_control import as_workers_do, on_threads
from fedgist.engines.server_function_check import check_shapes, lost_numbers, sums_of, watched
from fedgist.engines.sharding import merged
from fedgist.errors import MethodError, TooFewRepliesError
from fedgist.runs import divergence, evaluation, lost_models
from fedgist.runs.files.checkpoint import Checkpoint
from fedgist.runs.files.columns import EPSILON, NEWCOMER
from fedgist.runs.files.record import Line
from fedgist.runs.files.releases import Releases
from fedgist.runs.files.state_parts import Parts
from fedgist.runs.round_record import PartialRound, PausedError, RoundRecord, edges_of, under_way
from fedgist.training.client_store import check_alike
from fedgist.world.server_context import ServerContext


class Observer:
    """Functions that are called as a run proceeds, for example to show progress. These do nothing.

    Override those that you need.
    """

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Handle the start of the run, or its continuation after ``done`` rounds."""

    def finished_round(self, line: Line) -> None:
        """Handle the line of a round that was added to the record."""

    def working(self, text: str) -> None:
        """Handle a text about the stage that has just finished, during a long round."""

    def chose(self, text: str) -> None:
        """Handle a text on an early stop, or on the round whose models are kept."""

    def note(self, text: str) -> None:
        """Handle a message for the user."""


@dataclass
class ServerRun:
    """A run at its server: its context, the engine that reaches the clients, and its state.

    ``best`` is the state after the best round so far, if the run keeps that round's models. With
    noise from the system, ``releases`` holds the released totals. ``edges`` lists the messages from
    peer to peer in the last round. ``under_way`` is a round that stopped between two stages.
    ``probe`` trains probes on features of the models, and returns their columns and clients' lines.
    ``last_downloads`` holds the last download of each architecture, if the server is gone: then the
    models of a site are completed with these. ``parts_folder`` is where the machines of a cluster
    write their clients' state, if they share it.
    """

    side: ServerContext
    engine: Engine
    server: Tree
    round: int = 0
    best: Checkpoint | None = None
    releases: Releases | None = None
    edges: list[Line] = field(default_factory=list)
    under_way: PartialRound | None = None
    probe: Callable[[ServerRun], tuple[Line, list[Line]]] | None = None
    last_downloads: Mapping[str, Tree] | None = None
    parts_folder: Path | None = None

    @property
    def method(self) -> Method:
        """The method."""
        return self.side.method

    @property
    def task(self) -> Task:
        """The task."""
        return self.side.task

    @property
    def repeated_rounds(self) -> int:
        """The number of rounds that were repeated with new noise, so that they released more."""
        return self.releases.again if self.releases is not None else 0

    @property
    def is_spent(self) -> bool:
        """Whether the next round would exceed the privacy budget."""
        spending, number = self.side.spending, self.round + 1
        if spending is None or self.releases is None:
            return False
        repeats = self.releases.after(number, self._stages_done(number), steps=self._steps)
        return not spending.allows(number, repeats)

    @property
    def _steps(self) -> bool:
        privacy = self.task.privacy
        return privacy is not None and privacy.steps is not None

    def _stages_done(self, number: int) -> Sequence[str]:
        """Return the finished stages of a round that stopped between two stages."""
        if self.under_way is None or self.under_way.record.number != number:
            return ()
        return self.method.stages(self.context("", number))[: self.under_way.done]

    def context(self, stage: str, number: int | None = None) -> Context:
        """Return the server's context of a stage in a round, by default the last finished round."""
        return context(self.side, self.round if number is None else number, stage)

    def advance(self, pauses: Callable[[str], bool] = lambda _: False) -> tuple[Line, list[Line]]:
        """Do the next round; return its line and the clients' lines of its evaluation.

        ``pauses`` is called between two stages after work of the server, with a text about the
        progress. If it returns True, PausedError is raised; :meth:`checkpoint` has the finished
        stages.
        """
        self.round += 1
        try:
            return self.do_round(self.round, pauses)
        except PausedError:
            self.round -= 1
            raise

    # the server's sums do not depend on the cores, and a waiting thread of torch's takes a
    # worker's core
    @as_workers_do()
    def do_round(
        self, number: int, pauses: Callable[[str], bool] = lambda _: False
    ) -> tuple[Line, list[Line]]:
        """Do one round or its remaining stages. Round 0 is the exchange before training."""
        now = self._do_stages(number, pauses)
        begin = time.perf_counter() - now.seconds
        self.edges, line = now.edges, now.record.line(self.side.client_names)
        if self.side.neighbors is not None:
            line["comm/edge_bytes"] = sum(edge["bytes"] for edge in self.edges)
        with watched(self.method, "report", number, *self._held):
            numbers = self.method.report(self.server, self.context(EVALUATE, number))
        if not isinstance(numbers, Mapping):
            broken(self.method, "report", f"returned {kind_of(numbers)}, not numbers by name")
        # in one order: a state that was restored has its arrays in another
        line |= {f"server/{name}": float(numbers[name]) for name in sorted(numbers)}
        if self.side.spending is not None:
            line[EPSILON] = self.side.spending.epsilon(number, self.repeated_rounds)
        line["time/train_s"] = time.perf_counter() - begin
        details = self._evaluated(number, line) if self._due(number) else []
        line["time/round_s"] = time.perf_counter() - begin
        return line, details

    def _do_stages(self, number: int, pauses: Callable[[str], bool]) -> PartialRound:
        """Do the remaining stages of a round, and return the record of all its stages."""
        stages = self.method.stages(self.context("", number))
        if self.releases is not None:
            self.releases.begin(number, self._stages_done(number), steps=self._steps)
        if self.under_way is None or self.under_way.record.number != number:
            record = RoundRecord(number, tuple(self.task.pools))
            self.under_way = PartialRound(record, self._select(number, stages, record))
        now, began = self.under_way, time.perf_counter()  # sites were waited for before
        before = now.seconds
        for stage in stages[now.done :]:
            server_only = self._do_stage(self.context(stage, number), now)
            now.done += 1
            between = number > 0 and now.done < len(stages)
            now.seconds = before + time.perf_counter() - began
            if server_only and between and pauses(f"{stage}, {now.done} of {len(stages)}"):
                raise PausedError
        self.under_way = None
        return now

    def _select(self, number: int, stages: Sequence[str], record: RoundRecord) -> list[Order]:
        """Draw the clients of a round, once for all of its stages."""
        online = self.side.online(number)
        if not stages:
            return []
        if not online:
            record.offline = missing(self.task, 0, 0)
            return []
        ctx = self.context(stages[0], number)
        with watched(self.method, "select", number, *self._held):
            selected = self.method.select(self.server, online, ctx)
        chosen: list[Order] = list(check_returned(selected, self.method, "select"))
        if strange := [order for order in chosen if not isinstance(order, Order)]:
            broken(self.method, "select", f"returned {kind_of(strange[0])} among its orders")
        record.offline = missing(self.task, len(online), len({o.client for o in chosen}))
        return self._with_neighbors(chosen, number)

    def _with_neighbors(self, orders: list[Order], number: int) -> list[Order]:
        """Return the orders with each client's neighbors of this round, if clients are peers."""
        peers = None if self.side.neighbors is None else self.side.neighbors(number)
        return orders if peers is None else [replace(o, hears=peers[o.client]) for o in orders]

    def _do_stage(self, ctx: Context, now: PartialRound) -> bool:
        """Do a stage; return whether the server worked without clients."""
        record, failed = now.record, now.record.failed
        able = [order for order in now.selected if order.asked not in failed]
        with watched(self.method, "orders", ctx.round, *self._held):
            orders = self.method.orders(self.server, able, ctx)
        if orders is None:
            with on_threads(self.side.server_threads):
                self._update(Replies(), ctx, record)
            return True
        if not orders and not hides_absence(self.task):
            return False
        downs = self._downloads(orders, ctx)
        record.ordered(orders, downs)
        now.edges += edges_of(self.method, self.server, orders, ctx.round)
        if self.releases is not None:
            self.releases.begin_stage(ctx.round, ctx.stage)
        answer = self.engine.ask(ctx, orders, downs) if orders else Answer()
        replies = self._replies(answer, ctx, record)
        replies = add_central_noise(self.side, self.server, replies, orders, ctx, self.releases)
        if replies.totals or len(replies):  # no reply changes nothing
            self._update(replies, ctx, record)
        return False

    def _update(self, replies: Replies, ctx: Context, record: RoundRecord) -> None:
        """Update the server's state, or keep it if a total that the method needs was withheld."""
        try:
            with watched(self.method, "server_update", ctx.round, *self._held, *sums_of(replies)):
                server = self.method.server_update(self.server, replies, ctx)
        except TooFewRepliesError as error:
            record.events.append(str(error))
        else:
            check_state(server, self.method, "server_update")
            check_shapes(self.method, "server_update", self.server, server)
            if lost := lost_numbers(self.server, server):
                stage = f" in stage {ctx.stage!r}" if ctx.stage else ""
                event = f"the server's {lost} was not finite after round {ctx.round}{stage}: "
                record.events.append(event + "its previous state is kept")
                return
            self.server = server

    @property
    def _held(self) -> list[Tree]:
        """The server's state and the models' starts."""
        return [self.server, *self.task.starts.values()]

    def _downloads(self, orders: Sequence[Order], ctx: Context) -> list[Tree]:
        with watched(self.method, "download", ctx.round, *self._held):
            return [self.download(order, ctx) for order in orders]

    def download(self, order: Order, ctx: Context) -> Tree:
        """Return the download for an order."""
        if self.last_downloads is not None:
            return self.last_downloads[order.architecture]
        return self.method.download(self.server, order, ctx)

    def _replies(self, answer: Answer, ctx: Context, record: RoundRecord) -> Replies:
        """Return an answer's replies, without late ones that the method does not accept."""

        def usable(part: Subtotal | Reply) -> bool:
            in_time = part.round == ctx.round or self.method.accepts_late
            return in_time and part.stage == ctx.stage

        parts: list[Subtotal | Reply] = [*answer.subtotals, *answer.each]
        used = [part for part in parts if usable(part)]
        totals = [part for part in used if isinstance(part, Subtotal)]
        each = [part for part in used if isinstance(part, Reply)]
        if wrong := self._objected(each, ctx):
            record.refused += wrong.items()
            used = [part for part in used if not wrong.keys() & set(part.asked)]
            each = [part for part in each if part.order.asked not in wrong]
        replies = gather(totals, each, self.side.setup.recipe.privacy.min_replies)
        recipients = [recipient for part in used for recipient in part.asked]
        record.answered(answer, recipients, replies, ctx.stage)
        unused = [part for part in parts if not usable(part)]
        record.too_late((recipient, part.round) for part in unused for recipient in part.asked)
        return replies

    def _objected(self, each: Sequence[Reply], ctx: Context) -> dict[Asked, str]:
        """Return the clients whose messages the method cannot use, with the reasons."""
        reasons = {}
        for reply in each:
            with watched(self.method, "objection", ctx.round, reply.message):
                why = self.method.objection(reply.message, ctx)
            if check_returned(why, self.method, "objection"):
                reasons[reply.order.asked] = str(why)
        return reasons

    def _due(self, number: int) -> bool:
        last = self.task.training.num_rounds
        return number > 0 and (
            number % self.side.setup.recipe.evaluate.every == 0 or number == last
        )

    def _evaluated(self, number: int, line: Line) -> list[Line]:
        """Add the models' metrics to a round's line; return the lines of clients."""
        predicts = self.task.objective.views == 1
        details = self._evaluate(number, line) if predicts else []
        if self.probe is None:
            return details
        with on_threads(self.side.server_threads):
            probe_columns, more = self.probe(self)
        line |= probe_columns
        return evaluation.joined(details, more)

    def _evaluate(self, number: int, line: Line) -> list[Line]:
        recipe = self.side.setup.recipe
        settings, ctx = recipe.evaluate, self.context(EVALUATE, number)
        if evaluation.scores_models(recipe, self.task):
            with watched(self.method, "models", number, *self._held):
                returned = self.method.models(self.server, ctx)
            models = check_returned(returned, self.method, "models")
            with on_threads(self.side.server_threads):
                numbers, lost = evaluation.server_columns(models, ctx)
            line |= numbers
            divergence.add(line, lost)
        if settings.on == "global" or not recipe.privacy.share_measurements:
            return []
        orders, downs, ctx = self.downloads(number)
        new = self.task.newcomers
        old = [i for i, order in enumerate(orders) if order.client not in new]
        splits: list[tuple[str, Split, list[int]]] = [("client", settings.on, old)]
        splits += [("train", "train", old)] if settings.train else []
        splits += [("validation", "validation", old)] if self.side.holds_out else []
        others = [i for i in range(len(orders)) if orders[i].client in new]
        splits += [(NEWCOMER, settings.on, others)] if others else []
        details = []
        for column, split, places in splits:
            asked = [orders[i] for i in places], [downs[i] for i in places]
            scores = lost_models.without_lost(self.engine.score(ctx, *asked, split))
            divergence.add(line, lost_models.lost_clients(scores, self.side.client_names))
            if column == NEWCOMER:  # what all clients share is scored once
                scores = replace(scores, whole=None)
            line |= evaluation.columns(scores, column)
            if column == "client":
                line |= evaluation.unscored(scores, self.side.client_names)
            if column != "train":
                details += evaluation.per_client(scores, number, column)
        return details

    def downloads(self, number: int) -> tuple[list[Order], list[Tree], Context]:
        """Return the next download of every client."""
        ctx, orders = self.context(EVALUATE, number), self.orders_to_each(number)
        return orders, self._downloads(orders, ctx), ctx

    def orders_to_each(self, number: int) -> list[Order]:
        """Return an order to each client, for its first model."""
        return self._with_neighbors(
            [Order(c.id, c.architectures[0]) for c in self.side.clients], number
        )

    def checkpoint(self) -> Checkpoint:
        """Return everything needed to resume; clients' state only if clients are simulated."""
        clients: Mapping[str, Tensor] = {}
        parts = None
        if self.parts_folder and isinstance(self.engine, SpreadSimulation):
            parts = Parts(self.parts_folder, self.engine.save_parts(self.parts_folder))
        elif isinstance(self.engine, Simulation):
            clients = self.engine.state()
        done, now = self.round, None
        if self.under_way is not None:
            done, now = self.under_way.record.number - 1, self.under_way.plain()
        server = named(self.server)
        return Checkpoint(done, server, clients, self.best, under_way=now, parts=parts)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Replace the current state by a checkpoint's."""
        order = named(self.server)  # of the keys of dictionaries, which a file sorts
        check_alike(checkpoint.server, order, "the server's state")
        if isinstance(self.engine, Simulation):
            self._restore_clients(self.engine, checkpoint)
        device = self.side.setup.device  # a file's arrays are not on it
        arrays = {name: checkpoint.server[name].to(device) for name in order}
        self.server = build(type(self.server), arrays)
        self.round, self.best = checkpoint.round, checkpoint.best
        self.under_way = under_way(checkpoint.under_way) if checkpoint.under_way else None

    def _restore_clients(self, engine: Simulation, checkpoint: Checkpoint) -> None:
        parts = checkpoint.parts
        if parts is None:
            engine.restore(checkpoint.clients)
        elif parts.folder == self.parts_folder and isinstance(engine, SpreadSimulation):
            engine.restore_parts(parts.folder, parts.files)
        else:
            engine.restore(merged(parts.read(), self.side.clients))

    def forget(self, client: int, reply: Reply | None = None) -> None:
        """Drop the messages of one client that the server keeps, or that are in its totals.

        ``reply`` is the message that is in a total, if it was made again elsewhere.

        Raises
        ------
        MethodError
            If the client's message is in a total, and the client cannot send it again.
        """
        ctx, sent = self.context(EVALUATE), self.method.sent_in(self.server, client)
        if sent is None or reply is None:
            reply = None if sent is None else self._sent_again(client, *sent)
        name = "forget" if reply is None else "without"
        with watched(self.method, name, 0, *self._held):  # it is rare: in any round
            if reply is None:
                state = self.method.forget(self.server, client, ctx)
            else:
                state = self.method.without(self.server, reply, ctx)
        self.server = check_state(state, self.method, name)

    def _sent_again(self, client: int, number: int, stage: str) -> Reply:
        """Return a message that a simulated client sent before: the same bits."""
        privacy = self.side.task.privacy
        local = privacy is not None and privacy.where == "local" and privacy.source == "system"
        if not isinstance(self.engine, Simulation) or local:
            why = "its noise was the system's" if local else "it is at its site"
            raise MethodError(
                f"the sums of client {client} are in a total, and cannot be had again: {why}"
            )
        order, ctx = self.orders_to_each(number)[client], self.context(stage, number)
        answer = self.engine.ask(ctx, [order], [self.method.download(self.server, order, ctx)])
        if not answer.subtotals:
            raise MethodError(f"client {client} does not send its sums again: {answer.refused}")
        return Reply(order, number, stage, answer.subtotals[0].message)

    def keep_this_round(self) -> None:
        """Store the current state as the state of the best round."""
        self.best = self.checkpoint().copied()


def context(side: ServerContext, number: int, stage: str) -> Context:
    """Return the server's context of a stage, with a key made of seed, round and stage."""
    key = random.key(side.setup.recipe.seed, "server", number, stage)
    return Context(key.to(side.setup.device), side.task, number, stage)


def start_server(side: ServerContext) -> Any:
    """Return the server's state before round 1."""
    with watched(side.method, "init_server", 0, *side.task.starts.values()):
        state = side.method.init_server(context(side, 0, "init"))
    return check_returned(state, side.method, "init_server")


def hides_absence(task: Task) -> bool:
    """Return whether a round without drawn clients must be hidden, by releasing only noise."""
    central = task.privacy is not None and task.privacy.where == "central"
    return central and task.training.sampling == "poisson"


def add_central_noise(
    side: ServerContext,
    server: Tree,
    replies: Replies,
    orders: Sequence[Order],
    ctx: Context,
    releases: Releases | None = None,
) -> Replies:
    """Add central noise to the totals of a stage, and set the expected number of clients of each.

    Without privacy, replies are unchanged. If ``releases`` holds totals of this stage, they were
    released before the run was stopped. The method then sees these totals again instead of new
    ones.
    """
    privacy = side.task.privacy
    if privacy is None:
        return replies
    replies = replace(replies, expected=_expected(side, orders))
    if privacy.where == "local":
        return replies
    kept = releases.kept(ctx.round, ctx.stage) if releases is not None else None
    if kept is not None:
        return replace(replies, totals=kept)
    if hides_absence(side.task):
        replies = _completed(side, server, replies, ctx)
    replies = with_central_noise(replies, privacy, ctx.draw("privacy"))
    if releases is not None:
        releases.keep(ctx.round, ctx.stage, replies.totals)
    return replies


def _expected(side: ServerContext, orders: Sequence[Order]) -> dict[str, float]:
    """Return the expected number of clients behind each total, by architecture and for all.

    These numbers are public.
    """
    training, share = side.task.training, 1.0
    architectures = [order.architecture for order in orders]
    if training.sampling == "poisson":  # the number of drawn clients is not public
        architectures = [client.architectures[0] for client in side.clients]
        share = training.fraction_train
    counts = {name: share * architectures.count(name) for name in side.task.architectures}
    return {**counts, EVERYBODY: share * len(architectures)}


def _completed(side: ServerContext, server: Tree, replies: Replies, ctx: Context) -> Replies:
    """Add totals of zeros for architectures without a drawn client."""
    present, absent = {total.architecture for total in replies.totals}, []
    members = {client.architectures[0]: client.id for client in side.clients}
    for architecture, client in sorted(members.items()):
        down = side.method.download(server, Order(client, architecture), ctx)
        form = upload_form(side.method, ctx, architecture, down)
        name = EVERYBODY if scope(form.kind) == "all" else architecture
        if name not in present:
            present.add(name)
            zeros = form.zeros(ctx.key.device)
            absent.append(Subtotal(name, (), ctx.round, ctx.stage, zeros))
    totals = sorted((*replies.totals, *absent), key=lambda total: total.architecture)
    return replace(replies, totals=tuple(totals))
