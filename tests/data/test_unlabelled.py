"""Examples to predict get the form and units of the run's data, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedgist.data.dataset import Dataset
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.unlabelled import read_examples
from fedgist.errors import DataError

RNG = np.random.default_rng(0)
HEAD = "age,smokes,town,site,note,diagnosis\n"
ROWS = [
    "30,True,Ulm,10,a,ill",
    "40,False,Köln,9,b,well",
    "50,True,,9,c,ill",
    '60.5,False,"Bonn, am Rhein",10,d,well',
]


def run_data(
    shape: tuple[int, ...], kind: torch.dtype = torch.uint8, scale: float = 255.0
) -> Dataset:
    x, y = torch.zeros(2, *shape, dtype=kind), torch.zeros(2, dtype=torch.int64)
    return Dataset("run", x, y, x, y, 2, scale=scale if kind == torch.uint8 else 1.0)


def saved(path: Path, array: np.ndarray, name: str = "x.npy") -> Path:
    if name.endswith(".npy"):
        np.save(path / name, array)
    else:
        with (path / name).open("wb") as file:  # np.savez would add .npz to a name in capitals
            np.savez(file, x=array, y=np.array([None]), x_test=array)
    return path / name


def write(path: Path, text: str, name: str = "new.csv") -> Path:
    (path / name).write_text(text, encoding="utf-8", newline="")
    return path / name


def fails_to_read(
    path: Path,
    data: Dataset,
    message: str,
) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_examples(path, data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "X.NPZ"])
@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 5, 1), (3, 4, 5), (1, 4, 5), (1, 4, 3), (4, 5)])
def test_images_as_the_npz_source_reads_them(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    x = RNG.integers(0, 256, (20, *shape), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", x=x, y=np.arange(20) % 2)
    data = load_data("npz", path=tmp_path / "train.npz", test_fraction=0)
    x_read = read_examples(saved(tmp_path, x, name), data)
    assert x_read.dtype == torch.uint8
    assert torch.equal(x_read, data.x)
    assert torch.equal(read_examples(saved(tmp_path, x.astype(float), name), data), data.x)
    assert torch.equal(read_examples(tmp_path / "train.npz", data), data.x)


def test_the_digits_themselves(tmp_path: Path) -> None:
    data = load_data("digits")
    for x in (data.x.numpy(), data.x[:, 0].double().numpy()):
        assert torch.equal(read_examples(saved(tmp_path, x), data), data.x)


def test_the_only_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", other=np.ones((3, 4)))
    assert (
        read_examples(tmp_path / "a.npz", run_data((4,), torch.float32)).tolist() == [[1.0] * 4] * 3
    )


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.bool_, np.float16, ">f8"])
@pytest.mark.parametrize("shape", [(4,), (4, 5), (3, 4, 5), (1, 4, 5)])
def test_numbers_become_those_of_the_run(
    tmp_path: Path, kind: type, shape: tuple[int, ...]
) -> None:
    x: np.ndarray = RNG.integers(0, 2, (6, *shape)).astype(kind)
    x_read = read_examples(saved(tmp_path, x), run_data(shape, torch.float32))
    assert x_read.dtype == torch.float32
    assert np.array_equal(x_read.numpy(), x.astype(np.float32))


@pytest.mark.parametrize(
    ("x", "data", "message"),
    [
        (
            np.zeros((2, 3, 32, 32)),
            run_data((1, 8, 8)),
            r"x.npz: examples have shape \[3, 32, 32\]; this run takes \[1, 8",
        ),
        (
            np.zeros((2, 64)),
            run_data((1, 8, 8)),
            r"x.npz: examples have shape \[64\]; this run takes \[1, 8, 8\]",
        ),
        (
            np.zeros((8, 8)),
            run_data((1, 8, 8)),
            r"examples have shape \[8\]; this run takes \[1, 8, 8\]",
        ),
        (np.zeros((0, 4)), run_data((4,), torch.float32), "x.npz holds no examples"),
        (
            np.zeros(4),
            run_data((4,), torch.float32),
            r"x.npz: the examples must be numbers of .* float64 of shape \[4\]",
        ),
        (np.float64(4), run_data((4,), torch.float32), r"not float64 of shape \[\]"),
        (np.full((2, 4), "a"), run_data((4,), torch.float32), "the examples must be numbers"),
        (
            np.full((2, 4), None),
            run_data((4,), torch.float32),
            "x.npz: the array 'x' cannot be read: Object arrays",
        ),
        (
            np.diag([1, np.nan]),
            run_data((2,), torch.float32),
            "row 1 .counted from 0. holds nan; this run takes finite num",
        ),
        (
            np.diag([1, 1e39]),
            run_data((2,), torch.float32),
            "row 1 .counted from 0. holds inf; this run takes finite",
        ),
        (
            np.full((2, 4, 4), 0.5),
            run_data((1, 4, 4)),
            r"row 0 .* holds 0\.5; this run takes whole numbers 0\.\.255",
        ),
        (
            np.full((2, 4, 4), 17),
            run_data((1, 4, 4), scale=16.0),
            r"holds 17; this run takes whole numbers 0\.\.16",
        ),
        (
            np.full((2, 4, 4), 255, np.uint8),
            run_data((1, 4, 4), scale=16.0),
            r"holds 255; .* whole numbers 0\.\.16",
        ),
        (
            np.full((2, 4, 4), -1),
            run_data((1, 4, 4)),
            r"holds -1; this run takes whole numbers 0\.\.255",
        ),
        (
            np.full((2, 4, 4), np.nan),
            run_data((1, 4, 4)),
            r"holds nan; this run takes whole numbers 0\.\.255",
        ),
    ],
)
def test_errors_of_arrays(tmp_path: Path, x: np.ndarray, data: Dataset, message: str) -> None:
    fails_to_read(saved(tmp_path, x, "x.npz"), data, message)


def test_what_is_no_array(tmp_path: Path) -> None:
    data = run_data((4,), torch.float32)
    np.savez(tmp_path / "a.npz", a=np.ones((3, 4)), b=np.ones((3, 4)))
    fails_to_read(tmp_path / "a.npz", data, "a.npz has no array 'x'; it holds a, b")
    np.savez(tmp_path / "b.npz")
    fails_to_read(tmp_path / "b.npz", data, "b.npz has no array 'x'; it holds nothing")
    fails_to_read(saved(tmp_path, np.array([None])), data, "x.npy cannot be read: Object arrays")
    for name in ("x.npz", "x.npy"):
        for content in ("", "text", "PK\3\4" + 50 * " "):
            fails_to_read(write(tmp_path, content, name), data, f"{name} cannot be read")


def test_other_files(tmp_path: Path) -> None:
    fails_to_read(tmp_path / "x.npz", run_data((4,)), r"x\.npz does not exist")
    fails_to_read(
        write(tmp_path, "", "x.txt"),
        run_data((4,)),
        r"x\.txt is not a file of examples; use \.npz, .* or a folder of images",
    )


def table_data(path: Path) -> Dataset:
    path = write(path, HEAD + "\n".join(ROWS), "train.csv")
    options: dict[str, Any] = {
        "path": str(path),
        "label": "diagnosis",
        "client": "site",
        "ignore": ["note"],
    }
    options["test_fraction"] = 0
    return load_data("table", **options)


def test_a_table_is_encoded_as_the_training_table(tmp_path: Path) -> None:
    data = table_data(tmp_path)
    assert torch.equal(read_examples(tmp_path / "train.csv", data), data.x)
    table = write(
        tmp_path, "town\tsmokes\tid\tage\nUlm\tTrue\tx\t7\nRom\tperhaps\ty\t-1e1\n", "new.tsv"
    )
    x_read = read_examples(table, data)  # age; smokes: False, True; town: "", Bonn, Köln, Ulm
    assert x_read.tolist() == [[7, 0, 1, 0, 0, 0, 1], [-10, 0, 0, 0, 0, 0, 0]]
    pd.DataFrame({"age": [7], "smokes": [True], "town": ["Ulm"]}).to_parquet(
        tmp_path / "new.parquet"
    )
    assert torch.equal(read_examples(tmp_path / "new.parquet", data), x_read[:1])


def test_only_training_rows_teach_categories(tmp_path: Path) -> None:
    text = "kind,diagnosis\n" + "".join(f"k{i},{i % 2}\n" for i in range(20))
    options: dict[str, Any] = {"path": write(tmp_path, text, "train.csv"), "label": "diagnosis"}
    data = load_data("table", **options)
    assert data.input_shape == (16,)
    x_read = read_examples(write(tmp_path, "kind\n" + "".join(f"k{i}\n" for i in range(20))), data)
    assert (list(x_read.shape), int(x_read.sum())) == ([20, 16], 16)
    test = write(tmp_path, "kind,diagnosis\nother,0\n", "test.csv")
    data = load_data("table", **options, test=test)
    test.unlink()  # not needed any more
    x_read = read_examples(options["path"], data)
    assert torch.equal(x_read, torch.eye(20)[data.x.argmax(1)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,town\n1,Ulm\n", "new.csv has no column 'smokes'; it has age, town"),
        (
            "age,smokes,town\n1,True,Ulm\n,True,Ulm\n",
            "new.csv: the column 'age' holds no number in row 2 below .*: ''",
        ),
        (
            "age,smokes,town\nold,True,Ulm\n",
            "the column 'age' holds no number in row 1 below the header: 'old'",
        ),
        ("age,smokes,town\n1e39,True,Ulm\n", "new.csv: row 0 .counted from 0. holds inf"),
        ("age,smokes,town\n", "new.csv holds no examples"),
        ("", "new.csv cannot be read"),
    ],
)
def test_errors_of_tables(tmp_path: Path, text: str, message: str) -> None:
    data = table_data(tmp_path)
    fails_to_read(write(tmp_path, text), data, message)


def test_flat_rows_of_other_sources(tmp_path: Path) -> None:
    data = run_data((2,), torch.float32)
    assert read_examples(write(tmp_path, "b,a\n1,2\n3,4.5\n"), data).tolist() == [
        [1, 2],
        [3, 4.5],
    ]
    for text, message in (
        ("a\n1\n", r"new.csv: examples have shape \[1\]; this run takes \[2\]"),
        ("a,b\n1,x\n", "new.csv: the column 'b' holds no number in row 1 below the header: 'x'"),
        ("a,b\n", "new.csv holds no examples"),
    ):
        fails_to_read(write(tmp_path, text), data, message)
    fails_to_read(
        write(tmp_path, "a,b\n1,2\n"),
        run_data((1, 8, 8)),
        r"examples have shape \[2\]; this run takes \[1, 8, 8\]",
    )


def picture(path: Path, size: tuple[int, ...] = (5, 6, 3)) -> np.ndarray:
    array = RNG.integers(0, 256, size, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return array


@pytest.mark.parametrize("grey", [False, True])
def test_a_folder_as_the_folder_source_reads_it(tmp_path: Path, grey: bool) -> None:  # noqa: FBT001
    for name in ("b/1.png", "a/2.PNG", "a/1.bmp"):
        picture(tmp_path / "train" / name, (7, 6) if grey else (7, 6, 3))
    data = load_data("folder", path=tmp_path / "train", test_fraction=0, image_size=[4, 5])
    assert torch.equal(read_examples(tmp_path / "train", data), data.x)
    assert torch.equal(read_examples(tmp_path / "train" / "b" / "1.png", data), data.x[2:])


def test_order_and_what_is_left_out(tmp_path: Path) -> None:
    first, second, third = (picture(tmp_path / name) for name in ("a/z/1.png", "b.png", "c/1.png"))
    picture(tmp_path / ".cache" / "1.png")
    picture(tmp_path / "a" / "._1.png")
    write(tmp_path, "no image", "notes.txt")
    x_read = read_examples(tmp_path, run_data((3, 5, 6)))
    assert np.array_equal(x_read.numpy(), np.stack([first, second, third]).transpose(0, 3, 1, 2))


def test_colours_and_units_of_the_run(tmp_path: Path) -> None:
    colour, grey = picture(tmp_path / "1.png"), picture(tmp_path / "2.png", (5, 6))
    as_grey = np.asarray(Image.fromarray(colour).convert("L"))
    x_read = read_examples(tmp_path, run_data((1, 5, 6)))
    assert np.array_equal(x_read.numpy(), np.stack([as_grey, grey])[:, None])
    x_read = read_examples(tmp_path / "2.png", run_data((3, 5, 6)))
    assert np.array_equal(x_read.numpy(), np.stack([grey] * 3)[None])
    x_read = read_examples(tmp_path / "2.png", run_data((1, 5, 6), scale=16.0))
    assert np.array_equal(x_read.numpy()[0, 0], np.round(grey / 255 * 16))


def test_errors_of_images(tmp_path: Path) -> None:
    data = run_data((3, 5, 6))
    fails_to_read(tmp_path, data, r"holds no images \(\.png, \.jpg")
    picture(tmp_path / "1.png")
    message = r"1\.png: images have one or three channels of bytes; this run takes "
    fails_to_read(
        tmp_path / "1.png", run_data((4,), torch.float32), message + r"numbers of shape \[4\]"
    )
    fails_to_read(
        tmp_path / "1.png",
        run_data((3, 5, 6), torch.float32),
        message + r"numbers of shape \[3, 5, 6\]",
    )
    fails_to_read(tmp_path / "1.png", run_data((4, 5, 6)), message + r"bytes of shape \[4, 5, 6\]")
    fails_to_read(write(tmp_path, "no image", "2.png"), data, r"2\.png cannot be read as an image")
    fails_to_read(tmp_path, data, r"2\.png cannot be read as an image")


@settings(max_examples=100)
@given(st.binary(max_size=60), st.sampled_from([".npz", ".npy", ".csv", ".parquet", ".png"]))
def test_any_bytes_are_examples_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, kind: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{kind}"
    path.write_bytes(content)
    for data in (run_data((2,), torch.float32), run_data((1, 2, 2))):
        try:
            assert read_examples(path, data).shape[1:] == data.input_shape
        except DataError as error:
            assert path.name in str(error)  # noqa: PT017
