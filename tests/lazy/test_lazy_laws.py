"""The laws in a world whose rows are read when they are used; sites with such rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgist
from fedgist.core.tree import named
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import LazyRows
from fedgist.data.sources.map_rows import MapRows
from fedgist.errors import InputError
from fedgist.methods.fedavg import FedAvg
from fedgist.methods.fedlog import FedLog
from fedgist.methods.flesd import FLESD
from fedgist.testing import LAWS, Law, MethodUnderTest
from fedgist.testing.small_worlds import blobs, federation, law_world
from fedgist.testing.stages import stages
from fedgist.testing.wire_laws import canaries
from lazy.lazy_worlds import Files, write_rows
from sites_in_threads import Kits
from small_tasks import federated, numbers
from three_sites import NAMES

OTHERS = ("7", "10", "11b")  # these make or change rows of their own


class Pairs(torch.utils.data.Dataset[Any]):
    """The rows of tensors, one by one."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.x[row], 0


def read_when_used(data: Dataset) -> Dataset:
    """The same data, read lazily."""
    parts = (LazyRows.of(MapRows(Pairs(x), "rows")) for x in (data.x, data.x_test))
    return data.with_inputs(*parts)


SUBJECTS = {
    "fedavg": MethodUnderTest(FedAvg(), {"given": {"data": read_when_used(blobs())}}),
    "fedlog": MethodUnderTest(FedLog(), {"given": {"data": read_when_used(blobs())}}),
}
TRIED = [law for law in LAWS if law.name.split()[0] not in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("method", SUBJECTS)
@pytest.mark.parametrize("law", TRIED, ids=[law.name.split()[0] for law in TRIED])
def test_law(method: str, law: Law) -> None:
    law.try_on(SUBJECTS[method])


@pytest.mark.parametrize("method", [FedAvg(), FedLog(), FLESD()])
def test_no_number_of_a_row_is_in_a_message(method: Any) -> None:
    data = canaries()
    world = law_world(method, given={"data": read_when_used(data)})
    seen = 0
    for stage in stages(federation(world)):
        for _, message in stage.uploads:
            for array in named(message).values():
                assert not torch.isin(data.x[:, 0], array.flatten().float()).any()
                seen += 1
    assert seen


def test_every_byte_is_compared_if_it_is_asked_for(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "rows", 24)
    recipe: dict[str, Any] = {
        "data": {"read": "lazy", "test_fraction": 0.25, "mean": [0.0], "std": [1.0]},
        "clients": {"num_clients": 2},
        "partition": {"name": "iid"},
        "model": {"name": "mlp"},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 2},
    }
    for full in (False, True):
        out = tmp_path / f"run-{full}"
        fedgist.run(recipe, data=Files(folder), out=out, full_digest=full)
    file = min(folder.iterdir())
    before, array = file.stat(), np.load(file)
    np.save(file, array + 1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # the same size and time
    again: dict[str, Any] = {"data": Files(folder), "resume": True, "rounds": 2}
    assert len(fedgist.run(out=tmp_path / "run-False", **again).rounds) == 2
    with pytest.raises(InputError, match="all bytes of the rows changed"):
        fedgist.run(out=tmp_path / "run-True", **again)


@pytest.mark.slow
def test_a_site_reads_rows_when_they_are_used(tmp_path: Path) -> None:
    (tmp_path / "kits").mkdir()
    kits, data, lines = Kits.make(tmp_path / "kits"), numbers(), []
    assert data.clients is not None
    assert data.clients_test is not None
    for read in ("once", "lazy"):
        folder = tmp_path / read
        for number, name in enumerate(NAMES):
            place = folder / f"{name}-rows"
            place.mkdir(parents=True)
            train, test = data.clients == number, data.clients_test == number
            for key, array in (("x", data.x[train]), ("y", data.y[train])):
                np.save(place / f"{key}.npy", array.numpy())
            for key, array in (("x_test", data.x_test[test]), ("y_test", data.y_test[test])):
                np.save(place / f"{key}.npy", array.numpy())
        kits.serve(
            federated("regression", {"name": "fedavg"}, data),
            folder,
            source=f'name = "npy"\npath = "{{name}}-rows"\nread = "{read}"',
        )
        text = (folder / "run/rounds.jsonl").read_text()
        lines.append([part for part in text.split(",") if '"eval/' in part])
    assert lines[0]
    assert lines[0] == lines[1]
