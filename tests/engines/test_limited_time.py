"""Sites whose time is limited: whole steps, their number in reply and record, and again."""

from __future__ import annotations

import itertools
import json
import random as stdlib_random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgist
from changed_wires import only, resealed, with_wire
from counted_steps import CountsSteps, batches
from fedgist.engines.local_engine import LocalEngine
from fedgist.errors import RecipeError
from fedgist.federation.server.serving import checked_context
from fedgist.methods.fedrep import FedRep
from fedgist.runs.prepare import hosting_of
from fedgist.runs.repeated_steps import repeated_steps
from fedgist.runs.round import Observer
from fedgist.testing.small_worlds import (
    ALONE,
    SIZES,
    Trace,
    law_world,
    loopback,
    trace,
    world,
)
from fedgist.testing.wire_laws import compare_engines
from fedgist.training import clock
from fedgist.wire.envelope import header_of
from fedgist.wire.loopback_engine import LoopbackEngine
from fedgist.wire.wire import LoopbackWire
from fedgist.world.world import World
from method_objects import METHOD_OBJECTS, TRAINS, each
from three_sites import NAMES, SAME, parsed, recipe

LIMIT: dict[str, Any] = {"round_seconds": 10.0, "local_epochs": 3}


class Clock:
    """A clock on which drawn times pass between two looks."""

    def __init__(self, seed: int, longest: float) -> None:
        self.now, self.longest, self.draws = 0.0, longest, stdlib_random.Random(seed)

    def monotonic(self) -> float:
        self.now += self.draws.uniform(0.1, self.longest)
        return self.now


def limited(
    small: World, monkeypatch: pytest.MonkeyPatch, seed: int = 1, longest: float = 6.0
) -> Trace:
    """Return the run of sites on a clock of their own."""
    with monkeypatch.context() as patched:
        patched.setattr(clock, "time", Clock(seed, longest))
        return trace(small, rounds=2, make_engine=loopback)


def again(name: str, done: Trace, folder: Path, train: Mapping[str, Any]) -> Trace:
    """Return the run of a simulation with the steps of a record."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(line, default=float) for line in done.rounds]
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    small = law_world(METHOD_OBJECTS[name], train={**train, "steps_of": str(folder)})
    side = small.server

    def engine(_: World, __: object) -> LocalEngine:
        about = replace(hosting_of(small), steps=repeated_steps(side))
        plans = dict.fromkeys(side.task.architectures, ALONE)
        return LocalEngine(side.method, side.task, small.population, about, plans)

    return trace(small, rounds=2, make_engine=engine)


@pytest.mark.parametrize("name", each(n for n in METHOD_OBJECTS if n != "centralized"))
def test_a_simulation_takes_the_recorded_steps_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also methods with several phases, with memory, and that divide by the steps."""
    train = {**LIMIT, **TRAINS.get(name, {})}
    done = limited(law_world(METHOD_OBJECTS[name], train=train), monkeypatch)
    repeated = again(name, done, tmp_path / "run", train)
    compare_engines(law_world(METHOD_OBJECTS[name], train=train), repeated, done)
    steps = [[line.get("steps", []) for line in some.rounds] for some in (done, repeated)]
    assert steps[0] == steps[1]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.2, 40.0))
def test_a_site_takes_whole_steps_and_says_how_many(seed: int, longest: float) -> None:
    """The clients count by training; the clock is asked after each step."""
    small = world(CountsSteps(), train={"lr": 0.5, **LIMIT})
    with pytest.MonkeyPatch.context() as patched:
        done = limited(small, patched, seed, longest)
    (first, second), looks = done.rounds, Clock(seed, longest)
    for line in (first, second):
        taken = {entry["client"]: entry["steps"] for entry in line["steps"]}
        assert sorted(taken) == list(range(len(SIZES)))
        for client, rows in enumerate(SIZES):
            end, expected = looks.monotonic() + 10.0, 0
            while expected < 3 * batches(rows):
                expected += 1
                if looks.monotonic() >= end:
                    break
            assert taken[client] == [expected], (client, line["round"])
    for client in range(len(SIZES)):
        trained, told = (
            done.state[f"clients/{client}/mlp/own/{n}"] for n in ("so_far", "expected")
        )
        both = [line["steps"][client]["steps"][0] for line in (first, second)]
        assert float(trained) / 0.5 == float(told) == sum(both)


@pytest.mark.parametrize(("head", "steps"), [(4, [4, 4]), (12, [6, 2])])
def test_phases_share_the_time_by_their_steps(
    head: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last phase of a slow site would take one step in each round."""
    train = {**LIMIT, "round_seconds": 8.0, "local_epochs": 4}
    ticks = itertools.count()
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    done = trace(law_world(FedRep(head_epochs=head), train=train), rounds=1, make_engine=loopback)
    assert [entry["steps"] for entry in done.rounds[-1]["steps"]] == [steps] * len(SIZES)


def test_a_restarted_site_sends_the_reply_that_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its clock says now."""
    requests: list[bytes] = []
    small = world("fednova", train={**LIMIT, **TRAINS["fednova"]})
    fed = with_wire(small, lambda _, reply: [reply])
    assert isinstance(fed.engine, LoopbackEngine)
    site = fed.engine.sites[0]

    def hearing(envelope: bytes) -> bytes:
        requests.append(envelope)
        return site.handle(envelope)

    wire = fed.engine.remote.wire
    assert isinstance(wire, LoopbackWire)
    wire.clients[0] = hearing
    monkeypatch.setattr(clock, "time", Clock(3, 6.0))
    fed.advance()
    reply, state = site.handle(requests[0]), site.state()
    assert header_of(reply).steps
    monkeypatch.setattr(clock, "time", Clock(4, 0.2))
    other = loopback(small).sites[0]
    assert header_of(other.handle(requests[0])).steps != header_of(reply).steps
    other.restore(state)
    assert other.handle(requests[0]) == reply


@pytest.mark.parametrize("steps", [None, (), (1, 1), (3,)])
@pytest.mark.parametrize("train", [{}, LIMIT])
def test_a_reply_that_does_not_say_its_steps_is_refused_by_name(
    steps: tuple[int, ...] | None, train: dict[str, Any]
) -> None:
    fed = with_wire(world("fedavg", train=train), only(2, lambda b: [resealed(b, steps=steps)]))
    line, _ = fed.advance()
    fits = steps == (3,) if train else steps is None
    assert [entry["client"] for entry in line.get("refused", [])] == ([] if fits else [2])
    assert fits or "its steps are" in line["refused"][0]["reason"]


PRIVATE = {"unit": "client", "epsilon": 9.0, "delta": 1e-3, "clip": 1.0, "where": "central"}
TIME = {"round_seconds": 2.0}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": TIME}, "a simulation repeats one with train.steps_of"),
        ({"train": {"steps_of": "run"}}, "give both"),
        ({"train": {**TIME, "steps_of": "nowhere"}}, "there is no nowhere/rounds.jsonl"),
        ({"train": {**TIME, "steps_of": "other"}}, r"took the steps \[\] there"),
        ({"train": {**TIME, "steps_of": "run"}}, r"client 0 took the steps \[\] there"),
        ({"train": {**TIME, "steps_of": "run"}, "engine": {"name": "ray"}}, "use 'local'"),
        ({"train": TIME, "privacy": PRIVATE}, "the number of steps tells how long rows take"),
        ({"train": {"round_seconds": 0.0}}, "round_seconds"),
    ],
)
def test_what_cannot_be_repeated_or_promised_is_an_error(
    sections: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of = {"client": 1, "stage": "train", "steps": [2]}
    for name, line in (("run", {"round": 1, "steps": [of]}), ("other", {"round": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    recipe = {"method": {"name": "fedavg"}, "data": {"name": "digits"}, **sections}
    recipe["clients"] = {"num_clients": 4}
    with pytest.raises(RecipeError, match=words):
        fedgist.run(recipe)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"federation": {"sums": "secure"}}, "would tell the server how many steps"),
        ({"evaluate": {"trained_every": 1}}, "does not limit that training"),
        ({"train": {"steps_of": "run"}}, "a simulation repeats a federation with it"),
    ],
)
def test_what_a_federation_cannot_honour_is_an_error(sections: dict[str, Any], words: str) -> None:
    raw = recipe("fedavg", **SAME, **({"train": TIME} | sections))
    with pytest.raises(RecipeError, match=words):
        checked_context(parsed(raw), NAMES, Observer())
