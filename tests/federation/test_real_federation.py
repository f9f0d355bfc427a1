"""Four processes learn together, are killed, come back, and end as the simulation does."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedgist.runs.record import read_lines
from real_federation import compare, real_federation
from three_sites import ARCHITECTURES, NAMES, recipe, recipe_of, simulated

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
@pytest.mark.parametrize("method", ["fedlog", "fedavg", "repshare", "merged_codist", "flesd"])
def test_four_processes_give_the_simulations_numbers(method: str, tmp_path: Path) -> None:
    raw, images = recipe_of(method, rounds=3), method == "flesd"
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
        fed.wait_for(lambda: "0 of" in fed.status().get("waiting_for", ""))
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
