"""Formats are told by the structure of a file: never by its first byte, never by its name."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources import file_formats as formats
from fedgist.data.sources.array_file import read_arrays
from fedgist.data.sources.file_formats import UNKNOWN, format_of
from fedgist.data.sources.further_labels import read_labels
from fedgist.data.sources.idx_file import read_idx
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.table_file import load_table
from fedgist.data.sources.text_file import json_lines, read_further
from fedgist.data.sources.unlabelled import read_examples
from fedgist.errors import DataError
from fedgist.world.pretrained import read_weights

X = np.ones((2, 3))
ROWS = torch.zeros(2, 3)
RUN = Dataset("run", ROWS, torch.tensor([0, 1]), ROWS, torch.tensor([0, 1]), 2)
LIMIT = 1 << 27
drawn = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def made(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def safetensors(header_length: int, content: bytes, note: str = "") -> bytes:
    """A file with one byte array, by the definition of the format, and not by its library."""
    table = {"a": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    header = json.dumps(table | ({"__metadata__": {"note": note}} if note else {})).encode()
    return struct.pack("<Q", header_length) + header.ljust(header_length) + content


CONTENTS: Mapping[str, bytes] = MappingProxyType(
    {
        "npz": made(lambda s: np.savez(s, x=X, y=np.array([0, 1]))),
        "npy": made(lambda s: np.save(s, X)),
        "parquet": made(lambda s: pd.DataFrame({"a": [1.0], "c": [0]}).to_parquet(s)),
        "gzip": gzip.compress(b"a,c\n1,0\n"),
        "pickle": pickle.dumps({"a": 1}),
        "an older pickle": pickle.dumps({"a": 1}, 2),
        "safetensors": safetensors(128, b"abc"),
        "torch": made(lambda s: torch.save({"a": torch.ones(2)}, s)),
        "sqlite": b"SQLite format 3\0" + bytes(84),
        "UTF-16": "a,c\n1,0\n".encode("utf-16"),
        "csv": b"a,c\n1,0\n",
        "jsonl": b'{"text": "b"}\n',
        "idx": bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]),
    }
)
FORMATS = {
    "npz": formats.ZIP,
    "npy": formats.NPY,
    "parquet": formats.PARQUET,
    "gzip": formats.GZIP,
    "pickle": formats.PICKLE,
    "an older pickle": formats.PICKLE,
    "safetensors": formats.SAFETENSORS,
    "torch": formats.ZIP,
    "sqlite": "an SQLite database",
    "UTF-16": "a text in UTF-16",
}


def weights(file: Path) -> dict[str, Tensor]:
    return read_weights(file, LIMIT)


@drawn
@given(st.integers(70, 2000) | st.integers(1, 300).map(lambda n: 256 * n + 128), st.binary())
def test_weights_with_a_header_of_any_length_are_read(
    tmp_path: Path, length: int, content: bytes
) -> None:
    # a wrong rule: what begins with 0x80 is a pickle, which is so for each length 128 (mod 256)
    file = tmp_path / "w.safetensors"
    file.write_bytes(safetensors(length, content))
    assert bytes(weights(file)["a"].numpy()) == content


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"PK\x05\x06", b"\x80\x04\x95\0", b"\x80\x02]\0"])
def test_a_header_as_long_as_the_mark_of_another_format_is_one(
    tmp_path: Path, start: bytes
) -> None:
    # lengths of 6 to 101 MB, in a file of holes; the reader would refuse it as too short
    file = tmp_path / "w.safetensors"
    file.write_bytes(start + bytes(4) + b'{"a"')
    longest = 100_000_000
    expected = formats.SAFETENSORS if int.from_bytes(start, "little") <= longest else UNKNOWN
    assert format_of(file) == expected


@pytest.mark.parametrize("inner", ["npz", "torch"])
def test_numbers_that_look_like_the_end_of_an_archive_are_numbers(
    tmp_path: Path, inner: str
) -> None:
    # a wrong rule: zipfile.is_zipfile alone, which looks for the end of an archive
    content = CONTENTS[inner]
    file = tmp_path / "w.pt"
    file.write_bytes(safetensors(128, content))
    assert zipfile.is_zipfile(file)
    assert bytes(weights(file)["a"].numpy()) == content
    (tmp_path / "x.npy").write_bytes(made(lambda s: np.save(s, np.frombuffer(content, np.uint8))))
    [array] = read_arrays(tmp_path / "x.npy", list).values()
    assert bytes(array) == content


@drawn
@given(st.binary(max_size=200), st.sampled_from([b"PAR1,y\n", b"PK\x03\x04", b"\x80", b""]))
def test_any_content_has_a_format_and_its_first_bytes_alone_are_none(
    tmp_path: Path, content: bytes, start: bytes
) -> None:
    file = tmp_path / "x"
    file.write_bytes(start + content.replace(b"{", b"") + b"\nb,PAR1")
    assert format_of(file) in {UNKNOWN, *FORMATS.values()}
    if start.startswith(b"P"):
        assert format_of(file) == UNKNOWN


def test_a_table_may_begin_and_end_with_the_mark_of_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("PAR1,kind\n1,a\n2,PAR1")
    assert load_table(file).frame["kind"].tolist() == ["a", "PAR1"]


# the contents that each reader takes, and the names it may have
Reader = Callable[[Path], object]
READERS: Mapping[str, tuple[Reader, tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "weights": (weights, (".pt", ".safetensors", ".npz"), ("torch", "safetensors")),
        "arrays": (lambda f: read_arrays(f, list), (".npz", ".npy", ".csv"), ("npz", "npy")),
        "examples": (lambda f: read_examples(f, RUN), (".npz", ".npy"), ("npz", "npy")),
        "a text table": (load_table, (".csv", ".tsv"), ("csv", "jsonl")),
        "a table": (load_table, (".parquet",), ("parquet",)),
        "JSON lines": (lambda f: list(json_lines(f)), (".jsonl", ".txt"), ("jsonl",)),
        "texts": (read_further, (".txt",), ("csv", "jsonl", "idx")),
        "images": (lambda f: read_idx(f, 1), ("", ".gz"), ("idx",)),
    }
)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_with_a_false_name_is_read_as_it_is_or_refused_by_its_format(
    tmp_path: Path, reader: str, content: str
) -> None:
    read, endings, readable = READERS[reader]
    for ending in endings:
        file = tmp_path / f"x{ending}"
        file.write_bytes(CONTENTS[content])
        assert format_of(file) == FORMATS.get(content, UNKNOWN)
        if content in readable:
            assert read(file) is not None
            continue
        with pytest.raises(DataError) as error:
            read(file)
        assert "\n" not in str(error.value)
        if content in FORMATS and reader != "images":
            # an archive of another kind is told by what is in it
            words = FORMATS[content].partition(" (")[0]
            assert words in str(error.value) or FORMATS[content] == formats.ZIP


def test_labels_are_read_from_an_archive_under_any_name_of_arrays(tmp_path: Path) -> None:
    for ending in (".npz", ".npy"):
        file = tmp_path / f"x{ending}"
        file.write_bytes(CONTENTS["npz"])
        labels = read_labels(file, RUN, [])
        assert labels is not None
        assert labels.tolist() == [0, 1]
        file.write_bytes(CONTENTS["npy"])
        assert read_labels(file, RUN, []) is None


def test_a_folder_of_arrays_holds_no_archive(tmp_path: Path) -> None:
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", X if name == "x" else X[:, 0].astype(int))
    assert len(load_data("npy", path=tmp_path, test_fraction=0.5).x) == 1
    for name in ("x", "y"):
        whole = (tmp_path / f"{name}.npy").read_bytes()
        (tmp_path / f"{name}.npy").write_bytes(CONTENTS["npz"])
        with pytest.raises(DataError, match=rf"^{name}.npy cannot .* a zip archive .* is needed$"):
            load_data("npy", path=tmp_path, read="lazy" if name == "x" else "once")
        (tmp_path / f"{name}.npy").write_bytes(whole)
