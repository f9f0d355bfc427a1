"""Files of examples in every format, and of weights, damaged."""

from __future__ import annotations

import functools
import gzip
import io
import json
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import safetensors.torch
import torch
from PIL import Image

from fedgist.data.dataset import Dataset
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.unlabelled import read_examples
from fedgist.world.pretrained import read_weights
from fuzz.mutations import nasty, spoil_bytes, spoil_lines

NUMBERS = np.random.default_rng(0)
Y = np.array([0, 1, 2, 0, 1, 2, 0, 1])


def npz_bytes(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def npy_bytes(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def png_bytes(mode: str = "L", kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (8, 8), 3).save(stream, kind)
    return stream.getvalue()


def idx_bytes(*shape: int) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(
        int(np.prod(shape))
    )


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "a": NUMBERS.normal(size=8),
            "color": list("rgbrgbrg"),
            "site": list("nnssnnss"),
            "y": ["yes", "no"] * 4,
        }
    )


def parquet_bytes() -> bytes:
    stream = io.BytesIO()
    frame().to_parquet(stream)
    return stream.getvalue()


def torch_bytes() -> bytes:
    stream = io.BytesIO()
    torch.save({"state_dict": WEIGHTS, "epoch": 3}, stream)
    return stream.getvalue()


WEIGHTS = {"0.weight": torch.ones(3, 4), "0.bias": torch.zeros(3, dtype=torch.float64)}
MNIST = {
    "train-images-idx3-ubyte": idx_bytes(5, 28, 28),
    "train-labels-idx1-ubyte": idx_bytes(5),
    "t10k-images-idx3-ubyte": idx_bytes(2, 28, 28),
    "t10k-labels-idx1-ubyte": idx_bytes(2),
}
BATCH = {b"data": np.zeros((3, 3072), np.uint8), b"labels": [0, 1, 2]}
CIFAR = {
    f"cifar-10-batches-py/{name}": pickle.dumps(BATCH, protocol=2)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
}


ARFF = """@relation r
@attribute "UNIQUE_ID" numeric
@attribute "user" {"1" , "2"}
@attribute "X0" numeric
@attribute class{ "Walking" , "Jogging" , "Upstairs" , "Downstairs" , "Sitting" , "Standing" }
@data
1,1,0.5,Walking
2,2,?,Jogging
3,2,-1e3,Jogging
"""
WRITERS = {
    "users": ["f0", "f1"],
    "num_samples": [2, 1],
    "user_data": {
        "f0": {"x": [[1.0] * 784, [0.5] * 784], "y": [0, 61]},
        "f1": {"x": [[0.0] * 784], "y": [10]},
    },
}
LEAF = {"users": ["1"], "num_samples": [2], "user_data": {"1": {"x": ["a.jpg"] * 2, "y": [0, 1]}}}


@functools.cache
def formats() -> Mapping[str, tuple[Mapping[str, bytes], Mapping[str, Any]]]:
    """The files of each format, and how they are loaded."""
    x = NUMBERS.normal(size=(8, 3)).astype(np.float32)
    images = NUMBERS.integers(0, 255, (8, 8, 8, 1), dtype=np.uint8)
    table = {"name": "table", "label": "y"}
    return {
        "npz": ({"d.npz": npz_bytes(x=x, y=Y)}, {"name": "npz", "path": "d.npz"}),
        "npz of images": (
            {"d.npz": npz_bytes(x=images, y=Y, client=Y, test=Y == 2)},
            {"name": "npz", "path": "d.npz"},
        ),
        "npy": ({"x.npy": npy_bytes(images[:, None, :, :, 0])}, {"unlabelled": "x.npy"}),
        "csv": ({"d.csv": frame().to_csv(index=False).encode()}, {**table, "path": "d.csv"}),
        "csv of sites": (
            {"d.csv": frame().to_csv(index=False).encode()},
            {**table, "path": "d.csv", "client": "site"},
        ),
        "parquet": ({"d.parquet": parquet_bytes()}, {**table, "path": "d.parquet"}),
        "folder": (
            {
                "d/cat/a.png": png_bytes(),
                "d/cat/b.png": png_bytes("RGB"),
                "d/dog/a.jpg": png_bytes("RGB", "JPEG"),
                "d/dog/b.gif": png_bytes("P", "GIF"),
            },
            {"name": "folder", "path": "d"},
        ),
        "weights": ({"w.safetensors": safetensors.torch.save(WEIGHTS)}, {"weights": 1 << 20}),
        "weights of torch": ({"w.pt": torch_bytes()}, {"weights": 1 << 20}),
        "idx": ({f"MNIST/raw/{k}": v for k, v in MNIST.items()}, {"name": "mnist"}),
        "idx.gz": (
            {f"MNIST/{k}.gz": gzip.compress(v) for k, v in MNIST.items()},
            {"name": "mnist"},
        ),
        "arff": ({"wisdm/WISDM_ar_v1.1_transformed.arff": ARFF.encode()}, {"name": "wisdm"}),
        "leaf": (
            {
                "celeba/all_data/all_data.json": json.dumps(LEAF).encode(),
                "celeba/raw/img_align_celeba/a.jpg": png_bytes("RGB", "JPEG"),
            },
            {"name": "celeba"},
        ),
        "leaf of writers": (
            {"femnist/all_data/all_data.json": json.dumps(WRITERS).encode()},
            {"name": "femnist"},
        ),
        "cifar": (
            {
                **CIFAR,
                "cifar-10-batches-py/batches.meta": pickle.dumps(
                    {b"label_names": [f"c{i}".encode() for i in range(10)]}, protocol=2
                ),
            },
            {"name": "cifar10"},
        ),
    }


def data_file(random: Random, place: Path) -> None:
    kind = random.choice(list(formats()))
    files, how = formats()[kind]
    chosen = random.choice(list(files))
    for name, data in files.items():
        write(place / name, spoilt(random, name, data) if name == chosen else data)
    options = dict(how)
    if random.random() < 0.2:
        key = random.choice(
            ("test_fraction", "image_size", "missing", "label", "columns", "client")
        )
        options[key] = nasty(random)
    if "weights" in options:
        read_weights(place / chosen, options["weights"])
        return
    if "unlabelled" in options:
        read_examples(place / options["unlabelled"], load_data("digits"))
    elif "path" not in options:
        load_data(options.pop("name"), root=place, **options)
    elif random.random() < 0.3:
        read_examples(place / options["path"], learned(kind))
    else:
        load_data(options.pop("name"), **{**options, "path": place / options["path"]})


@functools.cache
def learned(kind: str) -> Dataset:
    """Return the data of a run that was trained on such files: what is predicted must be alike."""
    files, how = formats()[kind]
    with tempfile.TemporaryDirectory() as place:
        for name, data in files.items():
            write(Path(place) / name, data)
        options = {**how, "path": Path(place) / how["path"]}
        return load_data(options.pop("name"), **options)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def spoilt(random: Random, name: str, data: bytes) -> bytes:
    """Damage outside a compression, or inside it, where checksums hold."""
    if random.random() < 0.5:
        return spoil_bytes(random, data)
    if name.endswith(".gz"):
        return gzip.compress(spoil_bytes(random, gzip.decompress(data)))
    if name.endswith(".npz"):
        return rezipped(random, data)
    if name.endswith((".csv", ".arff")):
        return spoil_lines(random, data.decode()).encode("utf-8", "surrogateescape")
    return spoil_bytes(random, data)


def rezipped(random: Random, data: bytes) -> bytes:
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(stream, "w", random.choice((0, zipfile.ZIP_DEFLATED))) as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            match random.randrange(4):
                case 0:
                    content = spoil_bytes(random, content)
                case 1:
                    content = npy_bytes(unlikely_array(random))
                case 2 if random.random() < 0.2:
                    name += random.choice(("x", "/", "../a", ".npy"))  # noqa: PLW2901
            new.writestr(name, content)
    return stream.getvalue()


def unlikely_array(random: Random) -> Any:
    kind = random.choice(
        ("f2", "f4", "f8", "i1", "i8", "u1", "u8", "b1", "U3", "S3", "c8", "M8[s]")
    )
    shape = random.choice(((), (0,), (8,), (8, 0), (8, 3), (8, 8, 8), (8, 8, 8, 3), (7, 3), (1,)))
    array = np.zeros(shape, kind)
    if array.dtype.kind == "f" and random.random() < 0.3:
        array[...] = random.choice((np.nan, np.inf, 1e30, -1.0, 0.5))
    return array
