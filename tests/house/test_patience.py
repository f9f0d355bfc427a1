"""A busy machine fails no test: what a test waits for is given up only when it hangs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
PATIENT = TESTS / "commands.py"


def impatience(path: Path) -> Iterator[str]:
    """Processes begun elsewhere than in commands.py, and limits that are numbers of their own."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        here = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {
            "subprocess.run",
            "subprocess.Popen",
        }:
            yield f"{here} {ast.unparse(node)}: use the functions of commands.py"
        if isinstance(node, ast.keyword) and node.arg == "timeout" and is_number(node.value):
            yield f"{here} {ast.unparse(node)}: use HANG_S of commands.py"


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is not None


def test_no_test_has_a_time_limit_of_its_own() -> None:
    # seen: at a load of fourteen, seventeen tests failed by limits of 60 and 120 seconds
    others = [path for path in sorted(TESTS.rglob("*.py")) if path != PATIENT]
    assert [found for path in others for found in impatience(path)] == []


def test_such_limits_are_found(tmp_path: Path) -> None:
    bad = tmp_path / "test_bad.py"
    bad.write_text("import subprocess\nsubprocess.run(['true'])\nprocess.wait(timeout=60)\n")
    assert [found.split()[1] for found in impatience(bad)] == ["subprocess.run:", "timeout=60:"]
