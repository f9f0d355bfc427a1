"""How large the rooms of the package are, and who reads a recipe: `python bench/recipe_walk.py`.

For each package: its files, its lines, its import statements, its public names (classes, functions
and constants at the top of a module, without a leading underscore), its functions, how many of
these are private, and how many touch a recipe. A function touches a recipe if a parameter or its
result is annotated with ``Recipe``, or if its body reads a name or an attribute called ``recipe``.
Functions inside a function count with it.

``--source DIR`` counts another version, for instance a worktree's ``src/fedgist``.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedgist"
COLUMNS = ("files", "lines", "imports", "public names", "functions", "private", "with a recipe")
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


def public_names(tree: ast.Module) -> list[str]:
    """Return the public names that a module defines at its top."""
    names = []
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_")]


def counts(source: Path) -> dict[str, Counter[str]]:
    """Return the numbers of each package of a version of the source."""
    rooms: dict[str, Counter[str]] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        room = rooms.setdefault(parts[0] if len(parts) > 1 else "(top)", Counter())
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        inside = list(functions(tree))
        room["files"] += 1
        room["lines"] += text.count("\n")
        room["imports"] += sum(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(tree))
        room["public names"] += len(public_names(tree))
        room["functions"] += len(inside)
        room["private"] += sum(f.name.startswith("_") and f.name[1] != "_" for f in inside)
        room["with a recipe"] += sum(map(touches_recipe, inside))
    return rooms


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", maxsplit=1)[0])
    parser.add_argument("--source", type=Path, default=SOURCE)
    rooms = counts(parser.parse_args().source)
    print(f"{'':12}" + "".join(f"{column:>15}" for column in COLUMNS))
    for room, numbers in rooms.items():
        print(f"{room:12}" + "".join(f"{numbers[column]:15,}" for column in COLUMNS))
    total = sum(rooms.values(), Counter())
    print(f"{'together':12}" + "".join(f"{total[column]:15,}" for column in COLUMNS))
    print(f"imports per file: {total['imports'] / total['files']:.1f}")


if __name__ == "__main__":
    main()
