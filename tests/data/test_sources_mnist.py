"""IDX files as the MNIST authors wrote them, and all the ways in which they break."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedgist.data.sources.idx_file import read_idx
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError


@pytest.fixture(autouse=True)
def _any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of these tests are not the published ones."""
    monkeypatch.setattr("fedgist.data.sources.mnist.check_published", lambda data, *_: data)


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


X = np.arange(5 * 28 * 28, dtype=np.uint32).reshape(5, 28, 28) % 251
Y = np.array([9, 0, 3, 3, 1])
FILES = {
    "train-images-idx3-ubyte": idx(X),
    "train-labels-idx1-ubyte": idx(Y),
    "t10k-images-idx3-ubyte": idx(X[:2]),
    "t10k-labels-idx1-ubyte": idx(Y[:2]),
}


def write(folder: Path, *, zipped: bool = True, **changed: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        new = changed.get(name.split("-ubyte")[0].replace("-", "_"), content)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(new) if zipped else new)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["{}/raw", "{}", "."])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")]
)
def test_round_trip(tmp_path: Path, name: str, folder: str, place: str, zipped: bool) -> None:  # noqa: FBT001
    write(tmp_path / place.format(folder), zipped=zipped)
    data = load_data(name, root=tmp_path)
    assert data.x.shape == (5, 1, 28, 28)
    assert data.x.dtype == torch.uint8
    assert np.array_equal(data.x[:, 0].numpy(), X)
    assert np.array_equal(data.x_test[:, 0].numpy(), X[:2])
    assert data.y.tolist() == Y.tolist()
    assert (data.scale, data.num_classes, len(data.classes)) == (255.0, 10, 10)
    data.x[0] = 0  # the rows are ours, not a view of the file


def test_its_own_folder_is_preferred(tmp_path: Path) -> None:
    write(tmp_path, train_labels_idx1=idx(Y[::-1]))
    write(tmp_path / "MNIST" / "raw")
    assert load_data("mnist", root=tmp_path).y.tolist() == Y.tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"train_images_idx3": idx(X)[:-1]},
            r"train-images-idx3-ubyte.gz is truncated: it has 3935 bytes, .* says 3936",
        ),
        (
            {"train_images_idx3": idx(X) + b"\0"},
            "train-images-idx3-ubyte.gz has trailing bytes: it has more than 3936 bytes",
        ),
        (
            {"train_images_idx3": idx(X)[:9]},
            "is truncated: it has 9 bytes, but its header alone has 16",
        ),
        (
            {"train_images_idx3": idx(Y) + bytes(16)},
            "begins with 00000801, not 00000803: it is not an IDX file of bytes with 3",
        ),
        (
            {"t10k_labels_idx1": b"\0\0\x0d\x01" + bytes(4)},
            "t10k-labels-idx1-ubyte.gz begins with 00000d01",
        ),
        ({"train_labels_idx1": b"<html>not found</html>"}, "begins with 3c68746d"),
        (
            {"train_labels_idx1": idx(Y[:4])},
            "holds 5 images but train-labels-idx1-ubyte.gz holds 4 labels",
        ),
        ({"train_labels_idx1": idx(Y + 1)}, r"labels reach 1\.\.10, outside 0\.\.9"),
        ({"train_images_idx3": idx(X[:0]), "train_labels_idx1": idx(Y[:0])}, "no training rows"),
    ],
)
def test_broken_files(tmp_path: Path, changed: dict[str, bytes], message: str) -> None:
    write(tmp_path, **changed)  # type: ignore[arg-type]  # the names of files are keywords
    with pytest.raises(DataError, match=message):
        load_data("mnist", root=tmp_path)


def test_a_file_too_few(tmp_path: Path) -> None:
    write(tmp_path / "MNIST")
    (tmp_path / "MNIST" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"looked for MNIST/raw/t10k-labels-idx1-ubyte\.gz in"):
        load_data("mnist", root=tmp_path)


any_file = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_file
@given(size=st.integers(0, len(idx(X[:1])) - 1))
def test_any_truncation_is_an_error(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(idx(X[:1])[:size])
    with pytest.raises(DataError, match=str(path)):
        read_idx(path, 3)


@any_file
@given(st.data())
def test_any_truncation_of_a_gzip_is_an_error(tmp_path: Path, data: st.DataObject) -> None:
    path, whole = tmp_path / "x.gz", gzip.compress(idx(X[:1]))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError, match=str(path)):
        read_idx(path, 3)


@any_file
@given(at=st.integers(0, 200), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_data(tmp_path: Path, at: int, value: int) -> None:
    path, whole = tmp_path / "x.gz", bytearray(gzip.compress(idx(X[:1])))
    whole[at % len(whole)] = value
    path.write_bytes(whole)
    try:
        assert read_idx(path, 3).shape == (1, 28, 28)
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017


@any_file
@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_any_shape_comes_back(tmp_path: Path, shape: list[int]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape)
    (tmp_path / "x").write_bytes(idx(array))
    assert np.array_equal(read_idx(tmp_path / "x", len(shape)).numpy(), array)
