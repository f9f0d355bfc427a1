"""A user's objects become a data set, whole or not at all."""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist import Dataset
from fedgist.data.division import Division
from fedgist.data.sources.in_memory import in_memory, labelled_like, split_in_memory
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError

X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])
FRAME = pd.DataFrame(
    {
        "age": [30, 40, 50, 60],
        "town": ["Ulm", "Bonn", "Ulm", "Rom"],
        "size": pd.Categorical(["S", "L", "S", "S"], categories=["S", "M", "L"]),
        7: [True, False, True, True],
    },
    index=[9, 9, 3, 1],
)


class Pairs(torch.utils.data.Dataset[Any]):
    """A map-style data set of any pairs."""

    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> Any:
        return self.pairs[row]


class Endless(torch.utils.data.IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    "kind", [np.float64, np.float16, np.int32, np.uint16, np.bool_, ">f8", np.longdouble]
)
def test_numbers_are_float32_whatever_they_were(kind: Any) -> None:
    data = in_memory(((X % 2).astype(kind), Y))
    assert data.x.dtype == torch.float32
    assert data.x.tolist() == (X % 2).tolist()
    assert (data.num_classes, data.classes, data.scale) == (3, (), 1.0)


def test_inputs_are_normalized_as_those_of_a_file_are(tmp_path: Path) -> None:
    # seen: the record said that they were, and arrays from Python were not
    for x in (X, (X * 9).astype(np.uint8).reshape(6, 1, 2, 1)):
        np.savez(tmp_path / "same.npz", x=x, y=Y, x_test=x, y_test=Y)
        data, stored = in_memory((x, Y, x, Y)), load_data("npz", path=str(tmp_path / "same.npz"))
        assert torch.equal(data.x, stored.x)
        assert (data.scale, data.mean, data.std) == (stored.scale, stored.mean, stored.std)


def test_a_tensor_with_a_gradient_or_of_half_precision_is_read() -> None:
    x = torch.as_tensor(X, dtype=torch.bfloat16).requires_grad_()
    assert torch.equal(in_memory((x, Y)).x, torch.as_tensor(X, dtype=torch.float32))


def test_bytes_stay_bytes_and_what_is_not_contiguous_or_writable_is_copied() -> None:
    x = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)[:, ::-1]
    x.setflags(write=False)
    data = in_memory((x, list(Y), torch.as_tensor(x.copy()), torch.as_tensor(Y)))
    assert data.x.dtype == torch.uint8
    assert torch.equal(data.x, data.x_test)
    assert torch.equal(data.y, data.y_test)


@pytest.mark.parametrize(
    "y",
    [
        list("cabcab"),
        np.array(list("cabcab")),
        pd.Series(list("cabcab"), index=[5, 5, 5, 5, 5, 5]),
        np.array(list("cabcab"), dtype=object),
    ],
)
def test_names_of_classes_are_kept(y: Any) -> None:
    data = in_memory((X, y, X, y))
    assert (data.classes, data.num_classes) == (("a", "b", "c"), 3)
    assert data.y.tolist() == data.y_test.tolist() == [2, 0, 1, 2, 0, 1]


def test_a_categorical_has_its_own_order_and_classes_without_rows() -> None:
    grades = pd.Series(pd.Categorical(["low", "high"] * 3, categories=["low", "mid", "high"]))
    data = in_memory((X, grades))
    assert (data.classes, data.y.tolist()) == (("low", "mid", "high"), [0, 2] * 3)
    numbers = in_memory((X, pd.Categorical([30, 10, 20] * 2, categories=[30, 20, 10])))
    assert (numbers.classes, numbers.y.tolist()) == (("30", "20", "10"), [0, 2, 1] * 2)


def test_a_frame_is_encoded_like_a_table() -> None:
    test = pd.DataFrame({"town": ["Rom", "Kiel"], "7": [False, True], "age": [1, 2], "size": "M"})
    data = in_memory((FRAME, list("abab"), test, ["b", "b"]))
    # age; 7: False, True; town: Bonn, Rom, Ulm; in the frame's order
    names = [name for column in data.columns for name in column.inputs]
    assert names == [
        *("age", "town=Bonn", "town=Rom", "town=Ulm"),
        *("size=S", "size=M", "size=L", "7=False", "7=True"),
    ]
    assert data.x.tolist() == [
        [30, 0, 0, 1, 1, 0, 0, 0, 1],
        [40, 1, 0, 0, 0, 0, 1, 1, 0],
        [50, 0, 0, 1, 1, 0, 0, 0, 1],
        [60, 0, 1, 0, 1, 0, 0, 0, 1],
    ]
    assert data.x_test.tolist() == [
        [1, 0, 1, 0, 0, 1, 0, 1, 0],
        [2, 0, 0, 0, 0, 1, 0, 0, 1],
    ]
    assert (data.mean[0], data.std[0]) == (45.0, np.array([30, 40, 50, 60]).std())
    assert (data.mean[1:], data.std[1:]) == ((0.0,) * 8, (1.0,) * 8)


@pytest.mark.parametrize("kind", ["string", "boolean", "object", "string[pyarrow]"])
def test_missing_cells_of_any_type_of_pandas_are_a_category(kind: Any) -> None:
    # seen: TypeError: boolean value of NA is ambiguous
    cells = [True, None, False, True] if kind == "boolean" else ["a", None, "b", "a"]
    frame = pd.DataFrame({"q": pd.array(cells, dtype=kind), "n": [1.0, 2.0, 3.0, 4.0]})
    data = in_memory((frame, list("abab"), frame, list("abab")))
    names = [name for column in data.columns for name in column.inputs]
    assert len([name for name in names if name.startswith("q=")]) == 3
    assert data.x[:, :3].sum(1).tolist() == [1.0] * 4


def test_what_helps_against_a_gap_in_a_data_frame_can_be_done() -> None:
    # seen: "data.missing = 'mean' replaces missing numbers", which is then refused
    frame = pd.DataFrame({"n": [1.0, math.nan, 3.0, 4.0]})
    with pytest.raises(DataError, match=r"in row 1 \(counted from 0\).*; fill them in, or leave"):
        in_memory((frame, list("abab"), frame, list("abab")))


@given(st.integers(2, 40), st.integers(2, 5), st.integers(0, 9))
@settings(max_examples=15)
def test_folds_of_arrays_are_those_of_the_same_rows_in_a_file(
    classes: int, folds: int, seed: int
) -> None:
    # seen: with more than ten numbered classes they were others, since "10" is before "2" as a text
    y = np.random.default_rng(seed).integers(0, classes, 90)
    x = np.arange(90.0, dtype=np.float32)[:, None]
    division = Division(folds=folds, number=seed % folds)
    data, _ = split_in_memory((x, y), division)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "rows.npz", x=x, y=y)
        filed = load_data("npz", path=Path(folder) / "rows.npz", division=division)
    assert data.x_test.flatten().tolist() == filed.x_test.flatten().tolist()


def test_a_torch_data_set_of_pairs() -> None:
    pairs = [(torch.ones(2) * i, torch.tensor(i % 2)) for i in range(4)]
    data = in_memory(Pairs(pairs))
    assert (data.x[:, 0].tolist(), data.y.tolist()) == ([0, 1, 2, 3], [0, 1, 0, 1])
    named = in_memory(Pairs([(np.ones(2), "well"), ([1, 2], "ill")]))
    assert (named.classes, named.y.tolist()) == (("ill", "well"), [1, 0])


class Numbered:
    """Rows by number, of no type of torch's; more numbers than there are rows have a row."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row % len(self.rows)]  # torch asks for no IndexError


@pytest.mark.parametrize("kind", [Pairs, Numbered])
def test_two_data_sets_are_the_training_rows_and_the_test_rows(kind: Any) -> None:
    # seen: they were taken for arrays of pairs; one without an end was read until memory was full
    pairs = [(torch.ones(2) * i, i % 2) for i in range(6)]
    data = in_memory((kind(pairs[:4]), kind(pairs[4:])))
    assert (data.x[:, 0].tolist(), data.y.tolist()) == ([0, 1, 2, 3], [0, 1, 0, 1])
    assert (data.x_test[:, 0].tolist(), data.y_test.tolist()) == ([4, 5], [0, 1])
    assert len(in_memory((kind(pairs),)).y) == 6


class Strange:
    """What no array can be made of."""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (5, r"data is int; it must be \(x, y\), .*torch data set.*fedgist.Dataset"),
        ([X, Y], "data is list; it must be"),
        ((X, Y, X), "data is a tuple of 3"),
        (Endless(), "data: a Endless has no length"),
        (Pairs([X[0], X[1]]), "data: row 0 of the torch data set is not a pair"),
        (Pairs([(X[0], 0, 1)]), "row 0 of the torch data set is not a pair"),
        (Pairs([(X[0], 0), (X[0][:1], 1)]), r"x of row 1 has shape \[1\], row 0 \[2\]"),
        (Pairs([(Strange(), 0)]), "x of row 0 is a Strange, not a tensor"),
        # seen: int(y) cut a regression target, whose run then "reached 79.5 %"
        (Pairs([(X[0], 79.5), (X[1], 80.0)]), r"y must be whole numbers .* row 0 .* holds 79\.5"),
        (Pairs([(X[0], torch.tensor([1.0]))]), r"y has shape \[1, 1\]: one label a row"),
        (Pairs([]), "no training rows"),
        ((Pairs([(X[0], 0)]), Pairs([X[0]])), "data: test: row 0 of the torch data set is not a p"),
        ((Pairs([(X[0], 0)]),) * 3, "data is a tuple of 3"),
        ((Numbered([1, 2]), Y), "data: x is a Numbered, not an array"),
        (([Numbered([1, 2])], [0]), "data: x is a list, not an array"),
        (({"a": 1}, {"b": 2}), "data: x is a dict, not an array"),
        ((X, Y - 1), "data: y holds -1 in row 0; labels are 0, 1, 2"),
        ((X, Y.astype(float) + 0.25), r"data: y must be whole .* holds 0\.25"),
        ((X, np.array([0, 1, np.nan, 0, 1, 0])), "data: y must be whole .* row 2 .* holds nan"),
        ((X, np.array([0, 1, np.inf, 0, 1, 0])), "data: y must be whole .* row 2 .* holds inf"),
        ((X, ["a", None] * 3), "data: y must be whole numbers or text; row 1 .* holds None"),
        ((X, ["a", float("nan")] * 3), "data: y must be .* row 1 .* holds nan"),
        ((X, pd.Series(["a", None] * 3)), "data: y must be .* row 1 .* holds nan"),
        ((X, pd.Categorical([1, None] * 3)), "data: y must be .* row 1 .* holds None"),
        ((X, ["a", 1] * 3), "data: y must be .* row 1 .* holds 1"),
        ((X, np.eye(6)), r"y has shape \[6, 6\].*argmax"),
        ((X, np.array(3)), "data: y is a ndarray, not an array"),
        ((X, None), "data: y is None, not an array"),
        ((X, Y.astype(complex)), "data: y must be whole numbers or texts, not complex128"),
        ((X, Y.astype("M8[s]")), r"data: y must be whole numbers or texts, not datetime64\[s\]"),
        ((X, Y + 10**6), "y reaches 1000002, but has 3 different labels: number them 0..2"),
        ((X, Y + 2**60), "y must be whole|reaches"),
        ((X, Y[:5]), "data: x has 6 rows, but y has 5"),
        ((X, Y, X, Y[:5]), "data: x_test has 6 rows, but y_test has 5"),
        ((X, Y, X, ["a"] * 6), "one of y and y_test holds texts, the other numbers"),
        ((X, list("ab") * 3, X, list("ac") * 3), "data: y_test: unknown label 'c'.*known: a, b"),
        ((X, Y, X[:, :1], Y), r"training rows have shape \[2\], test rows \[1\]"),
        ((X, Y, X.astype(np.uint8), Y), "one of x and x_test holds bytes"),
        ((None, Y), "data: x is None, not an array"),
        ((Strange(), Y), "data: x is a Strange, not an array"),
        ((np.float64(3), Y), "data: x is a float64, not an array"),
        (([[1, 2], [3]], [0, 1]), "data: x cannot be read as an array"),
        ((X.astype(complex), Y), "data: x must hold numbers, not complex128"),
        ((X.astype(str), Y), "data: x must hold numbers, not <U"),
        ((np.array([[1, "a"]] * 6, dtype=object), Y), "data: x must hold numbers, not object"),
        (([[10**400]] * 6, Y), "data: x (must hold numbers|cannot be read)"),
        ((X[:, 0], Y), r"data: x has shape \[6\]: one value a row is x.reshape"),
        ((X[:, :0], Y), r"data: x has shape \[6, 0\]: there is nothing in a row"),
        ((X[:0], Y[:0]), "your data has no training rows"),
        ((X * np.nan, Y), "training row 0 holds a number that is not finite"),
        ((X * 1e300, Y), "training row 0 holds a number that is not finite"),
        ((np.ma.masked_equal(X, 3.0), Y), "data: x is masked in places"),
        ((torch.ones(6, 2).to_sparse(), Y), "data: x cannot be read as an array"),
        ((torch.ones(6, 2, device="meta"), Y), "data: x cannot be read as an array"),
        ((X, [torch.ones(2, device="meta"), "a"]), "data: y cannot be read as an array"),
        ((FRAME, list("abab"), X, Y), "one of x and x_test is a data frame"),
        ((FRAME, list("abab"), FRAME[["age"]], list("abab")), "x_test has no column 'town'"),
        ((FRAME[[]], list("abab")), "data: x has no columns"),
        ((pd.concat([FRAME] * 2, axis=1), list("abab")), "data: x has two columns named 'age'"),
        (
            (pd.DataFrame({"when": pd.to_datetime(["2020-01-01"] * 2)}), [0, 1]),
            "data: x: the column 'when' holds datetime64",
        ),
        ((pd.DataFrame({"a": [1.0, None]}), [0, 1]), "the column 'a' holds no number in row 1"),
        (
            (pd.DataFrame({"seen": ["2.1.2020", "13.1.2020"]}), [0, 1]),
            r"data: x: the column 'seen' holds dates \('2.1.2020'\); leave it out of the data fr",
        ),
        (
            (pd.DataFrame({"case": [f"P{i}" for i in range(30)]}), [0, 1] * 15),
            "the column 'case' holds 30 different texts, more than 20, like names or identifiers",
        ),
        (
            Dataset("mine", X, Y, X, Y, 3),  # type: ignore[arg-type]
            "data: x of a Dataset must be a tensor, not ndarray",
        ),
    ],
)
def test_what_cannot_be_used_is_named(data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as error:
        in_memory(data)
    assert "\n" not in str(error.value)
    assert "data" in str(error.value)


def test_further_rows_have_the_form_of_the_data() -> None:
    data = in_memory((FRAME, list("abab")))
    x, y = labelled_like(data, FRAME[::-1], ["b", "a", "b", "a"], "rare")
    assert torch.equal(x, data.x.flip(0))
    assert torch.equal(y, data.y.flip(0))
    with pytest.raises(DataError, match=r"rare: x: examples have shape \[2\]"):
        labelled_like(data, X, Y, "rare")
    numbers = in_memory((X, Y + 1))
    assert labelled_like(numbers, X, Y, "rare")[1].tolist() == Y.tolist()
    with pytest.raises(DataError, match="rare: y: unknown label '7'"):
        labelled_like(numbers, X, Y + 7, "rare")


def test_a_number_is_a_class_by_its_name_where_names_are_numbers() -> None:
    # rejects positions: the label 10 is the class named 10, not the eleventh
    named = in_memory((X, ["10", "20", "30"] * 2))
    assert labelled_like(named, X, [30, 20, 10] * 2, "more")[1].tolist() == [2, 1, 0] * 2
    # seen: of classes -1 and 1, the training file's own labels were refused
    signed = in_memory((X, ["-1", "1", "0"] * 2))
    own = [signed.names.index(name) for name in ("-1", "0", "1")]
    assert labelled_like(signed, X, np.array([-1, 0, 1] * 2), "more")[1].tolist() == own * 2
    with pytest.raises(DataError, match="rare: y: unknown label '-2'"):
        labelled_like(signed, X, [-2, 0, 1] * 2, "rare")
    words = in_memory((X, ["ill", "well"] * 3))
    assert labelled_like(words, X, [1, 0] * 3, "more")[1].tolist() == [1, 0] * 3


VALUES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.booleans(),
    st.complex_numbers(),
    st.binary(max_size=3),
)
OBJECTS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(OBJECTS, OBJECTS)
def test_any_objects_are_data_or_an_error(x: Any, y: Any) -> None:
    for form in ((x, y), (x, y, x, y), x, (X, y), (x, Y)):
        with contextlib.suppress(DataError):  # its message is one line by its class
            data = in_memory(form)
            assert len(data.x) == len(data.y)
