"""Laws 10 to 12: what may cross a wire, and that a wire changes no result.

No raw example leaves a client (10), and no invalid upload reaches the server (11). Sites with only
their own rows, over a wire, give the local engine's results (12). The same holds with clients that
are absent, late or asked twice: a reply counts at most once, a late reply counts only if the method
accepts it, and no reply is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.counts import CountRange, count_fields
from fedgist.core.message import why_refused
from fedgist.core.method import Context, Order
from fedgist.core.tree import Tree, build, map_leaves, named
from fedgist.core.wire_form import Bits, form_of
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import held
from fedgist.engines.engine import Answer, Engine
from fedgist.engines.plans.plan import Plan
from fedgist.runs.files.record import Line
from fedgist.runs.round import start_server
from fedgist.testing.method_under_test import MethodUnderTest
from fedgist.testing.small_worlds import (
    ALONE,
    FEATURES,
    Trace,
    blobs,
    federation,
    local_engine,
    loopback,
    state_of,
    trace,
    without_times,
)
from fedgist.testing.stages import stages
from fedgist.wire.delayed_engine import DelayedEngine
from fedgist.wire.envelope import unseal
from fedgist.wire.loopback_engine import LoopbackEngine, outlined
from fedgist.wire.wire import LoopbackWire, Parts
from fedgist.world.world import World

TOLERANCE = 1e-5
ANY_SIZE = 1 << 40
# the unreachable clients, and the clients with late replies, by round; client 0 is asked twice
ABSENT = {1: {1}, 2: {4}}
LATE = {1: {2}, 2: {3}}
TWICE = 0
BROKEN = (12, 19)  # rows of client 2


class UnreliableWire:
    """A wire that loses, delays and repeats envelopes as the tables above define."""

    def __init__(self) -> None:
        self.inner = LoopbackWire({})
        self.held: list[tuple[int, tuple[int, bytes]]] = []  # by the round they answer

    def present(self) -> frozenset[int]:
        """Return all clients."""
        return self.inner.present()

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        """Exchange envelopes, with faults except during evaluation."""
        header, _ = unseal(b"".join(envelopes[0][1]), ANY_SIZE)
        if header.purpose == "score":
            return self.inner.exchange(envelopes, deadline_s, largest)
        reached = [pair for pair in envelopes if pair[0] not in ABSENT.get(header.round, ())]
        arrivals = list(self.inner.exchange(reached, deadline_s, largest))
        again = [pair for pair in reached if pair[0] == TWICE]
        arrivals += self.inner.exchange(again, deadline_s, largest)
        delivered = [pair for number, pair in self.held if number < header.round]
        self.held = [(number, pair) for number, pair in self.held if number >= header.round]
        late = LATE.get(header.round, ())
        self.held += [(header.round, pair) for pair in arrivals if pair[0] in late]
        return iter(sorted(delivered + [pair for pair in arrivals if pair[0] not in late]))

    def unasked(self) -> Mapping[int, int]:
        """Return nothing: only engines drop replies here."""
        return {}

    def close(self) -> None:
        """Close the wire."""
        self.inner.close()


def unreliable_loopback(small_world: World, plan: Plan) -> Engine:
    """Return a loop-back engine over an unreliable wire."""
    wire = UnreliableWire()
    engine = loopback(small_world, plan, wire)
    wire.inner = LoopbackWire({client: site.handle for client, site in engine.sites.items()})
    return engine


class _Absent:
    """A local engine with the same absent clients as the unreliable wire."""

    def __init__(self, small_world: World, plan: Plan) -> None:
        engine = local_engine(small_world, plan)
        self.engine = engine
        self.score, self.close = engine.score, engine.close
        self.client, self.state, self.restore = engine.client, engine.state, engine.restore

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Run the clients that are not absent."""
        gone = ABSENT.get(ctx.round, set())
        reached = [i for i, order in enumerate(orders) if order.client not in gone]
        absent = tuple((o.asked, "") for o in orders if o.client in gone)
        if not reached:
            return Answer(absent=absent)
        answer = self.engine.ask(ctx, [orders[i] for i in reached], [downs[i] for i in reached])
        return Answer(**{**vars(answer), "absent": absent})


def unreliable_local(small_world: World, plan: Plan) -> Engine:
    """Return a local engine with the same absent and late clients as the unreliable wire."""

    def is_late(ctx: Context, orders: Sequence[Order]) -> list[bool]:
        return [order.client in LATE.get(ctx.round, ()) for order in orders]

    return DelayedEngine(_Absent(small_world, plan), is_late)


def clients_apart(small_world: World, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a local engine's state with the loop-back's names: by client."""
    apart = {name: array for name, array in state.items() if name.startswith("server/")}
    for architecture in small_world.server.task.architectures:
        members = [c.id for c in small_world.population.clients if architecture in c.architectures]
        start = f"clients/{architecture}/"
        for name, array in state.items():
            if name.startswith(start):
                rest = f"{architecture}/{name.removeprefix(start)}"
                lines = zip(members, array, strict=True)
                apart |= {f"clients/{c}/{rest}": line.unsqueeze(0) for c, line in lines}
    return apart


def compare_engines(small_world: World, local: Trace, remote: Trace) -> None:
    """Compare the results of two engines."""
    expected, seen = clients_apart(small_world, local.state), remote.state
    names = {name for name in seen if not name.startswith("clients/delayed")}
    assert expected.keys() == names, "the states have different names"
    for name, array in expected.items():
        far = float((array.double() - seen[name].double()).abs().max()) if array.numel() else 0.0
        assert far <= TOLERANCE, f"{name} differs by {far:.2g}"
    for local_line, remote_line in zip(local.rounds, remote.rounds, strict=True):
        a, b = _lines(local_line), _lines(remote_line)
        differ = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        assert not differ, f"round {local_line['round']}: {differ[0]} differs"


def _lines(line: Line) -> dict[str, Any]:
    """Return the part of a round's line that must be equal: who answered, bytes, accuracy."""
    kept = {k: v for k, v in line.items() if k.startswith(("clients/", "comm/")) or "accuracy" in k}
    kept |= {name: [e["client"] for e in line.get(name, ())] for name in ("absent", "late")}
    return {k: round(v, 9) if isinstance(v, float) else v for k, v in kept.items()}


def over_a_wire(subject: MethodUnderTest) -> None:
    """Compare the loop-back with the local engine, and with only outlines at the server."""
    if subject.method.merges_clients:
        return
    local, world = subject.alone, subject.world()
    compare_engines(world, local, subject.over_a_wire)
    less = replace(world, server=replace(world.server, task=outlined(world.server.task)))
    if shares_heads_alone(world, less):  # the server need not know the bodies
        compare_engines(
            world, local, trace(less, ALONE, make_engine=lambda _, plan: loopback(world, plan))
        )


def shares_heads_alone(world: World, less: World) -> bool:
    """Return whether a server that has only outlines begins with the same state."""
    if world.server.method.keeps not in {"all", "body"}:
        return False
    try:
        return _equal(named(start_server(world.server)), named(start_server(less.server)))
    except (ValueError, KeyError):
        return False  # it asks for weights that an outline does not have


def with_faults(subject: MethodUnderTest) -> None:
    """Compare both engines with clients that are absent, late and asked twice."""
    if subject.method.merges_clients:
        return
    local = trace(subject.world(), ALONE, make_engine=unreliable_local)
    remote = trace(subject.world(), ALONE, make_engine=unreliable_loopback)
    compare_engines(subject.world(), local, remote)


def asked_again(subject: MethodUnderTest) -> None:
    """Repeat the request of every stage: with the same download, and with another."""
    if subject.method.merges_clients:
        return
    fresh = subject.world()
    for stage in stages(federation(fresh, ALONE, loopback), rounds=(0, 1)):
        engine = stage.fed.engine
        assert isinstance(engine, LoopbackEngine)  # for the type checker
        first = stage.answer
        after = {k: v.clone() for k, v in engine.state().items()}
        again = stage.ask()
        assert _same(first, again), "a site gives another reply when asked again"
        assert _equal(after, engine.state()), "a site trains again when asked again"
        changed = [_other(down) for down in stage.downs]
        engine.ask(stage.ctx, stage.orders, changed)
        other = {k: v.clone() for k, v in engine.state().items()}
        untouched = loopback(fresh)
        untouched.restore(stage.own)
        untouched.ask(stage.ctx, stage.orders, changed)
        assert _equal(other, untouched.state()), "another download starts from another state"
        stage.ask()  # the next stage goes on from the first answer


def _other(down: Tree) -> Tree:
    """Return another valid message: other numbers, but for those that travel as single bits."""
    kind = type(down)

    def changes(name: str, array: Tensor) -> bool:
        return array.is_floating_point() and not isinstance(form_of(kind, name), Bits)

    arrays = named(down).items()
    return build(kind, {name: 1.5 * a if changes(name, a) else a for name, a in arrays})


def _same(first: Answer, again: Answer) -> bool:
    def arrays(answer: Answer) -> list[Mapping[str, Tensor]]:
        messages = [p.message for p in answer.subtotals] + [r.message for r in answer.each]
        return [named(message) for message in messages]

    pairs = zip(arrays(first), arrays(again), strict=True)
    return all(_equal(a, b) for a, b in pairs)


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def resumes(subject: MethodUnderTest) -> None:
    """Compare a run over the loop-back that resumes from a checkpoint, bit for bit."""
    if subject.method.merges_clients:
        return
    whole = subject.over_a_wire
    second = federation(subject.world(), ALONE, loopback)
    second.restore(whole.saved[0].copied())
    lines = [without_times(second.advance()[0]) for _ in range(2)]
    assert lines == whole.rounds[-2:], "the resumed run writes other lines"
    assert _equal(whole.state, state_of(second)), "the resumed run ends in another state"


WIRE_LAWS: Mapping[str, Callable[[MethodUnderTest], None]] = {
    "12 over a wire the result is the local engine's": over_a_wire,
    "12b absent, late and repeated: nothing counts twice, nothing is lost": with_faults,
    "12c asked again, a site gives the same reply or goes back": asked_again,
    "12d the loop-back resumes bit for bit": resumes,
}


def canaries() -> Dataset:
    """Return a data set in which each example holds a unique number."""
    data = blobs()
    x = data.x.clone()
    x[:, 0] = 1e4 + torch.arange(len(x)) * 7.25
    return replace(data, x=x, mean=(0.0,) * FEATURES, std=(1.0,) * FEATURES)


def no_example_leaves(subject: MethodUnderTest) -> None:
    """Look for raw numbers of examples in every upload."""
    data = canaries()
    for stage in stages(federation(subject.world(given={"data": data}))):
        for order, message in stage.uploads:
            for name, array in named(message).items():
                leaked = torch.isin(data.x[:, 0], array.flatten().to(data.x.dtype)).any()
                assert not leaked, f"{name} of client {order.client} holds an example's number"


def spoiled(message: Tree, how: str) -> Any:
    """Return a message with all its arrays corrupted in one way."""

    def change(leaf: Tensor) -> Tensor:
        if how == "wrong shape":
            return leaf.unsqueeze(0)
        if how == "oversized":
            return torch.cat([leaf.flatten()] * 1000)
        if how == "wrong type":
            return leaf.to(torch.float32 if leaf.dtype == torch.float64 else torch.float64)
        return torch.full_like(leaf, float(how)) if leaf.is_floating_point() else leaf

    return map_leaves(change, message)


def bad_uploads_are_refused(subject: MethodUnderTest) -> None:
    """Validate corrupted uploads of every stage, which must be refused."""
    for stage in subject.walk:
        (_, message), form = stage.uploads[0], stage.form(0)
        assert why_refused(message, form) is None, (
            f"a good upload is refused: {why_refused(message, form)}"
        )
        arrays = named(message)
        numbers = any(a.is_floating_point() for a in arrays.values())
        hows = ["nan", "inf", "-inf", "wrong shape", "oversized", "wrong type"]
        hows += ["-1"] if form.counts == CountRange() and count_fields(form.kind) else []
        for how in hows:
            if not arrays or (how in {"nan", "inf", "-inf"} and not numbers):
                continue
            reason = why_refused(spoiled(message, how), form)
            names_array = reason is not None and any(name in reason for name in arrays)
            assert names_array, f"an upload that is {how} was not refused by name: {reason}"


def broken_data_stop_nobody(subject: MethodUnderTest) -> None:
    """Run three rounds with one client whose rows are not finite."""
    healthy = subject.world()
    x = held(healthy.population.examples.x, "rows").clone()
    x[slice(*BROKEN)] = float("nan")
    examples = replace(healthy.population.examples, x=x)
    sick = replace(healthy, population=replace(healthy.population, examples=examples))
    fed = federation(sick)
    for number in range(3):
        line, _ = fed.do_round(number)
        refused = {entry["client"] for entry in line.get("refused", ())}
        assert refused <= {2}, f"clients {sorted(refused - {2})} were refused as well"
    finite = all(bool(torch.isfinite(leaf).all()) for leaf in named(fed.server).values())
    assert finite or subject.method.merges_clients, "the server's state is no longer finite"


GATE_LAWS: Mapping[str, Callable[[MethodUnderTest], None]] = {
    "10 no raw example appears in a message": no_example_leaves,
    "11 bad uploads are refused by name": bad_uploads_are_refused,
    "11b broken data of one client stop nobody": broken_data_stop_nobody,
}
