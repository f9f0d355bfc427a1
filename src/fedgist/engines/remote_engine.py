"""The remote engine: clients at the other end of a wire.

It seals each download in an envelope, sends it, and passes what comes back through the same gate as
the local engine: the right run, a registered type, the form worked out beforehand, finite numbers.
A reply counts at most once. One that arrives after its stage has closed is handed on with the round
it answers; whether it is of use is for the round loop and the method to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedgist.core.message import Form, payload_bytes, reduction, refuse
from fedgist.core.method import Context, Method, Order, Reply
from fedgist.core.replies import Subtotal
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer, Score, Scores, ScoreTable, Split, TrainingLoss, collect
from fedgist.engines.envelope import Header, Packed, seal, unseal
from fedgist.engines.message_form import upload_form
from fedgist.engines.site import SLACK
from fedgist.engines.wire import Wire
from fedgist.errors import MessageError

MOST_METRICS = 100  # values that a score may have
StageKey = tuple[int, str, int, str]  # round, stage, client, architecture


@dataclass(frozen=True)
class _Asked:
    """An order under way, and what a valid reply to it looks like."""

    order: Order
    form: Form


@dataclass
class _Arrivals:
    """What came over the wire in one exchange, sorted."""

    parts: list[Subtotal | Reply] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    answered: set[StageKey] = field(default_factory=set)
    upload_bytes: int = 0


class RemoteEngine:
    """Clients behind a wire, asked with a deadline."""

    def __init__(
        self, method: Method, wire: Wire, *, run: str, deadline_s: float | None = None
    ) -> None:
        """``run`` is the run's own name, which every envelope carries."""
        self.method, self.wire, self.run, self.deadline_s = method, wire, run, deadline_s
        self.under_way: dict[StageKey, _Asked] = {}
        self.forms: dict[tuple[bool, str, str], Form] = {}
        self.largest = 0  # bytes of the largest upload that was ever asked for
        self.waiting: list[Subtotal | Reply] = []  # late replies that wait for their stage

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Send each order with its download; return what came back in time, or late from before."""
        for order, down in zip(orders, downs, strict=True):
            self.under_way[_key(ctx, order)] = _Asked(order, self._form(ctx, order, down))
        envelopes = self._envelopes("train", ctx, orders, downs, None)
        arrived = self.wire.exchange(envelopes, self.deadline_s)
        found = _Arrivals()
        for client, blob in sorted(arrived, key=lambda pair: pair[0]):
            self._sort(client, blob, found)
        refused = {client for client, _ in found.refused}
        present = self.wire.present()
        absent = [
            (o.client, "no reply in time" if o.client in present else "not connected")
            for o in orders
            if _key(ctx, o) not in found.answered and o.client not in refused
        ]
        sizes = sum(len(blob) for _, blob in arrived), sum(len(e) for e in envelopes.values())
        parts = [*self.waiting, *found.parts]
        self.waiting = [part for part in parts if part.stage != ctx.stage]
        parts = [part for part in parts if part.stage == ctx.stage]
        return Answer(
            tuple(part for part in parts if isinstance(part, Subtotal)),
            tuple(part for part in parts if isinstance(part, Reply)),
            tuple(sorted(found.refused)),
            tuple(sorted(absent)),
            found.losses,
            found.upload_bytes,
            sizes,
        )

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Let each client score what it would hold after this download, on its own rows."""
        envelopes = self._envelopes("score", ctx, orders, downs, split)
        tables: dict[str, dict[int, ScoreTable]] = {}
        for client, blob in self.wire.exchange(envelopes, self.deadline_s):
            try:
                header, messages = unseal(blob, SLACK)
                self._check(client, header, purpose="reply")
                if (header.round, header.stage, header.split) != (ctx.round, ctx.stage, split):
                    continue  # of another exchange
                for name, score in messages.items():
                    table = _table(client, score)
                    tables.setdefault(name.removeprefix("score-"), {})[client] = table
            except MessageError:
                continue  # a score that cannot be read is a score that is missing
        return Scores({model: collect(list(rows.values())) for model, rows in tables.items()})

    def close(self) -> None:
        """Close the wire."""
        self.wire.close()

    def _envelopes(
        self,
        purpose: Any,
        ctx: Context,
        orders: Sequence[Order],
        downs: Sequence[Tree],
        split: Split | None,
    ) -> dict[int, bytes]:
        packed: dict[int, Packed] = {}  # a broadcast is one object
        envelopes = {}
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
            )
            envelopes[order.client] = seal(header, {"download": packed[id(down)]})
        return envelopes

    def _sort(self, client: int, blob: bytes, found: _Arrivals) -> None:
        """Pass one arrival through the gate and put it where it belongs."""
        try:
            header, messages = unseal(blob, self.largest + SLACK)
            self._check(client, header)
            key = (header.round, header.stage, client, header.architecture)
            asked = self.under_way.pop(key, None)
            if asked is None:
                return  # it was counted before, or nobody asked
            if header.purpose == "refusal":
                found.refused.append((client, header.reason))
                return
            self._count(asked, header, messages, found)
            found.answered.add(key)
        except MessageError as error:
            found.refused.append((client, str(error)))

    def _count(
        self, asked: _Asked, header: Header, messages: Mapping[str, Any], found: _Arrivals
    ) -> None:
        upload, client = messages.get("upload"), asked.order.client
        if reason := refuse(upload, asked.form) if upload is not None else "it holds no upload":
            raise MessageError(reason)
        found.upload_bytes += payload_bytes(upload)
        if reduction(type(upload)) == "sum":
            clients = (client,)
            found.parts.append(
                Subtotal(asked.order.architecture, clients, header.round, header.stage, upload)
            )
        else:
            found.parts.append(Reply(asked.order, header.round, header.stage, upload))
        loss = messages.get("loss")
        if isinstance(loss, TrainingLoss) and loss.loss.numel() == 1:
            found.losses[client] = float(loss.loss)

    def _check(self, client: int, header: Header, purpose: str | None = None) -> None:
        """Raise MessageError if an envelope is not from whom it came, or of another run."""
        if header.run != self.run:
            msg = f"it is of run {header.run!r}, not {self.run!r}"
            raise MessageError(msg)
        if header.client != client:
            msg = f"it is signed client {header.client} and came from client {client}"
            raise MessageError(msg)
        if header.purpose not in ({purpose} if purpose else {"reply", "refusal"}):
            msg = header.reason or f"a {header.purpose} is no answer"
            raise MessageError(msg)

    def _form(self, ctx: Context, order: Order, down: Tree) -> Form:
        key = (ctx.round == 0, ctx.stage, order.architecture)
        if key not in self.forms:
            self.forms[key] = upload_form(self.method, ctx, order.architecture, down)
            self.largest = max(self.largest, self.forms[key].payload_bytes)
        return self.forms[key]


def _key(ctx: Context, order: Order) -> StageKey:
    return ctx.round, ctx.stage, order.client, order.architecture


def _table(client: int, score: Any) -> ScoreTable:
    """Return what a client told of its model as a table of one line.

    Raises
    ------
    MessageError
        If it is no score.
    """
    sound = isinstance(score, Score) and score.rows.shape == () and len(score.values) < MOST_METRICS
    if not sound or any(value.shape != () for value in score.values.values()):
        msg = f"client {client} sent no score"
        raise MessageError(msg)
    values = {name: value.view(1).double() for name, value in score.values.items()}
    return ScoreTable((client,), score.rows.view(1), values, score.confusion)
