"""The house in order: files are listed, names stay in their rooms, excuses do not grow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgist.data.sources import SOURCES
from fedgist.methods import METHODS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedgist"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name not in {"__init__.py", "__main__.py"})
PAGE = ROOT / "ARCHITECTURE.md"
HEAD = "The first line of each; `python tests/house/test_rooms.py` writes this list anew.\n"
# what may not grow; where it falls, lower the number
MOST = {"noqa": 35, "type: ignore": 7, "Any": 231}


def file_list() -> str:
    """The list of files with the first line of each, as ARCHITECTURE.md holds it."""
    lines, room = ["", "```text"], None
    for path in FILES:
        name = path.relative_to(PACKAGE)
        if name.parent != room:
            room = name.parent
            lines += [] if lines[-1] == "```text" else [""]
            lines.append(f"{room.as_posix()}/" if room.parts else "fedgist/")
        summary = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]
        lines.append(f"  {name.name:22} {summary.replace('``', '')}")
    return "\n".join([*lines, "```", ""])


def test_every_file_is_on_the_page_of_the_architecture() -> None:
    head, _, listed = PAGE.read_text("utf-8").partition(HEAD)
    assert head
    assert listed == file_list(), "run: python tests/house/test_rooms.py"


@pytest.mark.parametrize("excuse", MOST)
def test_excuses_do_not_grow(excuse: str) -> None:
    text = "".join(p.read_text("utf-8") for p in [*FILES, *PACKAGE.rglob("__init__.py")])
    if excuse == "Any":
        names = (node for node in ast.walk(ast.parse(text_without_futures(text))))
        count = sum(isinstance(node, ast.Name) and node.id == "Any" for node in names)
    else:
        count = len(re.findall(rf"# (?:[^\n]*)?{excuse}", text))
    assert count <= MOST[excuse], "find a way without"
    assert count == MOST[excuse], f"well done: lower the number to {count}"


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
    # which methods a correction changes is said by their names
    apart = PACKAGE / "runs" / "corrections.py"
    outside = [p for p in FILES if p != apart and not any(room in p.parents for room in rooms)]
    found = [
        f"{path.relative_to(ROOT)}:{line} {text!r}"
        for path in outside
        for line, text in strings(path)
        if text in names
    ]
    assert found == []


def test_names_of_engines_stay_with_the_engines_and_what_chooses_them() -> None:
    room, chooser = PACKAGE / "engines", PACKAGE / "runs" / "prepare.py"
    outside = [path for path in FILES if room not in path.parents and path != chooser]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in outside
        for line, text in strings(path)
        if text == "loopback"
    ]
    assert found == []


def test_only_one_file_makes_consoles() -> None:
    # names are data: elsewhere rich would take brackets in them for markup
    room = PACKAGE / "report" / "terminal.py"
    makers = {"Console", "TextColumn"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path != room
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers
    ]
    assert found == []


if __name__ == "__main__":
    head, _, _ = PAGE.read_text("utf-8").partition(HEAD)
    PAGE.write_text(head + HEAD + file_list(), "utf-8")
