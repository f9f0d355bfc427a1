"""A module beside a recipe is found from any directory, and replaces no other module."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import commands
import fedgist
from fedgist.errors import RecipeError
from fedgist.recipe.own_code import before_each_import, load_own, modules_from
from fedgist.recipe.reading import read

RECIPE = """
[data]
name = "digits"
[clients]
num_clients = 3
[model]
name = "own_nets_{n}:net"
width = 6
[method]
name = "own_methods_{n}:Mine"
[train]
num_rounds = 2
[engine]
workers = 1
"""
NETS = """
import math
from torch import nn

def net(input_shape, num_classes, *, width: int = 4):
    from own_blocks_{n} import block
    return nn.Sequential(nn.Flatten(), block(math.prod(input_shape), width),
                         nn.Linear(width, num_classes))
"""
BLOCKS = """
from torch import nn

def block(inputs, width):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
"""
METHODS = """
from dataclasses import dataclass
from fedgist.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


def experiment(folder: Path, number: int) -> Path:
    """Write a recipe and its modules; ``number`` is in the modules' names, which Python keeps."""
    folder.mkdir(parents=True)
    for name, text in (("nets", NETS), ("blocks", BLOCKS), ("methods", METHODS)):
        (folder / f"own_{name}_{number}.py").write_text(text.replace("{n}", str(number)))
    (folder / "mine.toml").write_text(RECIPE.replace("{n}", str(number)))
    return folder / "mine.toml"


@pytest.mark.slow
def test_every_command_finds_it_from_another_directory(tmp_path: Path) -> None:
    recipe = experiment(tmp_path / "experiment", 1)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    run = commands.fedgist("run", recipe, "--out", "out", cwd=elsewhere)
    assert f"importing {recipe.parent / 'own_nets_1.py'} runs its code" in run.stderr
    recorded = tomllib.loads((elsewhere / "out" / "recipe.toml").read_text())
    assert recorded["engine"]["code_folder"] == str(recipe.parent)
    commands.fedgist("run", "--resume", "out", "--rounds", "3", cwd=elsewhere)
    commands.fedgist("export", "out", "--client", "0", "-o", "m.pt2", cwd=elsewhere)
    grid = ("--grid", "train.lr=0.1,0.2", "--jobs", "1", "-q")
    commands.fedgist("sweep", recipe, *grid, cwd=elsewhere)
    refused = commands.fedgist("run", recipe, "--out", "b", "--no-code", cwd=elsewhere, code=2)
    assert "names code to be run, which --no-code refuses" in refused.stderr
    assert not (elsewhere / "b").exists()


def test_it_is_found_from_python(tmp_path: Path) -> None:
    recipe = experiment(tmp_path / "a", 2)
    before = list(sys.path)
    result = fedgist.run(recipe)
    assert len(result.rounds) == 2
    assert sys.path[: len(before)] == before  # what Python finds elsewhere stays first


def test_a_stated_folder_starts_at_the_recipes(tmp_path: Path) -> None:
    recipe = experiment(tmp_path / "code", 3)
    (tmp_path / "recipes").mkdir()
    moved = recipe.rename(tmp_path / "recipes" / "mine.toml")
    with pytest.raises(RecipeError, match=rf"own_nets_3.*; looked in {moved.parent} first"):
        read(moved)
    text = moved.read_text().replace("workers = 1", 'workers = 1\ncode_folder = "../code"')
    moved.write_text(text)
    assert read(moved).engine.code_folder == str(tmp_path / "code")
    assert read(moved, ["engine.code_folder=../code"]).engine.code_folder == str(tmp_path / "code")


def test_a_mapping_may_state_the_folder(tmp_path: Path) -> None:
    experiment(tmp_path / "code", 4)
    recipe = {
        "model": {"name": "own_nets_4:net"},
        "engine": {"code_folder": str(tmp_path / "code"), "workers": 1},
        "train": {"num_rounds": 1},
    }
    assert len(fedgist.run(recipe).rounds) == 1


def test_a_recipe_without_own_code_records_no_folder(tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text("seed = 1\n")
    assert read(tmp_path / "plain.toml").engine.code_folder is None


@pytest.mark.parametrize("name", ["json", "numpy", "sys"])
def test_a_module_with_the_name_of_a_loaded_one_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("thing = 1\n")
    loaded = sys.modules[name]
    with (
        modules_from(tmp_path),
        pytest.raises(RecipeError, match=r"another module of this name is loaded.*rename yours"),
    ):
        load_own("model.name", f"{name}:thing")
    assert sys.modules[name] is loaded
    assert str(tmp_path) not in sys.path


def test_two_folders_with_modules_of_one_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_twice.py").write_text(f"thing = {folder!r}\n")
    with modules_from(tmp_path / "a"):
        assert load_own("model.name", "own_twice:thing") == "a"
    with (
        modules_from(tmp_path / "b"),
        pytest.raises(RecipeError, match=f"loaded, from {tmp_path / 'a' / 'own_twice.py'}"),
    ):
        load_own("model.name", "own_twice:thing")


def test_nothing_is_imported_once_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own_refused.py").write_text("raise SystemExit\n")

    def refuse(key: str, place: str, file: str) -> None:
        raise RecipeError(f"{key} {place} {file}")

    expected = f"model.name own_refused:thing {tmp_path / 'own_refused.py'}"
    with (
        before_each_import(refuse),
        modules_from(tmp_path),
        pytest.raises(RecipeError, match=expected),
    ):
        load_own("model.name", "own_refused:thing")


def test_a_module_of_a_package_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "own_package").mkdir()  # without __init__.py
    (tmp_path / "own_package" / "nets.py").write_text("thing = 3\n")
    with modules_from(tmp_path):
        assert load_own("model.name", "own_package.nets:thing") == 3


@pytest.mark.parametrize("lines", ["from own_width{n} import W", "def f():\n    import own_w{n}"])
def test_what_a_module_imports_is_not_another_folders(tmp_path: Path, lines: str) -> None:
    number = 30 + len(lines)  # Python keeps modules by name
    text = lines.replace("{n}", str(number))
    helper = text.split("import ")[-1] if "def" in text else text.split()[1]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{helper}.py").write_text(f"W = {folder!r}\n")
        # through another module beside it
        (tmp_path / folder / f"between_{number}_{folder}.py").write_text(f"{text}\n")
        first = f"import between_{number}_{folder}, {helper}\nthing = {helper}.W\n"
        (tmp_path / folder / f"first_{number}_{folder}.py").write_text(first)
    with modules_from(tmp_path / "a"):
        assert load_own("model.name", f"first_{number}_a:thing") == "a"
        assert load_own("model.name", f"first_{number}_a:thing") == "a"
    with (
        modules_from(tmp_path / "b"),
        pytest.raises(RecipeError, match=rf"module {helper}, but another .* {tmp_path / 'a'}"),
    ):
        load_own("model.name", f"first_{number}_b:thing")


def test_a_folder_that_is_no_package_hides_no_module(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "notes.py").write_text("")
    (tmp_path / "own_beside.py").write_text("import json\nthing = json.dumps([1])\n")
    with modules_from(tmp_path):
        assert load_own("model.name", "own_beside:thing") == "[1]"


def test_a_package_and_what_its_modules_import(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / f"own_pack_{folder}").mkdir(parents=True)
        (tmp_path / folder / f"own_pack_{folder}" / "__init__.py").write_text("")
        nets = tmp_path / folder / f"own_pack_{folder}" / "nets.py"
        nets.write_text("import own_packs_helper\nthing = own_packs_helper.W\n")
        (tmp_path / folder / "own_packs_helper.py").write_text(f"W = {folder!r}\n")
    with modules_from(tmp_path / "a"):
        assert load_own("model.name", "own_pack_a.nets:thing") == "a"
    with modules_from(tmp_path / "b"), pytest.raises(RecipeError, match="module own_packs_helper"):
        load_own("model.name", "own_pack_b.nets:thing")
