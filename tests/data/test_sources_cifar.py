"""CIFAR batches as Python 2 and Python 3 pickle them, and pickles that try to run something."""

from __future__ import annotations

import os
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedgist.data.sources.cifar_pickle import read_pickle
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError

X = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
NAMES = [f"class {i}" for i in range(100)]
Dump = Callable[[object], bytes]


@pytest.fixture(autouse=True)
def _any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of these tests are not the published ones."""
    monkeypatch.setattr("fedgist.data.sources.cifar.check_published", lambda data, *_: data)


def python3(content: object) -> bytes:
    return pickle.dumps(content, protocol=2)


def python2(content: object) -> bytes:
    """Write what Python 2's pickle wrote: its strings are bytes, its arrays are numpy.core's."""
    return b"\x80\2" + _item2(content) + b"."


def _item2(value: object) -> bytes:
    match value:
        case str():
            return _text2(value.encode("latin1"))
        case int():
            return b"J" + struct.pack("<i", value)
        case list():
            return b"](" + b"".join(map(_item2, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_item2(part) for pair in value.items() for part in pair) + b"u"
        case np.ndarray():
            return _array2(value)
    raise TypeError(value)


def _text2(value: bytes) -> bytes:
    if len(value) < 256:
        return b"U" + bytes([len(value)]) + value
    return b"T" + struct.pack("<i", len(value)) + value


def _array2(array: np.ndarray) -> bytes:
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + _text2(b"b") + b"tR"
    minus_one = b"J" + b"\xff" * 4
    dtype = b"cnumpy\ndtype\n(" + _text2(b"u1") + b"K\0K\1tR(K\3" + _text2(b"|") + b"NNN"
    dtype += minus_one + minus_one + b"K\0tb"
    shape = b"".join(map(_item2, array.shape))
    fortran = b"\x89" if array.flags.c_contiguous else b"\x88"
    return empty + b"(K\1(" + shape + b"t" + dtype + fortran + _text2(array.tobytes("A")) + b"tb"


def write(root: Path, dump: Dump, **changed: object) -> None:
    ten, hundred = root / "cifar-10-batches-py", root / "cifar-100-python"
    for folder in (ten, hundred):
        folder.mkdir(exist_ok=True)
    labels = [9, 0, 4]
    parts = {
        f"data_batch_{i}": {"data": X + i, "labels": labels, "batch_label": f"{i} of 5"}
        for i in range(1, 6)
    }
    parts |= {
        "test_batch": {"data": X, "labels": labels},
        "batches.meta": {"label_names": NAMES[:10], "num_vis": 3072},
    }
    for name, content in (parts | changed).items():
        (ten / name).write_bytes(content if isinstance(content, bytes) else dump(content))
    batch = {"data": np.asfortranarray(X), "fine_labels": [99, 0, 4], "coarse_labels": [19, 0, 1]}
    meta = {"fine_label_names": NAMES, "coarse_label_names": NAMES[:20]}
    for name, content in {"train": batch, "test": batch, "meta": meta}.items():
        (hundred / name).write_bytes(dump(content))


@pytest.mark.parametrize("dump", [python3, python2])
def test_round_trip(tmp_path: Path, dump: Dump) -> None:
    write(tmp_path, dump)
    data = load_data("cifar10", root=tmp_path)
    assert data.x.shape == (15, 3, 32, 32)
    assert (data.x.dtype, data.scale, data.num_classes) == (torch.uint8, 255.0, 10)
    assert np.array_equal(data.x[3:6].flatten(1).numpy(), X + 2)
    assert np.array_equal(data.x_test.flatten(1).numpy(), X)
    assert data.y.tolist() == [9, 0, 4] * 5
    assert data.classes == tuple(NAMES[:10])
    fine, coarse = (
        load_data("cifar100", root=tmp_path),
        load_data("cifar100", root=tmp_path, coarse=True),
    )
    assert np.array_equal(fine.x.flatten(1).numpy(), X)
    assert (fine.y.tolist(), coarse.y.tolist()) == ([99, 0, 4], [19, 0, 1])
    assert (fine.num_classes, coarse.num_classes, fine.classes) == (100, 20, tuple(NAMES))
    assert [fine.superclasses[label] for label in (99, 0, 4)] == [19, 0, 1]
    assert coarse.superclasses == ()
    turned = load_data("cifar100", root=tmp_path, classes=NAMES[::-1])
    assert turned.superclasses == fine.superclasses[::-1]


def test_keys_may_be_bytes(tmp_path: Path) -> None:
    batch = python3({b"data": X, b"labels": [1, 2, 3]})
    meta = python3({b"label_names": [b"%d" % i for i in range(10)]})
    write(tmp_path, python3, test_batch=batch, **{"batches.meta": meta})
    data = load_data("cifar10", root=tmp_path)
    assert (data.y_test.tolist(), data.classes[1]) == ([1, 2, 3], "1")


class Runs:
    """What an attacker's pickle does."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        return (self.call[0], tuple(self.call[1:]))


def test_nothing_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bad = python3({"data": Runs(os.system, f"touch {canary}"), "labels": []})
    write(tmp_path, python3, data_batch_1=bad)
    with pytest.raises(
        DataError, match=rf"cifar-10-batches-py/data_batch_1 would run {os.name}.system; refused"
    ):
        load_data("cifar10", root=tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "thing",
    [
        Runs(eval, "1"),
        Runs(os.system, "false"),
        Runs(getattr, X, "shape"),
        Runs(np.fromfile, "x"),
        Runs(OrderedDict),
        Runs(np.lib.format.open_memmap, "x"),
        np.float64(1),
        Path("x"),
        print,
        OrderedDict,
        {1, 2}.union,
    ],
)
def test_anything_else_is_refused(tmp_path: Path, thing: object, protocol: int) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": thing}, protocol=protocol))
    with pytest.raises(DataError, match=r"would run \S+; refused"):
        read_pickle(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            python3({"data": np.array([[1, "x"]], dtype=object)}),
            "corrupt: an array of dtype O8, not of bytes",
        ),
        (python3({"data": X.astype(np.int64)}), "corrupt: an array of dtype i8, not of bytes"),
        (
            python3({"data": np.zeros(3, dtype=[("a", "u1"), ("b", "O")])}),
            "an array of dtype V9, not of bytes",
        ),
        (
            b"\x80\2c_codecs\nencode\nX\1\0\0\0xX\5\0\0\0rot13\x86R.",
            "bytes encoded as rot13, not latin1",
        ),
        (b"\x80\2c_codecs\nencode\n}X\1\0\0\0aK\1sb.", "it would change a function"),
        (b"\x80\2cnumpy\nndarray\n}X\1\0\0\0aK\1sb.", "is truncated or corrupt"),
        (b"\x80\2cnumpy\nndarray\n)R.", "not callable"),
        (b"\x80\2cnumpy\nndarray\n)\x81.", "is truncated or corrupt"),
        (b"\x80\2cnumpy.core.multiarray\n_reconstruct\n)R(K\1K\2NN.", "is truncated or corrupt"),
        (
            b"\x80\2cnumpy.core.multiarray\n_reconstruct\n)RK\1b.",
            "an array without a shape, a type and bytes",
        ),
        (b"\x80\2Pid\n.", "persistent"),
        (b"\x80\2\x82\1.", "is truncated or corrupt"),
        (python3([1, 2]), "is truncated or corrupt"),
        (python3({1: 2}), "a name is int, not text"),
        (b"", "is truncated or corrupt: it ends too early"),
        # the unpickler in C would take 32 GiB
        (b"\x80\2K\1r\xff\xff\xff\x7f.", "is truncated or corrupt"),
        (b"\x80\2X\xff\xff\xff\xffabc.", "is truncated or corrupt: it ends too early"),
        (b"\x80\4\x8d" + b"\xff" * 7 + b"\x7fabc.", "is truncated or corrupt"),
        (b"\x1f\x8b\x08 a gzip", "is truncated or corrupt"),
        (python3({"data": X, "labels": [1, 2]}), r"data of shape \[3, 3072\] and 2 labels"),
        (python3({"data": X[:, :3071], "labels": [1, 2, 3]}), r"data of shape \[3, 3071\]"),
        (python3({"data": X, "labels": [1, 2, 10]}), r"the label 10 is outside 0\.\.9"),
        (python3({"data": X, "labels": [1, 2, -1]}), r"the label -1 is outside 0\.\.9"),
        (python3({"data": X, "labels": [1, 2, "3"]}), r"the label '3' is outside"),
        (
            python3({"data": X, "fine_labels": [1, 2, 3]}),
            "needs an array 'data' and a list 'labels'; it holds data, f",
        ),
        (python3({"data": "x", "labels": []}), "needs an array 'data'"),
    ],
)
def test_broken_batches(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path, python3, data_batch_3=content)
    with pytest.raises(DataError, match=rf"^cifar-10-batches-py/data_batch_3.*{message}"):
        load_data("cifar10", root=tmp_path)


@pytest.mark.parametrize("names", [{"label_names": ["a"]}, {"label_names": [1] * 10}, {}])
def test_broken_names(tmp_path: Path, names: dict[str, object]) -> None:
    write(tmp_path, python3, **{"batches.meta": names})
    with pytest.raises(DataError, match=r"batches\.meta needs a list 'label_names' of 10 names"):
        load_data("cifar10", root=tmp_path)


def test_a_missing_batch(tmp_path: Path) -> None:
    write(tmp_path, python3)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(DataError, match="looked for cifar-10-batches-py/data_batch_4 in"):
        load_data("cifar10", root=tmp_path)


any_file = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
SMALL = {"data": X[:, :5], "labels": [1, 2, 3], "name": "x"}


@any_file
@given(data=st.data(), dump=st.sampled_from([python2, python3]))
def test_any_truncation_is_an_error(tmp_path: Path, data: st.DataObject, dump: Dump) -> None:
    whole = dump(SMALL)
    (tmp_path / "batch").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError, match="batch is truncated or corrupt"):
        read_pickle(tmp_path / "batch")


@pytest.mark.slow
@any_file
@given(data=st.data(), dump=st.sampled_from([python2, python3]))
def test_a_changed_byte_is_an_error_or_data(
    tmp_path: Path, data: st.DataObject, dump: Dump
) -> None:
    whole = bytearray(dump(SMALL))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "batch").write_bytes(whole)
    try:
        assert isinstance(read_pickle(tmp_path / "batch"), dict)
    except DataError as error:
        assert "batch" in str(error)  # noqa: PT017


@pytest.mark.slow
def test_superclasses_of_the_real_images_have_five_classes_each(data_sets: Path) -> None:
    data = load_data("cifar100", root=data_sets)
    assert Counter(data.superclasses) == dict.fromkeys(range(20), 5)
    by_name = dict(zip(data.classes, data.superclasses, strict=True))
    assert by_name["oak_tree"] == by_name["maple_tree"] != by_name["shark"]
