"""Tables: what is a number, what a category, and where a file is wrong."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedgist.data.dataset import Dataset
from fedgist.data.division import Division
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.table_file import load_table
from fedgist.errors import DataError

HEAD = "age,smokes,town,site,diagnosis\n"
ROWS = [
    "30,True,Ulm,10,ill",
    "40,False,Köln,9,well",
    "50,True,,9,ill",
    '60.5,False,"Bonn, am Rhein",10,well',
    "-1e1,True,Ulm,2,ill",
    " 7,True,Ulm,2,well",
]


def write(path: Path, text: str, name: str = "table.csv") -> Path:
    (path / name).write_text(text, encoding="utf-8", newline="")
    return path / name


def read(path: Path, text: str, **options: Any) -> Dataset:
    held_out = {} if "test" in options else {"test_fraction": 0}
    return load_data(
        "table", path=write(path, text), **{"label": "diagnosis", **held_out, **options}
    )


def test_columns(tmp_path: Path) -> None:
    data = read(tmp_path, HEAD + "\n".join(ROWS), client="site")
    age = [30, 40, 50, 60.5, -10, 7]
    assert data.classes == ("ill", "well")
    assert data.y.tolist() == [0, 1] * 3
    assert data.clients is not None
    assert data.clients.tolist() == [2, 1, 1, 2, 0, 0]  # sites 2, 9, 10
    assert data.x.tolist() == [  # age; smokes: False, True; town: "", Bonn, Köln, Ulm
        [30, 0, 1, 0, 0, 0, 1],
        [40, 1, 0, 0, 0, 1, 0],
        [50, 0, 1, 1, 0, 0, 0],
        [60.5, 1, 0, 0, 1, 0, 0],
        [-10, 0, 1, 0, 0, 0, 1],
        [7, 0, 1, 0, 0, 0, 1],
    ]
    assert data.mean == pytest.approx([np.mean(age)] + [0] * 6)
    assert data.std == pytest.approx([np.std(age)] + [1] * 6)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (
            "2021-03-{}",
            "holds dates .'2021-03-1'.; name it in data.ignore, replace it with numbers, or say",
        ),
        ("{}/4/2021 10:30", "holds dates .'1/4/2021 10:30'."),
        (
            "case {}",
            "holds 28 different texts, more than 20, like names or identifiers; name it in data.ig",
        ),
    ],
)
def test_texts_that_are_no_categories(tmp_path: Path, cell: str, says: str) -> None:
    # seen: each date and each name of a patient became an input of its own
    rows = [f"{age},{cell.format(1 + age % 28)},ill" for age in range(40)]
    text = "age,which,diagnosis\n" + "\n".join([*rows, "1,,well"][: len(rows)])
    with pytest.raises(DataError, match=f"table.csv: the column 'which' {says}"):
        read(tmp_path, text)
    assert read(tmp_path, text, ignore=["which"]).x.shape == (40, 1)
    stated = {"age": "number", "which": [cell.format(day) for day in range(1, 29)]}
    assert read(tmp_path, text, columns=stated).x.shape == (40, 29)


PROBLEMS = {  # a column's cells, and what its problem is
    "name": ("person {}", "'name' holds 40 different texts, more than 20"),
    "day": ("2021-03-{}", "'day' holds dates"),
    "share": ("{} %", "'share' holds percentages"),
    "height": ("", "missing numbers in the column height (1); data.missing = 'mean' replaces"),
    "weight": ("heavy", "'weight' are numbers; row 3 below the header holds 'heavy'"),
}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wrong=st.sets(st.sampled_from([*PROBLEMS, "label", "client"])))
def test_all_problems_of_a_table_are_named_at_once(tmp_path: Path, wrong: set[str]) -> None:
    """What is wrong with the labels, the clients and each column is in one error."""
    columns: dict[str, list[Any]] = {
        "site": ["a", "b"] * 20,
        "y": ["ill", "well"] * 20,
        "age": [*range(40)],
    }
    for name, (cell, _) in PROBLEMS.items():
        cells: list[Any] = [row + 0.5 for row in range(40)]
        if name in {"height", "weight"} and name in wrong:
            cells[2] = cell
        elif name in wrong:
            cells = [cell.format(1 + row) for row in range(40)]
        columns[name] = cells
    for column, name in (("y", "label"), ("site", "client")):
        if name in wrong:
            columns[column] = ["", *columns[column][1:]]
    path = tmp_path / "t.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    options: dict[str, Any] = {"path": path, "label": "y", "client": "site", "test_fraction": 0}
    if not wrong:
        load_data("table", **options)
        return
    with pytest.raises(DataError) as found:
        load_data("table", **options)
    said = str(found.value)
    assert said.startswith("t.csv: ")
    roles = {
        "label": "the label column 'y' is empty",
        "client": "the client column 'site' is empty",
    }
    if wrong == {"height"}:
        assert "the column 'height' holds no number in row 3 below the header: ''" in said
        return
    for name in wrong:
        assert roles.get(name, PROBLEMS.get(name, ("", ""))[1]) in said
    lines = said.splitlines()
    assert len(lines) == (1 if len(wrong) == 1 else len(wrong) + 1)
    if len(wrong) > 1:
        assert lines[0] == f"t.csv: {len(wrong)} problems:"


def test_missing_numbers_of_several_columns_are_one_problem(tmp_path: Path) -> None:
    text = "age,size,y\n1,2,a\n,,b\n3,,a\n"
    says = r"table.csv: missing numbers in the columns age \(1\), size \(2\); data.missing = 'mean'"
    with pytest.raises(DataError, match=says):
        read(tmp_path, text, label="y")


def test_an_error_names_a_dozen_problems_and_counts_the_others(tmp_path: Path) -> None:
    columns = {f"c{i}": [f"name {i} {row}" for row in range(30)] for i in range(40)}
    pd.DataFrame({**columns, "y": ["a", "b"] * 15}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match=r"t.csv: 40 problems:\n- the column 'c0' holds") as found:
        load_data("table", path=tmp_path / "t.csv", label="y", test_fraction=0)
    lines = str(found.value).splitlines()
    assert len(lines) == 14
    assert lines[-1] == "- and 28 more; fedgist init proposes what to do about each"


def test_ignore_and_tabs(tmp_path: Path) -> None:
    path = write(tmp_path, "a\tb\ty\n1\tx\t1\n2\tz\t2\n", "table.tsv")
    data = load_data("table", path=path, label="y", ignore=["b"], test_fraction=0)
    assert (data.x.tolist(), data.classes) == ([[1], [2]], ("1", "2"))


def test_annotations_stay_beside_the_training_rows(tmp_path: Path) -> None:
    lines = "a,w,y,held\n1,0.5,1,0\n2,0.25,2,0\n3,9,1,1\n4,1,2,0\n"
    path = write(tmp_path, lines)
    data = load_data("table", path=path, label="y", test="held", annotations=["w"])
    assert data.x.tolist() == [[1], [2], [4]]
    assert data.annotations["w"].tolist() == [0.5, 0.25, 1]
    assert data.only(torch.tensor([2, 0])).annotations["w"].tolist() == [1, 0.5]
    for broken, words in (("many", "'many'"), ("1e999", "w")):
        path = write(tmp_path, lines.replace("0.25", broken))
        with pytest.raises(DataError, match=words):
            load_data("table", path=path, label="y", test="held", annotations=["w"])
    with pytest.raises(DataError, match="'v'"):
        load_data("table", path=path, label="y", annotations=["v"])


def test_a_test_file(tmp_path: Path) -> None:
    test = write(
        tmp_path, "town,diagnosis,age,smokes\nRom,ill,1,True\nUlm,well,2,perhaps\n", "test.csv"
    )
    data = read(tmp_path, HEAD + "\n".join(ROWS), test=str(test), client="site")
    assert data.x_test.shape == (2, 7)
    assert data.x_test[0].tolist() == [1, 0, 1, 0, 0, 0, 0]  # Rome is new
    assert data.x_test[1].tolist() == [2, 0, 0, 0, 0, 0, 1]
    assert (data.clients_test, data.y_test.tolist()) == (None, [0, 1])


def test_held_out(tmp_path: Path) -> None:
    data = read(
        tmp_path,
        "a,who,diagnosis\n" + "".join(f"{i},{i % 4},{i % 2}\n" for i in range(40)),
        client="who",
        test_fraction=0.25,
        division=Division(within="pooled"),
    )
    assert (len(data.x), len(data.x_test)) == (30, 10)
    assert torch.bincount(data.y_test).tolist() == [5, 5]
    assert data.clients_test is not None
    assert torch.equal(data.clients_test, (data.x_test[:, 0] % 4).long())
    assert data.mean == pytest.approx([float(data.x.mean())])


def test_parquet_keeps_types(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "zip": ["01", "02", None, "01"],
            "age": [1, 2, 3, 4],
            "flag": [True, False, True, True],
            "kind": pd.Categorical(["b", "a", "b", None]),
            "maybe": pd.array([1, 2, 3, 4], dtype="Int64"),
            "y": [1.0, 2.0, 1.0, 2.0],
        },
        index=[5, 7, 9, 11],
    )
    frame.to_parquet(tmp_path / "table.parquet")
    kinds = {"zip": "categories"}
    data = load_data(
        "table", path=tmp_path / "table.parquet", label="y", test_fraction=0, kinds=kinds
    )
    assert data.x[0].tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 1, 1]
    assert data.notes == (
        "columns that are left out because they number the rows: '__index_level_0__'",
    )
    assert data.x[:, 3].tolist() == [1, 2, 3, 4]
    assert data.classes == ("1", "2")


def test_holes_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pd.DataFrame({"age": [1.0, None, 3.0], "y": ["a", "b", None]}).to_parquet(path)
    with pytest.raises(DataError, match="the label column 'y' is empty in row 3 below the header"):
        load_data("table", path=path, label="y")
    pd.DataFrame({"age": [1.0, None, 3.0], "y": ["a", "b", "a"]}).to_parquet(path)
    with pytest.raises(
        DataError, match="the column 'age' holds no number in row 2 below the header: 'nan'"
    ):
        load_data("table", path=path, label="y", test_fraction=0)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            HEAD + ROWS[0],
            {"label": "illness"},
            "table.csv has no column 'illness'; it has age, smokes, town, site, d",
        ),
        (HEAD + ROWS[0], {"client": "who"}, "table.csv has no column 'who'"),
        (HEAD + ROWS[0], {"ignore": ["who"]}, "table.csv has no column 'who'"),
        (
            HEAD + "\n".join([*ROWS, "1,True,Ulm,2,"]),
            {},
            "table.csv: the label column 'diagnosis' is empty in row 7 below the header",
        ),
        (
            HEAD + "\n".join([*ROWS, "1,True,Ulm,,ill"]),
            {"client": "site"},
            "client column 'site' is empty in row 7",
        ),
        (
            "a,diagnosis\n1,1\n2,nan\n",
            {},
            r"the label column 'diagnosis' is empty \('nan'\) in row 2",
        ),
        (
            "a,diagnosis\n1,1\n2,2.5\n",
            {},
            "the labels 'diagnosis' must be whole numbers or text; row 1 .* holds 2.5",
        ),
        (
            "a,diagnosis\n1,x\n,y\n",
            {},
            "the column 'a' holds no number in row 2 below the header: ''",
        ),
        (
            "a,diagnosis\n1,x\n?,y\n",
            {},
            r"the column 'a' holds no number in row 2 below the header: '\?'",
        ),
        (
            "a,diagnosis\n1,x\nNA,y\n",
            {},
            "the column 'a' holds no number in row 2 below the header: 'NA'",
        ),
        (
            "a,diagnosis\n1,x\ninf,y\n",
            {},
            "the column 'a' holds no number in row 2 below the header: 'inf'",
        ),
        ("a,diagnosis\n1,x\n1e39,y\n", {}, "training row 1 holds a number that is not finite"),
        ("a,diagnosis\n1,x\n2\n", {}, "table.csv cannot be read: .*Expected 2 columns, got 1: 2"),
        ("a,diagnosis\n1,x\n2,y,z\n", {}, "table.csv cannot be read: .*Expected 2 columns, got 3"),
        ("a,a,diagnosis\n1,x,y\n", {}, "table.csv has two columns named 'a'"),
        ("a,diagnosis,diagnosis\n1,x,y\n", {}, "table.csv has two columns named 'diagnosis'"),
        ("", {}, "table.csv cannot be read: Empty CSV file"),
        (HEAD, {}, "table.csv has no training rows"),
        ("diagnosis\nill\n", {}, "table.csv has no column besides the label"),
        (
            "a,diagnosis\n" + "".join(f"p{i},x\n" for i in range(1001)),
            {},
            "'a' holds 1001 different texts, more than",
        ),
    ],
)
def test_errors(tmp_path: Path, text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, text, **options)


def test_the_error_of_a_label_says_how_its_number_is_written(tmp_path: Path) -> None:
    text = "a,diagnosis\n" + "1,01\n2,02\n" * 5
    with pytest.raises(DataError, match=r"are read as numbers: '1' for '01'$"):
        read(tmp_path, text, classes=["01", "02"])
    assert read(tmp_path, text, classes=["2", "1"]).y.unique().tolist() == [0, 1]
    with pytest.raises(DataError, match=r"not among the classes: nan, ill$"):
        read(tmp_path, text, classes=["nan", "ill"])


def test_errors_of_a_test_file(tmp_path: Path) -> None:
    text = "a,b,diagnosis\n1,x,ill\n2,y,well\n"
    for content, message in (
        ("a,diagnosis\n1,ill\n", "test.csv has no column 'b'; it has a, diagnosis"),
        (
            "a,b,diagnosis\n1,x,ill\nz,x,ill\n",
            "test.csv: the column 'a' holds no number in row 2 .*: 'z'",
        ),
        (
            "a,b,diagnosis\n1,x,dead\n",
            "the test label 'dead' is not among the training labels: ill, well",
        ),
    ):
        with pytest.raises(DataError, match=message):
            read(tmp_path, text, test=write(tmp_path, content, "test.csv"))
    with pytest.raises(
        DataError, match=r"test_fraction = 0.2 is not read: test = '.*test.csv' nam"
    ):
        read(tmp_path, text, test=tmp_path / "test.csv", test_fraction=0.2)


def test_a_bad_cell_keeps_its_row_number_after_the_split(tmp_path: Path) -> None:
    rows = [f"{i},{i % 2}" for i in range(30)]
    rows[16] = ",0"
    with pytest.raises(
        DataError, match="the column 'a' holds no number in row 17 below the header"
    ):
        read(tmp_path, "a,diagnosis\n" + "\n".join(rows), test_fraction=0.3)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"table\.xlsx is not a table that can be read; use \.csv, \.tsv, \.parquet"
    ):
        load_data("table", path=write(tmp_path, "", "table.xlsx"), label="y")
    with pytest.raises(DataError, match=r"table\.parquet cannot be read"):
        load_data("table", path=write(tmp_path, "no parquet", "table.parquet"), label="y")
    (tmp_path / "table.csv").write_bytes(b"a,y\n\xe4,1\n")
    with pytest.raises(DataError, match=r"table\.csv cannot be read: .*invalid UTF8"):
        load_data("table", path=tmp_path / "table.csv", label="y")


@pytest.mark.parametrize(("module", "name"), [("pandas", "pandas"), ("pyarrow.csv", "pyarrow")])
def test_missing_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        DataError, match=rf"reading tables needs {name}: pip install 'fedgist\[table\]'"
    ):
        read(tmp_path, HEAD + ROWS[0])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_truncation_of_parquet_is_an_error(tmp_path: Path, data: st.DataObject) -> None:
    file = io.BytesIO()
    pd.DataFrame({"a": range(50), "y": ["a", "b"] * 25}).to_parquet(file)
    size = data.draw(st.integers(0, len(file.getvalue()) - 1))
    (tmp_path / "table.parquet").write_bytes(file.getvalue()[:size])
    with pytest.raises(DataError, match=r"table\.parquet cannot be read"):
        load_data("table", path=tmp_path / "table.parquet", label="y")


cell = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    st.integers().map(str),
)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(cell, cell, st.sampled_from(["x", "y"])), min_size=1, max_size=8))
def test_any_table_is_read_or_an_error(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    quoted = "\n".join(",".join('"' + c.replace('"', '""') + '"' for c in row) for row in rows)
    try:
        data = read(tmp_path, "a,b,diagnosis\n" + quoted)
    except DataError as error:
        assert "table.csv" in str(error)  # noqa: PT017
    else:
        assert len(data.x) == len(rows)
        assert [data.classes[label] for label in data.y.tolist()] == [row[2] for row in rows]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "table.csv").write_bytes(b"a,y\n" + content)
    try:
        load_data("table", path=tmp_path / "table.csv", label="y")
    except DataError as error:
        assert "table.csv" in str(error)  # noqa: PT017


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from('"",,\nxy'), max_size=14), st.sampled_from(["\n", "\r\n"]))
@example('1,"x\n2,y', "\n")
@example('1,""', "\n")
@example('1,"""', "\n")
@example('1,"\n"\n', "\n")
@example('1,x"y\n2,"x""y"', "\r\n")
def test_a_table_that_ends_in_a_quoted_cell_is_an_error(
    tmp_path: Path, text: str, newline: str
) -> None:
    text = "a,b\n" + text
    (tmp_path / "t.csv").write_bytes(text.replace("\n", newline).encode())
    problem, rows = "", [["", ""]]
    try:
        rows = list(filter(None, csv.reader(io.StringIO(text, newline=""), strict=True)))
    except csv.Error as error:
        problem = str(error)
    try:
        cells = load_table(tmp_path / "t.csv").frame.to_numpy().tolist()
    except DataError as error:
        assert problem or any(len(row) != 2 for row in rows)
        assert "t.csv" in str(error)  # noqa: PT017
    else:
        assert "unexpected end of data" not in problem
        found = [[cell.replace("\r\n", "\n") for cell in row] for row in cells]
        assert problem or found == rows[1:]


@pytest.mark.parametrize("size", [200, 2 << 20], ids=["of a block", "of several blocks"])
def test_a_missing_closing_quote_is_named_by_its_row(tmp_path: Path, size: int) -> None:
    rows = [f"{i},{'Bonn' if i % 2 else 'Ulm'}" for i in range(1, 1 + size // 10)]
    rows[14] = '15,"Bonn'
    (tmp_path / "t.csv").write_text("age,town\n" + "\n".join(rows) + "\n", "utf-8")
    with pytest.raises(
        DataError, match=r"^t\.csv: a cell of row 15 below the header has no closing"
    ):
        load_table(tmp_path / "t.csv")


def test_a_cell_may_be_larger_than_a_block(tmp_path: Path) -> None:
    long = "x" * (2 << 20)
    (tmp_path / "t.csv").write_text(f'a,b\n1,"{long}"\n2,y\n', "utf-8")
    assert load_table(tmp_path / "t.csv").frame["b"].tolist() == [long, "y"]
