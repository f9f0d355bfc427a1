"""Registries of functions and classes that are imported at their first use.

A table of names and import paths is cheap to read, but importing an entry may load torch, which
takes a second. So a command can list, check and suggest names without delay.
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
    """Functions or classes by name, each with its import path ``"package.module:attribute"``.

    >>> roots = Registry({"square": "math:sqrt", "cubic": "math:cbrt"})
    >>> list(roots), roots["square"](9.0)
    (['square', 'cubic'], 3.0)
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> T:
        """Import and return the entry ``name``; raise KeyError if there is none."""
        entry: T = load_attribute(self._places[name])
        return entry

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of registration."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Return whether ``name`` is registered; nothing is imported."""
        return name in self._places

    def summaries(self) -> dict[str, str]:
        """Return the first paragraph of each entry's docstring, or of a class's module, by name."""
        return {name: _summary(place) for name, place in self._places.items()}


def load_attribute(place: str) -> Any:
    """Import ``package.module:attribute`` and return the attribute.

    Raises
    ------
    ImportError, AttributeError, ValueError, TypeError
        If there is no such module or attribute.
    """
    module, _, attribute = place.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def _summary(place: str) -> str:
    """Read the docstring from the source file, because an import would load torch."""
    module, _, attribute = place.partition(":")
    spec = find_spec(module)
    origin = getattr(spec, "origin", None)
    assert origin is not None, "our own modules are files"
    tree = ast.parse(Path(origin).read_text(encoding="utf-8"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == attribute]
    text = ast.get_docstring(functions[0] if functions else tree) or ""
    return " ".join(text.partition("\n\n")[0].split())
