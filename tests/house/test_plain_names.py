"""A name says what it holds: words that fit every value name no local, parameter or loop target."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "fedgist"
BANNED = {"found", "known", "what", "where", "told", "said", "asked", "one"}


def vague_names(code: str, path: str = "") -> Iterator[str]:
    """Yield assigned names and parameters that are banned; fields of a class are no locals."""
    tree = ast.parse(code)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {f.target for c in classes for f in c.body if isinstance(f, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg in BANNED:
            yield f"{path}:{node.lineno} {node.arg}"
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.Name) and stored and node not in fields and node.id in BANNED:
            yield f"{path}:{node.lineno} {node.id}"


def test_names_say_what_they_hold() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert [name for p in files for name in vague_names(p.read_text("utf-8"), str(p))] == []


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "def f(known): ...",
        "f = lambda said: 1",
        "for one in (): ...",
        "with open('a') as asked: ...",
        "[0 for where in ()]",
        "told, b = 1, 2",
        "(what := 1)",
    ],
)
def test_a_vague_name_is_rejected(code: str) -> None:
    assert len(list(vague_names(code))) == 1


def test_fields_and_other_uses_are_accepted() -> None:
    assert list(vague_names("class A:\n    known: int\nmissing = a.found + f(where=1)")) == []
