"""Check users' values against the type hints of the functions that take them.

A value must have the hinted type: ``true`` and ``"12"`` are not numbers, and numbers are finite.
An int is accepted as a float, and a list as a tuple.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeVar, Unpack, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fedgist.errors import RecipeError, did_you_mean, shown

Options = dict[str, Any]  # values by the options' names
Section = TypeVar("Section", bound=BaseModel)
LARGEST_INT = 2**63 - 1  # the largest whole number in TOML, and in torch
CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no keys but the fields
DEEPEST = 32  # maximal depth of nested tables
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "dataclass": "a table",
}

READABLE = 1e-4  # smaller numbers are not written with all their zeros
_OURS = {
    "Input should": "must",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def plain(value: object, path: str = "", depth: int = 0) -> Any:
    """Return a value in JSON types: tuples become lists, paths text, NumPy scalars numbers."""
    problem = ""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        if abs(int(value)) <= LARGEST_INT:
            return int(value)
        problem = f"must be at most {LARGEST_INT}"
    elif isinstance(value, numbers.Real):
        if math.isfinite(value):
            return float(value)
        problem = "must be a finite number"
    elif isinstance(value, PurePath):
        return str(value)
    elif depth == DEEPEST:
        problem = f"must not be nested more than {DEEPEST} deep"
    elif isinstance(value, Mapping):
        inner = f"{path}." if path else ""
        return {str(k): plain(v, f"{inner}{k}", depth + 1) for k, v in value.items()}
    elif isinstance(value, list | tuple):
        return [plain(part, path, depth + 1) for part in value]
    else:
        problem = f"is of type {type(value).__name__}, which a recipe cannot hold"
    raise RecipeError(f"{path} = {shown(value)}: {problem}")


def checked(kind: Any, value: object, path: str = "") -> Any:
    """Return ``value`` converted to the type ``kind``, which may be a pydantic model."""
    text = json.dumps(plain(value, path))
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise RecipeError(_first(error, json.loads(text), path, kind)) from error


def with_fields(section: Section, values: Mapping[str, object], path: str) -> Section:
    """Return a pydantic model with other values of some fields, all of which are checked again."""
    fields = {name: getattr(section, name) for name in section.model_fields_set} | dict(values)
    try:
        return type(section).model_validate(fields)
    except ValidationError as error:
        raise RecipeError(_first(error, fields, path, type(section))) from error


def check_options(
    function: Callable[..., object],
    options: Mapping[str, object],
    name: str,
    table: str,
    aside: Sequence[str] = (),
) -> Options:
    """Return a function's keyword options, each checked against its type hint.

    An option that is a dataclass is given as a table of its fields; omitted fields keep the values
    of the option's default.

    ``name`` is the function's name in recipes, ``table`` is the recipe's table with the options,
    and ``aside`` names parameters that are not options.
    """
    defaults, open_ended = options_of(function, aside)
    hints, out = _hints(function), {}
    for key, value in options.items():
        if key not in defaults and not open_ended:
            raise RecipeError(f"{table}.{key}: unknown key of {name}{did_you_mean(key, defaults)}")
        kind, path = hints.get(key, Any), f"{table}.{key}"
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
            stated = check_options(
                kind, {**_fields(defaults[key]), **value}, f"{name}'s {key}", path
            )
            out[key] = kind(**stated)
        else:
            out[key] = checked(kind, value, path)
    for key, default in defaults.items():
        if default is inspect.Parameter.empty and key not in options:
            raise RecipeError(f"{table}.{key} is missing: {name} needs it")
    return out


def options_of(function: Callable[..., object], aside: Sequence[str] = ()) -> tuple[Options, bool]:
    """Return a function's options with their defaults, and whether it accepts any other option.

    The default of a required option is ``inspect.Parameter.empty``. Options that several functions
    share may be declared once, as ``**options: Unpack[...]`` of a TypedDict.
    """
    parameters = inspect.signature(function).parameters.values()
    shared = shared_options(function)
    made = {
        field.name: field.default_factory()
        for field in (dataclasses.fields(function) if dataclasses.is_dataclass(function) else ())
        if field.default_factory is not dataclasses.MISSING
    }
    named = {
        p.name: made.get(p.name, p.default)
        for p in parameters
        if p.kind not in {p.VAR_KEYWORD, p.VAR_POSITIONAL} and p.name not in aside
    }
    if shared is not None:
        return named | {n: None for n in shared.__annotations__ if n not in aside}, False
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def shared_options(function: Callable[..., object]) -> type | None:
    """Return the TypedDict of options that a function shares with others, or None."""
    names = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD
    ]
    hint = _own_hints(function).get(names[0]) if names else None
    return get_args(hint)[0] if get_origin(hint) is Unpack else None


def _fields(value: object) -> Options:
    """Return the fields of a dataclass by name, and nothing for other objects."""
    if not dataclasses.is_dataclass(value):
        return {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _hints(function: Callable[..., object]) -> Options:
    shared = shared_options(function)
    return _own_hints(function) | (_own_hints(shared) if shared else {})


def _own_hints(function: Callable[..., object]) -> Options:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # noqa: BLE001  # users' annotations may contain undefined names
        return {}


def _first(error: ValidationError, value: object, table: str, kind: object) -> str:
    """Return the first problem in one line; the alternatives of a union are joined by "or"."""
    errors = error.errors()
    outer, _ = _locate(errors[0], value)
    below = [e for e in errors if _locate(e, value)[0][: len(outer)] == outer]
    first = max(below, key=lambda e: len(_locate(e, value)[0]))  # of a union what fits best
    path, given = _locate(first, value)
    same = [e for e in errors if _locate(e, value)[0] == path]
    key = ".".join([*([table] if table else []), *path])
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key{did_you_mean(path[-1], _keys(kind, path[:-1]))}"
    if first["type"] == "missing":
        return f"{key} is missing"
    wanted = " or ".join(dict.fromkeys(_words(e) for e in same))
    named = first["type"] == "value_error" and shown(given) in wanted  # one of fedgist's messages
    if not key:  # the whole table
        return wanted
    return f"{key}: {wanted}" if named else f"{key} = {shown(given)}: {wanted}"


def _locate(error: ErrorDetails, value: Any) -> tuple[list[str], object]:
    """Return the keys that lead to a problem, without the type names of a union."""
    path: list[str] = []
    for part in error["loc"]:
        inside = isinstance(value, Mapping) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            path, value = [*path, str(part)], value[part]
        elif error["type"] == "missing":
            path = [*path, str(part)]
    return path, value


def _words(error: ErrorDetails) -> str:
    kind = error["type"].removesuffix("_type").removesuffix("_parsing")
    if error["type"] == "literal_error":
        return f"must be {error['ctx']['expected']}"
    kind = {"int_from_float": "int", "model_attributes": "model"}.get(kind, kind)
    if kind in _WORDS:
        return f"must be {_WORDS[kind]}"
    if kind == "too_short":
        least = error["ctx"]["min_length"]
        return f"must have at least {least} {'item' if least == 1 else 'items'}"
    bound = error.get("ctx", {}).get("ge")
    if isinstance(bound, float) and 0 < bound < READABLE:
        return f"must be at least {bound:g}"
    text: str = error["msg"].removeprefix("Value error, ")
    for pydantics, ours in _OURS.items():
        text = text.replace(pydantics, ours)
    return text


def _keys(model: object, path: Sequence[str]) -> list[str]:
    """Return the keys of the model at a path of keys; an empty list if there is no model."""
    for part in path:
        fields = getattr(model, "model_fields", {})
        model = fields[part].annotation if part in fields else None
    return list(getattr(model, "model_fields", {}))
