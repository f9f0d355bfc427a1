"""Signals that stop commands: to the process, its group, one worker; from timeout, a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from commands import (
    Command,
    fedgist,
    ignoring_hangups,
    in_own_group,
    in_terminal,
    lines_so_far,
    python,
    under_timeout,
    wait_for_ends,
    wait_until,
)
from fedgist.engines.stop_signals import AS_ONE_S, stoppable
from fedgist.runs.files import checkpoint
from interrupted import bare

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ALL = [
    "train.num_rounds=30",
    "train.local_epochs=2",
    "engine.checkpoint_every=100",
    "engine.cohort_size=3",
]
WORKERS = ["data.train_rows=300", "engine.workers=2"]
READERS = ["data.name=npy", "data.path=rows", "data.read=lazy", "engine.workers=2"]
READERS += ["engine.readers=1", "data.mean=[0.5]", "data.std=[1.0]"]


def settings(*texts: str) -> list[str]:
    return [word for text in (*ALL, *texts) for word in ("--set", text)]


def write_rows(folder: Path) -> None:
    folder.mkdir()
    draws = np.random.default_rng(0)
    np.save(folder / "x.npy", draws.random((300, 1, 8, 8), dtype=np.float32))
    np.save(folder / "y.npy", draws.integers(0, 10, 300))


def lines(folder: Path) -> list[dict[str, object]]:
    return bare(json.loads(line) for line in lines_so_far(folder / "rounds.jsonl"))


def begun(
    tmp_path: Path, extra: list[str], work: Callable[[list[str]], None] = in_own_group
) -> Command:
    """Begin a run, and return it when it has done two rounds."""
    command = Command(["run", "demo", *settings(*extra), "--out", "cut"], tmp_path, work=work)
    wait_until(lambda: len(lines(tmp_path / "cut")) >= 2 or not command.runs)
    return command


def is_saved(tmp_path: Path) -> list[dict[str, object]]:
    """Check that no recorded round is lost, and return the record."""
    done, saved = lines(tmp_path / "cut"), checkpoint.load(tmp_path / "cut")
    assert saved is not None
    assert saved.round == len(done) < 30
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "extra"),
    [(signal.SIGINT, WORKERS), (signal.SIGTERM, WORKERS), (signal.SIGHUP, READERS)],
)
def test_a_signal_to_the_group_finishes_the_round_and_saves(
    tmp_path: Path, number: signal.Signals, extra: list[str]
) -> None:
    # workers that died of the signal ended the run with words about memory
    write_rows(tmp_path / "rows")
    command = begun(tmp_path, extra)
    command.signal_group(number)
    done = command.end()
    assert (done.returncode, "died" in done.stderr) == (130, False), done.stderr
    assert "resume with: fedgist run --resume cut" in done.stderr
    stopped = is_saved(tmp_path)
    fedgist("run", "--resume", "cut", "--quiet", cwd=tmp_path)
    fedgist("run", "demo", *settings(*extra), "--quiet", "--out", "whole", cwd=tmp_path)
    whole, again = lines(tmp_path / "whole"), lines(tmp_path / "cut")
    assert whole[: len(stopped)] == stopped
    assert [{k: v for k, v in line.items() if k != "events"} for line in again] == whole


@pytest.mark.slow
def test_workers_and_readers_do_not_heed_a_signal_to_them_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    command = begun(tmp_path, READERS)
    others = command.workers()
    assert len(others) >= 4, "two workers and a reader of each"
    for process in others:
        for number in STOPS:
            process.send_signal(number)
    done = command.end()
    assert (done.returncode, len(lines(tmp_path / "cut"))) == (0, 30), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPS)
def test_timeout_signals_twice_and_means_one_stop(tmp_path: Path, number: signal.Signals) -> None:
    command = begun(tmp_path, WORKERS, under_timeout)
    command.signal(number)
    done = command.end()
    assert done.returncode in {124, 130}, done.stderr
    assert "resume with: fedgist run --resume cut" in done.stderr
    is_saved(tmp_path)


@pytest.mark.slow
def test_a_closed_terminal_saves_the_run_though_nothing_can_be_printed(tmp_path: Path) -> None:
    command = begun(tmp_path, WORKERS, in_terminal)
    (tmp_path / "closes").touch()
    assert command.end().returncode == 130
    is_saved(tmp_path)


@pytest.mark.slow
def test_nohup_keeps_its_meaning(tmp_path: Path) -> None:
    command = begun(tmp_path, WORKERS, ignoring_hangups)
    command.signal_group(signal.SIGHUP)
    done = command.end()
    assert (done.returncode, len(lines(tmp_path / "cut"))) == (0, 30), done.stderr


SWEEP = ["sweep", "demo", "--grid", "method.name=fedlog,fedavg", "--seeds", "1", "--jobs", "2"]
SWEEP += ["--out", "sweep", *settings("data.train_rows=300")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.environment)],
)
@pytest.mark.parametrize("loading", [False, True])
def test_a_signal_to_all_processes_of_a_sweep_stops_and_saves_them(
    tmp_path: Path, number: signal.Signals, *, loading: bool
) -> None:
    # systemctl stop signals them all; a job that was still loading heard it as if it were another
    command = Command(SWEEP, tmp_path, work=in_own_group)

    def records() -> list[list[dict[str, object]]]:
        return [lines(path.parent) for path in tmp_path.glob("sweep/*/*/rounds.jsonl")]

    wait_until(lambda: bool(command.workers()) if loading else any(records()))
    others = command.workers()
    for process in [*others, psutil.Process(command.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    done = command.end()
    wait_for_ends(others)
    assert (done.returncode, "failed" in done.stderr) == (130, False), done.stderr
    assert all(len(record) < 30 for record in records())
    for path in tmp_path.glob("sweep/*/*/rounds.jsonl"):
        saved = checkpoint.load(path.parent)
        assert saved is not None
        assert saved.round == len(lines(path.parent))
    fedgist(*SWEEP, cwd=tmp_path)
    assert [len(record) for record in records()] == [30, 30]


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPS)
def test_a_page_ends_at_each_signal_alike(tmp_path: Path, number: signal.Signals) -> None:
    command = Command(["watch", "later", "--serve"], tmp_path, work=in_own_group)
    wait_until(lambda: "ends the page" in command.printed() or not command.runs)
    command.signal_group(number)
    assert command.end().returncode == 0


@pytest.mark.slow
def test_a_pool_that_nobody_closes_does_not_keep_its_process(tmp_path: Path) -> None:
    # multiprocessing ends such workers with SIGTERM, and waits
    script = "from fedgist.engines.worker_pool import WorkerPool\n"
    script += "pool = WorkerPool(abs, 2)\nassert pool.run([-1, -2]) == [1, 2]\n"
    (tmp_path / "script.py").write_text(script)
    python(tmp_path / "script.py", tmp_path)


@pytest.mark.parametrize("first", STOPS)
@pytest.mark.parametrize("second", STOPS)
def test_a_second_signal_ends_at_once_unless_it_belongs_to_the_first(
    first: signal.Signals, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = [100.0], list[str]()
    monkeypatch.setattr("fedgist.engines.stop_signals.time.monotonic", lambda: now[0])
    monkeypatch.setattr("fedgist.engines.stop_signals._heeded", lambda: STOPS)  # also under nohup
    before = [signal.getsignal(number) for number in STOPS]
    with stoppable(lambda: calls.append("save"), lambda: calls.append("at once")) as stopping:
        assert not stopping()
        os.kill(os.getpid(), first)
        now[0] += AS_ONE_S / 2
        os.kill(os.getpid(), second)
        assert stopping()
        assert calls == ["save"]
        now[0] += AS_ONE_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
    assert calls == ["save", "at once"]
    assert [signal.getsignal(number) for number in STOPS] == before
