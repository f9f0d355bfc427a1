"""The remote engine, which runs clients at sites over a network.

It seals each download in an envelope, sends the envelope, and validates replies as the local engine
does: the right run, a registered type, the expected form, finite numbers. A reply counts at most
once. A reply that arrives after its stage is passed on with its round. The round loop and the
method decide whether it is used.

If too few clients answered a stage, the others are asked again, with the same download. The replies
that arrived are kept, so no client trains or releases twice.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.counts import MOST_ROWS
from fedgist.core.finite_scores import LOST
from fedgist.core.message import (
    Form,
    is_finite,
    payload_bytes,
    reduction,
    scope,
    total,
    why_refused,
)
from fedgist.core.method import Context, Method, Order, Reply
from fedgist.core.objectives.metrics import LOSS, Metric
from fedgist.core.replies import Asked, Subtotal
from fedgist.core.tree import Tree
from fedgist.engines.engine import (
    FINETUNED,
    TRAINED,
    Answer,
    Score,
    Scores,
    ScoreTable,
    Split,
    TrainingLoss,
    collect,
    metrics_of,
)
from fedgist.engines.message_form import upload_form
from fedgist.errors import FederationError, MessageError, shown
from fedgist.wire.envelope import Header, Packed, in_parts, unseal
from fedgist.wire.site import SLACK
from fedgist.wire.wire import Parts, Wire

OrderKey = tuple[int, str, int, str]  # round, stage, client, architecture
OWN_SCORE = "score-"  # the name of the message with the score of a client's own model
SCORES = frozenset(OWN_SCORE + model for model in ("", FINETUNED, TRAINED))
FORGOTTEN_AFTER = 50  # rounds after which a late reply is dropped
FIRST_ROUNDS = (0, 1)
NO_REPLY, NOT_CONNECTED = "no reply in time", "not connected"
Envelopes = list[tuple[int, Parts]]


@dataclass
class Inbox:
    """Received replies that have not been passed on yet.

    ``sums`` holds one subtotal per architecture, round and stage, if the method adds per
    architecture. ``sizes`` holds the payload bytes of the parts of a round and stage. ``final``
    are the orders that were refused for a reason that asking again cannot change.
    """

    parts: list[Subtotal | Reply] = field(default_factory=list)
    sums: dict[tuple[int, str, str], int] = field(default_factory=dict)  # places in parts
    sizes: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    refused: list[tuple[Asked, str]] = field(default_factory=list)
    losses: dict[OrderKey, float] = field(default_factory=dict)
    steps: dict[OrderKey, tuple[int, ...]] = field(default_factory=dict)
    answered: set[OrderKey] = field(default_factory=set)
    final: set[OrderKey] = field(default_factory=set)
    received_bytes: int = 0

    def add(self, part: Subtotal | Reply) -> None:
        """Add a part; a message that is summed per architecture is added to those before it."""
        (recipient,) = part.asked
        key = (part.round, part.stage, recipient.architecture)
        self.sizes[key] += payload_bytes(part.message)
        place = self.sums.get(key)
        if isinstance(part, Reply) or scope(type(part.message)) == "all" or place is None:
            if isinstance(part, Subtotal):
                self.sums[key] = len(self.parts)
            self.parts.append(part)
            return
        before = self.parts[place]
        assert isinstance(before, Subtotal)  # a place is a subtotal's
        message = total([before.message, part.message])
        clients = (*before.clients, *part.clients)
        self.parts[place] = Subtotal(before.architecture, clients, part.round, part.stage, message)

    def taken(self, stage: str, oldest: int) -> tuple[list[Subtotal | Reply], Counter[str], Inbox]:
        """Return the parts of a stage, their bytes by architecture, and an inbox of the others.

        Parts of rounds up to ``oldest`` are dropped.
        """
        parts = [part for part in self.parts if part.stage == stage]
        sizes: Counter[str] = Counter()
        left = Inbox()
        for (number, of_stage, architecture), size in self.sizes.items():
            if of_stage == stage:
                sizes[architecture] += size
            elif number > oldest:
                left.sizes[number, of_stage, architecture] = size
        for part in self.parts:
            if part.stage != stage and part.round > oldest:
                if isinstance(part, Subtotal):
                    left.sums[part.round, part.stage, part.architecture] = len(left.parts)
                left.parts.append(part)
        return parts, sizes, left


@dataclass
class Scoring:
    """One evaluation of these ``clients``.

    ``tables`` holds each client's scores by name of the model. ``reasons`` says why another client
    has none so far. ``final`` holds the refusals that asking again cannot change.
    """

    clients: frozenset[int]
    tables: dict[int, Mapping[str, ScoreTable]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    final: dict[int, str] = field(default_factory=dict)

    @property
    def waiting(self) -> frozenset[int]:
        """The clients that neither have a score nor refuse for good."""
        return self.clients - self.tables.keys() - self.final.keys()

    def add(self, client: int, tables: Mapping[str, ScoreTable]) -> None:
        """Add the scores of a client."""
        self.tables[client] = tables

    def refuse(self, client: int, reason: str, *, final: bool = False) -> None:
        """Add the reason why a client has no score; an answer before it counts."""
        if client in self.waiting:
            (self.final if final else self.reasons)[client] = reason

    def scores(self) -> Scores:
        """Return the scores of all models, and the clients without one."""
        by_model: dict[str, list[ScoreTable]] = {}
        for client in sorted(self.tables):
            for model, table in self.tables[client].items():
                by_model.setdefault(model, []).append(table)
        why = {**self.reasons, **self.final}
        missing = tuple(
            (client, why[client]) for client in sorted(self.clients - self.tables.keys())
        )
        return Scores({model: collect(parts) for model, parts in by_model.items()}, missing=missing)


def tables_of(
    client: int, messages: Mapping[str, Tree], metrics: Mapping[str, Metric], classes: int
) -> dict[str, ScoreTable]:
    """Return a client's scores, a table of one row for each of its models, by name.

    A score of no rows has no values.

    Raises
    ------
    MessageError
        If a message is no score, or its values are not possible.
    """
    if OWN_SCORE not in messages or not messages.keys() <= SCORES:
        raise MessageError("it holds no score")
    tables = {}
    for name, score in messages.items():
        if reason := _fault(score, metrics, classes):
            raise MessageError(f"its score is not valid: {reason}")
        received = score.values if int(score.rows) else {}
        values = {m: received[m].view(1).double() for m in metrics if m in received}
        table = ScoreTable((client,), score.rows.view(1), values, score.confusion)
        tables[name.removeprefix(OWN_SCORE)] = table
    return tables


def _fault(score: Tree, metrics: Mapping[str, Metric], classes: int) -> str:
    """Return why a message is no score; an empty text if its values and counts are possible."""
    if not isinstance(score, Score):
        return f"it is a {type(score).__name__}"
    for name, v in score.values.items():
        if name not in metrics:
            return f"there is no metric {shown(name)}"
        lost = name == LOSS.name and len(score.values) == 1 and v.shape == () and v == LOST
        if lost and v.is_floating_point():
            continue
        if not (v.shape == () and v.is_floating_point() and is_finite(v)):
            return f"{name} is not a finite number"
        if not metrics[name].allows(float(v)):
            return f"{name} = {float(v):g} is not possible"
    shapes: list[tuple[str, Tensor, tuple[int, ...]]] = [("rows", score.rows, ())]
    if score.confusion is not None:
        shapes.append(("confusion", score.confusion, (classes, classes)))
    for name, counts, shape in shapes:
        whole = counts.dtype == torch.int64 and counts.shape == shape
        if not whole or not bool(((counts >= 0) & (counts <= MOST_ROWS)).all()):
            return f"{name} are no counts of rows"
    return ""


@dataclass(frozen=True)
class Patience:
    """How long a server waits for replies, and how many it needs.

    A stage with fewer than ``least_replies`` replies at its deadline is asked again, until it was
    asked ``most_attempts`` times, and so are scores. ``first_deadline_s`` holds for the first two
    rounds, in which sites prepare. None means no deadline.
    """

    deadline_s: float | None = None
    first_deadline_s: float | None = None
    least_replies: int = 0
    most_attempts: int = 1

    def deadline(self, number: int) -> float | None:
        """Return the deadline of a stage in a round, in seconds."""
        return self.first_deadline_s if number in FIRST_ROUNDS else self.deadline_s


@dataclass(frozen=True)
class _Asked:
    """An open order, the form of a valid reply, and of how many phases it tells the steps."""

    order: Order
    form: Form
    phases: int | None


class RemoteEngine:
    """Clients at sites, which answer over a wire until a deadline."""

    def __init__(
        self,
        method: Method,
        wire: Wire,
        *,
        run: str,
        patience: Patience | None = None,
        before_repeating: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect to a wire; ``run`` is the run's own name, which every envelope carries.

        ``before_repeating`` is called before a stage is asked again, with the reason. It may wait.
        """
        self.method, self.wire, self.run = method, wire, run
        self.patience, self.before_repeating = patience or Patience(), before_repeating
        self.under_way: dict[OrderKey, _Asked] = {}
        self.forms: dict[tuple[bool, str, str], Form] = {}
        self.largest = 0  # bytes of the largest upload requested so far
        self.inbox = Inbox()
        self.unasked: Counter[int] = Counter()  # dropped replies by client
        self.replied: frozenset[int] = frozenset()  # clients that answered the last stage

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Send each order with its download; return the replies received in time.

        Late replies of earlier rounds are part of the answer.

        Raises
        ------
        FederationError
            If too few clients answered in every attempt.
        """
        oldest = ctx.round - FORGOTTEN_AFTER
        self.under_way = {k: pending for k, pending in self.under_way.items() if k[0] > oldest}
        sent, events = self._ask_until_enough(ctx, orders, downs)
        answered = [o.client for o in orders if _key(ctx, o) in self.inbox.answered]
        self.replied = frozenset(answered)
        # a reply to another stage waits until that stage comes again
        inbox = self.inbox
        parts, sizes, self.inbox = inbox.taken(ctx.stage, oldest)
        keys = {_key(ctx, order): order.asked for order in orders}
        return Answer(
            tuple(part for part in parts if isinstance(part, Subtotal)),
            tuple(part for part in parts if isinstance(part, Reply)),
            tuple(sorted(inbox.refused)),
            self._absent(ctx, orders, inbox),
            {keys[key]: loss for key, loss in sorted(inbox.losses.items()) if key in keys},
            sizes,
            (inbox.received_bytes, sent),
            (*events, *self._unasked_events()),
            {keys[key]: steps for key, steps in sorted(inbox.steps.items()) if key in keys},
        )

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Let each client score its model after this download, on its own rows.

        Those without a score are asked again until ``least_replies`` have one, and in the last
        round until each that replied in this round has one. A client that refuses for good is not
        asked again and not waited for. The deadline of a stage ends all attempts together.
        """
        now = Scoring(frozenset(order.client for order in orders))
        seconds = self.patience.deadline(ctx.round)
        end = math.inf if seconds is None else time.monotonic() + seconds
        for attempt in range(1, self.patience.most_attempts + 1):
            pairs = [p for p in zip(orders, downs, strict=True) if p[0].client in now.waiting]
            recipients, messages = [order for order, _ in pairs], [down for _, down in pairs]
            now.reasons.clear()
            envelopes = self._envelopes("score", ctx, recipients, messages, split, attempt)
            left = None if seconds is None else max(0.0, end - time.monotonic())
            for client, blob in self.wire.exchange(envelopes, left, self.largest + SLACK):
                self._take_score(ctx, split, now, client, blob)
            now.reasons = dict(self._silent(now.waiting)) | now.reasons
            problem = self._unscored(ctx, now)
            if not problem or attempt == self.patience.most_attempts or time.monotonic() >= end:
                break
            text = f"round {ctx.round}: scores are asked for again (attempt {attempt + 1}): "
            self.before_repeating(text + problem)
        return now.scores()

    def finish(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]
    ) -> tuple[set[int], dict[int, str]]:
        """Send each client its last download; return those that have it, and refusals in words."""
        envelopes = self._envelopes("finish", ctx, orders, downs, None)
        received, refused = set[int](), dict[int, str]()
        for client, blob in self._exchange(ctx, envelopes):
            try:
                header, _ = self._opened(blob)
                self._check(client, header)
            except MessageError:
                continue
            if header.stage == ctx.stage and header.purpose == "refusal":
                refused[client] = header.words
            elif header.stage == ctx.stage:
                received.add(client)
        return received, refused

    def close(self) -> None:
        """Close the wire."""
        self.wire.close()

    def _silent(self, clients: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield the reason of each client from which nothing came."""
        present = self.wire.present()
        for client in clients:
            yield client, NO_REPLY if client in present else NOT_CONNECTED

    def _take_score(
        self, ctx: Context, split: Split, now: Scoring, client: int, blob: bytes
    ) -> None:
        """Add a client's score, or the reason why it has none."""
        metrics = {metric.name: metric for metric in metrics_of(self.method, ctx.task)}
        try:
            header, messages = self._opened(blob)
            if header.stage != ctx.stage:
                self._receive(client, blob)  # a late reply to a stage of training
                return
            self._check(client, header)
            if (header.round, header.split) != (ctx.round, split):
                return
            if header.purpose == "refusal":
                now.refuse(client, header.words, final=header.is_final)
            else:
                now.add(client, tables_of(client, messages, metrics, ctx.task.num_classes))
        except MessageError as error:
            now.refuse(client, str(error))

    def _unscored(self, ctx: Context, now: Scoring) -> str:
        """Return which clients lack a score that is waited for; an empty text if enough have one.

        Only clients that do not refuse for good count.
        """
        able = now.clients - now.final.keys()
        last = ctx.round == ctx.task.training.num_rounds
        lacking = (self.replied & able) - now.tables.keys() if last else frozenset()
        least = min(self.patience.least_replies, len(able))
        if not lacking and len(now.tables) >= least:
            return ""
        missing = "; ".join(f"client {c}: {now.reasons[c]}" for c in sorted(now.waiting))
        return f"{len(now.tables)} of {len(now.clients)} clients have a score: {missing}"

    def _ask_until_enough(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]
    ) -> tuple[int, list[str]]:
        """Ask, and ask those without a reply again, until enough replied.

        Return the bytes that were sent, and events for the record.
        """
        events: list[str] = []
        sent, most = 0, self.patience.most_attempts
        least = min(self.patience.least_replies, len(orders))
        for attempt in range(1, most + 1):
            sent += self._ask_once(ctx, orders, downs, attempt)
            count = sum(_key(ctx, order) in self.inbox.answered for order in orders)
            if count >= least:
                return sent, events
            final = sum(_key(ctx, order) in self.inbox.final for order in orders)
            problem = f"{count} of {len(orders)} clients replied, and {least} are needed: "
            problem += self._lacking(ctx, orders)
            stage = f"round {ctx.round}, stage {ctx.stage}"
            if len(orders) - final < least:
                raise FederationError(f"{stage}: {problem}; asking again cannot change that")
            if attempt < most:
                events.append(f"{stage} was asked again (attempt {attempt + 1}): {problem}")
                self.before_repeating(events[-1])
        raise FederationError(f"{stage} was asked {most} times; {problem}")

    def _ask_once(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], attempt: int
    ) -> int:
        """Ask the clients without a reply or a final refusal; return the bytes sent."""
        done = self.inbox.answered | self.inbox.final
        pairs = [
            (order, down)
            for order, down in zip(orders, downs, strict=True)
            if _key(ctx, order) not in done
        ]
        again = {order.asked for order, _ in pairs}
        self.inbox.refused = [entry for entry in self.inbox.refused if entry[0] not in again]
        for order, down in pairs:
            about = self.form_of(ctx, order, down), self._phases(ctx, order)
            self.under_way[_key(ctx, order)] = _Asked(order, *about)
        recipients, messages = [order for order, _ in pairs], [down for _, down in pairs]
        envelopes = self._envelopes("train", ctx, recipients, messages, None, attempt)
        for client, blob in self._exchange(ctx, envelopes):
            self._receive(client, blob)
        return sum(len(part) for _, parts in envelopes for part in parts)

    def _lacking(self, ctx: Context, orders: Sequence[Order]) -> str:
        """Return the clients without a reply, each with the reason."""
        missing = [*self.inbox.refused, *self._absent(ctx, orders, self.inbox)]
        return "; ".join(f"client {who.client}: {reason}" for who, reason in missing)

    def _unasked_events(self) -> list[str]:
        counts = self.unasked + Counter(self.wire.unasked())
        self.unasked.clear()
        return [
            f"{count} unexpected answer{'s' * (count > 1)} of client {client} dropped"
            for client, count in sorted(counts.items())
        ]

    def _envelopes(
        self,
        purpose: Any,
        ctx: Context,
        orders: Sequence[Order],
        downs: Sequence[Tree],
        split: Split | None,
        attempt: int = 1,
    ) -> Envelopes:
        packed: dict[int, Packed] = {}  # a broadcast is one object
        envelopes: Envelopes = []
        for order, down in zip(orders, downs, strict=True):
            if id(down) not in packed:
                packed[id(down)] = Packed.of(down)
            header = Header(
                purpose=purpose,
                run=self.run,
                round=ctx.round,
                stage=ctx.stage,
                client=order.client,
                architecture=order.architecture,
                split=split,
                attempt=attempt,
            )
            envelopes.append((order.client, in_parts(header, {"download": packed[id(down)]})))
        return envelopes

    def _exchange(self, ctx: Context, envelopes: Envelopes) -> Iterator[tuple[int, bytes]]:
        """Yield the replies ordered by client: the order of arrival must not matter."""
        deadline_s = self.patience.deadline(ctx.round)
        return self.wire.exchange(envelopes, deadline_s, self.largest + SLACK)

    def _receive(self, client: int, blob: bytes) -> None:
        """Validate a reply and add it to the inbox."""
        self.inbox.received_bytes += len(blob)
        pending: _Asked | None = None
        try:
            header, messages = self._opened(blob)
            self._check(client, header)
            key = _key_of(header)
            pending = self.under_way.pop(key, None)
            if pending is None:  # it was counted before, or was not requested
                self.unasked[client] += 1
                return
            if header.purpose == "refusal":
                self.inbox.refused.append((pending.order.asked, header.words))
                self.inbox.final |= {key} if header.is_final else set()
                return
            self._count(pending, header, messages)
        except MessageError as error:
            who = pending.order.asked if pending else self._waited_for(client)
            self.inbox.refused.append((who, str(error)))

    def _opened(self, blob: bytes) -> tuple[Header, dict[str, Tree]]:
        """Return the header and the messages of a reply. A reply without bytes was too large."""
        if not blob:
            raise MessageError(f"its reply has more than {self.largest + SLACK} bytes")
        return unseal(blob, self.largest + SLACK)

    def _waited_for(self, client: int) -> Asked:
        """Return the client's newest order, as the likely one for a reply that names none."""
        keys = [key for key in self.under_way if key[2] == client]
        return Asked(client, max(keys)[3] if keys else "")

    def _count(self, pending: _Asked, header: Header, messages: Mapping[str, Tree]) -> None:
        key = number, stage, client, architecture = _key_of(header)
        upload = messages.get("upload")
        if (
            reason := why_refused(upload, pending.form)
            if upload is not None
            else "it holds no upload"
        ):
            raise MessageError(reason)
        if (None if header.steps is None else len(header.steps)) != pending.phases:
            raise MessageError(
                f"its steps are {header.steps}; the stage has {pending.phases or 0} limited phases"
            )
        loss = messages.get("loss")
        if loss is not None and not _is_loss(loss):
            raise MessageError("its training loss is not one number of 32 bits")
        self.inbox.answered.add(key)
        if reduction(type(upload)) == "sum":
            self.inbox.add(Subtotal(architecture, (client,), number, stage, upload))
        else:
            self.inbox.add(Reply(pending.order, number, stage, upload))
        if isinstance(loss, TrainingLoss):
            self.inbox.losses[key] = float(loss.loss)
        if header.steps:
            self.inbox.steps[key] = header.steps

    def _absent(
        self, ctx: Context, orders: Sequence[Order], inbox: Inbox
    ) -> tuple[tuple[Asked, str], ...]:
        """Return the clients that neither answered nor were refused, each with the reason."""
        refused, present = {client for client, _ in inbox.refused}, self.wire.present()
        return tuple(
            (o.asked, NO_REPLY if o.client in present else NOT_CONNECTED)
            for o in sorted(orders, key=lambda order: order.asked)
            if _key(ctx, o) not in inbox.answered and o.asked not in refused
        )

    def _check(self, client: int, header: Header) -> None:
        """Raise MessageError if an envelope has another run or client, or is not an answer."""
        if header.run != self.run:
            raise MessageError(f"it is of run {header.run!r}, not {self.run!r}")
        if header.client != client:
            raise MessageError(f"it names client {header.client}, but came from client {client}")
        if header.purpose not in {"reply", "refusal"}:
            raise MessageError(header.reason or f"a {header.purpose} is not an answer")

    def _phases(self, ctx: Context, order: Order) -> int | None:
        """Return of how many phases a reply tells the steps; None if no time is limited."""
        if ctx.task.training.round_seconds is None:
            return None
        return len(self.method.phases(replace(ctx, architecture=order.architecture)))

    def expect(self, stage: str, architecture: str, form: Form) -> None:
        """State the form of replies in a stage that is no method's."""
        for first in (True, False):
            self.forms[first, stage, architecture] = form
        self.largest = max(self.largest, form.payload_bytes)

    def form_of(self, ctx: Context, order: Order, down: Tree) -> Form:
        """Return the form of a valid reply to an order with a download."""
        key = (ctx.round == 0, ctx.stage, order.architecture)
        if key not in self.forms:
            self.forms[key] = upload_form(self.method, ctx, order.architecture, down)
            self.largest = max(self.largest, self.forms[key].payload_bytes)
        return self.forms[key]


def _is_loss(message: Tree) -> bool:
    """Return whether a message is a loss; NaN is one, of training that diverged."""
    if not isinstance(message, TrainingLoss):
        return False
    return message.loss.shape == () and message.loss.dtype == torch.float32


def _key(ctx: Context, order: Order) -> OrderKey:
    return ctx.round, ctx.stage, order.client, order.architecture


def _key_of(reply: Header) -> OrderKey:
    return reply.round, reply.stage, reply.client, reply.architecture
