"""Reads what the code says of its options: descriptions, values and defaults, as Markdown.

A description stands with its option: in the string below a field, or in the section "Parameters"
of a function's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel

from fedgist.options import shared_options

WORDS = {str: "text", Path: "path", float: "number", int: "whole number", bool: "true or false"}
LARGEST = 2**31 - 1  # a bound that is only there because numbers end somewhere


def sections(thing: Callable[..., Any]) -> dict[str, str]:
    """Return the sections of a NumPy-style docstring by heading; the first one is called ''."""
    parts = re.split(r"(?:^|\n)(\w+)\n-+\n", inspect.getdoc(thing) or "")
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def meanings(thing: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of a function's parameters or a class's fields, one line each."""
    if isinstance(thing, type):
        return {name: one_line(text) for name, text in _below_fields(thing)}
    found = re.findall(
        r"^(\w+)\n((?:    .*\n?|\n)+)", sections(thing).get("Parameters", ""), re.MULTILINE
    )
    shared = shared_options(thing)
    return (meanings(shared) if shared else {}) | {name: one_line(text) for name, text in found}


def _below_fields(kind: type) -> Iterable[tuple[str, str]]:
    """Yield each field of a class that has a string below it, and that string."""
    module = inspect.getmodule(kind)
    assert module is not None
    for node in ast.parse(inspect.getsource(module)).body:
        if not (isinstance(node, ast.ClassDef) and node.name == kind.__name__):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                yield field.target.id, inspect.cleandoc(str(below.value.value))


def one_line(text: str) -> str:
    """Return a text in one line, as Markdown."""
    return markdown(" ".join(text.split()))


def markdown(text: str) -> str:
    """Return plain reStructuredText as Markdown: names in code, defined terms as a list."""
    listed = re.sub(r"^(``.*``)\n    (.*(?:\n    .*)*)", _as_item, text, flags=re.MULTILINE)
    return listed.replace("``", "`")


def _as_item(found: re.Match[str]) -> str:
    return f"- {found[1]}: " + re.sub(r"\n    ", "\n  ", found[2])


def in_words(kind: Any) -> str:
    """Return what values a type hint allows, as a reader of recipes says it."""
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not NoneType]
    if origin is Annotated:
        return _in_bounds(parts[0], parts[1:])
    if origin in {Union, UnionType}:
        return _choice(parts)
    if origin is Literal:
        return ", ".join(f'`"{part}"`' for part in parts)
    if origin in {list, tuple} or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return f"list of {_plural(in_words(parts[0]))}"
    if origin is dict and (parts[1] in WORDS or get_origin(parts[1]) in {Union, UnionType}):
        return f"table of {in_words(parts[1])}"
    return WORDS.get(kind, "table")  # sections and dataclasses are tables


def _choice(kinds: Sequence[Any]) -> str:
    if {str, Path} == set(kinds):
        return "path"
    words = [in_words(kind) for kind in kinds if not (kind is Path and str in kinds)]
    return " or ".join(dict.fromkeys(words))


def _plural(name: str) -> str:
    return re.sub(r"^(text|number|whole number|path|list)\b", r"\1s", name)


def _in_bounds(kind: Any, bounds: Iterable[Any]) -> str:
    """Return a number's type with its bounds; other notes on a type are left out."""
    least: Any = None
    most: Any = None
    above = below = False
    for bound in _flat(bounds):
        if isinstance(bound, annotated_types.Ge):
            least = bound.ge
        elif isinstance(bound, annotated_types.Gt):
            least, above = bound.gt, True
        elif isinstance(bound, annotated_types.Le):
            most = bound.le
        elif isinstance(bound, annotated_types.Lt):
            most, below = bound.lt, True
    return in_words(kind) + _bounds_in_words(least, most, above=above, below=below)


def _bounds_in_words(least: float | None, most: float | None, *, above: bool, below: bool) -> str:
    if most is not None and most >= LARGEST:
        most = None
    if least is None:
        return ""
    if most is None:
        return f" above {least:g}" if above else f" of at least {least:g}"
    start = "above" if above else "from"
    return f" {start} {least:g} to {'below ' if below else ''}{most:,g}"


def _flat(bounds: Iterable[Any]) -> Iterable[Any]:
    """Yield the notes of a type, also those that pydantic keeps in a field."""
    for bound in bounds:
        yield from getattr(bound, "metadata", (bound,))


def default(value: Any) -> str:
    """Return a default as recipes write it; nothing if there is none."""
    if value is inspect.Parameter.empty:
        return "needed"
    empty = value is None or value in ("", (), {})
    if empty or isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return ""
    return f"`{json.dumps(value)}`"
