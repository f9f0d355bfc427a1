"""The sources by name, their options, the data root, and the bundled digits."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from fedgist.data.sources import SOURCES
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.locations import data_root
from fedgist.errors import DataError, InputError
from fedgist.options import shared_options


@pytest.mark.parametrize("name", SOURCES)
def test_every_option_is_typed_and_keyword_only(name: str) -> None:
    parameters = inspect.signature(SOURCES[name]).parameters.values()
    shared = shared_options(SOURCES[name])
    assert all(p.kind is p.KEYWORD_ONLY or (shared and p.kind is p.VAR_KEYWORD) for p in parameters)
    assert all(p.annotation is not p.empty for p in parameters)


def test_unknown_names() -> None:
    with pytest.raises(
        DataError,
        match=r"unknown data set 'minst'; did you mean 'mnist'\? known: digits, .*huggingface$",
    ):
        load_data("minst")
    with pytest.raises(DataError, match=r"unknown data set 'qqqq'; known: digits"):
        load_data("qqqq")
    with pytest.raises(
        InputError,
        match=r"data.corse: unknown key of cifar100; did you mean 'coarse'\? known: coarse",
    ):
        load_data("cifar100", corse=True)
    with pytest.raises(InputError, match=r"data.path: unknown key of digits; known: none"):
        load_data("digits", path="x")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("npz", {}, "data.path is missing: npz needs it"),
        ("table", {"path": "x.csv"}, "data.label is missing: table needs it"),
        ("npz", {"path": 3}, "data.path = 3: must be text"),
        (
            "npz",
            {"path": "x", "test_fraction": "0.2"},
            "data.test_fraction = '0.2': must be a number",
        ),
        (
            "npz",
            {"path": "x", "test_fraction": True},
            "data.test_fraction = True: must be a number",
        ),
        ("cifar100", {"coarse": 1}, "data.coarse = 1: must be true or false"),
        (
            "table",
            {"path": "x", "label": "y", "ignore": "z"},
            "data.ignore = 'z': must be a list",
        ),
        ("table", {"path": "x", "label": "y", "ignore": [1]}, r"data.ignore.0 = 1: must be text"),
        ("npz", {"path": "/no/such.npz", "test_fraction": 0}, "/no/such.npz does not exist"),
        ("npz", {"path": "/"}, "/ is a folder, not a file"),
        ("folder", {"path": "/no/such"}, "/no/such does not exist"),
        ("folder", {"path": __file__}, "is not a folder"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_data(name, **options)


DOWNLOADED = ["mnist", "fashion_mnist", "cifar10", "cifar100", "celeba", "femnist", "wisdm"]


@pytest.mark.parametrize("name", DOWNLOADED)
def test_missing_data_says_what_to_do_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load_data(name, root=tmp_path)
    text = str(error.value)
    assert "\n" not in text
    assert "ROOT" not in text
    for part in (
        name,
        f"in {tmp_path};",
        "https://",
        "--data-root",
        "FEDGIST_DATA",
        str(tmp_path / ""),
    ):
        assert part in text


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDGIST_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root(Path("~/from-argument")) == Path.home() / "from-argument"
    monkeypatch.setenv("FEDGIST_DATA", "~/from-environment")
    assert data_root() == Path.home() / "from-environment"
    monkeypatch.setenv("FEDGIST_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root().name == "data"
    assert "fedgist" in data_root().parts


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="digits needs scikit-learn: pip install"):
        load_data("digits")


def test_digits_whose_file_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere = importlib.machinery.ModuleSpec("sklearn", None, origin=str(tmp_path / "x.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: elsewhere)
    with pytest.raises(DataError, match=r"digits cannot be read .*digits\.csv\.gz"):
        load_data("digits")


def test_digits_are_scikit_learns() -> None:
    data, bundled = load_data("digits"), load_digits()
    pairs = zip([*data.x.tolist(), *data.x_test.tolist()], [*data.y, *data.y_test], strict=True)
    expected = zip(bundled.images.tolist(), bundled.target, strict=True)
    assert sorted((int(y), x[0]) for x, y in pairs) == sorted((int(y), x) for x, y in expected)


def test_digits() -> None:
    data = load_data("digits")
    assert data.x.shape == (1442, 1, 8, 8)
    assert data.x_test.shape == (355, 1, 8, 8)
    assert (data.x.dtype, data.scale, int(data.x.max())) == (torch.uint8, 16.0, 16)
    counts = torch.bincount(torch.cat([data.y, data.y_test]))
    assert torch.equal(torch.bincount(data.y_test), counts // 5)
    x = data.x.double() / 16
    assert data.mean == pytest.approx((float(x.mean()),), abs=1e-6)
    assert data.std == pytest.approx((float(x.std(correction=0)),), abs=1e-6)
    assert dataclasses.is_dataclass(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_real_data(name: str) -> None:
    root = os.environ.get("FEDGIST_DATA")
    if not root:
        pytest.skip("FEDGIST_DATA is not set")
    folders = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "cifar-10-batches-py"}
    if not (Path(root) / folders.get(name, "cifar-100-python")).is_dir():
        pytest.skip(f"{name} is not in FEDGIST_DATA={root}")
    data = load_data(name)
    train, shape = (50_000, (3, 32, 32)) if "cifar" in name else (60_000, (1, 28, 28))
    assert data.x.shape == (train, *shape)
    assert data.x_test.shape == (10_000, *shape)
    assert data.num_classes == len(data.classes) == (100 if name == "cifar100" else 10)
    counts = torch.bincount(data.y).tolist()
    assert (
        counts[:3] == [5923, 6742, 5958]
        if name == "mnist"
        else set(counts) == {train // data.num_classes}
    )
    mean = [float(channel.double().mean()) / 255 for channel in data.x.unbind(1)]
    assert mean == pytest.approx(data.mean, abs=2e-3)
    if name == "cifar100":
        coarse = load_data(name, coarse=True)
        assert torch.bincount(coarse.y).tolist() == [2500] * 20
        assert coarse.classes[0] == "aquatic_mammals"
