"""Secure sums by real processes: the plain run's numbers, and a server that sees totals alone."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import fedgist
from fedgist.runs.files import checkpoint
from fedgist.runs.files.record import read_lines
from real_federation import RealFederation, real_federation
from three_sites import NAMES, recipe

pytestmark = pytest.mark.slow
ALL = {"least_sites": 3, "least_replies": 3}


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    saved = checkpoint.load(folder)
    assert saved is not None
    return {n: a for n, a in saved.arrays().items() if n.startswith("server/")}


def one_of(first: str, *others: str) -> list[Any]:
    """Return values for a test: the first in `make test`, the others in `make test-all` alone."""
    return [first, *(pytest.param(value, marks=pytest.mark.environment) for value in others)]


def done(fed: RealFederation, raw: dict[str, Any], out: str) -> dict[str, torch.Tensor]:
    """Do a run with all three sites, and return the server's state."""
    fed.write_recipe(raw)
    fed.start_server()
    for name in NAMES:
        fed.write_site(name, state=f"{out}-{name}")
        fed.start_site(name)
    for label in ("server", *NAMES):
        fed.wait_end(label)
    fed.run.rename(fed.folder / out)
    return state_of(fed.folder / out)


@pytest.mark.parametrize("method", one_of("fedlog", "fedavg", "fedproto", "analytic"))
def test_the_run_is_that_of_plain_sums(method: str, tmp_path: Path) -> None:
    one = {"model": {"name": "logistic"}} if method == "analytic" else {"model": {"name": "mlp"}}
    raw = recipe(method, rounds=2, **one)
    if method == "analytic":
        raw["method"] = {"name": method, "expand": 0, "wire": "float64"}
    with real_federation(tmp_path) as fed:
        plain = done(fed, raw | {"federation": ALL}, "plain")
        secure = done(fed, raw | {"federation": ALL | {"sums": "secure"}}, "secure")
        for name, array in plain.items():
            size = max(1.0, float(array.abs().max())) if array.numel() else 1.0
            torch.testing.assert_close(secure[name] / size, array / size, rtol=0, atol=2e-6)
        for line in read_lines(tmp_path / "secure/rounds.jsonl"):
            assert "train/loss" not in line
        log = (tmp_path / "secure-ulm/audit.log").read_text()
        assert "sent mask Masked (numbers [" in log
        assert "upload" not in log


def test_what_would_show_a_message_is_refused(tmp_path: Path) -> None:
    """By the server before it listens, and by a site before it trains."""
    with real_federation(tmp_path) as fed:
        kit, given = fed.folder / "kits/server", fed.folder / "recipe.toml"
        for raw, says in (
            (recipe("repshare", model={"name": "mlp"}), "reads each Released by itself"),
            (
                recipe("fedlog", clients={"architectures": {"mlp": 0.5, "logistic": 0.5}}),
                "needs 3 of an architecture",
            ),
        ):
            fed.write_recipe(raw | {"federation": ALL | {"sums": "secure"}})
            served = fedgist("server", kit, given, "--out", tmp_path / "x", cwd=tmp_path, code=2)
            assert says in " ".join(served.stderr.split())
        fed.write_recipe(recipe("fedlog", model={"name": "mlp"}))
        about = ("--check", "--recipe", given)
        for policy, says in (
            (
                {"sums": "secure"},
                "policy.sums = 'secure'; the recipe has federation.sums = 'plain'",
            ),
            ({"least_sites": 2}, "policy.least_sites"),
        ):
            fed.write_site("ulm", policy=policy)
            kit, table = fed.folder / "kits/sites/ulm", tmp_path / "ulm.toml"
            said = fedgist("site", kit, "--config", table, *about, cwd=tmp_path, code=2)
            assert says in " ".join(said.stderr.split())


FOUR = (*NAMES, "oslo")


def four(tmp_path: Path) -> Any:
    """A federation of four sites, of which one may be lost; the fourth has rows of another."""
    return real_federation(tmp_path, names=FOUR)


def started(fed: RealFederation, dies: str, **federation: Any) -> None:
    """Write recipe and sites, and start all; the fourth is killed at a step in round 2."""
    quick = {"least_sites": 4, "least_replies": 3, "deadline_s": 20.0} | federation
    raw = recipe("fedlog", rounds=3, model={"name": "mlp"})
    fed.write_recipe(raw | {"federation": quick | {"sums": "secure"}})
    fed.write_site("oslo", data={"name": "npz", "path": "ulm.npz"})
    fed.start_server()
    for name in FOUR:
        fed.start_site(name, dies=(dies, 2) if name == "oslo" else None)


@pytest.mark.parametrize("step", one_of("unmask", "share", "mask", "confirm"))
def test_a_site_that_is_killed_at_a_step_is_not_missed(step: str, tmp_path: Path) -> None:
    """The total is that of the three others until its numbers are there, and then of all four."""
    with four(tmp_path) as fed:
        started(fed, f"site at {step}")
        fed.wait_killed("oslo")
        fed.start_site("oslo")
        for label in ("server", *FOUR):
            fed.wait_end(label)
        replied = [line["clients/replied"] for line in fed.rounds() if line["round"] > 0]
        assert replied == [4, 3 if step in {"share", "mask"} else 4, 4]


def test_a_server_that_is_killed_with_a_total_goes_on_with_it(tmp_path: Path) -> None:
    with real_federation(tmp_path) as fed:
        raw = recipe("fedlog", rounds=3, model={"name": "mlp"})
        fed.write_recipe(raw | {"federation": ALL | {"sums": "secure"}})
        fed.start_server(dies=("server updating", 2))
        for name in NAMES:
            fed.start_site(name)
        fed.wait_killed("server")
        fed.start_server()
        for label in ("server", *NAMES):
            fed.wait_end(label)
        lines = {line["round"]: line for line in fed.rounds()}
        assert [line["clients/replied"] for line in lines.values() if line["round"]] == [3, 3, 3]
        events = lines[2]["events"]
        assert any("opened before the restart is used" in event for event in events)


NINE = tuple(f"site-{letter}" for letter in "abcdefghi")
KILL_STEPS = ("share", "mask", "confirm", "unmask")
ROUNDS = 20


def drawn_kills() -> dict[str, list[tuple[int, str]]]:
    """Two sites and their steps in each of twenty rounds, and three sites in one round more."""
    draws, kills = np.random.default_rng(0), dict[str, list[tuple[int, str]]]()
    for number in range(1, ROUNDS + 1):
        for site in draws.choice(len(NINE), 2, replace=False):
            step = KILL_STEPS[int(draws.integers(len(KILL_STEPS)))]
            kills.setdefault(NINE[site], []).append((number, step))
    for site in NINE[:3]:
        kills.setdefault(site, []).append((ROUNDS + 1, "mask"))
    return kills


@pytest.mark.environment
def test_nine_processes_of_which_two_are_killed_in_each_of_twenty_rounds(tmp_path: Path) -> None:
    """And three in a round more: it opens nothing until they are back."""
    kills = drawn_kills()
    absent = Counter(n for each in kills.values() for n, step in each if step in {"share", "mask"})
    with real_federation(tmp_path, names=NINE) as fed:
        raw = recipe("fedlog", rounds=ROUNDS + 1, model={"name": "mlp", "hidden": [8]})
        section = {"least_sites": 9, "least_replies": 7, "deadline_s": 60.0, "sums": "secure"}
        fed.write_recipe(raw | {"federation": section})
        for place, name in enumerate(NINE):
            fed.write_site(name, data={"name": "npz", "path": f"{NAMES[place % 3]}.npz"})

        def start(name: str) -> None:
            (tmp_path / f"{name}-died").unlink(missing_ok=True)
            number, step = kills[name].pop(0) if kills.get(name) else (0, "")
            fed.start_site(name, dies=(f"site at {step}", number) if step else None)

        fed.start_server()
        for name in NINE:
            start(name)
        died, end = 0, time.monotonic() + 600
        while time.monotonic() < end and "server" in fed.processes and fed.processes["server"].runs:
            for name in NINE:
                if not fed.processes[name].runs and (tmp_path / f"{name}-died").exists():
                    fed.wait_killed(name)
                    start(name)
                    died += 1
            time.sleep(0.05)
        fed.wait_end("server")
        for name in NINE:
            fed.wait_end(name)
        assert died == 2 * ROUNDS + 3
        lines = {line["round"]: line for line in fed.rounds()}
        for number in range(1, ROUNDS + 1):
            assert lines[number]["clients/replied"] == 9 - absent[number], number
        last = lines[ROUNDS + 1]
        assert last["clients/replied"] == 9
        (event,) = [text for text in last["events"] if "no total was opened" in text]
        assert "6 sites sent numbers, and 7 are needed" in event
