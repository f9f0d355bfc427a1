"""Files that claim or unpack to more than there is, and things that are no files: one line each."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedgist.data.dataset import Dataset
from fedgist.data.sources import file_sizes, table_file
from fedgist.data.sources.array_file import read_arrays
from fedgist.data.sources.cifar_pickle import read_pickle
from fedgist.data.sources.file_sizes import readable, usable_memory
from fedgist.data.sources.idx_file import read_idx
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.locations import existing
from fedgist.data.sources.table_file import load_table
from fedgist.data.sources.unlabelled import read_examples
from fedgist.errors import DataError

X, Y = np.zeros((6, 3)), np.arange(6) % 2
ROWS = torch.zeros(2, 3)
COLUMNS = Dataset("run", ROWS, torch.tensor([0, 1]), ROWS, torch.tensor([0, 1]), 2)


def refused(read: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def npy(header: str, content: bytes = b"", version: int = 1) -> bytes:
    text = header.encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + content


def claims(shape: str, kind: str = "<f8") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"


def archive(path: Path, how: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", how) as opened:
        for name, content in members.items():
            opened.writestr(f"{name}.npy", content)
    return path


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "shape", ["(1000000000000, 3)", "(-1, 3)", "(7, 3)", "(5, 3)", "(10**9, 10**9, 10**9)"]
)
def test_a_header_of_an_array_promises_what_is_there(
    tmp_path: Path, shape: str, version: int
) -> None:
    content = npy(claims(shape.replace("10**9", "1000000000")), X.tobytes(), version)
    file = archive(tmp_path / "x.npz", x=content, y=saved(Y))
    refused(
        lambda: load_data("npz", path=file),
        r"x\.npz: the array 'x' cannot be read: its header says",
    )
    (tmp_path / "x.npy").write_bytes(content)
    refused(lambda: read_examples(tmp_path / "x.npy", COLUMNS), r"x\.npy cannot be read: its head")


@pytest.mark.parametrize(
    "header",
    [
        "(" * 4000,
        "[" * 9000,
        "{'descr': " + "-" * 9000 + "1}",
        "1 + " * 2000 + "1",
        claims("(2, 3)").replace("'<f8'", "[('a', '<f8'), ('b', ('<f4', (1000, 1000, 1000)))]"),
        claims("(2, 3)", "<U1000000000"),
        claims("(2, 3)", "|O"),
        claims("(True, 3)"),
        "",
        "\0",
    ],
)
def test_headers_of_arrays_that_are_no_headers(tmp_path: Path, header: str) -> None:
    file = archive(tmp_path / "x.npz", x=npy(header, bytes(48)), y=saved(Y))
    refused(lambda: load_data("npz", path=file), r"x\.npz")


def test_an_archive_of_zeros_is_not_unpacked(tmp_path: Path) -> None:
    bomb = tmp_path / "x.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("y.npy", saved(Y))
        with opened.open("x.npy", "w", force_zip64=True) as member:
            member.write(npy(claims("(33554432, 3)", "|u1")))
            for _ in range(96):
                member.write(bytes(1 << 20))
    assert bomb.stat().st_size < 200_000
    refused(
        lambda: load_data("npz", path=bomb),
        r"the array 'x' is .* kB that unpack to 101 MB, more than 100 times as much; if that is "
        r"meant, save it by numpy\.savez, unpacked",
    )


def test_members_packed_otherwise_are_not_unpacked(tmp_path: Path) -> None:
    for how in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        file = archive(tmp_path / "x.npz", how, x=saved(X), y=saved(Y))
        refused(
            partial(load_data, "npz", path=file), "'x' cannot be read: it is packed by a method"
        )
    content = bytearray(archive(tmp_path / "x.npz", x=saved(X), y=saved(Y)).read_bytes())
    for sign, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(sign) + at] |= 1  # says that it has a password
    file.write_bytes(content)
    refused(lambda: load_data("npz", path=file), "'x' cannot be read: .*password")


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sizes, "usable_memory", lambda: 20_000)


@pytest.mark.usefixtures("little_memory")
def test_arrays_larger_than_memory_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((3000, 3), np.float32), y=np.zeros(3000, int))
    refused(
        lambda: load_data("npz", path=tmp_path / "x.npz"),
        r"x\.npz with the arrays x, y would take 60\.3 kB; half of this machine's memory is 20 kB",
    )
    np.savez(tmp_path / "x.npz", x=np.ones((3000, 3), bool), y=np.zeros(10, int))
    refused(lambda: load_data("npz", path=tmp_path / "x.npz"), r"x\.npz: x would take 36 kB")
    np.save(tmp_path / "x.npy", np.ones((9000, 3)))
    refused(lambda: read_examples(tmp_path / "x.npy", COLUMNS), r"x\.npy would take 216 kB")


@pytest.mark.usefixtures("little_memory")
def test_tables_larger_than_memory_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,y\n" + "1,2\n" * 1000)
    refused(lambda: load_table(file), r"x\.csv would take 20 kB")
    file.write_text("a,y\n" + "".join(f"c{i % 60},{i % 2}\n" for i in range(120)))
    refused(
        lambda: load_data(
            "table", path=file, label="y", test_fraction=0, kinds={"a": "categories"}
        ),
        r"x\.csv with 120 rows of 60 numbers and categories would take 57.6 kB; .*ignore",
    )
    file = tmp_path / "x.parquet"
    pd.DataFrame({"a": np.zeros(3000), "y": np.zeros(3000)}).to_parquet(file)
    assert file.stat().st_size < 4000
    refused(
        lambda: load_table(file), r"x\.parquet with its 3000 rows of 2 columns would take 48 kB"
    )
    pd.DataFrame({"a": ["x" * 1000] * 300}).to_parquet(file)
    assert file.stat().st_size < 6000
    refused(lambda: load_table(file), r"x\.parquet with its 300 rows of 1 columns would take 30")


def test_a_parquet_file_of_equal_rows_is_not_unpacked(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.zeros(10**7)})
    frame.to_parquet(tmp_path / "x.parquet", compression="zstd")
    refused(
        lambda: load_table(tmp_path / "x.parquet"),
        r"x\.parquet with its 10000000 rows of 1 columns is .* kB that unpack to 80 MB, more than "
        r"100 times as much; if that is meant, use a \.csv file",
    )


def test_too_many_columns_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.csv"
    file.write_text(",".join(f"c{i}" for i in range(50)) + "\n" + "1," * 49 + "1\n")
    refused(
        lambda: load_data("table", path=file, label="y"), r"it has c0, .*c19, \.\.\. \(30 more\)$"
    )
    monkeypatch.setattr(table_file, "_MOST_COLUMNS", 40)
    refused(lambda: load_table(file), r"x\.csv has 50 columns, more than 40; use an \.npz file")
    pd.read_csv(file).to_parquet(tmp_path / "x.parquet")
    refused(lambda: load_table(tmp_path / "x.parquet"), "has 50 columns, more than 40")


def idx(shape: tuple[int, ...], content: bytes = b"") -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def test_an_idx_file_is_read_as_far_as_its_header_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "x.gz", list[int]()
    path.write_bytes(gzip.compress(idx((2, 2, 2), bytes(200 << 20)), 1))

    read = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        asked.append(size or 0)
        return read(self, size)

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    refused(lambda: read_idx(path, 3), "has trailing bytes: it has more than 24 bytes, .* says 24")
    assert sum(asked) < 100


def test_idx_files_that_promise_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(idx((2**32 - 1,) * 3, bytes(10)))
    refused(lambda: read_idx(path, 3), "of its header would take 8e.28 bytes; half of this machine")
    path.write_bytes(gzip.compress(idx((2**32 - 1,) * 3)))
    refused(lambda: read_idx(path, 3), "of its header would take")
    monkeypatch.setattr(file_sizes, "usable_memory", lambda: 1 << 40)
    path.write_bytes(gzip.compress(idx((100_000, 100, 100)), 9))
    refused(lambda: read_idx(path, 3), "unpack to 1 GB, more than 100 times .* unpack it by gunzip")
    path.write_bytes(idx((100_000, 100, 100)))
    refused(lambda: read_idx(path, 3), "is truncated: it has 16 bytes")


def picture(path: Path, size: tuple[int, int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size[::-1]).save(path)
    return path


def test_the_first_image_sets_no_enormous_size(tmp_path: Path) -> None:
    first = picture(tmp_path / "a" / "1.png", (2049, 2048))
    for i in range(2, 5):
        picture(tmp_path / "a" / f"{i}.png", (5, 6))
    refused(
        lambda: load_data("folder", path=tmp_path, test_fraction=0),
        rf"{first} has 2049x2048 pixels, and the first image sets the size of all 4; .* image_size",
    )
    data = load_data("folder", path=tmp_path, image_size=4, test_fraction=0)
    assert data.x.shape == (4, 1, 4, 4)
    refused(
        lambda: load_data("folder", path=tmp_path, image_size=10**6),
        r"4 images of 1000000x1000000 pixels would take 12 TB; .*image_size makes them smaller",
    )


@pytest.mark.usefixtures("little_memory")
def test_images_that_are_too_much_together(tmp_path: Path) -> None:
    for i in range(9):
        picture(tmp_path / "a" / f"{i}.png", (30, 30))
    refused(
        lambda: load_data("folder", path=tmp_path),
        "9 images of 30x30 pixels would take 24.3 kB; .*size",
    )
    assert load_data("folder", path=tmp_path, image_size=9, test_fraction=0).x.shape == (9, 1, 9, 9)


def test_an_image_of_another_format_starts_no_program(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a" / "1.png", "EPS")  # pillow would start Ghostscript
    refused(lambda: load_data("folder", path=tmp_path), r"1\.png cannot be read as an image")


def not_files(path: Path) -> list[Path]:
    """A named pipe, a link to one, a socket, a device and a folder."""
    os.mkfifo(path / "pipe")
    (path / "link").symlink_to(path / "pipe")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path / "s"))
    (path / "folder").mkdir()
    return [path / "pipe", path / "link", path / "s", path / "folder", Path("/dev/zero")]


def test_what_is_no_file_is_not_opened(tmp_path: Path, tmp_path_factory: Any) -> None:
    short = tmp_path_factory.mktemp("s")  # a socket's path is short
    for path in not_files(short):
        is_what = "is (a named pipe|a socket|a device|a folder), not a file"
        refused(partial(read_idx, path, 3), is_what)
        refused(partial(read_pickle, path), is_what)
        refused(partial(read_arrays, path, list), is_what)
        refused(partial(existing, path), is_what)
        for name in ("npz", "table"):
            options: dict[str, Any] = {"path": path} | ({"label": "y"} if name == "table" else {})
            refused(partial(load_data, name, **options), is_what)
        image = short / "images" / "a" / "1.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.symlink_to(path)
        refused(lambda: load_data("folder", path=short / "images"), f"1.png {is_what}")
        if not path.is_dir():
            refused(partial(read_examples, path, COLUMNS), is_what)
        image.unlink()


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x.npz", "x" * 300])
def test_paths_that_cannot_be(path: str) -> None:
    for name in ("npz", "folder"):
        refused(partial(load_data, name, path=path), "does not exist|home|not a folder|too long")


def batch(path: Path, **changed: Any) -> Path:
    content = {"data": None, "labels": [0, 1], **changed}
    path.write_bytes(pickle.dumps({key.encode(): value for key, value in content.items()}, 2))
    return path


def cifar(path: Path, labels: object) -> None:
    folder = path / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    raw = np.zeros((2, 3072), np.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch(folder / name, data=raw, labels=labels)
    batch(folder / "batches.meta", label_names=[b"a"] * 10)


def doubled(times: int) -> list[Any]:
    """A list that is small in a file, and endless when written out."""
    content: list[Any] = []
    for _ in range(times):
        content = [content, content]
    return content


def test_labels_of_pickles_are_not_written_out(tmp_path: Path) -> None:
    for label, kind in ((doubled(60), "list"), (10**5000, "int"), (None, "NoneType")):
        cifar(tmp_path, [0, label])
        refused(
            lambda: load_data("cifar10", root=tmp_path), f"the label of type {kind} is outside 0..9"
        )
    cifar(tmp_path, [0, "x" * 300])
    refused(lambda: load_data("cifar10", root=tmp_path), "the label 'xxx")


@pytest.mark.slow
def test_pickles_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "b"
    for claim in (
        b"\x80\x04\x8e" + b"\xff" * 8,
        b"\x80\x02\x8b" + b"\xff\xff\xff\x7f",
        b"T\xff\xff",
    ):
        path.write_bytes(claim + b"abc")
        refused(lambda: read_pickle(path), "b is truncated or corrupt")
    path.write_bytes(b"}" * 5_000_001)
    refused(lambda: read_pickle(path), "it has more than 5,000,000 parts")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), "memory"),
        (RecursionError("maximum"), "nested too deeply"),
        (PermissionError(13, "Permission denied", "x"), "Permission denied"),
    ],
)
def test_what_the_system_cannot_do_is_one_line(error: Exception, words: str) -> None:
    def fail() -> None:
        with readable("x.npz"):
            raise error

    refused(fail, f"x.npz.*{words}")


def test_the_usable_memory_is_half_of_the_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    monkeypatch.setattr(file_sizes, "_GROUP_LIMITS", (tmp_path / "limit",))
    assert usable_memory() == 2_048_000
    for text, most in (("max\n", 2_048_000), ("4000\n", 2000)):
        (tmp_path / "limit").write_text(text)
        assert usable_memory() == most


any_bytes = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_bytes
@given(
    st.text(
        st.sampled_from("{}()[],:'<f8descrfortran_ordershapeTrueFalse0123456789 -|OUV"), max_size=90
    )
    | st.builds(
        claims,
        st.lists(st.integers(-2, 2**70), max_size=4).map(lambda shape: f"{tuple(shape)}"),
        st.sampled_from(["<f8", "|u1", "<U7", "|S3", "<M8[s]", "|b1", "<c16", "|V8", "<U0", "|O"]),
    ),
    st.binary(max_size=64),
)
def test_any_header_is_read_or_refused(tmp_path: Path, header: str, content: bytes) -> None:
    file = archive(tmp_path / "x.npz", zipfile.ZIP_STORED, x=npy(header, content), y=saved(Y))
    try:
        assert load_data("npz", path=file).x.numel() * 8 <= len(content) * 8
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017


@any_bytes
@given(st.data())
def test_texts_of_any_bytes_are_labels_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    labels = np.array(["cat", "dog"] * 3)
    raw = bytearray(labels.tobytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    content = npy(claims("(6,)", "<U3"), bytes(raw))
    file = archive(tmp_path / "x.npz", zipfile.ZIP_STORED, x=saved(X), y=content)
    try:
        load_data("npz", path=file, test_fraction=0)
    except DataError as error:
        assert "x.npz" in str(error)  # noqa: PT017
