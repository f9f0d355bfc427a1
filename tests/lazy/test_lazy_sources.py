"""Sources that are larger than memory: folders of images, mapped arrays, row groups, and more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import fedgist
from fedgist.data.division import Division
from fedgist.data.lazy_rows import held
from fedgist.data.sources import file_sizes, image_folder
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.user_rows import user_rows
from fedgist.errors import DataError, RecipeError
from fedgist.recipe.reading import read as read_recipe
from fedgist.runs.files.digests import of_all_rows
from lazy.lazy_worlds import RECIPE, Blobs, Files, record, write_rows

COUNT = 40


def folder_of_images(place: Path) -> dict[str, Any]:
    for row in range(COUNT):
        draw = np.random.default_rng(row)
        (place / str(row % 2)).mkdir(exist_ok=True, parents=True)
        shape = (6, 5) if row < 3 else (6, 5, 3)
        image = Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8))
        image.save(place / str(row % 2) / f"{row}.png")
    return {"name": "folder", "path": str(place)}


def npy_folder(place: Path) -> dict[str, Any]:
    place.mkdir()
    draw = np.random.default_rng(0)
    np.save(place / "x.npy", draw.integers(0, 256, (COUNT, 6, 5, 3), dtype=np.uint8))
    np.save(place / "y.npy", np.array(["b", "a"])[np.arange(COUNT) % 2])
    np.save(place / "client.npy", np.arange(COUNT) % 4)
    return {"name": "npy", "path": str(place)}


def npy_floats(place: Path) -> dict[str, Any]:
    section = npy_folder(place)
    np.save(place / "x.npy", np.random.default_rng(0).normal(size=(COUNT, 7)))
    np.save(place / "x_test.npy", np.random.default_rng(1).normal(size=(9, 7)))
    np.save(place / "y_test.npy", np.array(["a"] * 9))
    return section


def parquet_file(place: Path) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(COUNT, 3)), columns=list("abc"))
    frame["n"], frame["y"] = np.arange(COUNT), np.arange(COUNT) % 2
    frame.to_parquet(place.with_suffix(".parquet"), row_group_size=7)
    return {"name": "parquet", "path": str(place.with_suffix(".parquet")), "label": "y"}


SOURCES = [folder_of_images, npy_folder, npy_floats, parquet_file]


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_lazy_rows_are_those_in_memory(
    make: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    section = make(tmp_path / "rows")
    once, lazy = (load_data(**section, read=read) for read in ("once", "lazy"))
    assert once.lazy is None
    assert lazy.lazy is not None
    assert torch.equal(held(lazy.inputs, "x"), once.x)
    assert torch.equal(held(lazy.inputs_test, "x"), once.x_test)
    assert torch.equal(lazy.y, once.y)
    assert (lazy.classes, lazy.scale, lazy.facts.element) == (
        once.classes,
        once.scale,
        once.facts.element,
    )
    identity = lazy.lazy.source.reader.identity()
    assert identity is not None


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_a_run_on_a_lazy_source_is_that_in_memory(
    make: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    section = make(tmp_path / "rows")
    recipes = [RECIPE | {"data": section | {"read": read}} for read in ("once", "lazy")]
    runs = [fedgist.run(recipe).rounds for recipe in recipes]
    for line, other in zip(*runs, strict=True):
        assert {k: v for k, v in line.items() if "time/" not in k} == {
            k: v for k, v in other.items() if "time/" not in k
        }


def test_images_that_do_not_fit_are_read_lazily(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = folder_of_images(tmp_path / "rows") | {"image_size": 2}
    assert load_data(**section).lazy is None
    monkeypatch.setattr(image_folder, "_IN_A_BATCH", 4)
    monkeypatch.setattr(file_sizes, "usable_memory", lambda: 100)  # of 480 bytes
    assert load_data(**section).lazy is not None
    with pytest.raises(DataError, match=r"data\.read = 'lazy' decodes them when they are used"):
        load_data(**section, read="once")


def test_a_source_that_is_read_once_says_so() -> None:
    with pytest.raises(DataError, match=r"data.read = 'lazy': the rows of digits are read once"):
        load_data("digits", read="lazy")
    with pytest.raises(RecipeError, match=r"data\.read.*auto.*once.*lazy"):
        fedgist.run({"data": {"read": "never"}})
    with pytest.raises(DataError, match="data is a tuple"):
        fedgist.run(RECIPE, data=(np.zeros((3, 2)), [0, 1, 2]))


def test_auto_reads_once_what_fits_and_does_not_change() -> None:
    data, _ = user_rows(Blobs(9))
    assert data.lazy is None
    assert "all rows are read into memory (9 rows, 576 bytes)" in data.how_read[0]
    data, _ = user_rows(Blobs(9, noisy=True))
    assert data.lazy is not None
    assert "random transforms are drawn anew at each read" in data.how_read[0]
    torch.manual_seed(1)
    data, _ = user_rows(Blobs(9, noisy=True), read="once")
    torch.manual_seed(2)  # rejects rows that depend on what the caller drew before
    state, again = torch.get_rng_state(), user_rows(Blobs(9, noisy=True), read="once")[0]
    assert torch.equal(data.x, again.x)
    assert torch.equal(state, torch.get_rng_state())
    assert "random transforms are drawn only once" in data.how_read[0]


def test_auto_reads_lazily_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sizes, "usable_memory", lambda: 1000)
    data, _ = user_rows(Blobs(9))
    assert data.lazy is not None
    assert "they would fill more than a quarter of the memory" in data.how_read[0]


def test_a_list_holds_a_client_each() -> None:
    sets = [Blobs(12), (Blobs(15, noisy=True), Blobs(6)), Subset(Blobs(30), range(5, 25))]
    with pytest.warns(UserWarning, match="2 clients are in no mean of the result"):
        result = fedgist.run(RECIPE | {"clients": {}}, data=sets)
    parts = result.world.partition
    assert parts.train.counts.tolist() == [12, 15, 20]
    assert parts.test.counts.tolist() == [0, 6, 0]
    data = result.world.data
    assert torch.equal(
        held(data.inputs, "x")[:12], torch.stack([Blobs(12)[i][0] for i in range(12)])
    )
    held_out, _ = user_rows(sets[::2], Division(0.25))
    assert held_out.clients_test is not None
    assert held_out.clients_test.bincount().tolist() == [3, 6]
    with pytest.raises(RecipeError, match="leave out clients="):
        fedgist.run(RECIPE, data=sets, clients=[[0], [1], [2]])


def test_labels_are_declared_or_listed_or_read_once() -> None:
    class Listed(Blobs):
        targets: Any = None

    rows = Listed(9)
    rows.targets = torch.arange(9) % 3
    y = fedgist.lazy(rows).y.tolist()
    assert y == [0, 1, 2] * 3
    rows.targets = [5] * 9  # not what the rows say: a transform changes them
    assert fedgist.lazy(rows).y.tolist() == y
    assert fedgist.lazy(rows, targets=list("abcabcabc")).classes == ("a", "b", "c")
    tensors = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]))
    assert fedgist.lazy(ConcatDataset([tensors, tensors])).y.tolist() == [0, 1, 1, 0] * 2


def test_labels_of_files_are_read_once_and_kept(tmp_path: Path) -> None:
    reads: list[int] = []

    class Counted(Files):
        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            reads.append(row)
            return super().__getitem__(row)

    folder = write_rows(tmp_path / "rows", 30)
    assert fedgist.lazy(Counted(folder)).y.tolist() == [0, 1, 2] * 10
    first = len(reads)
    assert first >= 30
    assert fedgist.lazy(Counted(folder)).y.tolist() == [0, 1, 2] * 10
    assert len(reads) - first < 30
    os.utime(folder / "0000-0.npy", (1, 1))
    fedgist.lazy(Counted(folder))
    assert len(reads) > first + 30


def test_a_data_set_that_draws_elsewhere_is_refused() -> None:
    class Wild(Blobs):
        draw = np.random.default_rng()

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            x, y = super().__getitem__(row)
            return x + float(self.draw.normal()), y

    with pytest.raises(DataError, match="two reads with the same seed differ; draw from"):
        fedgist.lazy(Wild(9))


def test_moments_are_measured_on_a_sample_and_said() -> None:
    class Many(Dataset[Any]):
        targets = [0, 1] * 2000

        def __len__(self) -> int:
            return 4000

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            return torch.tensor([row % 10.0, 1.0]), self.targets[row]

    recipe = RECIPE | {"data": {"read": "lazy"}, "train": {"num_rounds": 1, "fraction_train": 0.3}}
    result = fedgist.run(recipe | {"evaluate": {"train": True}}, data=Many())
    data = result.world.data
    assert "mean and std are those of 2,048 of 4,000 training rows" in data.how_read
    assert data.mean[0] == pytest.approx(4.5, abs=0.3)
    assert data.std[0] == pytest.approx(2.87, abs=0.2)
    assert data.std[1] == 1.0  # of a constant column
    assert "moments" in data.measured


def test_a_recipe_names_a_function(tmp_path: Path) -> None:
    code = ["from lazy.lazy_worlds import Blobs", "def rows(*, count: int):"]
    code.append("    return Blobs(count)")
    (tmp_path / "own_lazy_rows.py").write_text("\n".join(code))
    file = tmp_path / "recipe.toml"
    lines = ["[data]", "name = 'own_lazy_rows:rows'", "count = 40", "test_fraction = 0.25"]
    file.write_text("\n".join([*lines, "read = 'lazy'", "mean = [0.0]", "std = [1.0]"]))
    engine = ["engine.workers=1", "engine.cohort_size=2"]
    small = read_recipe(file, ["clients.num_clients=4", "train.num_rounds=1", *engine])
    result = fedgist.run(small)
    assert len(result.world.data.y) == 30
    assert result.world.data.lazy is not None
    assert result.world.data.name == "own_lazy_rows:rows"
    file.write_text("\n".join([*lines[:3], "cuont = 3"]))
    with pytest.raises(RecipeError, match=r"data\.cuont: unknown key of own_lazy_rows:rows"):
        read_recipe(file)


def test_all_bytes_are_compared_if_asked_for(tmp_path: Path) -> None:
    once, lazy = (user_rows(Blobs(20), read=read)[0] for read in ("once", "lazy"))
    assert of_all_rows(once) == of_all_rows(lazy)
    assert of_all_rows(once) != of_all_rows(user_rows(Blobs(21))[0])
    with pytest.warns(UserWarning, match="1 client is in no mean of the result"):
        assert record(RECIPE | {"data": RECIPE["data"] | {"test_fraction": 0.2}}, Blobs(30))
