"""A run on lazy rows is the run on the same rows in memory, however many processes read them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fedgist
from fedgist.core import random
from fedgist.data.row_seeds import seeds_of
from fedgist.engines import reader_pool
from fedgist.errors import DataError, RecipeError, WorkerError
from fedgist.runs.files import checkpoint
from interrupted import StopAfter
from lazy.lazy_worlds import RECIPE, Blobs, Files, record, with_data, with_engine, write_rows
from pretended_cluster import pretend

pytestmark = pytest.mark.slow

SETS = (Blobs(60), Blobs(21))
NOISY = (Blobs(60, noisy=True), Blobs(21, noisy=True))
HELD_OUT = {"data": RECIPE["data"] | {"test_fraction": 0.3}}
ENGINES = [
    {"workers": 1, "readers": 0},
    {"workers": 1, "readers": 1},
    {"workers": 1, "readers": 2},
    {"workers": 2, "readers": 0},
    {"workers": 2, "readers": 1},
]


@pytest.mark.parametrize("method", ["fedavg", "fedlog"])
def test_a_run_is_that_in_memory_bit_for_bit(method: str) -> None:
    named = {"method": {"name": method}}
    expected = record(with_data(read="once") | named, SETS)
    for engine in ENGINES:
        assert record(with_engine(**engine) | named, SETS) == expected, engine


def test_a_client_alone_has_the_bits_in_memory_too() -> None:
    for engine in ({"cohort_size": 1}, {"name": "loopback"}):
        expected = record(
            with_data(read="once") | {"engine": with_engine(**engine)["engine"]}, SETS
        )
        assert record(with_engine(**engine), SETS) == expected, engine


def test_random_transforms_do_not_depend_on_the_processes_that_read() -> None:
    expected = record(RECIPE, NOISY)
    assert expected != record(with_data(read="once"), NOISY)  # drawn once, and frozen
    for engine in ENGINES[1:]:
        assert record(with_engine(**engine), NOISY) == expected, engine
    with pytest.warns(UserWarning, match="1 client is in no mean of the result"):
        assert record({**RECIPE, "seed": 1}, NOISY) != expected


@pytest.mark.parametrize("data", [SETS, NOISY], ids=["", "transforms"])
def test_a_cluster_reads_its_own_rows_and_has_the_bits_of_as_many_shards_here(
    data: tuple[Blobs, Blobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = pretend(monkeypatch)
    expected = record(with_engine(shards=2, workers=2), data)
    assert record(with_engine(shards=2, name="ray"), data) == expected
    assert len(clusters) == 1


def test_random_transforms_over_a_wire_are_those_of_clients_alone() -> None:
    plan = {"mlp": {"cohort_size": 1, "stack": False}}
    alone = record(with_engine(plans=plan), NOISY)
    over_wire = record(with_engine(name="loopback"), NOISY)
    for line, other in zip(alone, over_wire, strict=True):
        assert line["eval/client/loss_mean"] == pytest.approx(
            other["eval/client/loss_mean"], rel=1e-5
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:privacy:UserWarning", "ignore:losses:UserWarning")
@pytest.mark.filterwarnings("ignore:simulated:UserWarning")
@pytest.mark.parametrize("noisy", [False, True])
def test_a_private_run_of_records_reads_rows_too(*, noisy: bool) -> None:
    steps = {"bodies": "dp_sgd", "sampling_rate": 0.5, "gradient_clip": 1.0}
    private = {"unit": "record", "epsilon": 5.0, "delta": 1e-3, "clip": 1.0, "where": "local"}
    parts = {"privacy": private | steps, "method": {"name": "fedlog"}}
    data = NOISY if noisy else SETS
    expected = record(RECIPE | parts, data)
    assert record(with_engine(workers=2, readers=1) | parts, data) == expected


def test_a_resumed_run_draws_what_the_uninterrupted_run_draws(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "rows")
    data = Files(folder, noisy=True)
    recipe = with_engine(checkpoint_every=1) | HELD_OUT
    whole = fedgist.run(recipe, data=data, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedgist.run(recipe, data=data, out=tmp_path / "cut", observer=StopAfter(2))
    again = fedgist.run(recipe, data=data, out=tmp_path / "cut", resume=True)
    for name, array in whole.server_run.checkpoint().server.items():
        assert torch.equal(array, again.server_run.checkpoint().server[name]), name


def test_a_changed_file_is_noticed_on_resume(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "rows")
    recipe = with_engine(checkpoint_every=1) | HELD_OUT
    with pytest.raises(KeyboardInterrupt):
        fedgist.run(recipe, data=Files(folder), out=tmp_path / "run", observer=StopAfter(2))
    os.utime(folder / "0003-0.npy", (1, 1))
    with pytest.raises(RecipeError, match=r"cannot go on: the data changed since"):
        fedgist.run(recipe, data=Files(folder), out=tmp_path / "run", resume=True)


def test_a_file_that_breaks_during_a_run_ends_it_with_an_error(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "rows")
    for engine in ({}, {"readers": 1}, {"workers": 2}):
        recipe = with_engine(checkpoint_every=1, **engine) | HELD_OUT
        broken = folder / "0003-0.npy"
        content = broken.read_bytes()

        def breaks(line: dict[str, Any], file: Path = broken) -> None:
            if line["round"] == 1:
                file.write_bytes(b"not an array")

        place = tmp_path / f"run-{len(engine)}-{engine}"
        with pytest.raises(DataError, match=r"row 3 .*0003-0\.npy.* cannot be read"):
            fedgist.run(recipe, data=Files(folder), out=place, callback=breaks)
        saved = checkpoint.load(place)
        assert saved is not None
        assert saved.round == 1
        broken.write_bytes(content)


def test_a_killed_reader_ends_the_run_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[reader_pool.ReaderPool] = []
    start = reader_pool.ReaderPool.start

    def seen(self: reader_pool.ReaderPool, workers: int) -> None:
        start(self, workers)
        started.append(self)

    monkeypatch.setattr(reader_pool.ReaderPool, "start", seen)

    def kill(line: dict[str, Any]) -> None:
        for process in started[-1].processes:
            os.kill(process.pid or 0, signal.SIGKILL)

    for workers in (1, 2):
        with pytest.raises(WorkerError, match="a process that reads rows died"):
            fedgist.run(with_engine(readers=1, workers=workers), data=SETS, callback=kill)


def test_the_readers_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    close = reader_pool.ReaderPool.close

    def seen(self: reader_pool.ReaderPool) -> None:
        pools.extend(self.processes)
        close(self)

    monkeypatch.setattr(reader_pool.ReaderPool, "close", seen)
    fedgist.run(with_engine(readers=2), data=SETS)
    assert len(pools) == 2
    assert not any(process.is_alive() for process in pools)


def test_a_canary_row_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = 12345.678

    class Marked(Blobs):
        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            x, y = super().__getitem__(row)
            x[0, 0, 0] = canary
            return x, y

    result = fedgist.run(with_engine(checkpoint_every=1), data=(Marked(60), Blobs(21)))
    state = result.server_run.checkpoint()
    for arrays in (state.server, state.clients):
        for name, array in arrays.items():
            assert not torch.isin(array.float(), torch.tensor(canary)).any(), name


def test_public_rows_are_read_once_into_memory() -> None:
    recipe = {**RECIPE, "method": {"name": "flesd"}, "objective": {"name": "simclr"}}
    recipe |= {"data": {**RECIPE["data"], "public": {"rows": 12}}}
    result = fedgist.run(recipe, data=SETS)
    assert result.world.public is not None
    assert result.world.public.x.shape == (12, 1, 4, 4)
    assert not result.world.public.x.is_meta


@pytest.mark.parametrize(
    "section",
    [
        {"evaluate": {"on": "global"}, "method": {"name": "fedavg"}},
        {"evaluate": {"on": "test"}},
        {"evaluate": {"probe": "logistic", "train": True}},
        {"data": {"validation": 0.2, "read": "lazy", "normalize": "client"}},
        {
            "data": {"held_out": 9, "read": "lazy", "mean": [0.0], "std": [1.0]},
            "method": {"name": "fedavg"},
        },
        {"data": {"train_rows": 40, "draw": "random", "read": "lazy"}},
        {"method": {"name": "centralized"}},
    ],
    ids=lambda section: str(section)[:60],
)
def test_every_way_of_scoring_and_splitting_is_that_in_memory(section: dict[str, Any]) -> None:
    lazy = RECIPE | section
    once = lazy | {"data": lazy["data"] | {"read": "once"}}
    assert record(lazy, SETS) == record(once, SETS)


def test_seeds_of_a_place_differ_between_places_and_keys() -> None:
    keys = random.fold(random.key(0), "client", torch.arange(3))
    seeds = seeds_of(keys, torch.zeros(3, 5, dtype=torch.int64))
    assert len(set(seeds.flatten().tolist())) == 15
    # alone and stacked
    assert torch.equal(seeds_of(keys[1:2], torch.zeros(1, 9, dtype=torch.int64))[0, :5], seeds[1])
