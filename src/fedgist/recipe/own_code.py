"""A user's own code, named ``package.module:thing`` by a recipe or a run directory.

Importing such code runs it, so this module is the only place that imports it. A reader of other
people's recipes can be warned before an import, or can refuse it. A module is looked for in the
recipe's folder, and then wherever Python looks.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from fedgist.errors import FedgistError, RecipeError, first_line, shown
from fedgist.registry import load_attribute

# called with the key, the place that it names, and the file; it may refuse by an error
Before = Callable[[str, str, str], None]
_before: ContextVar[Before] = ContextVar("before", default=lambda _key, _place, _file: None)
_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextlib.contextmanager
def before_each_import(before: Before) -> Iterator[None]:
    """Inside this context, call ``before(key, place, file)`` before each import of a user's code.

    ``file`` is the module's file if it is in the recipe's folder, and empty otherwise. An exception
    that ``before`` raises prevents the import.
    """
    token = _before.set(before)
    try:
        yield
    finally:
        _before.reset(token)


@contextlib.contextmanager
def modules_from(folder: Path | str | None) -> Iterator[None]:
    """Inside this context, look for a user's modules in a folder first; None means no folder."""
    token = _folder.set(None if folder is None else Path(folder).resolve())
    try:
        yield
    finally:
        _folder.reset(token)


def load_own(key: str, place: str) -> Any:
    """Import ``package.module:thing``, the value of the recipe's ``key``, and return the thing."""
    folder = _folder.get()
    spec = None if folder is None else _spec(folder, place)
    _before.get()(key, place, (spec and spec.origin) or "")
    try:
        if spec and folder:
            _import_from(folder, place)
        return load_attribute(place)
    except FedgistError:
        raise
    except Exception as error:  # a user's module may fail in any way
        missing = isinstance(error, ModuleNotFoundError) and error.name == _top(place)
        looked = ""
        if missing:
            where = (
                f"looked in {folder} first, then on PYTHONPATH" if folder else "not on PYTHONPATH"
            )
            looked = f"; {where}: set engine.code_folder to the folder of the file"
        raise RecipeError(f"{key} = {shown(place)}: {first_line(error)}{looked}") from error


def holds_module(folder: Path, place: str) -> bool:
    """Return whether a folder contains the module of ``package.module:thing``."""
    return _spec(folder, place) is not None


def _spec(folder: Path, place: str) -> ModuleSpec | None:
    spec = PathFinder.find_spec(_top(place), [str(folder)])
    # a folder without __init__.py is a package only if a module of it is named
    is_module = spec is not None and (spec.origin is not None or "." in place.partition(":")[0])
    return spec if is_module else None


def _top(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]


def _modules_beside(folder: Path, top: str) -> list[str]:
    """Return a module of a folder, and the modules there that it imports, or that these import."""
    found, todo = dict[str, None](), [top]
    while todo:
        spec = PathFinder.find_spec(name := todo.pop(), [str(folder)])
        # any other folder without __init__.py is no module that hides one
        if name in found or spec is None or (spec.origin is None and name != top):
            continue
        found[name] = None
        file = Path(spec.origin or folder / name / "__init__.py")
        for each in file.parent.rglob("*.py") if file.name == "__init__.py" else [file]:
            with contextlib.suppress(OSError, SyntaxError, ValueError):  # the import will tell
                todo += _imported(ast.parse(each.read_bytes()))
    return list(found)


def _imported(code: ast.Module) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _import_from(folder: Path, place: str) -> None:
    """Import a module from a folder. Modules beside it are found as well, but replace no others."""
    path = str(folder)
    for name in _modules_beside(folder, _top(place)):
        if (loaded := sys.modules.get(name)) is None:
            continue
        file = getattr(loaded, "__file__", None) or next(iter(getattr(loaded, "__path__", [])), "")
        if not Path(file).resolve().is_relative_to(folder):
            raise RecipeError(
                f"{shown(place)}: {folder} has a module {name}, but another module of this name is "
                f"loaded, from {file or 'Python itself'}; rename yours"
            )
    if path in sys.path:
        importlib.import_module(place.partition(":")[0])
        return
    sys.path.insert(0, path)
    try:
        importlib.import_module(place.partition(":")[0])
    finally:
        sys.path.remove(path)
        sys.path.append(path)  # for imports that happen later, inside functions
