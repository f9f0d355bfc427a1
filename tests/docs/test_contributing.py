"""CONTRIBUTING says which files to touch: they exist, and what is registered is in all of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from fedgist.core.objectives import class_metrics
from fedgist.core.objectives.metrics import CLASS_METRICS, METRICS_OF, OBJECTIVES
from fedgist.core.objectives.target import LABELS_OF
from fedgist.data.sources import SOURCES
from fedgist.methods import METHODS
from fedgist.recipe.schema import Recipe
from settings_page import fields, table_in

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
TABLE = TEXT.partition("## To add something\n")[2].strip().partition("\n\n")[0]
ROWS: dict[str, str] = dict(re.findall(r"^\| (an? [\w ]+?) \| (.*)$", TABLE, re.MULTILINE))
EXAMPLES = {
    "a method": "fedlog",
    "a data set": "",
    "a metric": "",
    "an objective": "regression",
    "a setting": "",
}


def test_the_five_rows_are_there() -> None:
    assert set(ROWS) == set(EXAMPLES)


@pytest.mark.parametrize("row", EXAMPLES)
def test_files_and_symbols_of_a_row_exist(row: str) -> None:
    found = re.findall(r"`(?:python )?([\w./]+/[\w./]*)(?: NAME)?`(?: \(`(\w+)`\))?", ROWS[row])
    assert found
    for name, symbol in found:
        path = ROOT / name.replace("NAME", EXAMPLES[row])
        assert path.exists(), name
        if symbol:
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            assert hasattr(module, symbol), f"{name} ({symbol})"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_in_all_files_of_its_row(name: str) -> None:
    assert METHODS[name].__module__ == f"fedgist.methods.{name}"
    page = (ROOT / "docs/which-method.md").read_text("utf-8")
    table = page.partition("## The methods")[2].partition("\n## ")[0]
    assert f"[`{name}`](methods/{name}.md)" in table
    words = "".join(path.read_text("utf-8") for path in (ROOT / "tests/methods").glob("*.py"))
    assert re.search(rf"\b({name}|{METHODS[name].__name__})\b", words)


@pytest.mark.parametrize("name", SOURCES)
def test_a_data_set_is_in_all_files_of_its_row(name: str) -> None:
    assert SOURCES[name].__module__.startswith("fedgist.data.sources.")
    words = "".join(path.read_text("utf-8") for path in (ROOT / "tests/data").glob("*.py"))
    assert re.search(rf"\b{name}\b", words)


def test_a_metric_has_its_function_in_the_file_of_its_row() -> None:
    assert set(class_metrics.MEASURES) == set(CLASS_METRICS)
    tested = (ROOT / "tests/core/test_objective.py").read_text("utf-8")
    assert [name for name in CLASS_METRICS if name not in tested] == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_in_all_files_of_its_row(name: str) -> None:
    assert name in METRICS_OF
    assert name in LABELS_OF
    index = (ROOT / "docs/tasks/index.md").read_text("utf-8")
    assert re.search(rf"^\| \[?`{name}`", index, re.MULTILINE)
    page = index.partition(f"[`{name}`](")[2].partition(")")[0]
    assert name == "classes" or (ROOT / "docs/tasks" / page.partition("#")[0]).is_file()
    words = "".join(path.read_text("utf-8") for path in (ROOT / "tests/core").glob("*.py"))
    assert re.search(rf"\b({OBJECTIVES[name].__name__})\b", words)


def sections(kind: type) -> set[str]:
    """The modules of a section and of the sections in it."""
    own = {kind.__module__} if issubclass(kind, BaseModel) else set()
    inner = [found for hint, _ in fields(kind).values() if (found := table_in(hint))]
    return own.union(*map(sections, inner))


def test_every_file_with_settings_is_in_the_row_of_a_setting() -> None:
    files = {f"src/{name.replace('.', '/')}.py" for name in sections(Recipe)}
    assert {name for name in files if f"`{name}`" not in ROWS["a setting"]} == set()
