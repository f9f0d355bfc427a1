"""The page on real files has a line for each table of the script, as the script states it now."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedgist.recipe.reading import make

ROOT = Path(__file__).parents[2]

if TYPE_CHECKING:
    import real_files as real
else:  # bench/ is not on the path: its lazy.py would hide the folder tests/lazy
    spec = importlib.util.spec_from_file_location("real_files", ROOT / "bench" / "real_files.py")
    real = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = real  # dataclasses look there
    spec.loader.exec_module(real)


def lines() -> list[list[str]]:
    made = real.PAGE.read_text("utf-8").partition(real.BEGIN)[2].partition(real.END)[0]
    return [re.split(r" \| ", line.strip("| ")) for line in made.splitlines()[2:]]


def test_the_page_has_a_line_for_each_table() -> None:
    stated = [[*real.fixed(file), *real.written(file.settings)] for file in real.FILES]
    assert [[line[0], line[1], line[3]] for line in lines()] == stated, "run the script again"


def test_commands_ended_well_and_all_scores_are_numbers() -> None:
    for table, *_, fedlog, fedavg, used in lines():
        assert used == "yes", table
        assert all(re.fullmatch(r"\d+\.\d%|r2 -?\d+\.\d\d", score) for score in (fedlog, fedavg))


def test_no_package_with_a_table_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    needed = [*project["dependencies"], *(need for extra in extras for need in extra)]
    names = {re.split(r"[^\w-]", need)[0].lower() for need in needed}
    assert names.isdisjoint(name.lower() for name in real.VERSIONS)
    assert {file.package for file in real.FILES} == set(real.VERSIONS)


@pytest.mark.parametrize("file", real.FILES, ids=lambda file: file.name)
def test_the_recipes_and_settings_are_valid(file: real.RealFile) -> None:
    client = real.BY_CLIENT.format(file.client) if file.client else real.DEALT
    text = real.RECIPE.format(path=file.name, label=file.label, client=client, task=file.task)
    recipe = make(tomllib.loads(text), file.settings)
    assert recipe.train.num_rounds == 2
    assert recipe.objective.name == file.task
