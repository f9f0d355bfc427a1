"""A user's own data: who has which row, what is held out, missing numbers, stated classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedgist.data.dataset import Dataset, check, with_classes
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.splits import as_mask
from fedgist.data.sources.unlabelled import read_examples
from fedgist.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.normal(3, 2, (20, 4)).astype(np.float32)
Y = np.arange(20) % 2


def refused(read: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def npz(path: Path, arrays: dict[str, Any], **options: Any) -> Dataset:
    np.savez(path / "x.npz", **arrays)
    return load_data("npz", path=path / "x.npz", **options)


def write(path: Path, text: str, name: str = "table.csv") -> Path:
    (path / name).write_text(text, encoding="utf-8", newline="")
    return path / name


def test_the_array_client(tmp_path: Path) -> None:
    arrays = {"x": X, "y": Y, "client": np.array(["bo", "al"] * 10)}
    more = {"x_test": X[:2], "y_test": Y[:2], "client_test": np.array(["al", "al"])}
    data = npz(tmp_path, arrays | more)
    assert data.clients is not None
    assert data.clients_test is not None
    assert (data.clients.tolist(), data.clients_test.tolist()) == ([1, 0] * 10, [0, 0])
    assert data.client_names == ("al", "bo")


@pytest.mark.parametrize("kind", [bool, int, float, str])
def test_the_array_test(tmp_path: Path, kind: type) -> None:
    held = np.arange(20) % 5 == 3
    values = np.where(held, "1", "0") if kind is str else held.astype(kind)
    data = npz(tmp_path, {"x": X, "y": Y, "test": values, "client": np.arange(20) // 10})
    assert np.array_equal(data.x_test.numpy(), X[held])
    assert np.array_equal(data.x.numpy(), X[~held])
    assert data.y_test.tolist() == Y[held].tolist()
    assert data.clients_test is not None
    assert data.clients_test.tolist() == [0, 0, 1, 1]
    assert data.mean == pytest.approx(X[~held].mean(0))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"test": Y, "x_test": X, "y_test": Y}, "an array 'test' and an array 'x_test'"),
        ({"test": Y[:3]}, "x has 20 rows but test has 3"),
        ({"test": Y + 1}, r"the array 'test' must be 0 or 1, .*; row 1 .* holds '2'"),
        ({"test": Y + 0.5}, "'test' must be whole numbers or text; row 0"),
        ({"test": np.ones(20)}, "has no training rows"),
        ({"client": X}, r"client have shape \[20, 4\]"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    refused(lambda: npz(tmp_path, {"x": X, "y": Y, **arrays}), message)


ROWS = "age,town,set,y\n1,Ulm,0,a\n2,Bonn,1,a\n3,Ulm,false,b\n4,Bonn,True,b\n"


def test_a_column_says_which_rows_test(tmp_path: Path) -> None:
    data = load_data("table", path=write(tmp_path, ROWS), label="y", test="set")
    assert (data.x[:, 0].tolist(), data.x_test[:, 0].tolist()) == ([1, 3], [2, 4])
    assert [column.name for column in data.columns] == ["age", "town"]
    file = write(tmp_path, ROWS.replace("false", "maybe"))
    refused(
        lambda: load_data("table", path=file, label="y", test="set"),
        r"table.csv: the test column 'set' must be 0 or 1, .*; row 2 .* holds 'maybe'",
    )
    refused(lambda: load_data("table", path=file, label="y", test="sett"), "sett does not exist")


COLUMNS: dict[str, Any] = {"town": ["Ulm", "Bonn", "Rom"], "age": "number"}


def test_stated_columns(tmp_path: Path) -> None:
    file = write(tmp_path, ROWS)
    data = load_data("table", path=file, label="y", test="set", columns=COLUMNS)
    assert data.x.tolist() == [[1, 0, 0, 1], [1, 0, 0, 3]]  # Ulm, Bonn, Rom, age
    assert data.x_test.tolist() == [[0, 1, 0, 2], [0, 1, 0, 4]]
    assert data.mean == pytest.approx((0, 0, 0, 2))
    new = write(tmp_path, "age,town\n7,Rom\n", "new.csv")
    assert read_examples(new, data).tolist() == [[0, 0, 1, 7]]
    new = write(tmp_path, "age,town\n7,Ulm\n8,Oslo\n", "new.csv")  # predict names it as unusual
    assert read_examples(new, data).tolist() == [[1, 0, 0, 7], [0, 0, 0, 8]]


@pytest.mark.parametrize(
    ("columns", "more", "message"),
    [
        ({"town": ["Ulm"]}, {}, "the column 'town' holds 'Bonn' in row 2 below the header, which"),
        ({"town": "number"}, {}, "the column 'town' holds no number in row 1 below the header"),
        ({"size": "number"}, {}, "has no column 'size'; it has age, town, set, y"),
        (
            {"town": []},
            {},
            r"columns.town is \[\]; it must be 'number', 'categories' or the list of",
        ),
        ({"town": ["Ulm", "Ulm"]}, {}, "columns.town is .*its different categories"),
        ({"town": "text"}, {}, "columns.town is 'text'; it must be 'number', 'categories' or"),
        ({"town": 3}, {}, r"data.columns.town = 3: must be text or must be a list"),
        ({"y": "number"}, {}, "columns names 'y', which is the label, the client or the test"),
        ({"age": "number"}, {"ignore": ["town"]}, "columns says which are used: leave out ignore"),
        ({}, {}, "has no column besides the label"),
    ],
)
def test_columns_that_are_stated_wrongly(
    tmp_path: Path, columns: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    options = {"path": write(tmp_path, ROWS), "label": "y", "test_fraction": 0.0, **more}
    refused(lambda: load_data("table", columns=columns, **options), message)


def test_two_sites_encode_and_number_alike(tmp_path: Path) -> None:
    """Seen: a site whose table holds only "malignant" calls it class 0, and another's is "Ulm"."""
    first = write(tmp_path, "town,y\nUlm,malignant\nUlm,malignant\n", "first.csv")
    second = write(tmp_path, "town,y\nBonn,benign\nUlm,malignant\n", "second.csv")
    stated: dict[str, Any] = {
        "classes": ["benign", "malignant"],
        "columns": {"town": ["Bonn", "Ulm"]},
    }
    sites = [
        load_data("table", path=file, label="y", test_fraction=0, **stated)
        for file in (first, second)
    ]
    assert [site.y.tolist() for site in sites] == [[1, 1], [0, 1]]
    assert [site.x.tolist() for site in sites] == [[[0, 1], [0, 1]], [[1, 0], [0, 1]]]
    assert {site.num_classes for site in sites} == {2}
    alone = load_data("table", path=first, label="y", test_fraction=0)  # what happens without
    assert (alone.y.tolist(), alone.x.tolist()) == ([0, 0], [[1], [1]])
    test = write(tmp_path, "town,y\nUlm,benign\n", "test.csv")
    refused(
        lambda: load_data("table", path=first, label="y", test=test), "the test label 'benign' is"
    )
    assert load_data("table", path=first, label="y", test=test, **stated).y_test.tolist() == [0]


def test_every_source_takes_classes(tmp_path: Path) -> None:
    data = load_data("digits", classes=[*"9876543210"])
    assert torch.equal(data.y, 9 - load_data("digits").y)
    assert torch.equal(data.y_test, 9 - load_data("digits").y_test)
    assert (data.classes[0], data.num_classes) == ("9", 10)
    refused(
        lambda: load_data("digits", classes=[*"012345678"]), "digits: the label '9' is not among th"
    )
    data = npz(tmp_path, {"x": X, "y": Y + 5}, classes=["6", "4", "5"], test_fraction=0)
    assert data.y.tolist() == [2, 0] * 10
    refused(
        lambda: npz(tmp_path, {"x": X, "y": Y + 5}, classes=["5"]),
        "x.npz: the label '6' is not among the classes: 5",
    )
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "1.png")
    data = load_data("folder", path=tmp_path, classes=["dog", "cat"], test_fraction=0)
    assert data.y.tolist() == [1, 0]


@pytest.mark.parametrize("classes", [["0", "0"], ["0", "1", "0"]])
def test_classes_named_twice(tmp_path: Path, classes: list[str]) -> None:
    refused(lambda: load_data("digits", classes=classes), "data.classes names '0' twice")
    refused(lambda: npz(tmp_path, {"x": X, "y": Y * 0}, classes=classes), "names '0' twice")


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_any_order_of_classes_keeps_every_rows_name(order: list[int], labels: list[int]) -> None:
    y = torch.tensor(labels)
    data = Dataset("d", torch.zeros(len(y), 1), y, torch.zeros(0, 1), y[:0], 4)
    stated = with_classes(data, [str(number) for number in order])
    assert [int(stated.classes[label]) for label in stated.y] == labels


def test_missing_numbers_of_a_table_are_as_pandas_fills_them(tmp_path: Path) -> None:
    x = RNG.normal(size=(40, 2))
    x[RNG.random((40, 2)) < 0.3] = np.nan
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(
        town=np.array(["Ulm", None] * 20, dtype=object),
        y=np.arange(40) % 2,
        held=np.arange(40) % 4 == 0,
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    train = frame[~frame.held]
    wanted = train[["a", "b"]].fillna(train[["a", "b"]].mean())
    wanted_test = frame[frame.held][["a", "b"]].fillna(train[["a", "b"]].mean())
    for name in ("t.csv", "t.parquet"):
        options: dict[str, Any] = {"path": tmp_path / name, "label": "y", "test": "held"}
        data = load_data("table", **options, missing="mean")
        assert data.x[:, :2].numpy() == pytest.approx(wanted.to_numpy(), abs=1e-6)
        assert data.x_test[:, :2].numpy() == pytest.approx(wanted_test.to_numpy(), abs=1e-6)
        assert data.columns[2].categories == ("", "Ulm")  # an empty cell is a category of its own
        assert data.mean[:2] == pytest.approx(tuple(wanted.mean()), abs=1e-6)
        new = write(tmp_path, "a,b,town\n,?,Ulm\n", "new.csv")
        given_mean = [*train[["a", "b"]].mean(), 0, 1]
        assert read_examples(new, data)[0].tolist() == pytest.approx(given_mean)
        refused(
            lambda o=options: load_data("table", **o),  # type: ignore[misc]
            r"(column '[ab]' holds no number in row \d+ below the header: .*|"
            r"missing numbers in the columns a \(\d+\), b \(\d+\)); data.missing = 'mean'",
        )


def test_missing_is_not_wrong(tmp_path: Path) -> None:
    file = write(tmp_path, "a,y\n1,0\nold,1\n,0\n3,1\n")
    options: dict[str, Any] = {"label": "y", "test_fraction": 0, "columns": {"a": "number"}}
    refused(
        lambda: load_data("table", path=file, missing="mean", **options),
        "the column 'a' holds no number in row 2 below the header: 'old'$",
    )
    file = write(tmp_path, "a,y\n,0\n,1\n")
    refused(
        lambda: load_data("table", path=file, missing="mean", **options),
        r"table.csv: column 0 \(counted from 0\) is missing in every training row",
    )
    # seen: "data.missing = 'mean' replaces missing numbers", which it does not for annotations
    file = write(tmp_path, "a,w,y\n1,,0\n2,1,1\n")
    refused(
        lambda: load_data("table", path=file, annotations=["w"], **options),
        "the column 'w' holds no number in row 1 below the header: ''$",
    )
    refused(
        lambda: load_data("table", path=file, missing="median", **options),
        "data.missing = 'median': must be 'refuse' or 'mean'",
    )


def test_missing_numbers_of_arrays(tmp_path: Path) -> None:
    x = X.copy()
    x[RNG.random(x.shape) < 0.3] = np.nan
    arrays = {"x": x, "y": Y, "test": np.arange(20) % 4 == 0}
    data = npz(tmp_path, arrays, missing="mean")
    held = arrays["test"]
    frame = pd.DataFrame(x[~held])
    assert data.x.numpy() == pytest.approx(frame.fillna(frame.mean()).to_numpy())
    assert data.x_test.numpy() == pytest.approx(
        pd.DataFrame(x[held]).fillna(frame.mean()).to_numpy()
    )
    np.save(tmp_path / "new.npy", np.full((1, 4), np.nan))
    assert read_examples(tmp_path / "new.npy", data)[0].numpy() == pytest.approx(
        frame.mean().to_numpy()
    )
    row, column = np.argwhere(np.isnan(x))[0]
    refused(
        lambda: npz(tmp_path, {"x": x, "y": Y}, test_fraction=0),
        rf"training row {row} holds a number that is not finite: nan in column {column} \(counted",
    )
    refused(
        lambda: npz(tmp_path, arrays | {"x": np.where(x > 5, np.inf, x)}, missing="mean"),
        "is not finite: inf",
    )


cell = st.sampled_from(["1", "0", "true", "FALSE", " True ", "2", "yes", "", "nan"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(cell, min_size=1, max_size=8))
def test_any_mask_is_read_or_refused(cells: list[str]) -> None:
    known = {"0": False, "false": False, "1": True, "true": True}
    values = np.array(cells, dtype=object)
    if all(text.strip().lower() in known for text in cells):
        assert as_mask(values, "m").tolist() == [known[text.strip().lower()] for text in cells]
    else:
        refused(lambda: as_mask(values, "m"), "m must be 0 or 1")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["Ulm", "Bonn", "", "Rom", "1", "ü"]), min_size=1, max_size=6),
    st.lists(st.sampled_from(["Ulm", "Bonn", "", "Rom", "1", "ü"]), min_size=1, unique=True),
)
def test_any_stated_categories_encode_or_name_the_cell(
    tmp_path: Path, towns: list[str], stated: list[str]
) -> None:
    file = write(tmp_path, "town,y\n" + "".join(f'"{town}",a\n' for town in towns))

    def read() -> Dataset:
        return load_data("table", path=file, label="y", test_fraction=0, columns={"town": stated})

    if set(towns) <= set(stated):
        assert read().x.argmax(1).tolist() == [stated.index(town) for town in towns]
    else:
        refused(read, "the column 'town' holds")


def test_a_data_set_of_tensors_takes_classes() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])
    data = Dataset("mine", x, y, x, y, 2, classes=("no", "yes"))
    assert with_classes(data, ["yes", "no"]).y.tolist() == [1, 0, 0, 1]
    assert with_classes(data, []) is data
    unused = replace(data, y=y * 0, y_test=y * 0)
    assert with_classes(unused, ["no"]).num_classes == 1  # no row is called yes
    refused(lambda: with_classes(data, ["no"]), "mine: the label 'yes' is not among the classes")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"clients": torch.tensor([0, 1])}, "clients of the training rows must be one whole numb"),
        ({"clients": torch.zeros(4)}, "clients of the training rows must be one whole number"),
        ({"clients": torch.tensor([0, 1, -1, 0])}, r"rows reach -1\.\.1, outside 0\.\.3"),
        (
            {"clients_test": torch.tensor([0, 1, 2, 0]), "client_names": ("a", "b")},
            r"clients of the test rows reach 0\.\.2, outside 0\.\.1",
        ),
        ({"mean": (1.0, 2.0, 3.0)}, "mine: mean has 3 numbers; it needs 2, or 1 for all"),
        ({"std": (0.0,)}, r"mine: std is \[0.0\]; finite numbers are needed, greater than 0"),
        ({"scale": float("nan")}, r"mine: scale is \[nan\]; finite numbers"),
        (
            {"x": torch.zeros(4)},
            r"training rows must be real numbers of shape \(rows, \.\.\.\), not",
        ),
        ({"x": torch.zeros(4, 2, dtype=torch.complex64)}, "must be real numbers"),
    ],
)
def test_parts_of_a_data_set_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])
    data = Dataset("mine", x, y, x, y, 2)
    refused(lambda: check(replace(data, **changed)), message)
