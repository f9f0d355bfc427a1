"""Named things that are imported when they are first asked for.

A table of names and places costs nothing to read; what the names stand for may cost a second,
because it loads torch. So a command can list, check and suggest names at once.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Functions or classes by name, each given by its place, ``"package.module:attribute"``.

    >>> roots = Registry({"square": "math:sqrt", "cubic": "math:cbrt"})
    >>> list(roots), roots["square"](9.0)
    (['square', 'cubic'], 3.0)
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> T:
        """Return what is called ``name``; KeyError if nothing is."""
        found: T = load(self._places[name])
        return found

    def __iter__(self) -> Iterator[str]:
        """Go through the names, in order."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a name; nothing is imported."""
        return name in self._places

    def summaries(self) -> dict[str, str]:
        """Return by name the first paragraph of a function's docstring, or of a class's module."""
        return {name: _summary(place) for name, place in self._places.items()}


def load(place: str) -> Any:
    """Import ``package.module:attribute`` and return it, whatever it is.

    Raises
    ------
    ImportError, AttributeError, ValueError, TypeError
        If there is no such module or attribute.
    """
    module, _, attribute = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _summary(place: str) -> str:
    """Read the docstring from the source file: to import it would load torch."""
    module, _, attribute = place.partition(":")
    spec = find_spec(module)
    origin = getattr(spec, "origin", None)
    assert origin is not None, "our own modules are files"
    tree = ast.parse(Path(origin).read_text(encoding="utf-8"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == attribute]
    text = ast.get_docstring(functions[0] if functions else tree) or ""
    return " ".join(text.partition("\n\n")[0].split())
