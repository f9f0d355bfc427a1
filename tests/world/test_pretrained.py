"""Pretrained weights: what fits is the start, what does not is named, and no file runs code."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fedgist
from fedgist.errors import DataError, RecipeError
from fedgist.models import MODELS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import blobs, world_of
from fedgist.world.pretrained import read_weights
from fedgist.world.world import World

LIMIT = 1 << 20
Arrays = dict[str, Tensor]


def weights(classes: int = 3, prefix: str = "") -> Arrays:
    """Arrays as those of the mlp with 5 hidden units on 6 numbers."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (5, 6), "0.bias": (5,), "2.weight": (classes, 5), "2.bias": (classes,)}
    shapes = {names()[i]: shape for i, shape in enumerate(shapes.values())}
    return {f"{prefix}{n}": torch.randn(*s, generator=generator) for n, s in shapes.items()}


def names() -> list[str]:
    return list(MODELS["mlp"]((6,), 3, hidden=[5]).state_dict())


def opened(file: Path, **sections: Any) -> World:
    raw = {"model": {"name": "mlp", "hidden": [5], "weights": str(file)}, **sections}
    return world_of(make(raw), Overrides(data=blobs()))


def start(world: World, architecture: str = "mlp") -> Arrays:
    return dict(world.server.task.starts[architecture].params)


def save_torch(arrays: object, file: Path) -> None:
    torch.save(arrays, file)


def save_safe(arrays: Arrays, file: Path) -> None:
    safetensors.torch.save_file(arrays, file)


@pytest.mark.parametrize("save", [save_torch, save_safe])
def test_the_start_is_what_the_file_holds(
    tmp_path: Path, save: Callable[[Arrays, Path], None]
) -> None:
    save(weights(), tmp_path / "w")
    world = opened(tmp_path / "w")
    assert all(torch.equal(start(world)[name], array) for name, array in weights().items())
    assert world.server.notes == ()


@pytest.mark.parametrize(
    "nest",
    [
        lambda w: {"state_dict": w, "epoch": 3},
        lambda w: {"model": {f"module.{k}": v for k, v in w.items()}, "lr": 0.1},
        lambda w: {f"module.model.{k}": v.double() for k, v in w.items()},
        lambda w: {k: nn.Parameter(v) for k, v in w.items()},
    ],
)
def test_checkpoints_and_common_beginnings_of_names_are_understood(
    tmp_path: Path, nest: Callable[[Arrays], object]
) -> None:
    torch.save(nest(weights()), tmp_path / "w.pt")
    loaded = start(opened(tmp_path / "w.pt"))
    assert all(torch.equal(loaded[name], array) for name, array in weights().items())
    assert all(array.dtype == torch.float32 for array in loaded.values())


def test_another_head_keeps_its_random_start_and_is_named(tmp_path: Path) -> None:
    *body, weight, bias = names()
    arrays = weights(classes=10) | {"projector.weight": torch.zeros(2)}
    torch.save(arrays, tmp_path / "w.pt")
    world, plain = (
        opened(tmp_path / "w.pt"),
        world_of(make({"model": {"name": "mlp", "hidden": [5]}}), Overrides(data=blobs())),
    )
    assert all(torch.equal(start(world)[name], arrays[name]) for name in body)
    assert all(torch.equal(start(world)[name], start(plain)[name]) for name in (weight, bias))
    (note,) = world.server.notes
    assert note == (
        f"w.pt: the head keeps its random start: {weight} is [10, 5] in the file, [3, 5] in the "
        "model; not used: projector.weight"
    )
    headless = {name: array for name, array in weights().items() if name in body}
    torch.save(headless, tmp_path / "w.pt")
    assert opened(tmp_path / "w.pt").server.notes == (
        f"w.pt: the head keeps its random start: the file has no {weight}",
    )


def test_a_head_of_other_classes_is_not_the_start(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    raw = {"model": {"name": "mlp", "hidden": [5], "weights": str(file)}}
    named = replace(blobs(), classes=("cat", "dog", "owl"))
    for said, data, random_head in (
        ('["cat", "dog", "owl"]', named, False),
        ('["0", "1", "2"]', named, False),  # classes without names
        ('["cat", "dog", "owl"]', blobs(), False),
        ("[1, 2", named, False),  # said by nobody of ours
        ('{"cat": 1}', named, False),
        ('["cat", "owl", "dog"]', named, True),
    ):
        safetensors.torch.save_file(weights(), file, {"classes": said})
        made = world_of(make(raw), Overrides(data=data))
        note = "w.safetensors: the head keeps its random start: class 1 is 'owl' in the file, 'dog'"
        assert [n.startswith(note) for n in made.server.notes] == [True] * random_head
        same = [torch.equal(array, weights()[name]) for name, array in start(made).items()]
        assert same == [True, True, not random_head, not random_head]


def test_names_in_a_file_are_cut_and_printable(tmp_path: Path) -> None:
    torch.save(weights() | {"\x1b[31m" + "x" * 10**6: torch.zeros(1)}, tmp_path / "w.pt")
    (note,) = opened(tmp_path / "w.pt").server.notes
    assert note.isprintable()
    assert len(note) < 200


def test_clients_with_starts_of_their_own_share_the_body_of_the_file(tmp_path: Path) -> None:
    *body, weight, _ = names()
    torch.save(weights(classes=10), tmp_path / "w.pt")
    arch = opened(tmp_path / "w.pt", clients={"init": "own"}).server.task.architectures["mlp"]
    first, second = arch.start(1).params, arch.start(2).params
    assert all(torch.equal(first[name], second[name]) for name in body)
    assert not torch.equal(first[weight], second[weight])


def test_each_architecture_may_have_its_file_and_batch_norm_keeps_its_statistics(
    tmp_path: Path,
) -> None:
    file = tmp_path / "resnet.pt"
    source = MODELS["resnet9"]((3, 32, 32), 7)
    for buffer in source.buffers():
        buffer.copy_(torch.full_like(buffer, 2))
    torch.save(source.state_dict(), file)
    data = fedgist.Dataset(
        "images",
        torch.zeros(20, 3, 32, 32),
        torch.arange(20) % 4,
        torch.zeros(4, 3, 32, 32),
        torch.arange(4),
        4,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    tables = {"resnet9": {"share": 1, "weights": str(file)}, "mlp": 1.0}
    raw = {"method": {"name": "local"}, "clients": {"num_clients": 2, "architectures": tables}}
    world = world_of(make(raw), Overrides(data=data))
    buffers = world.server.task.starts["resnet9"].buffers
    assert buffers
    assert all(bool((b == 2).all()) for b in buffers.values())
    assert len(world.server.notes) == 1


def test_a_note_on_the_head_is_said_and_the_run_starts_from_the_file(tmp_path: Path) -> None:
    module = MODELS["mlp"]((1, 8, 8), 3, hidden=[5])
    torch.save(module.state_dict(), tmp_path / "w.pt")
    raw = {
        "model": {"name": "mlp", "hidden": [5], "weights": str(tmp_path / "w.pt")},
        "train": {"num_rounds": 1},
    }
    with pytest.warns(UserWarning, match=r"w\.pt: the head keeps its random start"):
        fedgist.run(raw)


@pytest.mark.slow
def test_a_run_does_not_go_on_from_another_file(tmp_path: Path) -> None:
    module, out = MODELS["mlp"]((1, 8, 8), 10, hidden=[5]), tmp_path / "run"
    torch.save(module.state_dict(), tmp_path / "w.pt")
    raw = {
        "model": {"name": "mlp", "hidden": [5], "weights": str(tmp_path / "w.pt")},
        "data": {"train_rows": 100},
        "train": {"num_rounds": 1},
    }
    fedgist.run(raw, out=out)
    fedgist.run(raw, out=out, resume=True)
    arrays = {name: array + 1 for name, array in module.state_dict().items()}
    torch.save(arrays, tmp_path / "w.pt")
    with pytest.raises(RecipeError, match="the models' start changed"):
        fedgist.run(raw, out=out, resume=True)


class Runs:
    """An object whose pickle runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class Counts:
    """An object whose pickle counts to a billion, by what torch's own safe mode allows."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Counter, (bytearray(3),)


def packed(file: Path) -> None:
    whole = io.BytesIO()
    torch.save(weights(), whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def two_pickles(file: Path) -> None:
    torch.save(weights(), file)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], b"\x80\x02}.")


def too_large(file: Path) -> None:
    file.touch()
    os.truncate(file, 70 << 20)


def changed(name: str, array: Tensor | None) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        arrays = weights() | ({} if array is None else {name: array})
        torch.save({k: v for k, v in arrays.items() if array is not None or k != name}, file)

    return write


FIRST = names()[0]
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "runs a command": (
        lambda f: torch.save({"a": Runs(f"touch {f.parent}/run")}, f),
        r"more than arrays \(posix system\), and code in a file is never run",
    ),
    "counts to a billion": (lambda f: torch.save({"a": Counts()}, f), "more than arrays .*Counter"),
    "a bare pickle": (
        lambda f: f.write_bytes(pickle.dumps(Runs(f"touch {f.parent}/run"))),
        "a bare pickle",
    ),
    "a packed archive": (packed, "its archive is packed"),
    "two pickles": (two_pickles, "its archive is not one of torch.save"),
    "too large": (
        too_large,
        "weights of this model",
    ),
    "empty": (lambda f: f.write_bytes(b""), "cannot be read as weights"),
    "text": (lambda f: f.write_bytes(b"weights"), "cannot be read as weights"),
    "an archive of something": (
        lambda f: zipfile.ZipFile(f, "w").writestr("a", "b"),
        "not one of torch.save",
    ),
    "a header that claims much": (
        lambda f: f.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
        "cannot be read as weights",
    ),
    "a list": (lambda f: torch.save([1, 2], f), "holds a list, not arrays by name"),
    "a model": (lambda f: torch.save(nn.Linear(2, 2), f), "more than arrays .*Linear"),
    "a folder": (lambda f: f.mkdir(), "is a folder, not a file"),
    "a pipe": (os.mkfifo, "is a named pipe, not a file"),
    "nothing": (lambda f: None, "does not exist"),
    "other names": (
        lambda f: torch.save({"a": torch.zeros(2), "b": torch.zeros(2)}, f),
        f"the file has no {FIRST}; it has a, b",
    ),
    "no arrays": (lambda f: torch.save({}, f), f"the file has no {FIRST}; it has nothing"),
    "a part missing": (changed(FIRST, None), f"the file has no {FIRST}; it has"),
    "another shape": (
        changed(FIRST, torch.zeros(5, 7)),
        rf"{FIRST} is \[5, 7\] in the file, \[5, 6\] in the model",
    ),
    "whole numbers": (
        changed(FIRST, torch.zeros(5, 6, dtype=torch.int8)),
        f"{FIRST} is of type torch.int8 in the file",
    ),
    "NaN": (changed(FIRST, torch.full((5, 6), torch.nan)), f"{FIRST} holds numbers that are not f"),
    "too large for float32": (
        changed(FIRST, torch.full((5, 6), 1e300, dtype=torch.float64)),
        f"{FIRST} holds numbers that are not finite",
    ),
    "sparse": (changed(FIRST, torch.eye(5).to_sparse()), "more than arrays|not a plain array"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_does_not_fit_is_one_line_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    write, says = HOSTILE[kind]
    write(tmp_path / "w.pt")
    with pytest.raises(RecipeError, match=says) as caught:
        opened(tmp_path / "w.pt")
    assert str(caught.value).startswith(f"model.weights = '{tmp_path}/w.pt': ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("save", [save_torch, save_safe])
def test_files_with_flipped_and_missing_bytes_are_read_or_refused(
    tmp_path: Path, save: Callable[[Arrays, Path], None]
) -> None:
    save(weights(), tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    draw, refused = random.Random(0), list[str]()
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(min(len(bad), 900))] = draw.randrange(256)
        file = tmp_path / "bad"
        file.write_bytes(bad[: draw.choice([len(bad), len(bad), draw.randrange(len(bad))])])
        try:
            read_weights(file, LIMIT)
        except DataError as error:
            refused.append(str(error))
    assert 0 < len(refused) < 150
    assert not any("\n" in text for text in refused)
