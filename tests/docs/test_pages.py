"""Pages say what works: their blocks run, their commands exist, their tables have all cells."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from commands import python
from fedgist.cli.main import app
from fedgist.errors import InputError
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text("utf-8")]
SEPARATOR = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")), "utf-8")
    done = python(script, tmp_path)
    if page.name == "tutorial.md":  # its first number is an accuracy
        assert float(done.stdout.split()[0]) > 0.9


def commands(page: Path) -> list[str]:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("fedgist ") and "|" not in line]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=named)
def test_commands_and_their_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for line in commands(page):
        name, *words = shlex.split(line, comments=True)[1:]
        command = group.commands.get(name)
        assert command is not None, line
        try:
            command.make_context(name, words)
        except Exception as error:  # noqa: BLE001  # whatever the parser raises
            pytest.fail(f"{line}: {error}")


#: Pages with files of other kinds: of sites and authorities, and the spaces of searches.
OTHER_FILES = {"federation", "one-exchange", "studies"}
OF_USERS = re.compile("# or\n|No module named")  # alternatives, and code that users write
WITH_RECIPES = [p for p in PAGES if blocks(p, "toml") and p.stem not in OTHER_FILES]


@pytest.mark.parametrize("page", WITH_RECIPES, ids=named)
def test_recipes_can_be_used(page: Path) -> None:
    # seen: examples named a model that does not exist
    for block in blocks(page, "toml"):
        if OF_USERS.search(block):
            continue
        problem = ""
        try:
            resolve(make(tomllib.loads(block)))
        except InputError as error:
            problem = str(error)
        assert not problem or OF_USERS.search(problem), f"{block}\n{problem}"


@pytest.mark.parametrize("name", ["attacks", "security"])
def test_pages_on_safety_name_tests_that_exist(name: str) -> None:
    page = ROOT / "docs" / f"{name}.md"
    groups = re.findall(r"\]\((\S+?\.py)\): ((?:`test_\w+`(?:, )?)+)", page.read_text("utf-8"))
    named_tests = re.findall(r"`test_\w+`", page.read_text("utf-8"))
    assert (
        sum(len(re.findall(r"`test_\w+`", names)) for _, names in groups) == len(named_tests) > 20
    )
    for file, names in groups:
        source = (page.parent / file).read_text("utf-8")
        for test in re.findall(r"`(test_\w+)`", names):
            assert f"def {test}(" in source, f"{file}: {test}"


def tables(page: Path) -> list[list[str]]:
    """Runs of lines that begin with a bar, outside quoted blocks."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    groups: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            groups[-1].append(line)
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if group]


def cells(line: str) -> int:
    """Cells of a row as a reader sees them: an escaped bar is no border."""
    return len(re.findall(r"(?<!\\)\|", line.strip())) - 1


@pytest.mark.parametrize("page", [page for page in PAGES if tables(page)], ids=named)
def test_tables_have_all_their_cells(page: Path) -> None:
    for table in tables(page):
        assert len(table) > 1, table
        assert SEPARATOR.fullmatch(table[1].strip()), table[:2]
        for row in table:
            assert cells(row) == cells(table[0]), row
            assert row.strip().endswith("|"), row
