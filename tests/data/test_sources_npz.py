"""Arrays of the user's own, and what all such sources share: held-out rows, numbering, moments."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedgist.data.dataset import Dataset, check
from fedgist.data.division import Division
from fedgist.data.held_out_rows import held_out
from fedgist.data.sources import splits
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.splits import as_texts, moments
from fedgist.errors import DataError

RNG = np.random.default_rng(0)
X = RNG.normal(3, 2, (20, 4))
Y = np.arange(20) % 2


def read(path: Path, arrays: dict[str, Any], **options: Any) -> Dataset:
    np.savez(path / "x.npz", **arrays)
    return load_data("npz", path=str(path / "x.npz"), **options)


def test_columns(tmp_path: Path) -> None:
    x = np.concatenate([X, np.full((20, 1), 0.1)], axis=1)
    data = read(tmp_path, {"x": x, "y": Y, "x_test": x[:3], "y_test": Y[:3], "other": X})
    assert (data.name, data.x.dtype, data.scale, data.classes) == (
        "x.npz",
        torch.float32,
        1.0,
        ("0", "1"),
    )
    assert np.array_equal(data.x.numpy(), x.astype(np.float32))
    assert data.mean == pytest.approx(x.mean(0))
    assert data.std == pytest.approx([*X.std(0), 1.0])  # a constant column is only centred
    assert (data.y_test.tolist(), data.clients) == ([0, 1, 0], None)


@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 5, 1), (3, 4, 5), (1, 4, 5), (1, 4, 3), (4, 5)])
def test_images(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = RNG.integers(0, 256, (20, *shape), dtype=np.uint8)
    data = read(tmp_path, {"x": x, "y": Y, "x_test": x[:2], "y_test": Y[:2]})
    first = x[:, None] if len(shape) == 2 else x.transpose(0, 3, 1, 2) if shape[0] == 4 else x
    assert data.x.dtype == torch.uint8
    assert np.array_equal(data.x.numpy(), first)
    assert data.scale == 255
    assert data.mean == pytest.approx((first / 255).mean((0, 2, 3)))
    assert data.std == pytest.approx((first / 255).std((0, 2, 3)))


def test_other_numbers_become_float32(tmp_path: Path) -> None:
    for kind in (np.uint8, np.int64, np.bool_, np.float16, ">f8"):
        x = RNG.integers(0, 2, (20, 3)).astype(kind)
        data = read(tmp_path, {"x": x, "y": Y})
        assert (data.x.dtype, data.scale) == (torch.float32, 1.0)
    images = read(tmp_path, {"x": RNG.random((20, 4, 4, 3)), "y": Y})
    assert (images.input_shape, len(images.mean), images.scale) == ((3, 4, 4), 3, 1.0)


@pytest.mark.parametrize(
    ("labels", "classes", "codes"),
    [
        ([10, 1, 2, 10], ("1", "2", "10"), [2, 0, 1, 2]),
        ([1, -1, -1, 1], ("-1", "1"), [1, 0, 0, 1]),
        ([2.0, 1.0, 1.0, 2.0], ("1", "2"), [1, 0, 0, 1]),
        ([True, False, False, True], ("False", "True"), [1, 0, 0, 1]),
        (["dog", "cat", "ant", "dog"], ("ant", "cat", "dog"), [2, 1, 0, 2]),
        (["10", "9", "9", "10"], ("9", "10"), [1, 0, 0, 1]),
    ],
)
def test_labels(
    tmp_path: Path, labels: list[object], classes: tuple[str, ...], codes: list[int]
) -> None:
    data = read(tmp_path, {"x": X[:4], "y": np.array(labels)}, test_fraction=0)
    assert (data.classes, data.num_classes, data.y.tolist()) == (classes, len(classes), codes)


def test_arrays_that_are_not_read_are_named(tmp_path: Path) -> None:
    data = read(tmp_path, {"x": X, "y": Y, "clients": Y, "ages": Y})
    assert data.notes == ("arrays of x.npz that are not read: clients, ages",)
    assert not read(tmp_path, {"x": X, "y": Y, "client": Y}).notes


def test_clients(tmp_path: Path) -> None:
    clients = np.array(["bo", "al"] * 10)
    data = read(
        tmp_path,
        {
            "x": X,
            "y": Y,
            "client": clients,
            "x_test": X[:3],
            "y_test": Y[:3],
            "client_test": np.array(["aa", "bo", "al"]),
        },
    )
    assert data.clients is not None
    assert data.clients_test is not None
    assert data.clients.tolist() == [1, 0] * 10
    assert data.clients_test.tolist() == [2, 1, 0]  # "aa" has no training rows, so it comes last
    data = read(tmp_path, {"x": X, "y": Y, "client": np.arange(20) // 4 * 7})
    assert data.clients is not None
    assert data.clients_test is not None
    assert torch.bincount(torch.cat([data.clients, data.clients_test])).tolist() == [4] * 5


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"y": Y}, {}, "x.npz has no array 'x'; it holds y"),
        ({"other": Y}, {}, "x.npz has no array 'x'; it holds other"),
        ({"x": X, "y": Y, "x_test": X}, {}, "no array 'y_test'; it holds x, y, x_test"),
        ({"x": X, "y": Y[:9]}, {}, "x.npz: x has 20 rows but y has 9"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:9]}, {}, "x_test has 20 rows but y_test has 9"),
        ({"x": X, "y": Y, "client": Y[:3]}, {}, "x has 20 rows but client has 3"),
        (
            {"x": X, "y": np.eye(20)},
            {},
            r"the labels y have shape \[20, 20\]; one value per row is needed",
        ),
        ({"x": X, "y": Y + 0.5}, {}, r"whole numbers or text; row 0 \(counted from 0\) holds 0\.5"),
        ({"x": X, "y": np.where(Y == 1, np.nan, 0)}, {}, r"row 1 \(counted from 0\) holds nan"),
        ({"x": X, "y": np.full(20, 1e300)}, {}, "holds 1e[+]300"),
        ({"x": X, "y": Y.astype("M8[s]")}, {}, "whole numbers or text, not datetime64"),
        (
            {"x": X[:, 0], "y": Y},
            {},
            r"x.npz: x must be numbers of at least two dim.*, not float64 of shape \[20\]",
        ),
        ({"x": X.astype(str), "y": Y}, {}, "x must be numbers"),
        ({"x": X * 1j, "y": Y}, {}, "x must be numbers"),
        (
            {"x": X.astype(object), "y": Y},
            {},
            "the array 'x' cannot be read: Object arrays cannot be loaded",
        ),
        ({"x": X, "y": Y.astype(object)}, {}, "the array 'y' cannot be read: Object arrays"),
        (
            {"x": np.where(np.arange(20)[:, None] == 7, np.nan, X), "y": Y},
            {"test_fraction": 0},
            "training row 7 holds",
        ),
        ({"x": X * 1e300, "y": Y}, {}, "holds a number that is not finite"),
        ({"x": X[:0], "y": Y[:0]}, {}, "x.npz has no training rows"),
        ({"x": X[:, :0], "y": Y}, {}, "x.npz has no training columns"),
        (
            {"x": X, "y": Y, "x_test": X[:, :3], "y_test": Y},
            {},
            r"training rows have shape \[4\], test rows \[3\]",
        ),
        (
            {"x": X, "y": Y, "x_test": X, "y_test": Y + 1},
            {},
            "the test label '2' is not among the training labels: 0",
        ),
        (
            {"x": X, "y": Y},
            {"test_fraction": 1.0},
            "test_fraction is 1.0; it must be at least 0 and below 1",
        ),
        ({"x": X, "y": Y}, {"test_fraction": -0.1}, "test_fraction is -0.1; it must be at least 0"),
        # seen: it was read by nothing, without a word
        (
            {"x": X, "y": Y, "test": Y % 2},
            {"test_fraction": 0.2},
            "test_fraction = 0.2 is not read: x.npz has an array 'test'; leave it out",
        ),
    ],
)
def test_errors(
    tmp_path: Path, arrays: dict[str, object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, arrays, **options)


def test_labels_that_are_no_classes(tmp_path: Path) -> None:
    numbers = 10**6 + np.arange(1999) % 1001
    with pytest.raises(
        DataError,
        match=r"x\.npz has 1001 different labels in 1999 training rows, such as '1000000' and "
        "'1001000': labels are classes, each with several rows",
    ):
        read(tmp_path, {"x": np.zeros((1999, 1)), "y": numbers}, test_fraction=0)
    data = read(tmp_path, {"x": X, "y": 10**6 + Y})
    assert (data.num_classes, data.classes) == (2, ("1000000", "1000001"))


def test_classes_that_no_row_can_have() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([1000000, 1000001, 1000002])
    data = Dataset("your data", x, y, x[:0], y[:0], 1000003)
    with pytest.raises(
        DataError,
        match="your data has 1000003 classes for 3 rows; number the labels from 0 on without gaps",
    ):
        check(data)
    with pytest.raises(DataError, match="has 3 classes and 2 names of classes"):
        check(replace(data, y=y - 1000000, num_classes=3, classes=("a", "b")))
    assert check(replace(data, y=y - 1000000, num_classes=1000)).num_classes == 1000


def test_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.save(tmp_path / "x.npy", X)
    for content in (b"", b"text", (tmp_path / "x.npy").read_bytes(), b"PK\3\4" + bytes(50)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.npz"):
            load_data("npz", path=path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "no array")
        archive.writestr("y.npy", "no array")
    with pytest.raises(DataError, match=r"x\.npz"):
        load_data("npz", path=path)


any_file = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_file
@given(st.data())
def test_any_truncation_is_an_error(tmp_path: Path, data: st.DataObject) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, x=X, y=Y)
    size = data.draw(st.integers(0, len(file.getvalue()) - 1))
    (tmp_path / "x.npz").write_bytes(file.getvalue()[:size])
    with pytest.raises(DataError, match=r"x\.npz"):
        load_data("npz", path=tmp_path / "x.npz")


@any_file
@given(st.data())
def test_a_changed_byte_is_an_error_or_data(tmp_path: Path, data: st.DataObject) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, x=X, y=Y)
    content = bytearray(file.getvalue())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.npz").write_bytes(content)
    try:
        load_data("npz", path=tmp_path / "x.npz")
    except DataError as error:
        assert "x.npz" in str(error)  # noqa: PT017


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=60), st.floats(0, 0.95))
def test_held_out_rows_are_a_share_of_each_class(labels: list[str], fraction: float) -> None:
    values = as_texts(np.array(labels), "labels")
    mask = held_out(Division(fraction, within="pooled"), values)
    assert np.array_equal(mask, held_out(Division(fraction, within="pooled"), values))
    for label in set(labels):
        of_class = values == label
        count, held = int(of_class.sum()), int(mask[of_class].sum())
        assert held < count
        assert abs(held - fraction * count) <= 1


def test_held_out_rows_are_not_the_first_ones() -> None:
    mask = held_out(Division(0.2), np.zeros(1000))
    assert mask.sum() == 200
    assert 20 < mask[:200].sum() < 60


@given(st.integers(1, 3), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_moments_of_bytes_agree_with_numpy(channels: int, rows: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 256, (rows, channels, 2, 3), dtype=np.uint8)
    mean, std = moments(torch.from_numpy(x), 255.0)
    assert mean == pytest.approx((x / 255).mean((0, 2, 3)))
    assert std == pytest.approx((x / 255).std((0, 2, 3)), abs=1e-7)
    assert (
        moments(torch.full((rows, channels, 2, 2), 7, dtype=torch.uint8), 255.0)[1]
        == (1.0,) * channels
    )


def test_moments_of_many_columns_are_measured_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.from_numpy(RNG.normal(3, 2, (7, 5, 2)).astype(np.float32))
    monkeypatch.setattr(splits, "_NUMBERS_AT_ONCE", 30)  # two columns of fourteen numbers
    mean, std = moments(x, 1.0)
    assert mean == pytest.approx(x.double().numpy().mean((0, 2)))
    assert std == pytest.approx(x.double().numpy().std((0, 2)))


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_sources_that_may_be_larger_than_memory_fill_in_missing_numbers_too(
    kind: str, tmp_path: Path
) -> None:
    x = X.copy()
    x[3, 1] = np.nan
    options: dict[str, Any] = {"path": str(tmp_path), "missing": "mean", "test_fraction": 0}
    if kind == "npy":
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", Y)
    else:
        options |= {"path": str(tmp_path / "x.parquet"), "label": "y"}
        pd.DataFrame(x, columns=[*"abcd"]).assign(y=Y).to_parquet(options["path"])
    data = load_data(kind, **options)
    assert data.x[3, 1].item() == pytest.approx(np.nanmean(x[:, 1]), rel=1e-6)
    with pytest.raises(DataError, match=r"missing = 'mean' needs all rows in memory"):
        load_data(kind, read="lazy", **options)
    with pytest.raises(DataError, match="holds a number that is not finite"):
        load_data(kind, **options | {"missing": "refuse"})
