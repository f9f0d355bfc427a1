"""Sites that train for unlike numbers of steps, by the recipe and by their own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedgist.errors import SiteError
from fedgist.federation.site.file import read_site_file
from fedgist.federation.site.setup import site_part
from fedgist.runs.files.record import read_lines
from real_federation import compare
from sites_in_threads import Kits
from three_sites import NAMES, SAME, parsed, recipe, simulated, write_rows

DATA = 'name = "npz"\npath = "{name}.npz"\n'
ALL = {"least_sites": 3, "least_replies": 3}
SLOW = {"settings": {"slow": {"clients": ["ulm"], "train": {"local_steps": 1}}}}


@pytest.mark.slow
def test_a_recipe_says_which_site_does_less(tmp_path: Path) -> None:
    raw = recipe("fednova", 2, **SAME, federation=ALL, clients=SLOW, train={"local_steps": 3})
    write_rows(tmp_path)
    Kits.make(tmp_path).serve(raw, tmp_path)
    lines = read_lines(tmp_path / "run/rounds.jsonl")
    compare(lines, simulated(raw).rounds, loss=1e-4)
    alike = simulated(recipe("fednova", 2, **SAME, train={"local_steps": 3})).rounds
    assert abs(alike[-1]["train/loss"] - lines[-1]["train/loss"]) > 1e-3


@pytest.mark.slow
def test_a_site_says_how_long_it_trains(tmp_path: Path) -> None:
    write_rows(tmp_path)
    own = DATA + "[settings.train]\nlocal_steps = 2\n"
    Kits.make(tmp_path).serve(recipe("fednova", 2, **SAME, federation=ALL), tmp_path, source=own)
    lines = read_lines(tmp_path / "run/rounds.jsonl")
    expected = simulated(recipe("fednova", 2, **SAME, train={"local_steps": 2})).rounds
    compare(lines, expected, loss=1e-4)


@pytest.mark.slow
def test_sites_stop_when_their_time_is_over_and_a_simulation_repeats_them(tmp_path: Path) -> None:
    limit: dict[str, Any] = {"round_seconds": 0.2, "local_epochs": 2_000}
    write_rows(tmp_path)
    raw = recipe("fednova", 2, **SAME, federation=ALL, train=limit)
    Kits.make(tmp_path).serve(raw, tmp_path)
    lines = read_lines(tmp_path / "run/rounds.jsonl")
    assert [entry["name"] for entry in lines[-1]["steps"]] == list(NAMES)
    again = recipe("fednova", 2, **SAME, train=limit | {"steps_of": str(tmp_path / "run")})
    expected = simulated(again).rounds
    compare(lines, expected, loss=1e-4)
    assert [line["steps"] for line in expected] == [line["steps"] for line in lines]


def part_of(folder: Path, text: str, raw: dict[str, Any]) -> object:
    write_rows(folder)
    (folder / "ulm.toml").write_text('state = "ulm"\n[data]\n' + DATA.format(name="ulm") + text)
    return site_part(parsed(raw), NAMES, 2, read_site_file(folder / "ulm.toml"), 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[settings.train]\nlocal_steps = 200\n[policy]\nmost_local_steps = 100",
            "a round has 200",
        ),
        ("[settings.train]\nsteps = 2", "settings.train.steps: unknown key"),
        ("[settings]\nm_up = 2", "clients of FedAvg have no settings of their own but train"),
    ],
)
def test_what_a_site_cannot_train_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        part_of(tmp_path, text, recipe("fedavg", **SAME))


def test_private_steps_are_the_recipes(tmp_path: Path) -> None:
    private = {"unit": "record", "epsilon": 9.0, "delta": 1e-3, "bodies": "dp_sgd"}
    steps = {"sampling_rate": 0.2, "gradient_clip": 1.0, "clip": 3.0, "noise": "system"}
    raw = recipe("fedlog", clients={"max_rows": 900}, **SAME, privacy=private | steps)
    text = "[settings.train]\nlocal_steps = 1\n[policy]\nepsilon = 10.0\n"
    with pytest.raises(SiteError, match=r"settings.train: private steps are charged before"):
        part_of(tmp_path, text, raw)
