"""Runs that are watched from their files; their rounds in TensorBoard and MLflow, read back."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedgist.errors import ReportError
from fedgist.report.terminal import watch
from fedgist.report.tracking.sending import Sender
from fedgist.report.tracking.tracker_names import tracker
from fedgist.runs.files.run_directory import LOCK, locked
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import find

from written import write_run  # isort: skip


def read_run(folder: Path) -> FinishedRun:
    return find([folder])[0]


def add_round(folder: Path, number: int, accuracy: float) -> None:
    line = {
        "round": number,
        "eval/client/accuracy_mean": accuracy,
        "comm/up_bytes": 5,
        "comm/down_bytes": 5,
    }
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_a_run_is_running_until_it_is_finished_or_silent(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [0.5, 0.6], planned=12, result=False))
    assert watch.state(run) == "running"
    assert watch.left(run) == 10.0  # a second a round
    old = time.time() - 3600
    os.utime(run.folder / "rounds.jsonl", (old, old))
    os.utime(run.folder / "recipe.toml", (old, old))
    assert watch.state(run) == "silent for 1 h 00 min"
    whole = read_run(write_run(tmp_path / "b", [0.5, 0.6]))
    assert watch.state(whole) == "finished"
    assert watch.left(whole) is None


def test_a_run_that_nobody_holds_is_stopped_and_listed_after_running_ones(tmp_path: Path) -> None:
    finished = write_run(tmp_path / "a", [0.5, 0.6])
    stopped = write_run(tmp_path / "b", [0.5, 0.6], planned=12, result=False)
    running = write_run(tmp_path / "c", [0.5, 0.6], planned=12, result=False)
    for folder in (stopped, running):
        old = time.time() - 50
        for name in ("rounds.jsonl", "recipe.toml"):
            os.utime(folder / name, (old, old))
    (stopped / LOCK).parent.mkdir(exist_ok=True)
    (stopped / LOCK).touch()
    with locked(running):
        runs = watch.in_order(find([tmp_path]))
        assert [run.folder for run in runs] == [running, stopped, finished]
        assert [watch.state(run) for run in runs] == ["running", "stopped", "finished"]
        assert [watch.is_over(run) for run in runs] == [False, True, True]
        assert watch.lines(runs)[0].endswith("running, 10.0 s left")
    assert watch.state(read_run(running)) == "stopped"


@pytest.mark.parametrize(
    ("age", "held", "unheld"),
    [
        (86400.0, "silent for 24 h 00 min", "stopped"),
        (50.0, "running", "stopped"),
        (0.0, "running", "running"),
        (-5.0, "running", "running"),  # by a machine whose clock is ahead
        (-86400.0, "running", "stopped"),  # seen: running for ever
    ],
)
def test_files_of_any_age_tell_a_held_run_from_a_dead_one(
    tmp_path: Path, age: float, held: str, unheld: str
) -> None:
    folder = write_run(tmp_path / "a", [0.5, 0.6], planned=12, result=False)
    then = time.time() - age
    for name in ("rounds.jsonl", "recipe.toml"):
        os.utime(folder / name, (then, then))
    with locked(folder):
        assert watch.state(read_run(folder)) == held
    assert watch.state(read_run(folder)) == unheld


def test_a_run_that_has_not_done_a_round_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [], planned=3, result=False)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(watch.overview(find([tmp_path])))
    assert "0/3" in console.export_text()
    assert watch.lines(find([tmp_path]))[0].endswith("round 0/3 accuracy - running")


def test_of_a_run_with_validation_rows_those_are_shown(tmp_path: Path) -> None:
    # rejects test accuracy: whoever is tuning must not see it
    write_run(tmp_path / "a", [0.5, 0.6], columns={"eval/validation/accuracy_mean": 0.25})
    assert watch.lines(find([tmp_path]))[0].endswith("accuracy 25.00 % (validation) finished")


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(1, 20))
def test_a_sparkline_is_as_wide_as_asked_and_ends_with_the_last(
    values: list[float], width: int
) -> None:
    text = watch.sparkline(values, width)
    assert len(text) == min(width, len(values))
    if len(text) > 1 and values[-1] == max(values) > min(values) == values[0]:
        assert (text[0], text[-1]) == ("▁", "█")


def scalars(folder: Path) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return [
        (event.step, round(event.value, 6)) for event in read.Scalars("eval/client/accuracy_mean")
    ]


def test_tensorboard_reads_every_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = write_run(tmp_path / "a", [0.5, 0.6], planned=4, result=False)
    live = Sender(tracker("tensorboard"))
    assert live.send_files(read_run(folder)) == 2
    add_round(folder, 3, 0.7)
    assert live.send_files(read_run(folder)) == 1
    assert live.send_files(read_run(folder)) == 0
    live.close()
    assert scalars(folder / "tensorboard") == [(1, 0.5), (2, 0.6), (3, 0.7)]
    again = Sender(tracker("tensorboard"))  # after a resume that cut the record back
    add_round(folder, 4, 0.8)
    again.send_files(read_run(folder))
    again.close()
    assert scalars(folder / "tensorboard") == [(1, 0.5), (2, 0.6), (3, 0.7), (4, 0.8)]


def test_only_files_of_its_own_are_replaced(tmp_path: Path) -> None:
    # seen: event files that somebody else wrote were deleted
    pytest.importorskip("tensorboard")
    folder = write_run(tmp_path / "run", [0.5])
    other = folder / "tensorboard" / "events.out.tfevents.1.host.1.0"
    other.parent.mkdir()
    other.write_bytes(b"someone else's")
    link = folder / "tensorboard" / "events.out.tfevents.2.host.1.0.fedgist"
    link.symlink_to(other)
    for _ in range(2):
        live = Sender(tracker("tensorboard"))
        live.send_files(read_run(folder))
        live.close()
    assert other.read_bytes() == b"someone else's"
    assert link.is_symlink()
    written = [path for path in other.parent.iterdir() if ".fedgist-" in path.name]
    assert len(written) == 1  # the second call replaced what the first one wrote


def test_two_runs_in_one_folder_keep_their_files(tmp_path: Path) -> None:
    # the last three parts of their paths are the same, and so is the folder below --track's
    pytest.importorskip("tensorboard")
    for root in "ab":
        live = Sender(tracker(f"tensorboard:{tmp_path / 'logs'}"))
        live.send_files(read_run(write_run(tmp_path / root / "x" / "y" / "z", [0.5])))
        live.close()
    assert len(list((tmp_path / "logs").glob("*/events*"))) == 2


def test_a_linked_folder_is_not_written_to(tmp_path: Path) -> None:
    # seen: event files of another project were deleted through a link
    pytest.importorskip("tensorboard")
    folder = write_run(tmp_path / "run", [0.5])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "tensorboard").symlink_to(elsewhere)
    with pytest.raises(ReportError, match=r"run/tensorboard is a link"):
        Sender(tracker("tensorboard")).send_files(read_run(folder))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of its database
def test_mlflow_tells_folders_apart_and_takes_any_name(tmp_path: Path) -> None:
    # seen: a quote was dropped from the tag, so that the runs of two folders were one
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'ml.db'}"
    for name in ("its", "it's", 'it"s', "a\x1bb"):
        folder = write_run(tmp_path / name, [0.5], columns={"server/$a_$//..": 1.5})
        for _ in range(2):
            live = Sender(tracker(f"mlflow:{uri}"))
            live.send_files(read_run(folder))
            live.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert len(runs) == 4
    tags = {run.data.tags["fedgist.folder"] for run in runs}
    assert {str(tmp_path / "it's"), str(tmp_path / 'it"s')} < tags
    assert {run.data.metrics["server/_a__"] for run in runs} == {1.5}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of its database
def test_mlflow_reads_rounds_settings_and_the_end(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'ml.db'}"
    folder = write_run(tmp_path / "a", [0.5, 0.6], planned=3, result=False)
    for _ in range(2):  # a second watcher goes on where the first one stopped
        live = Sender(tracker(f"mlflow:{uri}"))
        live.send_files(read_run(folder))
        live.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"  # nobody watches it any more
    add_round(folder, 3, 0.7)
    live = Sender(tracker(f"mlflow:{uri}"))
    assert live.send_files(read_run(folder)) == 1
    assert live.send_files(read_run(folder)) == 0
    live.close()
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "eval/client/accuracy_mean")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.5), (2, 0.6), (3, 0.7)]
    assert run.data.params["method.name"] == "fedlog"
    assert run.info.status == "FINISHED"


def test_an_unknown_tracker_is_refused_with_the_choices() -> None:
    with pytest.raises(ReportError, match="unknown tracker 'wandbb'; did you mean 'wandb'"):
        tracker("wandbb")
