"""How many functions take, return or read a recipe: `python bench/recipe_walk.py`.

A function counts if a parameter or its result is annotated with ``Recipe``, or if its body reads a
name or an attribute called ``recipe``. Functions inside a function count with it. A recipe is
resolved once where the number is small.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedgist"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions and methods of a module, without those inside another."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        else:
            yield from functions(node)


def touches_recipe(function: Function) -> bool:
    """Return whether a function takes, returns or reads a recipe."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in {"recipe", "Recipe"}:
            return True
        if isinstance(node, ast.Attribute) and node.attr == "recipe":
            return True
        if isinstance(node, ast.arg) and node.arg == "recipe":
            return True
    return False


def counted() -> tuple[dict[str, int], int]:
    """Return the functions that touch a recipe, by package, and the number of all functions."""
    found: dict[str, int] = {}
    total = 0
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0]
        for function in functions(ast.parse(path.read_text("utf-8"))):
            total += 1
            found[package] = found.get(package, 0) + touches_recipe(function)
    return {package: count for package, count in found.items() if count}, total


if __name__ == "__main__":
    by_package, total = counted()
    for package, count in by_package.items():
        print(f"{package:12} {count}")
    print(f"{sum(by_package.values())} of {total} functions take, return or read a recipe")
