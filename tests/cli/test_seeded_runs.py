"""Runs of several seeds in a folder: what may stand beside what, and how they go on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedgist.cli import seeded_runs
from fedgist.errors import DiskFullError, RecipeError, Stopped
from fedgist.recipe.reading import Recipe, make, read
from fedgist.report.tables.run_tables import overview
from fedgist.runs import runner
from fedgist.runs.finished.run_reader import find
from fedgist.runs.round import Observer

RECIPE = make(
    {
        "seed": 1,
        "data": {"name": "digits", "train_rows": 100},
        "clients": {"num_clients": 2},
        "partition": {"name": "iid"},
        "model": {"name": "mlp", "hidden": [4]},
        "method": {"name": "fedavg"},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1},
    }
)
OTHER = {"train.lr": 0.5}


def start(
    out: Path, seeds: int, change: dict[str, Any] | None = None, *, overwrite: bool = False
) -> list[runner.Outcome]:
    recipe: Recipe = RECIPE.changed(change or {})
    return list(seeded_runs.start(recipe, seeds, out, None, Observer(), overwrite=overwrite))


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one seed, and one with runs of two."""
    place = tmp_path_factory.mktemp("begun")
    start(place / "one", 1)
    start(place / "two", 2)
    return place


@pytest.fixture
def place(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "place")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "seeds", "change", "says"),
    [
        ("one", 2, {}, "one holds a run of one seed; choose another --out, or remove it"),
        ("one", 2, OTHER, "one holds a run of one seed"),
        ("two", 1, {}, "two holds runs of several seeds; choose another folder"),
        ("two", 1, {"seed": 7}, "two holds runs of several seeds"),
        ("two", 2, {"seed": 7, **OTHER}, r"two/seed-1 holds a run with train.lr = .*, not 0.5"),
        ("two", 2, {"seed": 2, **OTHER}, r"two/seed-1 holds a run with train.lr = .*, not 0.5"),
        ("two", 2, {"seed": 7, "train.num_rounds": 2}, "a run with train.num_rounds = 1, not 2"),
        ("two", 2, {"seed": 7, "data.train_rows": 99}, "a run with data.train_rows"),
    ],
)
def test_runs_that_would_hide_or_join_others_are_refused(
    place: Path, name: str, seeds: int, change: dict[str, Any], says: str, *, overwrite: bool
) -> None:
    # rejects that --overwrite leaves the old run, of which reports would then tell
    before = content(place)
    with pytest.raises(RecipeError, match=says):
        start(place / name, seeds, change, overwrite=overwrite)
    assert content(place) == before


def test_a_recipe_of_ones_own_is_not_in_the_way_of_seeds_in_silence(tmp_path: Path) -> None:
    # rejects seeds that no report finds, because it takes the folder above them for one run
    (tmp_path / "recipe.toml").write_text(RECIPE.to_toml())
    with pytest.raises(RecipeError, match=r"reports would take .* for one run"):
        start(tmp_path, 2)


@pytest.mark.parametrize(
    ("seeds", "change", "overwrite", "rows"),
    [
        (2, {"seed": 3}, False, ["fedavg, 4 seeds"]),
        (3, {}, True, ["fedavg, 3 seeds"]),
        (2, OTHER, True, ["fedavg, 2 seeds"]),
    ],
)
def test_seeds_of_a_recipe_are_added_or_replaced(
    place: Path, seeds: int, change: dict[str, Any], rows: list[str], *, overwrite: bool
) -> None:
    start(place / "two", seeds, change, overwrite=overwrite)
    assert [row[0] for row in overview(find([place / "two"])).rows] == rows


def resume(folder: Path, seeds: int, rounds: int | None) -> None:
    list(seeded_runs.resume(folder, [], seeds, None, Observer(), rounds))


def stop_in(name: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run in a folder of this name stop, and others do nothing."""

    def run(*given: object, folder: Path, **flags: object) -> None:
        del given, flags
        if folder.name == name:
            raise Stopped(folder) if kind is Stopped else DiskFullError("full", "another command")

    monkeypatch.setattr(runner, "run", run)


def test_seeds_that_had_not_begun_get_the_raised_rounds_too(place: Path) -> None:
    # rejects the number of rounds that the others had before
    resume(place / "two", 4, 3)
    assert {run.folder.name: run.done for run in find([place / "two"])} == {
        f"seed-{seed}": 3 for seed in (1, 2, 3, 4)
    }


@pytest.mark.parametrize(
    ("stops_at", "seeds", "rounds", "options"),
    [
        ("seed-1", 1, 2, " --rounds 2"),
        ("seed-2", 1, 2, " --rounds 2"),
        ("seed-2", 3, 2, " --seeds 3 --rounds 2"),
        ("seed-3", 3, 2, " --seeds 3 --rounds 2"),
        ("seed-3", 3, None, " --seeds 3"),
    ],
)
@pytest.mark.parametrize("kind", [Stopped, DiskFullError])
def test_what_stops_a_resumed_seed_names_the_command_for_all(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    stops_at: str,
    seeds: int,
    rounds: int | None,
    options: str,
    kind: type[Exception],
) -> None:
    # rejects a command that goes on with that seed alone
    stop_in(stops_at, kind, monkeypatch)
    with pytest.raises(kind, match=rf"fedgist run --resume \S+/two{options}$"):
        resume(place / "two", seeds, rounds)


@pytest.mark.parametrize("kind", [Stopped, DiskFullError])
def test_what_stops_a_run_of_one_seed_keeps_its_own_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    stop_in("one", kind, monkeypatch)
    with pytest.raises(kind, match=r"/one$" if kind is Stopped else "another command$"):
        resume(place / "one", 1, 2)


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (("seed-1", "other"), {}),
        (("seed-1", "seed-2"), OTHER),
        (("a", "b"), {}),
        (("seed-1", "seed-2"), {"method.name": "local"}),
    ],
)
def test_runs_that_are_not_one_recipes_seeds_are_not_resumed_together(
    names: tuple[str, str], change: dict[str, Any], begun: Path, tmp_path: Path
) -> None:
    # seen: all were raised, and a further seed was trained by the recipe of the last
    shutil.copytree(begun / "two/seed-1", tmp_path / names[0])
    shutil.copytree(begun / "two/seed-2", tmp_path / names[1])
    file = tmp_path / names[1] / "recipe.toml"
    file.write_text(read(file).changed(change).to_toml())
    before = content(tmp_path)
    with pytest.raises(RecipeError, match="holds runs of several settings"):
        resume(tmp_path, 3, 2)
    assert content(tmp_path) == before


def test_further_seeds_beside_several_divisions_are_refused(begun: Path, tmp_path: Path) -> None:
    for division in (0, 1):
        place = shutil.copytree(begun / "two/seed-1", tmp_path / f"seed-1-division-{division}")
        folds = {"data.folds": 3, "data.division": division}
        (place / "recipe.toml").write_text(read(place / "recipe.toml").changed(folds).to_toml())
    with pytest.raises(RecipeError, match="holds several divisions of the rows"):
        resume(tmp_path, 2, None)
