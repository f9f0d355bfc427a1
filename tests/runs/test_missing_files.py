"""A run's recipe names files by paths; seen from another folder, the error says where they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedgist
from fedgist.errors import InputError
from fedgist.runs import runner

RECIPE: dict[str, Any] = {
    "method": {"name": "fedavg"},
    "model": {"name": "mlp"},
    "data": {"name": "digits", "train_rows": 60},
    "clients": {"num_clients": 2},
    "partition": {"name": "iid"},
    "train": {"num_rounds": 1},
}
DRAWS = np.random.default_rng(0)


def table(file: Path) -> None:
    lines = [f"{a},{i % 2}" for i, a in enumerate(DRAWS.integers(1, 90, 40))]
    file.write_text("\n".join(["age,out", *lines]) + "\n")


def npz(file: Path) -> None:
    np.savez(file, x=DRAWS.random((40, 3), np.float32), y=np.arange(40) % 2)


def npy(folder: Path) -> None:
    folder.mkdir()
    np.save(folder / "x.npy", DRAWS.random((40, 3), np.float32))
    np.save(folder / "y.npy", np.arange(40) % 2)


def availability(file: Path) -> None:
    file.write_text("round,client\n1,0\n1,1\n")


def texts(file: Path) -> None:
    file.write_text("".join(f'{{"text": "a b", "label": "{i % 2}"}}\n' for i in range(40)))


TABLE = {"name": "table", "label": "out"}
TEXTS = {"name": "text_file", "label": "label"}
OF_TEXTS = {"objective": {"name": "text_classes"}, "model": {"name": "text_mean"}}
CASES: list[tuple[str, str, Callable[[Path], None], dict[str, Any]]] = [
    ("data.path", "x.csv", table, {"data": TABLE | {"path": "x.csv"}}),
    ("data.path", "x.npz", npz, {"data": {"name": "npz", "path": "x.npz"}}),
    ("data.path", "scans", npy, {"data": {"name": "npy", "path": "scans"}}),
    ("clients.availability", "on.csv", availability, {"clients": {"availability": "on.csv"}}),
]


@pytest.mark.parametrize(("key", "file", "write", "parts"), CASES, ids=[case[1] for case in CASES])
@pytest.mark.parametrize("there", [True, False])
def test_a_run_that_is_used_elsewhere_names_its_key_its_folder_and_the_cure(
    key: str,
    file: str,
    write: Callable[[Path], None],
    parts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    there: bool,
) -> None:
    # seen: "base.csv does not exist", of a command whose own argument was /there/base.csv
    (home := tmp_path / "home").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(home)
    write(home / file)
    recipe = {k: {**RECIPE.get(k, {}), **parts.get(k, {})} for k in {**RECIPE, **parts}}
    recipe["data"] = parts.get("data", recipe["data"])
    fedgist.run(recipe, out=home / "run")
    monkeypatch.chdir(elsewhere)
    if not there:
        (home / file).rename(home / "gone")
    cure = str(home) if there else "the folder where it was begun"
    says = rf"{key}.*[ (]{file} does not exist in {re.escape(str(elsewhere))}.*"
    says += rf"recipe of .*run reads it: give the command in {re.escape(cure)}$"
    for use in (
        lambda: runner.load_run(home / "run"),
        lambda: fedgist.run(recipe, out=home / "run", resume=True),
    ):
        with pytest.raises(InputError, match=says):
            use()
    with pytest.raises(InputError, match=rf"{key}.*[ (]{file} does not exist in [^ ,]*$"):
        fedgist.run(recipe, out=elsewhere / "new")
    if there:
        monkeypatch.chdir(home)
        runner.load_run(home / "run")


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("data.test", {"data": TABLE | {"path": "x.csv", "test": "no.csv"}}),
        ("data.file", {"data": TEXTS | {"file": "no.jsonl"}} | OF_TEXTS),
        (
            "data.words.file",
            {"data": TEXTS | {"file": "texts.jsonl", "words": {"file": "no.txt"}}} | OF_TEXTS,
        ),
    ],
)
def test_every_key_of_a_file_is_named(
    key: str, parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "x.csv")
    texts(tmp_path / "texts.jsonl")
    with pytest.raises(InputError, match=rf"{key}: no\.\w+ does not exist in "):
        fedgist.run(RECIPE | parts)
