"""Studies on a Ray cluster of two nodes: the table of one machine, also if a node is killed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from commands import Command, fedgist, wait_until
from fedgist.runs.files.run_directory import LOCK
from fedgist.runs.files.seals import seal_of
from ray_nodes import Nodes

pytestmark = pytest.mark.slow

GRID = ["sweep", "demo", "--grid", "method.name=fedlog,local", "--seeds", "2"]
SETTINGS = {"train.num_rounds": "16", "engine.cohort_size": "5", "engine.checkpoint_every": "4"}
SWEEP = [*GRID, *(word for k, v in SETTINGS.items() for word in ("--set", f"{k}={v}"))]


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sweep on this machine."""
    folder = tmp_path_factory.mktemp("here")
    fedgist(*SWEEP, "--out", "s", cwd=folder)
    return folder


def table_of(text: str) -> str:
    """Return the printed tables, behind the lines of progress."""
    return text[text.index("Accuracy") :]


def lines_of(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Return the lines of all runs, without times, by the run's folder."""
    found = {}
    for path in sorted(folder.rglob("rounds.jsonl")):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        kept = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
        found[str(path.parent.relative_to(folder))] = kept
    return found


def assert_as_here(folder: Path, printed: str, here: Path) -> None:
    assert lines_of(folder / "s") == lines_of(here / "s")
    assert len(lines_of(here / "s")) == 4
    again = fedgist(*SWEEP, "--out", "s", cwd=here).stdout  # nothing is left to do
    assert table_of(printed) == table_of(again)
    assert not any(seal_of(path).problems for path in (folder / "s").glob("*/*"))


def on_cluster(nodes: Nodes, folder: Path) -> Command:
    """Return the sweep, begun on the cluster."""
    return Command([*SWEEP, "--on", "ray", "--out", "s"], folder, {"RAY_ADDRESS": nodes.address})


@pytest.mark.environment
def test_a_sweep_over_two_nodes_of_which_one_is_killed_has_the_table_of_one_machine(
    nodes: Nodes, here: Path, tmp_path: Path
) -> None:
    command = Command(
        [*SWEEP, "--on", "ray", "--out", "s"], tmp_path, {"RAY_ADDRESS": nodes.address}
    )
    wait_until(lambda: bool(list(tmp_path.glob("s/*/*/checkpoint/state*"))) or not command.runs)
    assert command.runs, command.end()
    nodes.cluster.remove_node(nodes.second, allow_graceful=False)
    try:
        done = command.end()
    finally:
        nodes.add()
    assert done.returncode == 0, done.stderr
    assert_as_here(tmp_path, done.stdout, here)


@pytest.mark.environment
def test_a_sweep_whose_driver_is_killed_goes_on_by_the_same_command(
    nodes: Nodes, here: Path, tmp_path: Path
) -> None:
    command = Command(
        [*SWEEP, "--on", "ray", "--out", "s"], tmp_path, {"RAY_ADDRESS": nodes.address}
    )
    wait_until(lambda: len(list(tmp_path.glob("s/*/*/result.json"))) >= 2 or not command.runs)
    command.signal(signal.SIGKILL)
    command.end()
    wait_until(lambda: not nodes.actors("Place"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("s/*/*/result.json")}
    done = fedgist(*SWEEP, "--on", "ray", "--out", "s", cwd=tmp_path, RAY_ADDRESS=nodes.address)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert_as_here(tmp_path, done.stdout, here)


@pytest.mark.environment
def test_sigterm_saves_what_runs_on_the_cluster(nodes: Nodes, here: Path, tmp_path: Path) -> None:
    command = Command(
        [*SWEEP, "--on", "ray", "--out", "s"], tmp_path, {"RAY_ADDRESS": nodes.address}
    )
    wait_until(lambda: bool(list(tmp_path.glob("s/*/*/checkpoint/state*"))) or not command.runs)
    command.signal(signal.SIGTERM)  # Ray's own handler, set as it connected, ended the process
    done = command.end()
    assert done.returncode == 130
    assert "go on with: fedgist sweep demo" in done.stderr
    wait_until(lambda: not nodes.actors("Place"))
    done = fedgist(*SWEEP, "--on", "ray", "--out", "s", cwd=tmp_path, RAY_ADDRESS=nodes.address)
    assert_as_here(tmp_path, done.stdout, here)


@pytest.mark.environment
def test_a_search_runs_on_the_cluster(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text('["train.lr"]\nchoices = [0.001, 0.01]\n', "utf-8")
    words = ["tune", "demo", "--space", "space.toml", "--trials", "3", "--out", "t"]
    few = ["--set", "train.num_rounds=2"]
    done = fedgist(*words, *few, "--on", "ray", cwd=tmp_path, RAY_ADDRESS=nodes.address)
    assert "best of 3 trials" in done.stdout
    assert (tmp_path / "t" / "best.toml").exists()


@pytest.mark.environment
def test_what_the_cluster_cannot_do_is_an_error(nodes: Nodes, tmp_path: Path) -> None:
    words = ["sweep", "demo", "--grid", "train.lr=0.1,0.01", "--on", "ray"]
    for more, says in [
        (["--cores", "2"], "--cores 2 --gpus 0: no machine of the Ray cluster has room"),
        (["--gpus", "0.5"], "--cores 1 --gpus 0.5: no machine of the Ray cluster has room"),
        (["--set", "engine.name=ray"], "spreads one run, and --on ray many: choose one"),
    ]:
        done = fedgist(*words, *more, cwd=tmp_path, code=2, RAY_ADDRESS=nodes.address)
        assert says in re.sub(r"\s+", " ", done.stderr)


def test_options_of_a_cluster_are_refused_without_one(tmp_path: Path) -> None:
    words = ["sweep", "demo", "--grid", "train.lr=0.1,0.01"]
    done = fedgist(*words, "--cores", "2", cwd=tmp_path, code=2)
    assert "--cores and --gpus are for --on ray" in done.stderr
    done = fedgist(*words, "--on", "rya", cwd=tmp_path, code=2)
    assert "unknown --on 'rya'; did you mean 'ray'" in done.stderr


@pytest.mark.environment
def test_a_runs_files_are_read_without_its_lock_and_unfinished_files(tmp_path: Path) -> None:
    from fedgist.studies.ray_jobs import read_files

    for name in ("rounds.jsonl", "checkpoint/state.safetensors", str(LOCK), ".recipe.toml.7"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, "utf-8")
    files = read_files(tmp_path)
    assert list(files) == ["checkpoint/state.safetensors", "rounds.jsonl"]
    assert files["rounds.jsonl"] == b"rounds.jsonl"
