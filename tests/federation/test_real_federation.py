"""Four processes learn together, are killed, come back, and end as the simulation does."""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from commands import fedgist
from fedgist.runs.files.record import read_lines
from real_federation import RealFederation, compare, real_federation
from three_sites import ARCHITECTURES, HETEROGENEOUS, NAMES, recipe, recipe_of, simulated

PATIENT = {"deadline_s": 60.0, "first_deadline_s": 120.0}


@pytest.mark.slow
def test_a_site_and_the_server_are_killed_and_the_run_is_the_simulations(tmp_path: Path) -> None:
    raw = recipe(
        "fedlog",
        rounds=8,
        clients={"architectures": ARCHITECTURES},
        federation={"least_sites": 3, "least_replies": 3, **PATIENT},
    )
    with real_federation(tmp_path) as fed:
        fed.write_recipe(raw)
        fed.start_server(dies=("server updating", 6))
        fed.start_site("berlin")
        fed.start_site("lyon", dies=("site training", 3))
        fed.start_site("ulm")
        fed.wait_killed("lyon")
        fed.start_site("lyon", dies=("site training", 3))  # it counts in round 3 all the same
        fed.wait_killed("server")
        assert fed.rounds()[-1]["round"] == 5
        fed.start_server()
        for label in ("server", *NAMES):
            fed.wait_end(label)
        lines = fed.rounds()
        assert all(line["clients/replied"] == 3 for line in lines)
        compare(lines, simulated(raw).rounds)
        assert fed.participants() == {number: {0, 1, 2} for number in range(1, 9)}


@pytest.mark.environment
@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("fedlog", {}),
        ("repshare", {}),
        ("merged_codist", {}),
        ("fedavg", {}),
        ("fedavg", HETEROGENEOUS),
        ("flesd", {}),
        ("flesd", HETEROGENEOUS),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "own",
)
def test_four_processes_give_the_simulations_numbers(
    method: str, sections: dict[str, Any], tmp_path: Path
) -> None:
    raw, images = recipe_of(method, rounds=3) | sections, method == "flesd"
    if sections:
        raw.pop("model", None)
    with real_federation(tmp_path, images=images) as fed:
        for name in NAMES:
            fed.write_site(name, public={"path": "public.npz"})
        fed.write_recipe(raw)
        fed.start_server()
        for name in NAMES:
            fed.start_site(name)
        for label in ("server", *NAMES):
            fed.wait_end(label)
        # FLESD: one encoder alone against a stack of them
        compare(fed.rounds(), simulated(raw, images=images).rounds, loss=2e-4 if images else 1e-4)


@pytest.mark.environment
def test_twenty_rounds_with_kills_a_late_site_and_nobody_for_a_while(tmp_path: Path) -> None:
    raw = recipe(
        "fedlog",
        rounds=20,
        clients={"architectures": ARCHITECTURES},
        federation={"least_sites": 2, "least_replies": 2, **PATIENT},
    )
    with real_federation(tmp_path) as fed:
        fed.write_recipe(raw)
        fed.start_server(dies=("server updating", 13))
        fed.start_site("berlin")
        fed.start_site("lyon", dies=("site training", 5))
        fed.wait_killed("lyon")
        fed.start_site("lyon", dies=("site training", 5))
        fed.wait_round(7)
        fed.start_site("ulm")  # it joins when it is ready
        fed.wait_killed("server")
        for name in NAMES:
            fed.kill(name)
        fed.start_server()
        fed.wait_for(lambda: "and 0 are ready" in fed.status().get("waiting_for", ""))
        done = len(fed.rounds())
        for name in NAMES:
            fed.start_site(name)
        for label in ("server", *NAMES):
            fed.wait_end(label)
        assert done == 12  # nothing was burnt while nobody was there
        lines, took_part = fed.rounds(), fed.participants()
        assert [line["round"] for line in lines] == list(range(1, 21))
        assert took_part[5] == {0, 1}  # the site that was killed in this round counts in it
        assert {0, 1} == took_part[1]
        assert {0, 1, 2} == took_part[20]
        raw["clients"]["availability"] = str(fed.run / "participants.csv")
        whole = simulated(raw)
        for ours, theirs in zip(lines, whole.rounds, strict=True):
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-4)
            assert ours["comm/up_bytes"] == theirs["comm/up_bytes"]
        expected = {(line["round"], line["client"]): line for line in whole.clients}
        scores = read_lines(fed.run / "clients.jsonl")
        assert {(line["round"], line["client"]) for line in scores} >= {
            (number, site) for number, sites in took_part.items() for site in sites
        }
        for line in scores:
            theirs = expected[line["round"], line["client"]]
            assert line["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-5)


@pytest.mark.environment
def test_an_administrator_sees_and_stops_a_run_that_goes_on_later(tmp_path: Path) -> None:
    raw = recipe(
        "fedlog",
        rounds=1000,
        clients={"architectures": ARCHITECTURES},
        federation={"least_sites": 3, "least_replies": 3, **PATIENT},
    )
    with real_federation(tmp_path) as fed:
        admin = tmp_path / "kits/administrators/anna"
        nobody = fedgist("status", admin, cwd=tmp_path, code=1)
        assert "cannot be reached" in nobody.stderr
        fed.write_recipe(raw)
        fed.start_server()
        for name in NAMES:
            fed.start_site(name)
        fed.wait_round(3)
        shown = fedgist("status", admin, cwd=tmp_path).stdout
        assert all(name in shown for name in NAMES)
        refused = fedgist("stop", tmp_path / "kits/sites/ulm", cwd=tmp_path, code=2)
        assert "a kit for the role site" in refused.stderr
        fedgist("stop", admin, cwd=tmp_path)
        assert "stopped by anna; the same command goes on" in fed.wait_end("server")
        done = len(fed.rounds())
        fed.start_server()
        fed.wait_round(done + 2)  # the sites waited for it
        for name, number in zip(NAMES, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), strict=True):
            fed.processes[name].signal(number)
            assert "stopped; go on with: fedgist site" in fed.wait_end(name, 130)
        fed.processes["server"].signal(signal.SIGTERM)  # it waits for sites
        assert "stopped; go on with: fedgist server" in fed.wait_end("server", 130)
        assert [line["round"] for line in fed.rounds()] == list(range(1, len(fed.rounds()) + 1))


@pytest.mark.slow
def test_a_check_without_a_network_says_what_would_leave(tmp_path: Path) -> None:
    fed = RealFederation(tmp_path)  # its files: nothing is started
    fed.write_recipe(recipe("fedlog", clients={"architectures": ARCHITECTURES}))
    own = ("site", tmp_path / "kits/sites/berlin", "--config", "berlin.toml", "--check")
    shown = fedgist(*own, "--recipe", "recipe.toml", cwd=tmp_path).stdout
    assert "kit: berlin of test" in shown
    assert "one step of training was done" in shown
    assert "would leave in each round, stage train: ClassSums (total [10, 25]), 1000 bytes" in shown
    few = recipe("fedlog", clients={"architectures": ARCHITECTURES}, data={"validation": 0.002})
    fed.write_recipe(few)
    assert ", 0 validation and " in fedgist(*own, "--recipe", "recipe.toml", cwd=tmp_path).stdout
    facts = fedgist(*own, cwd=tmp_path).stdout
    text = facts[facts.index("[data]") : facts.index("not checked")]
    assert tomllib.loads(text)["facts"]["input_shape"] == [64]
    fed.write_site("berlin", policy={"methods": ["fedproto"]})
    refused = fedgist(*own, "--recipe", "recipe.toml", cwd=tmp_path, code=2).stderr
    assert "policy.methods accepts fedproto" in refused
    assert not (tmp_path / "state-berlin").exists()


@pytest.mark.environment
def test_a_site_that_hangs_is_absent_after_the_deadline_and_comes_back(tmp_path: Path) -> None:
    raw = recipe(
        "fedlog",
        rounds=1000,
        clients={"architectures": ARCHITECTURES},
        federation={"least_sites": 2, "least_replies": 2, "deadline_s": 3.0},
    )
    with real_federation(tmp_path) as fed:
        fed.write_recipe(raw)
        fed.start_server()
        for name in NAMES:
            fed.start_site(name)
        fed.wait_for(lambda: any(len(sites) == 3 for sites in fed.participants().values()))
        fed.processes["ulm"].signal(signal.SIGSTOP)
        fed.wait_for(lambda: any("absent" in line for line in fed.rounds()))
        line = next(line for line in fed.rounds() if "absent" in line)
        assert [entry["name"] for entry in line["absent"]] == ["ulm"]
        assert line["clients/replied"] == 2
        fed.processes["ulm"].signal(signal.SIGCONT)
        last = line["round"]
        fed.wait_for(lambda: any(n > last and len(s) == 3 for n, s in fed.participants().items()))
