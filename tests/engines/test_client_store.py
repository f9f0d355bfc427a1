"""What clients keep, in memory or in a file: the same bits, and gone with the run."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedgist
from fedgist.errors import DiskFullError, OutputError
from fedgist.runs.files.checkpoint import load
from fedgist.training import client_store
from fedgist.training.client_store import ClientStore

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only on Linux are clients' states in files"
)
RECIPE: dict[str, Any] = {
    "data": {"train_rows": 60},
    "clients": {"num_clients": 4},
    "method": {"name": "fedper"},
    "train": {"num_rounds": 3, "optimizer": "adam", "optimizer_memory": "run"},
    "engine": {"workers": 2, "cohort_size": 2, "checkpoint_every": 1},
}
TIGHT = {"engine": RECIPE["engine"] | {"memory_limit": 1}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(client_store, "user_cache_path", lambda _: tmp_path / "cache")
    return tmp_path / "cache"


SHAPES = st.lists(st.integers(0, 5), max_size=2).map(tuple)
TYPES = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.float64])


@settings(deadline=None, max_examples=60)
@given(
    like=st.dictionaries(st.text("abc/", min_size=1), st.tuples(SHAPES, TYPES), max_size=4),
    clients=st.lists(st.integers(0, 10**9), unique=True, max_size=6),
    data=st.data(),
)
def test_a_file_keeps_what_memory_keeps(
    like: dict[str, tuple[tuple[int, ...], torch.dtype]], clients: list[int], data: st.DataObject
) -> None:
    # rejects arrays that overlap in the file, and pages that are dropped before they are written
    first = {name: torch.zeros(shape, dtype=kind) for name, (shape, kind) in like.items()}
    stores = [ClientStore(clients, first, "cpu", in_file=in_file) for in_file in (False, True)]
    for number in range(data.draw(st.integers(0, 5))):
        some = data.draw(st.lists(st.sampled_from(clients), unique=True)) if clients else []
        draw = torch.Generator().manual_seed(number)
        values = {
            name: torch.randint(0, 99, (len(some), *a.shape), generator=draw).to(a.dtype)
            for name, a in first.items()
        }
        for store in stores:
            store.put(some, values)
    again = ClientStore(clients, first, "cpu", in_file=True)
    again.restore(stores[0].state())
    for store in (stores[1], again):
        assert_equal(store.state(), stores[0].state())
        assert store.absent(clients) == stores[0].absent(clients)
        assert_equal(store.get(clients), stores[0].get(clients))


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert torch.equal(array, b[name]), name


def test_a_run_whose_state_is_in_a_file_has_the_same_bits_and_says_so(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = fedgist.run(RECIPE, out=tmp_path / "plain", progress=False)
    said = capsys.readouterr()
    assert "absent clients" not in said.out + said.err
    tight = fedgist.run(RECIPE | TIGHT, out=tmp_path / "tight", progress=True)
    said = capsys.readouterr()
    words = f"is in a file of {own_cache / 'state'} (engine.memory_limit)"
    assert words in " ".join((said.out + said.err).split())
    assert [line["train/loss"] for line in tight.rounds] == [
        line["train/loss"] for line in plain.rounds
    ]
    states = [load(tmp_path / name) for name in ("plain", "tight")]
    assert all(states)
    assert_equal(*(dict(state.clients) for state in states if state))
    assert list((own_cache / "state").iterdir()) == []  # a file without a name


def test_a_resumed_run_reads_its_state_back_into_a_file(tmp_path: Path) -> None:
    whole = fedgist.run(RECIPE, out=tmp_path / "whole", progress=False)

    class StopError(Exception):
        pass

    def stop(_: object) -> None:
        raise StopError

    with pytest.raises(StopError):
        fedgist.run(RECIPE | TIGHT, out=tmp_path / "run", progress=False, callback=stop)
    again = fedgist.run(RECIPE | TIGHT, out=tmp_path / "run", resume=True, progress=False)
    assert len(again.rounds) == 3
    assert again.rounds[-1]["train/loss"] == whole.rounds[-1]["train/loss"]


def test_a_full_disk_and_a_cache_that_cannot_be_written_are_named(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.write_text("a file, not a folder")
    with pytest.raises(OutputError, match=r"absent clients .* raise engine.memory_limit"):
        fedgist.run(RECIPE | TIGHT, out=tmp_path / "run", progress=False)
    own_cache.unlink()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match=r"absent clients .* No space left on device; free"):
        fedgist.run(RECIPE | TIGHT, out=tmp_path / "run", overwrite=True, progress=False)
