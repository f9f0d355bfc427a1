"""Run directories: records and checkpoints that are damaged, or edited, and all that reads them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import shutil
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import safetensors.torch
import tomli_w
import torch
from torch import Tensor

import fedgist
from fedgist.cli.main import main
from fedgist.errors import InputError
from fedgist.recipe.reading import read
from fedgist.runs.files import checkpoint as checkpoints
from fedgist.runs.files.record import STATE
from fedgist.runs.files.seals import HEADER_KEY
from fedgist.runs.finished import archived_run
from fedgist.runs.finished.run_reader import read_run
from fedgist.studies.archive import Archive
from fedgist.studies.job import Job
from fuzz.mutations import spoil_bytes, spoil_lines, spoil_tree

RECORDS = (
    *("rounds.jsonl", "clients.jsonl", "result.json", "metrics.json", "partition.json"),
    "recipe.toml",
)
RECIPE = {
    "data": {"train_rows": 60},
    "clients": {"num_clients": 3},
    "train": {"num_rounds": 3},
    "engine": {"workers": 1, "cohort_size": 2, "checkpoint_every": 1},
}


class EnoughError(Exception):
    """Stops a run from outside, as a kill would."""


@functools.cache
def run_folder(*, cut: bool) -> Path:
    """A run that is finished, or one that ended after two of three rounds."""
    place = Path(tempfile.mkdtemp(prefix="fedgist-fuzz-")) / "run"

    def stop(line: object) -> None:
        assert isinstance(line, dict)
        if cut and line["round"] == 2:
            raise EnoughError

    with contextlib.suppress(EnoughError):
        fedgist.run(RECIPE, out=place, callback=stop)
    return place


def command(*words: object, place: Path) -> None:
    """Call the program in this process; it may refuse, in one line."""
    said, code = io.StringIO(), None
    with (
        mock.patch.object(sys, "argv", ["fedgist", *map(str, words)]),
        contextlib.chdir(place),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    lines = said.getvalue().strip().splitlines()
    assert code in {0, None, 1, 2}, f"exit code {code}"
    assert "Traceback" not in said.getvalue()
    if code:
        assert lines[-1].startswith("error: "), said.getvalue()
        raise InputError(lines[-1])


def record(random: Random, place: Path) -> None:
    cut = random.random() < 0.5
    shutil.copytree(run_folder(cut=cut), place / "run")
    for _ in range(random.choice((1, 1, 2))):
        spoil_file(random, place / "run" / random.choice(RECORDS))
    read_it(random, place)


def spoil_file(random: Random, path: Path) -> None:
    if not path.exists():
        path.write_text("{}")
    data = path.read_bytes()
    match random.randrange(4):
        case 0:
            path.write_bytes(spoil_bytes(random, data))
        case 1:
            text = spoil_lines(random, data.decode("utf-8", "replace"))
            path.write_text(text, "utf-8", "surrogateescape")
        case _ if path.suffix != ".toml":
            lines = data.decode("utf-8", "replace").splitlines() or ["{}"]
            at = random.randrange(len(lines)) if path.suffix == ".jsonl" else 0
            whole = lines if path.suffix == ".jsonl" else ["".join(lines)]
            with contextlib.suppress(ValueError):
                whole[at] = json.dumps(spoil_tree(random, json.loads(whole[at])))
            path.write_text("\n".join([*whole, ""]), "utf-8")
        case _:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                tree = spoil_tree(random, tomllib.loads(data.decode("utf-8")))
                path.write_bytes(tomli_w.dumps(tree).encode("utf-8", "replace"))


def read_it(random: Random, place: Path) -> None:
    """Whatever reads a run; pages and pictures now and then, because they take long."""
    options = {
        "resume": ("run", "--resume", "run", "--quiet"),
        "show": ("show", "run"),
        "compare": ("compare", "run", "--format", random.choice(("text", "json", "latex", "csv"))),
        "predict": ("predict", "run", "x.npz", "--client", random.choice((0, 2, 3))),
        "evaluate": ("evaluate", "run", "x.npz"),
        "export": ("export", "run", "--client", 1, "-o", "m.safetensors"),
        "report": ("report", "run", "-o", "page.html"),
    }
    likely = ["resume", "show", "compare", "predict", "evaluate", "export"] * 6 + ["report"]
    words = options[random.choice(likely)]
    np.savez(place / "x.npz", x=np.zeros((2, 1, 8, 8), np.uint8), y=np.array([0, 1]))
    (place / "command.txt").write_text(" ".join(map(str, words)))
    command(*words, place=place)


def archive(random: Random, place: Path) -> None:
    """A file of an archived run: what is above its table is not sealed, the rest mostly anew."""
    run = archived_run.archived_part(read_run(run_folder(cut=False)), "fedgist run")
    path = place / "seed-0.csv"
    match random.randrange(3):
        case 0:
            path.write_bytes(spoil_bytes(random, archived_run.to_csv(run).encode()))
        case 1:
            text = spoil_lines(random, archived_run.to_csv(run))
            path.write_text(text, "utf-8", "surrogateescape")
        case _:
            kept = ("command", "recipe", "rounds", "result", "described")
            spoilt = spoil_tree(random, {name: getattr(run, name) for name in kept})
            with contextlib.suppress(Exception):  # it may have no such form: then nothing is there
                path.write_text(archived_run.to_csv(replace(run, **spoilt)), "utf-8")
    recipe = read(run_folder(cut=False) / "recipe.toml")
    if path.exists():
        archived_run.read_csv(path)
        if random.random() < 0.5:
            Archive(place, place).holds(Job("", recipe, place / "seed-0"))
    command(*random.choice((("show", "."), ("compare", "."))), place=place)


def checkpoint(random: Random, place: Path) -> None:
    shutil.copytree(run_folder(cut=random.random() < 0.5), place / "run")
    path = place / "run" / STATE
    if random.random() < 0.4:
        path.write_bytes(spoil_bytes(random, path.read_bytes()))
    else:
        spoil_arrays(random, path)
    read_it(random, place)


def spoil_arrays(random: Random, path: Path) -> None:
    """A whole file, of other arrays than were saved; mostly with digests as if it had been."""
    with safetensors.safe_open(path, "pt") as file:
        entry = json.loads(file.metadata()[HEADER_KEY])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    spoil_one(random, arrays)
    if random.random() < 0.2:
        spoilt = spoil_tree(random, entry)
        entry = spoilt if isinstance(spoilt, dict) else entry
    entry.pop("digest", None)
    if random.random() < 0.8:
        entry["digest"] = checkpoints._digest(entry, arrays)
    path.write_bytes(safetensors.torch.save(arrays, {HEADER_KEY: json.dumps(entry)}))


def spoil_one(random: Random, arrays: dict[str, Tensor]) -> None:
    name, other = random.choice(list(arrays)), random.choice(list(arrays))
    array = arrays[name]
    match random.randrange(9):
        case 0:
            del arrays[name]
        case 1:
            arrays[name + random.choice(("x", "/", "/a/b"))] = array.clone()
        case 2:
            arrays[name], arrays[other] = arrays[other], arrays[name]
        case 3:
            kind = random.choice((torch.float64, torch.int64, torch.float16, torch.bool))
            arrays[name] = array.to(kind)
        case 4:
            arrays[name] = array[..., :1].clone()
        case 5:
            arrays[name] = array.reshape(-1).clone()
        case 6:
            worst = (math.nan, math.inf, 0, 1e38) if array.is_floating_point() else (0, 1)
            arrays[name] = torch.full_like(array, random.choice(worst))
        case 7:
            arrays[name] = torch.zeros((0, *array.shape[1:]), dtype=array.dtype)
        case _:
            arrays[random.choice(("server", "clients/9/x", "best/server/a", ""))] = array.clone()
