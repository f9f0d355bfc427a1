"""Secure sums by real processes: the plain run's numbers, and a server that sees totals alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("method", ["fedlog", "fedavg", "fedproto", "analytic"])
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


@pytest.mark.parametrize("step", ["share", "mask", "confirm", "unmask"])
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
