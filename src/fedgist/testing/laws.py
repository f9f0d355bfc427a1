"""The laws: fedgist's invariants, which every method must keep.

Each is tried in a tiny world of five uneven clients with two architectures, in every kind of round
and every stage. :func:`check_laws` tries them all on a method object.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import safetensors.torch
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.message import pack, payload_bytes, reduction, shapes, unpack
from fedgist.core.method import Context, Method, Order
from fedgist.core.replies import gather
from fedgist.core.tree import Tree, build, named
from fedgist.data.client_rows import Rows
from fedgist.engines.engine import Answer, Engine
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.method_check import check_method
from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import Features
from fedgist.engines.server_function_check import sums_of
from fedgist.errors import (
    FedgistError,
    InputError,
    MethodError,
    TooFewRepliesError,
    first_line,
    one_of,
)
from fedgist.runs.files.columns import over_clients
from fedgist.testing.method_under_test import MethodUnderTest
from fedgist.testing.server_laws import SERVER_LAWS
from fedgist.testing.small_nets import NORMED
from fedgist.testing.small_worlds import (
    ALONE,
    federation,
    local_engine,
    nets,
    sections,
    state_of,
    trace,
    without_times,
)
from fedgist.testing.stages import stages
from fedgist.testing.wire_laws import GATE_LAWS, WIRE_LAWS
from fedgist.world.world import World

Objectives = Literal["classes", "regression", "multilabel"]
Arrays = Mapping[str, Tensor]
#: Largest difference of results whose numbers are added in another order, in roundings of the size
#: of the sum. Three rounds of training showed at most 7, on three instruction sets.
ROUNDINGS = 64
EPSILON = torch.finfo(torch.float32).eps


class LawError(FedgistError, AssertionError):
    """A method breaks a law."""


@dataclass(frozen=True)
class Law:
    """A law: its number and statement in one text, and a function that tries it."""

    name: str
    try_on: Callable[[MethodUnderTest], None]


def check_laws(
    method: Method,
    only: Sequence[str] = (),
    objective: Objectives = "classes",
    *,
    model: Mapping[str, object] | None = None,
    architectures: Literal[1, 2] = 2,
    frozen: bool = False,
) -> list[str]:
    """Try the laws on a method; return the names of those that were tried.

    Parameters
    ----------
    method
        A method object, with the hyper-parameters to be tried.
    only
        Numbers of laws (``"1"``, ``"12"``): by default all.
    objective
        The task of the laws' world: ``classes``, ``regression`` or ``multilabel``.
    model
        The clients' model, as a recipe's ``[model]``: ``{"name": "mlp", "hidden": [7]}``, or
        ``{"name": "mypackage.models:factory"}``. The default are small multilayer perceptrons.
    architectures
        Number of architectures, 1 or 2, for a method that needs clients with one model.
    frozen
        Whether the bodies are frozen, for a method that needs it.

    Raises
    ------
    LawError
        If the method breaks one; the message says which, and how.
    """
    if not isinstance(method, Method):
        raise MethodError(f"check_laws takes a method object, not {method!r}")
    numbers = [law.name.split()[0] for law in LAWS]
    for number in only:
        one_of(number, numbers, "law")
    one_of(objective, ("classes", "regression", "multilabel"), "objective of the laws")
    one_of(str(architectures), ("1", "2"), "number of architectures of the laws")
    about = sections(method, model=model, architectures=architectures, frozen=frozen)
    subject = MethodUnderTest(method, {"objective": {"name": objective}, **about})
    try_law(Law("0 every function keeps to the vocabulary", keeps_to_the_vocabulary), subject)
    chosen = [law for law, number in zip(LAWS, numbers, strict=True) if not only or number in only]
    for law in chosen:
        try_law(law, subject)
    return [law.name for law in chosen]


def try_law(law: Law, subject: MethodUnderTest) -> None:
    """Try one law.

    Raises
    ------
    LawError
        If the method breaks it or fails; the message names the method, the law and, of a failure,
        the method's function.
    """
    name = type(subject.method).__name__
    try:
        law.try_on(subject)
    except AssertionError as error:
        place = _function_of(error, subject.method)
        raise LawError(f"{name}{place} breaks law {law.name}: {error}") from error
    except Exception as error:
        place = _function_of(error, subject.method)
        why = first_line(error) if isinstance(error, FedgistError) else _described(error)
        raise LawError(f"{name}{place} fails under law {law.name}: {why}") from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _function_of(error: BaseException | None, method: Method) -> str:
    """Return ``.function`` for the method's function in which an error was raised, if any."""
    name = ""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_locals.get("self") is method:
                name = f".{frame.f_code.co_name}"
        error = error.__cause__
    return name


def keeps_to_the_vocabulary(subject: MethodUnderTest) -> None:
    """Call each function of the method once and check what it returns."""
    small_world = subject.world()
    server = federation(small_world).server
    check_method(subject.method, small_world.server.task, server, _key(small_world))


def _key(small_world: World) -> Tensor:
    """Return a key, (), on the device of a world."""
    return random.key(0).to(small_world.server.setup.device)


def close(a: Arrays, b: Arrays, roundings: float = ROUNDINGS) -> bool:
    """Return whether two states are equal up to so many roundings of what was added up."""
    return a.keys() == b.keys() and all(_off(a[k], b[k]) <= roundings for k in a)


def _off(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two arrays, in roundings of their norm.

    Moments, residuals and losses are small differences of numbers of size 1, as all numbers in the
    world of the laws are. So what was added up has at least that size.
    """
    if a.shape != b.shape or not bool((a.isfinite() == b.isfinite()).all()):
        return math.inf
    first, second = (array.double().nan_to_num() for array in (a, b))
    size = max(1.0, *(float(array.norm()) for array in (first, second)))
    return float((first - second).abs().max()) / (EPSILON * size) if first.numel() else 0.0


def equal(a: Arrays, b: Arrays) -> bool:
    """Return whether two states are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def stacking_changes_nothing(subject: MethodUnderTest) -> None:
    """Compare unstacked clients with stacked clients."""
    alone = subject.alone
    metric = subject.world().server.task.objective.metrics[0]
    column = over_clients("client", metric.name)
    in_fives = trace(subject.world(), Plan(5))
    for size, together in ((2, subject.in_pairs.until(3)), (5, in_fives)):
        same = close(alone.state, together.state, subject.enlarges * ROUNDINGS)
        assert same, f"stacks of {size} give another state"
        expected, seen = ([line[column] for line in t.rounds[-3:]] for t in (alone, together))
        scores, others = ({"": torch.tensor(values)} for values in (expected, seen))
        alike = close(scores, others, subject.enlarges * ROUNDINGS)
        assert alike, f"stacks of {size} give {metric.name} {seen}, not {expected}"


class _Reversed:
    """A local engine that gets its orders in reverse."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.score, self.close = engine.score, engine.close
        self.client, self.state, self.restore = engine.client, engine.state, engine.restore

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Ask the clients in reverse order."""
        return self.engine.ask(ctx, list(orders)[::-1], list(downs)[::-1])


def reversed_engine(small_world: World, plan: Plan) -> Engine:
    """Return a local engine that asks the clients in reverse order."""
    return _Reversed(local_engine(small_world, plan))


def order_does_not_matter(subject: MethodUnderTest) -> None:
    """Compare runs with opposite orders of the clients."""
    straight = subject.in_pairs.until(2)
    other = trace(subject.world(), rounds=2, make_engine=reversed_engine)
    assert straight.rounds == other.rounds, "another order gives other lines in the record"
    assert straight.clients == other.clients, "another order gives other scores of clients"
    assert equal(straight.state, other.state), "another order gives another state"


class _Padded(Rows):
    """Rows whose tables are wider than necessary."""

    def table(self, clients: Sequence[int]) -> Tensor:
        tight = super().table(clients)
        return torch.cat([tight, tight.new_full((len(tight), 9), -1)], dim=1)


def padding_changes_nothing(subject: MethodUnderTest) -> None:
    """Add absent rows to every table, and put other numbers into absent rows."""
    tight = subject.world()
    server = federation(tight).server
    try:
        check_method(subject.method, tight.server.task, server, _key(tight))
    except MethodError as error:
        raise AssertionError(str(error)) from error
    rows = tight.population.train
    wider = replace(tight.population, train=_Padded(rows.rows, rows.offsets))
    padded = replace(tight, population=wider)
    expected = subject.in_pairs.until(3).state
    assert close(expected, trace(padded).state, 16 * subject.enlarges), (
        "absent rows weigh something"
    )


def any_subset_may_answer(subject: MethodUnderTest) -> None:
    """Let only some of the clients answer, in every stage."""
    for stage in subject.walk:
        for kept in ([0], [1, 3], list(range(len(stage.orders)))):
            places = [i for i in kept if i < len(stage.orders)] or [0]
            server = stage.update(stage.ask_some(places))
            finite = all(bool(torch.isfinite(leaf).all()) for leaf in named(server).values())
            assert finite, f"the server's state is not finite if orders {places} alone are answered"
            assert shapes(server) == shapes(stage.server), "the server's state changes shape"


def messages_cost_their_fields(subject: MethodUnderTest) -> None:
    """Pack and unpack every message, and count its bytes."""
    for stage in subject.walk:
        sent = [message for _, message in stage.uploads]
        booked = sum(stage.answer.upload_bytes.values())
        expected = sum(payload_bytes(m) for m in sent)
        assert booked == expected, f"{booked} bytes are recorded, but {expected} are sent"
        for message in [*stage.downs, *sent]:
            back = unpack(type(message), pack(message))
            assert equal(named(back), named(message)), f"{type(message).__name__} does not survive"
            travels = safetensors.torch.load(pack(message)).values()
            sent_bytes = sum(a.numel() * a.element_size() for a in travels)
            assert payload_bytes(message) == sent_bytes, "its bytes are not those that travel"


def sums_are_totals(subject: MethodUnderTest) -> None:
    """Try to look at single messages, and at a total over too few clients."""
    for stage in subject.walk:
        answer = stage.answer
        replies = gather(answer.subtotals, answer.each)
        few = gather(answer.subtotals, answer.each, min_replies=len(replies) + 1)
        assert not len(few), "fewer replies than privacy.min_replies are shown"
        try:
            few.total()
        except TooFewRepliesError:
            pass
        else:
            raise AssertionError("a total over too few replies was given")
        if reduction(type(stage.uploads[0][1])) != "sum":
            continue
        try:
            iter(replies)
        except TypeError:
            continue
        raise AssertionError("messages that sum can be looked at one by one")


def seeds_decide(subject: MethodUnderTest) -> None:
    """Run twice with one seed, and once with another."""
    first = subject.in_pairs.until(3)
    again, other = trace(subject.world()), trace(subject.world(seed=1), rounds=1)
    assert equal(first.state, again.state), "the same seed gives another state"
    assert first.rounds == again.rounds, "the same seed gives another record"
    assert not close(first.until(1).state, other.state), "another seed gives the same state"


def inputs_stay(subject: MethodUnderTest) -> None:
    """Check that no stage changes its inputs."""
    for stage in stages(federation(subject.world())):
        nets = stage.fed.task.starts.values()
        given = [*map(named, (*stage.downs, stage.server)), *(net.state() for net in nets)]
        before = _copied(given)
        answer = stage.answer
        assert _same(before, given), "a function of the client changed its net or its message"
        replies = gather(answer.subtotals, answer.each)
        sent = list(map(named, sums_of(replies)))
        sent_before = _copied(sent)
        stage.fed.method.server_update(stage.server, replies, stage.ctx)
        assert _same(before, given), "server_update changed its state or a net"
        assert _same(sent_before, sent), "server_update changed a reply"


def _copied(values: Sequence[Arrays]) -> list[Arrays]:
    return [{name: array.clone() for name, array in value.items()} for value in values]


def _same(first: Sequence[Arrays], second: Sequence[Arrays]) -> bool:
    return all(equal(a, b) for a, b in zip(first, second, strict=True))


def resumed_equals_uninterrupted(subject: MethodUnderTest) -> None:
    """Compare a run that resumes from a checkpoint with an uninterrupted run."""
    whole = subject.in_pairs
    second = federation(subject.world())
    second.restore(whole.saved[1].copied())
    lines = [without_times(second.advance()[0]) for _ in range(2)]
    assert lines == whole.rounds[-2:], "the resumed run writes other lines"
    assert equal(whole.state, state_of(second)), "the resumed run ends in another state"
    server = second.server
    back = build(type(server), named(server))
    assert equal(named(back), named(server)), "the server's state does not read back as itself"


def normed_nets_keep_the_laws(subject: MethodUnderTest) -> None:
    """Try laws 1, 3, 8 and 9 on nets with batch norm and dropout."""
    own = subject.sections.get("architectures"), subject.sections.get("model")
    if any(own):
        return  # the method is tried on its own nets
    normed = _on_normed_nets(subject, alone="architectures" in subject.sections)
    for law in LAWS:
        if law.name.split()[0] in {"1", "3", "8", "9"}:
            law.try_on(normed)


def features_stand_for_rows(subject: MethodUnderTest) -> None:
    """Over frozen bodies, compare clients that read features with clients that read rows."""
    alone = "architectures" in subject.sections
    about = sections(subject.method, model=None, architectures=1 if alone else 2, frozen=True)
    frozen = {**subject.sections, **about, "given": {"public": None}}
    try:
        small = MethodUnderTest(subject.method, frozen).world()
        rows = trace(_with_features(small, "raw"), ALONE)
    except InputError:
        return  # it needs public rows, or bodies that learn
    kept, anew = (trace(_with_features(small, how), ALONE) for how in ("kept", "anew"))
    assert kept.rounds == anew.rounds, "features that are kept give other lines in the record"
    assert equal(kept.state, anew.state), "features that are kept give another state"
    assert close(rows.state, kept.state, subject.enlarges * ROUNDINGS), (
        "features of a frozen body in place of rows give another state: a method that reads or "
        "changes batch.x itself says so with alters_inputs = True"
    )


def _with_features(small: World, features: Features) -> World:
    return replace(small, hosting=replace(small.hosting, features=features))


def _on_normed_nets(subject: MethodUnderTest, *, alone: bool) -> MethodUnderTest:
    """Return the method on two normed nets, or on one if it refuses nets that differ."""
    about = nets(subject.method, NORMED, alone=alone)
    # batch norm divides by the deviation of a few rows, which may be small
    normed = MethodUnderTest(subject.method, {**subject.sections, **about}, enlarges=32)
    try:
        normed.world()
    except InputError:
        if alone:
            raise
        return _on_normed_nets(subject, alone=True)
    return normed


LAWS = (
    Law("1 stacked and one by one agree", stacking_changes_nothing),
    Law("2 the order of clients does not matter", order_does_not_matter),
    Law("3 padding changes nothing", padding_changes_nothing),
    Law("4 any non-empty subset of replies is accepted", any_subset_may_answer),
    Law("5 messages survive the wire and cost their fields", messages_cost_their_fields),
    Law("6 sums are only ever seen as totals", sums_are_totals),
    Law("7 the seed decides, and nothing else", seeds_decide),
    Law("8 inputs are not mutated", inputs_stay),
    Law("9 resumed equals uninterrupted", resumed_equals_uninterrupted),
    *(Law(name, try_on) for name, try_on in {**GATE_LAWS, **WIRE_LAWS}.items()),
    Law("13 batch norm and dropout change no law", normed_nets_keep_the_laws),
    *(Law(name, try_on) for name, try_on in SERVER_LAWS.items()),
    Law("16 features of frozen bodies stand for rows", features_stand_for_rows),
)
