"""The remote engine, which runs clients at sites over a network.

It seals each download in an envelope, sends the envelope, and validates replies as the local engine
does: the right run, a registered type, the expected form, finite numbers. A reply counts at most
once. A reply that arrives after its stage is passed on with its round. The round loop and the
method decide whether it is used.

If too few clients answered a stage, the others are asked again, with the same download. The replies
that arrived are kept, so no client trains or releases twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core.counts import MOST_ROWS
from fedgist.core.message import Form, is_finite, reduction, refuse
from fedgist.core.method import Context, Method, Order, Reply
from fedgist.core.metrics import Metric
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
from fedgist.engines.envelope import Header, Packed, in_parts, unseal
from fedgist.engines.inbox import Inbox, OrderKey
from fedgist.engines.message_form import upload_form
from fedgist.engines.site import SLACK
from fedgist.engines.wire import Parts, Wire
from fedgist.errors import FederationError, MessageError, printable

FORGOTTEN_AFTER = 50  # rounds after which a late reply is dropped
FIRST_ROUNDS = (0, 1)
Envelopes = list[tuple[int, Parts]]


@dataclass(frozen=True)
class Patience:
    """How long a server waits for replies, and how many it needs.

    A stage with fewer than ``least_replies`` replies at its deadline is asked again, until it was
    asked ``most_attempts`` times. ``first_deadline_s`` holds for the first two rounds, in which
    sites prepare. None means no deadline.
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
    """An open order, and the form of a valid reply."""

    order: Order
    form: Form


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
        )

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Let each client score its model after this download, on its own rows."""
        envelopes = self._envelopes("score", ctx, orders, downs, split)
        tables: dict[str, dict[int, ScoreTable]] = {}
        for client, blob in self._exchange(ctx, envelopes):
            try:
                header, messages = unseal(blob, self.largest + SLACK)
                if header.stage != ctx.stage:
                    self._receive(client, blob)  # a late reply to a stage of training
                    continue
                self._check(client, header, purpose="reply")
                if (header.round, header.split) == (ctx.round, split):
                    for model, table in self._tables(ctx, client, messages).items():
                        tables.setdefault(model, {})[client] = table
            except MessageError:
                continue  # an unreadable score counts as missing
        return Scores({model: collect(list(rows.values())) for model, rows in tables.items()})

    def finish(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> set[int]:
        """Send each client its last download; return the clients that have it."""
        envelopes = self._envelopes("finish", ctx, orders, downs, None)
        received = set()
        for client, blob in self._exchange(ctx, envelopes):
            try:
                header, _ = self._opened(blob)
                self._check(client, header, purpose="reply")
            except MessageError:
                continue
            if header.stage == ctx.stage:
                received.add(client)
        return received

    def close(self) -> None:
        """Close the wire."""
        self.wire.close()

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
            problem = f"{count} of {len(orders)} clients replied, and {least} are needed: "
            problem += self._lacking(ctx, orders)
            stage = f"round {ctx.round}, stage {ctx.stage}"
            if attempt < most:
                events.append(f"{stage} was asked again (attempt {attempt + 1}): {problem}")
                self.before_repeating(events[-1])
        raise FederationError(f"{stage} was asked {most} times; {problem}")

    def _ask_once(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], attempt: int
    ) -> int:
        """Ask the clients that have not replied to this stage; return the bytes sent."""
        pairs = [
            (order, down)
            for order, down in zip(orders, downs, strict=True)
            if _key(ctx, order) not in self.inbox.answered
        ]
        again = {order.asked for order, _ in pairs}
        self.inbox.refused = [entry for entry in self.inbox.refused if entry[0] not in again]
        for order, down in pairs:
            self.under_way[_key(ctx, order)] = _Asked(order, self._form(ctx, order, down))
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
            key = (header.round, header.stage, client, header.architecture)
            pending = self.under_way.pop(key, None)
            if pending is None:  # it was counted before, or was not requested
                self.unasked[client] += 1
                return
            if header.purpose == "refusal":
                self.inbox.refused.append((pending.order.asked, printable(header.reason)))
                return
            self._count(pending, key, messages)
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

    def _count(self, pending: _Asked, key: OrderKey, messages: Mapping[str, Tree]) -> None:
        number, stage, client, architecture = key
        upload = messages.get("upload")
        if reason := refuse(upload, pending.form) if upload is not None else "it holds no upload":
            raise MessageError(reason)
        self.inbox.answered.add(key)
        if reduction(type(upload)) == "sum":
            self.inbox.add(Subtotal(architecture, (client,), number, stage, upload))
        else:
            self.inbox.add(Reply(pending.order, number, stage, upload))
        loss = messages.get("loss")
        if isinstance(loss, TrainingLoss) and loss.loss.shape == () and is_finite(loss.loss):
            self.inbox.losses[key] = float(loss.loss)

    def _absent(
        self, ctx: Context, orders: Sequence[Order], inbox: Inbox
    ) -> tuple[tuple[Asked, str], ...]:
        """Return the clients that neither answered nor were refused, each with the reason."""
        refused, present = {client for client, _ in inbox.refused}, self.wire.present()
        return tuple(
            (o.asked, "no reply in time" if o.client in present else "not connected")
            for o in sorted(orders, key=lambda order: order.asked)
            if _key(ctx, o) not in inbox.answered and o.asked not in refused
        )

    def _tables(
        self, ctx: Context, client: int, messages: Mapping[str, Tree]
    ) -> dict[str, ScoreTable]:
        """Return a client's scores, a table of one row for each of its models, by name."""
        classes = ctx.task.num_classes
        metrics = {metric.name: metric for metric in metrics_of(self.method, ctx.task)}
        tables = {}
        for name, score in messages.items():
            model = name.removeprefix("score-")
            if model not in {"", FINETUNED, TRAINED} or not _sound(score, metrics, classes):
                raise MessageError(f"client {client} sent something that is not a score")
            received = score.values
            values = {
                metric: received[metric].view(1).double()
                for metric in metrics
                if metric in received
            }
            rows = score.rows.view(1)
            tables[model] = ScoreTable((client,), rows, values, score.confusion)
        return tables

    def _check(self, client: int, header: Header, purpose: str | None = None) -> None:
        """Raise MessageError if an envelope has another run or client, or is not an answer."""
        if header.run != self.run:
            raise MessageError(f"it is of run {header.run!r}, not {self.run!r}")
        if header.client != client:
            raise MessageError(f"it names client {header.client}, but came from client {client}")
        if header.purpose not in ({purpose} if purpose else {"reply", "refusal"}):
            raise MessageError(header.reason or f"a {header.purpose} is not an answer")

    def _form(self, ctx: Context, order: Order, down: Tree) -> Form:
        key = (ctx.round == 0, ctx.stage, order.architecture)
        if key not in self.forms:
            self.forms[key] = upload_form(self.method, ctx, order.architecture, down)
            self.largest = max(self.largest, self.forms[key].payload_bytes)
        return self.forms[key]


def _key(ctx: Context, order: Order) -> OrderKey:
    return ctx.round, ctx.stage, order.client, order.architecture


def _sound(score: Any, metrics: Mapping[str, Metric], classes: int) -> bool:
    """Return whether a message is a score: possible values of known metrics, and valid counts."""
    if not isinstance(score, Score) or not set(score.values) <= set(metrics):
        return False
    for name, v in score.values.items():
        if not (v.shape == () and v.is_floating_point() and is_finite(v)):
            return False
        if not metrics[name].allows(float(v)):
            return False
    shapes: list[tuple[Tensor, tuple[int, ...]]] = [(score.rows, ())]
    shapes += [] if score.confusion is None else [(score.confusion, (classes, classes))]
    return all(
        counts.dtype == torch.int64
        and counts.shape == shape
        and bool(((counts >= 0) & (counts <= MOST_ROWS)).all())
        for counts, shape in shapes
    )
