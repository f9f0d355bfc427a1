"""A run from Python, in a process whose threads, settings and pools are the user's."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch

import fedgist
from fedgist.engines.worker_pool import WorkerPool, default_readers, default_workers
from fedgist.errors import RecipeError
from fedgist.testing.small_worlds import blobs, rows

QUICK: dict[str, Any] = {
    "model": {"hidden": [5]},
    "train": {"num_rounds": 2, "batch_size": 5},
    "engine": {"workers": 1, "cohort_size": 3},
}
GIVEN: dict[str, Any] = {"data": blobs(), "clients": rows()}


def in_a_thread(function: Callable[[], object]) -> object:
    """Return what a function returns in another thread, or raises."""
    seen: list[object] = []

    def call() -> None:
        try:
            seen.append(function())
        except RecipeError as error:
            seen.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    return seen[0]


def test_one_run_at_a_time_and_a_run_within_a_callback() -> None:
    alone = fedgist.run(QUICK, **GIVEN)
    beside: list[object] = []

    def callback(line: Any) -> None:
        if line["round"] == 1:
            beside.append(in_a_thread(lambda: fedgist.run(QUICK, **GIVEN)))
            beside.append(fedgist.run(QUICK, **GIVEN).rounds[-1]["train/loss"])

    around = fedgist.run(QUICK, **GIVEN, callback=callback)
    assert "a run is under way in another thread" in str(beside[0])
    expected = alone.rounds[-1]["train/loss"]
    assert [around.rounds[-1]["train/loss"], beside[1]] == [expected, expected]
    later = in_a_thread(lambda: fedgist.run(QUICK, **GIVEN).rounds[-1]["train/loss"])
    assert later == expected


@contextlib.contextmanager
def default_type(kind: torch.dtype) -> Any:
    """Set torch's default type within a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (lambda: default_type(torch.float64), "torch's default type is torch.float64"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "leave torch.autocast before a run"),
        (torch.inference_mode, "leave torch.inference_mode before a run"),
    ],
)
def test_settings_of_torch_in_which_no_run_is_right(setting: Any, says: str) -> None:
    with setting(), pytest.raises(RecipeError, match=says):
        fedgist.run(QUICK, **GIVEN)
    assert fedgist.run(QUICK, **GIVEN).rounds  # the refused run is over


def of_a_daemon(_: object) -> tuple[int, int, str]:
    """Return the workers and readers of a daemon, and why it has no more."""
    try:
        WorkerPool(print, 2).start()
    except RecipeError as error:
        return default_workers("cpu"), default_readers(1), str(error)
    return 0, 0, ""


def test_a_process_of_a_pool_starts_no_workers() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        ((workers, readers, says),) = pool.map(of_a_daemon, [0])
    assert (workers, readers) == (1, 0)
    assert "engine.workers = 2: a process of a multiprocessing.Pool starts no others" in says


@pytest.mark.filterwarnings("ignore:data.validation")  # a client of one row has none
def test_a_callback_may_change_its_line() -> None:
    best = {"evaluate": {"keep": "best_validation"}, "data": {"validation": 0.3}}

    def change(line: Any) -> None:
        for name in [key for key in line if isinstance(line[key], float)]:
            line[name] = 1 - line[name]
        line.pop("round")

    plain, changed = (fedgist.run(QUICK | best, **GIVEN, callback=f) for f in (None, change))
    of_both = [
        {key: value for key, value in done.summary.items() if not key.startswith("time/")}
        for done in (plain, changed)
    ]
    assert of_both[0] == of_both[1]  # the final scores, and the round that was kept
    assert [line["train/loss"] for line in changed.rounds] == [
        line["train/loss"] for line in plain.rounds
    ]


def test_clients_by_labels_of_another_index_are_refused() -> None:
    given = blobs()
    shuffled = torch.randperm(len(given.y), generator=torch.Generator().manual_seed(1)).tolist()
    frame = pd.DataFrame(given.x.numpy()[shuffled], index=shuffled).add_prefix("c")
    tests = pd.DataFrame(given.x_test.numpy()).add_prefix("c")
    town = pd.Series(["Ulm", "Rom"] * len(frame))[: len(frame)]
    data = frame, given.y.numpy()[shuffled], tests, given.y_test.numpy()
    of_town = town[frame.index].groupby(town[frame.index])

    def names_of(clients: Any) -> tuple[str, ...]:
        return fedgist.run(QUICK, data=data, clients=clients).world.partition.names

    assert names_of(of_town.indices) == ("Rom", "Ulm")
    assert names_of({name: town[frame.index] == name for name in ("Ulm", "Rom")}) == ("Ulm", "Rom")
    for wrong in (of_town.groups, {name: town == name for name in ("Ulm", "Rom")}):
        with pytest.raises(RecipeError, match="its pandas labels are not those of the rows of x"):
            names_of(wrong)
    own = {"Ulm": pd.Index([5, 6]), "Rom": pd.Index([0])}  # the labels of test rows are numbers
    done = fedgist.run(QUICK, data=data, clients=of_town.indices, clients_test=own)
    assert done.world.partition.test[1].tolist() == [5, 6]
