"""Every method runs over the network as in the simulation: a server, and sites in threads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from fedgist.errors import CheckpointError, MethodError
from fedgist.federation.server.run_state import RunStateFile
from fedgist.federation.site.agent import MODELS
from fedgist.methods import METHODS
from fedgist.runs.evaluation import score_rows
from fedgist.runs.files.record import read_lines
from fedgist.runs.finished.trained_models import trained_model
from fedgist.runs.forgetting import forget
from fedgist.runs.runner import load_run
from real_federation import compare
from sites_in_threads import Kits
from three_sites import NAMES, recipe_of, rows_of_sites, simulated, write_rows


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    return Kits.make(tmp_path_factory.mktemp("kits"))


def check_models(folder: Path, *, images: bool) -> None:
    """Compare each site's model, read without the server, with its last recorded score."""
    data, parts = rows_of_sites(images=images)
    last = {line["client"]: line for line in read_lines(folder / "run/clients.jsonl")}
    for number, name in enumerate(NAMES):
        (place,) = (folder / name / MODELS).iterdir()
        federation, world = load_run(place)
        model, rows = trained_model(federation, world, 0), parts.test[number]
        objective = federation.task.objective
        scores = score_rows(model, data.x_test[rows], data.y_test[rows], objective)
        assert scores["accuracy"] == pytest.approx(last[number]["accuracy"], abs=1e-6), name


METHODS_OF_SITES = [name for name in METHODS if not METHODS[name]().merges_clients]
# several stages, and pools; the others in `make test-all`
ALWAYS = ("cs_fl", "merged_codist")


def marked(method: str) -> ParameterSet:
    mark = pytest.mark.slow if method in ALWAYS else pytest.mark.environment
    return pytest.param(method, marks=mark)


@pytest.mark.parametrize("method", [marked(name) for name in METHODS_OF_SITES])
def test_over_the_network_a_method_gives_the_simulations_numbers(
    method: str, kits: Kits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, images = recipe_of(method), method == "flesd"
    write_rows(tmp_path, images=images)
    monkeypatch.chdir(tmp_path)  # the server's public rows are beside it
    kits.serve(raw, tmp_path)
    loss = 2e-4 if images else 1e-4  # one encoder alone against a stack of them
    lines = read_lines(tmp_path / "run/rounds.jsonl")
    compare(lines, simulated(raw, images=images).rounds, loss=loss)
    if not images:  # encoders have no accuracy
        check_models(tmp_path, images=images)


@pytest.mark.slow
def test_a_site_that_was_away_at_the_end_gets_its_model_later(kits: Kits, tmp_path: Path) -> None:
    write_rows(tmp_path)
    kits.serve(recipe_of("fedlog"), tmp_path)
    path = tmp_path / "run/checkpoint/sites.json"
    written = RunStateFile.open(tmp_path / "run", NAMES)
    assert written.state.finished == (0, 1, 2)
    written.state = written.state.model_copy(update={"finished": (0, 1)})
    written.write()
    shutil.rmtree(tmp_path / "ulm" / MODELS)
    kits.serve(recipe_of("fedlog"), tmp_path, ["ulm"])
    assert len(list((tmp_path / "ulm" / MODELS).iterdir())) == 1
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "ulm").rglob("*")}
    assert modes == {0}, "only the owner can read a site's state and models"
    assert json.loads(path.read_text())["finished"] == [0, 1, 2]
    check_models(tmp_path, images=False)
    (place,) = (tmp_path / "ulm" / MODELS).iterdir()
    with pytest.raises(MethodError, match="is a site's own model, which keeps no messages"):
        forget(place, 0)
    path.unlink()  # seen: another run, and each site's budget was charged again
    with pytest.raises(CheckpointError, match=r"sites\.json is missing: put it back from a copy"):
        kits.serve(recipe_of("fedlog"), tmp_path)
