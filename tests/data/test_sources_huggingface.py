"""Hugging Face data sets that were saved with the library, or lie in a folder, with the library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from data.hub_worlds import (
    CLASSES,
    CODES,
    COUNT,
    PIXELS,
    SITES,
    hub,
    images,
    labelled,
    offline,
    pictures,
    saved,
)
from fedgist.data.lazy_rows import held
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError


def whole(**columns: Any) -> Any:
    """Rows with a column of each kind that is used."""
    kinds, text = hub().Value, hub().Value("string")
    lists = [[1.0, float(i)] for i in range(COUNT)]
    return images(
        v=(kinds("int64"), range(COUNT)),
        w=(hub().List(kinds("float32")), lists),
        who=(text, SITES),
        **columns,
    )


@pytest.mark.parametrize("read", ["once", "lazy"])
def test_images_with_the_classes_and_clients_of_the_data_set(tmp_path: Path, read: str) -> None:
    both = hub().DatasetDict(train=whole(), test=whole().select([3, 2]), validation=whole())
    data = saved(both, tmp_path / "saved", client="who", read=read)
    assert np.array_equal(held(data.inputs, "x")[:, 0].numpy(), PIXELS)
    assert np.array_equal(held(data.inputs_test, "x")[:, 0].numpy(), PIXELS[[3, 2]])
    assert (data.classes, data.y.tolist()) == (CLASSES, CODES)  # sorted order would swap them
    assert data.y_test.tolist() == [CODES[3], CODES[2]]
    assert data.clients is not None
    assert [data.client_names[i] for i in data.clients.tolist()] == SITES
    assert data.scale == 255
    unused = "columns that are neither input nor label: v (int64), w (List(Value('float32')))"
    assert f"inputs: image; {unused}" in data.notes
    assert any(note.startswith("splits that are not read: validation;") for note in data.notes)
    other = load_data("huggingface", path=tmp_path / "saved", image="image", image_size=3)
    assert other.input_shape == (1, 3, 3)
    other = load_data("huggingface", path=tmp_path / "saved", test="validation", image_size=[2, 3])
    assert (other.x_test.shape, other.y_test.tolist()) == ((COUNT, 1, 2, 3), CODES)


def test_columns_of_numbers(tmp_path: Path) -> None:
    data = saved(whole(), tmp_path / "a", features=["w", "v"], test_fraction=0.3)
    kept = sorted(data.x.tolist() + data.x_test.tolist(), key=lambda row: row[1])
    assert kept == [[1, i, i] for i in range(COUNT)]
    assert len(data.x_test) == 3  # a share of each class: round(0.3 x 3) + round(0.3 x 5)
    data = saved(whole(), tmp_path / "b", features=["v"], label="who", read="lazy")
    assert (data.classes, data.y.tolist()) == (("a", "b", "c"), [ord(s) - 97 for s in SITES])
    assert (data.lazy is not None, data.input_shape) == (True, (1,))


def test_files_behind_rows_that_are_read_lazily_are_known(tmp_path: Path) -> None:
    data = saved(whole(), tmp_path / "saved", read="lazy")
    assert data.lazy is not None
    identity = data.lazy.source.reader.identity()
    assert identity is not None
    assert identity[0].startswith("data-00000-of-00001.arrow ")


def test_a_folder_of_files_and_a_name_that_is_not_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, first in (("one", 1.0), ("two", 3.0)):
        frame = pd.DataFrame({"v": [first, first + 1], "label": ["b", "a"]})
        frame.to_parquet(folder / f"{name}-train.parquet")
    configs = [f"- config_name: {n}\n  data_files: {n}-train.parquet" for n in ("one", "two")]
    (folder / "README.md").write_text("\n".join(["---", "configs:", *configs, "---"]))
    with offline(tmp_path / "cache", monkeypatch):
        data = load_data("huggingface", path=folder, config="two", test_fraction=0)
        assert (data.x.tolist(), data.classes, data.y.tolist()) == ([[3], [4]], ("a", "b"), [1, 0])
        choices = r"cannot be loaded: Config name is missing. .*\['one', 'two'\]"
        with pytest.raises(DataError, match=choices):
            load_data("huggingface", path=folder)
        with pytest.raises(DataError, match=r"data set 'nobody/nothing' cannot be loaded: \S"):
            load_data("huggingface", path="nobody/nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": []}, "two: train: features names no column$"),
        ({"image": "image", "features": ["v"]}, r"name either .*; both are given"),
        (
            {"image": "picture"},
            "two: train has no column 'picture'; it has image, v, w, who, label",
        ),
        ({"label": "y"}, "two: train has no column 'y'"),
        ({"client": "y"}, "two: train has no column 'y'"),
        ({"test": "dev"}, "two has no split 'dev'; it has train, test: name the splits by data."),
        ({"train": "dev"}, "two has no split 'dev'"),
        ({"image": "v"}, "the column 'v' holds int64, not images; name another column"),
        ({"features": ["who"]}, "the column 'who' holds string, not numbers; name another"),
        ({"features": ["v"], "label": "w"}, "two: train: the labels 'w' have shape"),
        ({"features": ["v", "w"], "label": "v"}, "the column 'v' is an input, and the label"),
        ({"test_fraction": 0.1}, "test_fraction = 0.1 is not read: .*two has the split 'test'"),
        ({"label": ["v", "w"]}, "a class is in one column"),
    ],
)
def test_wrong_names_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    both = hub().DatasetDict(train=whole(), test=whole())
    with pytest.raises(DataError, match=message) as error:
        saved(both, tmp_path / "two", **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", ["once", "lazy"])
def test_images_of_other_kinds_are_named(tmp_path: Path, read: str) -> None:
    deep = [Image.fromarray(np.zeros((2, 2), np.uint16))] * 2
    for name, cells, message in (
        ("deep", deep, r"deep: the image in row 0 \(counted from 0\) has more than 8 bits"),
        ("none", [*pictures()[:1], None], r"none: the column 'image' holds no image in row 1 "),
    ):
        rows = labelled(image=(hub().Image(), cells))
        with pytest.raises(DataError, match=message):
            held(saved(rows, tmp_path / name, read=read).inputs, "x")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"Hugging Face data sets needs datasets: pip install 'fedgist\[huggingface\]'"
    with pytest.raises(DataError, match=message):
        load_data("huggingface", path="two", image="image")


def test_a_colour_image_among_grey_ones_is_named_when_it_is_read(tmp_path: Path) -> None:
    few = [Image.fromarray(PIXELS[0])] * 200
    few[101] = few[101].convert("RGB")
    columns = {"image": few, "label": [0, 1] * 100}
    kinds = {"image": hub().Image(), "label": hub().ClassLabel(num_classes=2)}
    rows = hub().Dataset.from_dict(columns, features=hub().Features(kinds))
    data = saved(rows, tmp_path / "many", read="lazy")
    assert data.lazy is not None
    with pytest.raises(DataError, match=r"row 101 .*has colours"):
        data.lazy.read(torch.tensor([101]))
    assert load_data("huggingface", path=tmp_path / "many", test_fraction=0).input_shape[0] == 3


def test_columns_of_numbers_are_predicted(tmp_path: Path) -> None:
    data = saved(whole(), tmp_path / "a", target="numbers", label="v", features=["w"])
    assert (data.target, data.classes) == ("numbers", ("v",))
    assert data.y[:, 0].tolist() == list(range(COUNT))


def test_rows_without_a_class_are_left_out_if_the_recipe_says_so(tmp_path: Path) -> None:
    cells = [0, -1, None, 1]
    rows = labelled(v=(hub().Value("float32"), range(4)))
    rows = rows.remove_columns("label").add_column("label", cells)
    rows = rows.cast_column("label", hub().ClassLabel(names=list(CLASSES)))
    both = hub().DatasetDict(train=rows, test=rows.select([1, 2]))
    with pytest.raises(DataError, match=r"'label' are missing \(-1\) in row 1 .*, in 2 of 4 rows"):
        saved(both, tmp_path / "saved")
    data = load_data("huggingface", path=tmp_path / "saved", missing_labels="mask")
    assert (data.x[:, 0].tolist(), data.y.tolist(), len(data.y_test)) == ([0, 3], [0, 1], 0)
    assert "rows that are left out because they have no label: 4" in data.notes
