"""Functions, modules and lines stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MOST_LINES_OF_A_FUNCTION = 60  # of its body, without docstring
MOST_LINES_OF_A_MODULE = 600
WIDEST = 100  # of code this is the linter's business
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > MOST_LINES_OF_A_FUNCTION:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines"


def test_functions_are_short() -> None:
    assert [found for path in SOURCES for found in long_functions(path)] == []


def test_modules_are_short() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > MOST_LINES_OF_A_MODULE}
    assert too_long == {}


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page without quoted code and output, tables, and lines that a link makes long."""
    quoted = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            quoted = not quoted
        elif not (quoted or line.startswith(("|", "    ")) or "](" in line or "http" in line):
            yield number, line


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_docs_fit_a_screen(path: Path) -> None:
    assert [number for number, line in text_lines(path) if len(line) > WIDEST] == []
