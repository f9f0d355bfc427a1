"""The house in order: files say what they hold, names stay in their rooms, excuses do not grow."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgist.data.sources import SOURCES
from fedgist.methods import METHODS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedgist"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name not in {"__init__.py", "__main__.py"})
PAGE = ROOT / "ARCHITECTURE.md"
# what may not grow; where it falls, lower the number
MOST = {"noqa": 34, "type: ignore": 7, "Any": 229}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_in_its_first_line_what_it_holds(path: Path) -> None:
    summary = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0]
    assert re.fullmatch(r"[A-Z`].*[.]", summary)


def test_the_page_of_the_architecture_is_one_page_and_shows_every_room() -> None:
    text = PAGE.read_text("utf-8")
    assert len(text.splitlines()) <= 100
    picture = text.split("```")[1]
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in FILES if path.parent == PACKAGE}
    shown = set(re.findall(r"[a-z]+", picture))
    assert rooms - shown == set()
    assert (modules - {"errors"}) - shown == set()


def test_files_that_the_page_of_the_architecture_names_exist() -> None:
    for name in re.findall(r"`((?:\w+/)+\w*(?:\.py)?)\b", PAGE.read_text("utf-8")):
        assert (PACKAGE / name).exists(), name


def test_every_dependency_is_justified_in_a_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    names = {re.split(r"[<>=]", one)[0] for one in sum(extras, project["dependencies"])}
    table = PAGE.read_text("utf-8").partition("## Dependencies")[2]
    assert {name for name in names if not re.search(rf"\b{name}\b", table)} == set()


@pytest.mark.parametrize("excuse", MOST)
def test_excuses_do_not_grow(excuse: str) -> None:
    text = "".join(p.read_text("utf-8") for p in [*FILES, *PACKAGE.rglob("__init__.py")])
    if excuse == "Any":
        names = (node for node in ast.walk(ast.parse(text_without_futures(text))))
        count = sum(isinstance(node, ast.Name) and node.id == "Any" for node in names)
    else:
        count = len(re.findall(rf"# (?:[^\n]*)?{excuse}", text))
    assert count <= MOST[excuse], "find a way without"


def text_without_futures(text: str) -> str:
    """Many modules in one text: their future imports would have to come first."""
    return text.replace("from __future__ import annotations\n", "")


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """String constants of a module that are no docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def test_names_of_methods_and_sources_stay_in_their_rooms() -> None:
    # "local" is an engine as well, and "table" a word of everybody's
    names = {*METHODS, *SOURCES} - {"local", "table", "folder"}
    rooms = (PACKAGE / "methods", PACKAGE / "data" / "sources", PACKAGE / "testing")
    outside = [path for path in FILES if not any(room in path.parents for room in rooms)]
    found = [
        f"{path.relative_to(ROOT)}:{line} {text!r}"
        for path in outside
        for line, text in strings(path)
        if text in names
    ]
    assert found == []


def test_names_of_engines_stay_with_the_engines_and_what_chooses_them() -> None:
    rooms, chooser = {PACKAGE / "engines", PACKAGE / "wire"}, PACKAGE / "runs" / "prepare.py"
    outside = [path for path in FILES if path != chooser and rooms.isdisjoint(path.parents)]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in outside
        for line, text in strings(path)
        if text == "loopback"
    ]
    assert found == []


def test_only_one_file_makes_consoles() -> None:
    # names are data: elsewhere rich would take brackets in them for markup
    room = PACKAGE / "report" / "terminal" / "console.py"
    makers = {"Console", "TextColumn"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path != room
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers
    ]
    assert found == []
