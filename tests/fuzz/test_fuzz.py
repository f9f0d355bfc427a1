"""A small part of the fuzz suite, and that the suite finds what it is for."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from fedgist.errors import InputError, WorkerError
from fuzz import cases, mutations, suite
from fuzz.cases import Door, outcome

CASES = {
    "recipe": 100,
    "setting": 120,  # three in a hundred are taken
    "study": 60,
    "record": 15,
    "archive": 40,
    "checkpoint": 15,
    "data": 100,
    "python": 20,
}


FEW = 8


def done_at(name: str, numbers: int, folder: Path) -> list[cases.Outcome]:
    gc.collect()  # what other tests left would be logged as a traceback, into what a command says
    (door,) = (door for door in suite.DOORS if door.name == name)
    return [suite.do_case(door, number, folder) for number in range(numbers)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_first_cases_of_each_door(name: str, tmp_path: Path) -> None:
    found = done_at(name, FEW, tmp_path)
    assert [done.text for done in found if done.kind == "failed"] == []


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.parametrize("name", CASES)
def test_some_cases_of_each_door(name: str, tmp_path: Path) -> None:
    found = done_at(name, CASES[name], tmp_path)
    assert [done.text for done in found if done.kind == "failed"] == []
    assert {done.kind for done in found} == {"taken", "refused"}


def test_the_shares_are_those_of_a_thousand() -> None:
    assert sum(door.share for door in suite.DOORS) == 1000


def take(random: Random, place: Path) -> None:
    pass


def refuse(random: Random, place: Path) -> None:
    raise InputError("no")


def trip(random: Random, place: Path) -> None:
    (place / "input.json").write_text(json.dumps(random.random()))
    int("no number")


def hang(random: Random, place: Path) -> None:
    time.sleep(100)


def catch_all(random: Random, place: Path) -> None:
    try:
        time.sleep(100)
    except Exception as error:  # what would hide a watchdog
        raise WorkerError("worker") from error


def devour(random: Random, place: Path) -> None:
    bytearray(os.urandom(1 << 20) * 64)


def test_a_case_is_taken_refused_or_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = {door.__name__: Door(door.__name__, 1, door) for door in (take, refuse, trip, devour)}
    kinds = {name: outcome(door, 0, tmp_path).kind for name, door in doors.items()}
    assert kinds == {"take": "taken", "refuse": "refused", "trip": "failed", "devour": "taken"}
    monkeypatch.setattr(cases, "MOST_MEMORY", -1)
    assert outcome(doors["devour"], 0, tmp_path).text.startswith("took ")


@pytest.mark.parametrize("door", [hang, catch_all])
def test_a_case_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Callable[[Random, Path], None]
) -> None:
    monkeypatch.setattr(cases, "HANG_S", 0.2)
    assert outcome(Door("hang", 1, door), 0, tmp_path).text.startswith("hung for ")


def test_a_failure_is_kept_and_done_again_by_its_number(tmp_path: Path) -> None:
    door = Door("trip", 1, trip)
    assert suite.do_case(door, 7, tmp_path).kind == "failed"
    kept = tmp_path / "trip-7"
    first = (kept / "input.json").read_text()
    assert "invalid literal for int()" in (kept / "failure.txt").read_text()
    suite.do_case(door, 7, tmp_path)
    assert (kept / "input.json").read_text() == first
    suite.do_case(door, 8, tmp_path)
    assert (tmp_path / "trip-8" / "input.json").read_text() != first


def test_mutations_change_something() -> None:
    tree = {"a": [1, 2, {"b": "c"}], "d": 1.5}
    changed = [mutations.spoil_tree(Random(i), tree) for i in range(200)]
    assert sum(value != tree for value in changed) > 150
    assert tree == {"a": [1, 2, {"b": "c"}], "d": 1.5}
    data = bytes(range(100))
    assert sum(mutations.spoil_bytes(Random(i), data) != data for i in range(200)) > 150
