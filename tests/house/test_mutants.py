"""The faults of mutants.toml can be made, and the tests that they name are quick ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutants import ROOT, Mutant, chosen, read

MUTANTS = read()


def marks(path: Path, function: str) -> list[str]:
    """Decorators of a test function, and the marks of its whole module."""
    tree = ast.parse(path.read_text("utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    (found,) = (node for node in functions if node.name == function)
    of_module = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return [ast.unparse(node) for node in found.decorator_list] + of_module


def test_there_are_many_and_none_is_there_twice() -> None:
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
    assert len({m.what for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: Path(m.file).stem)
def test_a_fault_can_be_made_and_its_test_is_quick(mutant: Mutant) -> None:
    assert mutant.file.startswith("src/fedgist/")
    assert mutant.old != mutant.new
    changed = mutant.applied((ROOT / mutant.file).read_text("utf-8"))
    assert changed is not None, f"the old text must occur exactly once in {mutant.file}"
    ast.parse(changed)
    path, _, name = mutant.test.partition("::")
    found = marks(ROOT / path, name.partition("[")[0])
    assert "pytest.mark.slow" not in " ".join(found)
    assert "pytest.mark.environment" not in " ".join(found)


def test_a_fault_is_picked_by_its_number_or_a_text() -> None:
    assert list(chosen(MUTANTS, "")) == list(range(1, len(MUTANTS) + 1))
    assert chosen(MUTANTS, "3") == {3: MUTANTS[2]}
    assert MUTANTS[2] in chosen(MUTANTS, MUTANTS[2].file).values()
    assert chosen(MUTANTS, str(len(MUTANTS) + 1)) == {}
