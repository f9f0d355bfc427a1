"""Four processes learn together, are killed, come back, and end as the simulation does."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_federation import compare, real_federation
from three_sites import ARCHITECTURES, NAMES, recipe, simulated

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
        assert all(line["clients/replied"] == 3 for line in lines), fed.output("server")
        compare(lines, simulated(raw).rounds)
        assert fed.participants() == {number: {0, 1, 2} for number in range(1, 9)}
