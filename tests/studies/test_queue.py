"""The queue of results: its order, what fits into the time, stops and starts, runs that are cut."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

import commands
from commands import Command, wait_until
from fedgist.cli.queue_runs import jobs_of_command
from fedgist.cli.study_commands import JOBS_OF
from fedgist.errors import RecipeError
from fedgist.recipe.reading import make
from fedgist.runs.finished.run_reader import read_run
from fedgist.studies.archive import Archive
from fedgist.studies.job import Event, Job, difference
from fedgist.studies.queue import (
    MOST_CUT,
    Clock,
    CutRuns,
    Experiment,
    Run,
    in_order,
    next_jobs,
    read_queue,
    split,
)

SMALL = (
    "--set data.train_rows=100 --set clients.num_clients=4 --set train.local_epochs=1 "
    "--set 'clients.architectures={}'"
)


def experiment(of: str = "page one", cost: float = 1.0, **more: object) -> Experiment:
    return Experiment.model_validate({"of": of, "command": "fedgist", "cost": cost, **more})


def job(name: str, folder: Path, seed: int = 0, rounds: int = 10) -> Job:
    recipe = make({"seed": seed, "method": {"name": "local"}, "train": {"num_rounds": rounds}})
    return Job(f"{name} seed {seed}", recipe, folder / name / f"seed-{seed}")


def queue_in(folder: Path, *experiments: str) -> Path:
    """A queue in a checkout's place: docs/results/queue.toml below the folder."""
    path = folder / "docs" / "results" / "queue.toml"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(experiments))
    return path


def entry(command: str, of: str = "page one", **more: object) -> str:
    pairs = {"of": of, "command": command, "cost": 1.0, **more}
    return "[[experiments]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in pairs.items())


# order


def test_the_first_seed_of_every_method_comes_before_the_second_of_one(tmp_path: Path) -> None:
    jobs = [job(name, tmp_path, seed) for name in ("a", "b") for seed in (0, 1)]
    runs = in_order([experiment()], lambda _: jobs, on_gpu=False)
    assert [run.job.name for run in runs] == ["a seed 0", "b seed 0", "a seed 1", "b seed 1"]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_wants_a_gpu_is_first_on_one_and_last_without(tmp_path: Path, device: str) -> None:
    both = [experiment("gpu", gpu=True), experiment("cpu")]
    first, _ = in_order(both, lambda of: [job(of.of, tmp_path)], on_gpu=device == "gpu")
    assert first.of.of == device


def test_seeds_are_divided_and_no_run_is_in_the_queue_twice(tmp_path: Path) -> None:
    early, late = experiment("page early", seeds=1), experiment("page late")
    jobs = [job("a", tmp_path, seed) for seed in (5, 6)]
    runs = in_order([early, late], lambda _: jobs, on_gpu=False)
    assert [(run.of.of, run.job.recipe.seed) for run in runs] == [
        ("page early", 5),
        ("page late", 6),
    ]


# time


def test_a_run_begins_if_it_fits_one_and_a_half_times(tmp_path: Path) -> None:
    run = Run(job("a", tmp_path), experiment(cost=100))
    clock = Clock(hours=149 / 3600, round_s=1.0)
    assert not clock.fits(run)
    assert Clock(hours=151 / 3600, round_s=1.0).fits(run)
    assert Clock(hours=None, round_s=1e9).fits(run)
    assert clock.fits(Run(run.job, experiment(cost=100, cut=True)))
    assert not Clock(hours=0.0, round_s=1.0).fits(Run(run.job, experiment(cut=True)))


def test_what_was_done_of_a_run_costs_nothing_more(tmp_path: Path) -> None:
    run = Run(job("a", tmp_path), experiment(cost=100))
    assert run.cost() == 100
    run.job.folder.mkdir(parents=True)
    lines = [{"round": number} for number in range(1, 5)]
    (run.job.folder / "rounds.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert run.cost() == pytest.approx(60)


def test_the_speed_of_the_machine_is_learned_from_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run, clock = Run(job("a", tmp_path), experiment(cost=50)), Clock(None, round_s=1.0)
    assert clock.seconds(10) == 10
    clock.saw(run, Event("began"))
    for _ in range(3):
        now[0] += 20.0  # of ten rounds, each a cost of 5
        clock.saw(run, Event("round", line={"round": 1}))
    assert clock.seconds(10) == pytest.approx(40)


def test_the_first_run_that_fits_comes_next(tmp_path: Path) -> None:
    long = Run(job("long", tmp_path), experiment(cost=1000))
    short = Run(job("short", tmp_path), experiment(cost=1))
    waiting = [long, short]
    jobs = list(next_jobs(waiting, Clock(0.1, 1.0), CutRuns(tmp_path / "q", tmp_path)))
    assert jobs == [short.job]
    assert waiting == [long]


# runs that are cut


def test_an_unfinished_run_goes_on_elsewhere_and_is_removed_at_its_end(tmp_path: Path) -> None:
    kept = tmp_path / "queue"
    here, there = (Run(job("a", tmp_path / name), experiment(cut=True)) for name in "xy")
    here.job.folder.mkdir(parents=True)
    (here.job.folder / "rounds.jsonl").write_text('{"round": 1}\n')
    assert CutRuns(kept, tmp_path / "x").keep(here) == ""
    other = CutRuns(kept, tmp_path / "y")
    other.restore(there)
    assert (there.job.folder / "rounds.jsonl").read_text() == '{"round": 1}\n'
    (there.job.folder / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    other.restore(there)  # what is further here stays
    assert len((there.job.folder / "rounds.jsonl").read_text().splitlines()) == 2
    other.remove(there)
    assert not kept.exists()


def test_a_large_unfinished_run_is_not_kept_and_that_is_said(tmp_path: Path) -> None:
    run = Run(job("a", tmp_path / "x"), experiment(cut=True))
    run.job.folder.mkdir(parents=True)
    with (run.job.folder / "state").open("wb") as file:
        file.truncate(MOST_CUT + 1)
    assert "20 MB: only here can it go on" in CutRuns(tmp_path / "q", tmp_path / "x").keep(run)
    assert not (tmp_path / "q").exists()


# commands


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("fedgist run demo", "expected fedgist sweep or fedgist reproduce"),
        ("python docs/x.py", "expected fedgist sweep"),
        ("fedgist sweep demo --grid method.name=local", "it has no --archive"),
        ("fedgist sweep demo --grids method.name=local --archive x", "--grids"),
    ],
)
def test_a_command_that_makes_no_runs_is_refused(tmp_path: Path, command: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        jobs_of_command(command, JOBS_OF, tmp_path)


@pytest.mark.parametrize("text", ["experiments = 3", "[[experiments]]\nof = 'x'", "a = ["])
def test_a_queue_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "queue.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"queue\.toml: "):
        read_queue(path)
    with pytest.raises(RecipeError, match="no such file; a checkout of fedgist has"):
        read_queue(tmp_path / "none.toml")


def test_a_hyper_parameter_that_is_the_default_is_no_difference() -> None:
    stated = make({"method": {"name": "fedlog", "nu": 1.0}})
    unstated, other = make({}), make({"method": {"name": "fedlog", "nu": 2.0}})
    assert difference(stated, unstated) is None
    assert "method.nu" in (difference(other, unstated) or "")


# the whole


@pytest.mark.slow
def test_a_queue_is_stopped_started_and_ends(tmp_path: Path) -> None:
    sweep = f"fedgist sweep demo --grid method.name=local,fedavg {SMALL}"
    long = f"{sweep} --set train.num_rounds=100 --archive docs/results/data/long"
    short = f"{sweep} --set train.num_rounds=2 --archive docs/results/data/short --seeds 2"
    path = queue_in(tmp_path, entry(long, cut=True), entry(short, of="page two", cells=4))
    words = ["reproduce", "all", "--jobs", "2"]
    planned = commands.fedgist(*words, "--plan", cwd=tmp_path)
    assert "0 of 6 runs are in the archive" in " ".join(planned.stdout.split())
    assert not (tmp_path / "runs").exists()
    first = Command([*words], tmp_path)
    wait_until(lambda: len(list((tmp_path / "runs").rglob("state.safetensors"))) == 2)
    first.signal(signal.SIGINT)
    stopped = first.end()
    assert "stopped; what was running is saved" in stopped.stderr
    data = path.parent / "data"
    kept = path.with_suffix("")
    assert len(list(kept.rglob("rounds.jsonl"))) == 2
    # elsewhere: the folder of the runs is lost, what was kept goes on
    (tmp_path / "runs").rename(tmp_path / "lost")
    ended = commands.fedgist(*words, cwd=tmp_path)
    assert "6 of 6 runs are in the archive" in " ".join(ended.stdout.split())
    assert len(list(data.rglob("seed-*.csv"))) == 6
    assert not kept.exists()
    whole = read_run(data / "long" / "method.name=local" / "seed-0.csv")
    assert whole.done == 100
    assert whole.command == long.replace(" --archive docs/results/data/long", "")
    again = commands.fedgist(*words, cwd=tmp_path)  # nothing is left to do
    assert "6 of 6" in again.stdout


@pytest.mark.slow
def test_when_the_hours_are_over_a_cut_run_is_saved_and_kept(tmp_path: Path) -> None:
    sweep = f"fedgist sweep demo --grid method.name=local {SMALL} --set train.num_rounds=100000"
    path = queue_in(tmp_path, entry(f"{sweep} --archive docs/results/data/a", cut=True))
    done = commands.fedgist("reproduce", "all", "--hours", "0.001", "--jobs", "1", cwd=tmp_path)
    assert "0 of 1 runs are in the archive" in " ".join(done.stdout.split())
    (kept,) = path.with_suffix("").rglob("rounds.jsonl")
    (here,) = (tmp_path / "runs").rglob("rounds.jsonl")
    assert kept.read_bytes() == here.read_bytes() != b""


@pytest.mark.slow
def test_with_too_little_time_nothing_begins_and_faults_are_named(tmp_path: Path) -> None:
    sweep = f"fedgist sweep demo --grid method.name=local {SMALL} --set train.num_rounds=1"
    costly = entry(f"{sweep} --archive docs/results/data/a", cost=1e6)
    path = queue_in(tmp_path, costly, entry(f"{sweep} --archive docs/results/data/b", cost=1.0))
    for _ in range(2):  # the second finds one run in the archive, and does nothing
        done = commands.fedgist("reproduce", "all", "--hours", "0.1", "--jobs", "1", cwd=tmp_path)
        said = " ".join(done.stdout.split())
        assert "1 of 2 runs are in the archive" in said
        assert "or 27 h 46 min on an H200, one at a time" in said
    assert [file.parent.parent.name for file in path.parent.rglob("*.csv")] == ["b"]
    other = path.parent / "data" / "a" / "method.name=local" / "seed-0.csv"
    other.parent.mkdir(parents=True)
    other.write_text("nonsense")
    done = commands.fedgist("reproduce", "all", "--plan", cwd=tmp_path)
    assert "left out" in done.stderr
    assert str(other.relative_to(tmp_path)) in done.stderr
    refused = commands.fedgist("reproduce", "all", "--seeds", "2", cwd=tmp_path, code=2)
    assert "--seeds has no effect with all" in refused.stderr


def test_runs_of_other_settings_in_the_archive_are_left_out(tmp_path: Path) -> None:
    run = Run(job("a", tmp_path / "runs"), experiment())
    archive = Archive(tmp_path / "data", tmp_path / "runs")
    assert split([run], archive) == ([], [run], [])
