"""Hugging Face data sets, with a stand-in for the library, and the library itself if installed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedgist.data.lazy_rows import LazyRows
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 4, 5), dtype=np.uint8)


@dataclass(frozen=True)
class Split:
    """As much of datasets.Dataset as is used."""

    columns: dict[str, list[Any]]
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return {name: values[key] for name, values in self.columns.items()}
        return self.columns[key]


def split(rows: int, **columns: list[Any]) -> Split:
    standard: dict[str, Any] = {
        "image": [Image.fromarray(array) for array in PIXELS[:rows]],
        "label": [1, 0, 1, 0, 1, 1][:rows],
        "v": list(range(rows)),
        "w": [[1.0, float(i)] for i in range(rows)],
        "who": list("babbab")[:rows],
    }
    return Split(
        {**standard, **columns}, {name: SimpleNamespace() for name in standard} | {"label": KINDS}
    )


KINDS = SimpleNamespace(names=["well", "ill"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the library; its hub holds what is in the returned dictionary."""
    on_hub: dict[str, Any] = {"two": {"train": split(6), "test": split(2)}, "one": split(6)}

    def load_dataset(path: str, config: str | None) -> Any:
        if path not in on_hub:
            raise FileNotFoundError(f"no {path}\nand more lines")
        return on_hub[path] if config is None else on_hub[path][config]

    def load_from_disk(path: str) -> Any:
        return on_hub["disk:" + Path(path).name]

    module = ModuleType("datasets")
    module.load_dataset, module.load_from_disk = load_dataset, load_from_disk  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return on_hub


@pytest.mark.usefixtures("hub")
def test_images() -> None:
    data = load_data("huggingface", path="two", image="image", client="who")
    assert np.array_equal(data.x[:, 0].numpy(), PIXELS)
    assert data.x_test.shape == (2, 1, 4, 5)
    assert (data.classes, data.y.tolist()) == (
        ("well", "ill"),
        [1, 0, 1, 0, 1, 1],
    )  # the data set's own order
    assert data.clients is not None
    assert data.clients.tolist() == [1, 0, 1, 1, 0, 1]
    assert data.scale == 255
    assert load_data("huggingface", path="two", image="image", image_size=3).input_shape == (
        1,
        3,
        3,
    )


def test_numbers(hub: dict[str, Any]) -> None:
    data = load_data("huggingface", path="one", features=["v", "w"], test_fraction=0.3)
    assert (len(data.x), len(data.x_test)) == (4, 2)
    assert data.input_shape == (3,)
    hub["text"] = {"a": {"train": split(2), "dev": split(2)}}
    hub["text"]["a"]["dev"].features["label"] = hub["text"]["a"]["train"].features["label"] = None
    data = load_data(
        "huggingface", path="text", config="a", features=["w"], label="who", test="dev"
    )
    assert (data.classes, data.y_test.tolist(), data.x_test.tolist()) == (
        ("a", "b"),
        [1, 0],
        [[1, 0], [1, 1]],
    )


def test_saved_to_disk(hub: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    hub["disk:" + tmp_path.name] = split(6)
    assert load_data("huggingface", path=tmp_path, features=["v"], test_fraction=0).x[
        :, 0
    ].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"path": "none", "image": "image"},
            "the Hugging Face data set 'none' cannot be loaded: no none$",
        ),
        (
            {"path": "two"},
            r"two: name either the column of images \(image\) or .*; neither is given",
        ),
        ({"path": "two", "features": []}, r"name either .*; neither is given"),
        ({"path": "two", "image": "image", "features": ["v"]}, r"name either .*; both are given"),
        (
            {"path": "two", "image": "picture"},
            "two has no column 'picture'; it has image, label, v, w, who",
        ),
        ({"path": "two", "image": "image", "label": "y"}, "two has no column 'y'"),
        (
            {"path": "two", "image": "image", "test": "dev"},
            "two has no split 'dev'; it has train, test",
        ),
        (
            {"path": "two", "image": "v"},
            r"the column 'v' holds no image in row 0 \(counted from 0\)",
        ),
        (
            {"path": "two", "features": ["who"]},
            "two: the column 'who' must hold numbers, equally many in every row",
        ),
        ({"path": "two", "features": ["v"], "label": "w"}, "two: the labels 'w' have shape"),
        (
            {"path": "bad", "features": ["v"]},
            r"the label column 'label' holds -1 in row 1 .*, outside 0\.\.1",
        ),
        ({"path": "bad", "features": ["w"], "label": "v"}, "the column 'w' must hold numbers"),
        (
            {"path": "bad", "image": "image", "label": "v"},
            "the image in row 0 .* has more than 8 bits per pixel",
        ),
    ],
)
def test_errors(hub: dict[str, Any], options: dict[str, Any], message: str) -> None:
    deep = [Image.fromarray(np.zeros((2, 2), np.uint16))] * 2
    hub["bad"] = split(2, label=[0, -1], w=[[1.0], [1.0, 2.0]], image=deep)
    with pytest.raises(DataError, match=message):
        load_data("huggingface", **options)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError,
        match=r"Hugging Face data sets needs datasets: pip install 'fedgist\[huggingface\]'",
    ):
        load_data("huggingface", path="two", image="image")


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the package datasets is not installed"
)
def test_the_library_itself(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["well", "ill"])}
    )
    columns = {"image": [Image.fromarray(array) for array in PIXELS], "label": [1, 0, 1, 0, 1, 1]}
    datasets.Dataset.from_dict(columns, features=kinds).save_to_disk(tmp_path / "saved")
    data = load_data("huggingface", path=tmp_path / "saved", image="image", test_fraction=0)
    assert np.array_equal(data.x[:, 0].numpy(), PIXELS)
    assert (data.classes, data.y.tolist()) == (("well", "ill"), [1, 0, 1, 0, 1, 1])


@pytest.mark.usefixtures("hub")
def test_rows_that_are_read_when_they_are_used_equal_those_in_memory() -> None:
    for columns in ({"image": "image"}, {"features": ["v", "w"]}):
        options: dict[str, Any] = {"path": "two", "label": "label", **columns}
        once = load_data("huggingface", read="once", **options)
        lazy = load_data("huggingface", read="lazy", **options)
        assert isinstance(lazy.inputs, LazyRows)
        assert torch.equal(lazy.inputs.read(torch.arange(6)), once.x)
        assert isinstance(lazy.inputs_test, LazyRows)
        assert torch.equal(lazy.inputs_test.read(torch.arange(2)), once.x_test)
        assert torch.equal(lazy.y, once.y)


def test_a_colour_image_among_grey_ones_is_named_when_it_is_read(hub: dict[str, Any]) -> None:
    few = [Image.fromarray(PIXELS[0])] * 200
    few[101] = few[101].convert("RGB")
    columns: dict[str, list[Any]] = {"image": few, "label": [0, 1] * 100}
    hub["many"] = Split(columns, {"image": SimpleNamespace(), "label": KINDS})
    data = load_data("huggingface", path="many", image="image", read="lazy", test_fraction=0.0)
    assert isinstance(data.inputs, LazyRows)
    with pytest.raises(DataError, match=r"row 101 .*has colours"):
        data.inputs.read(torch.tensor([101]))


@pytest.mark.usefixtures("hub")
def test_columns_of_numbers_are_predicted() -> None:
    options: dict[str, Any] = {"path": "two", "label": ["v", "w"], "features": ["v"]}
    with pytest.raises(DataError, match="a class is in one column"):
        load_data("huggingface", **options)
    data = load_data("huggingface", target="numbers", path="two", label="v", features=["w"])
    assert data.target == "numbers"
    assert data.y[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.classes == ("v",)
