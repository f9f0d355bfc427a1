"""Recipes: the complete, typed description of a run.

A recipe is TOML. Everything is checked when it is read: an unknown key, an impossible value or an
unknown name is a :class:`RecipeError` of one line that names the key, the value and the choices.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedgist.errors import InputError, RecipeError, did_you_mean
from fedgist.federation.method_loading import build_method
from fedgist.federation.recipe_sections import (
    MethodSection,
    ModelSection,
    Recipe,
    role_of,
)
from fedgist.federation.training_section import TrainSection

__all__ = ["ModelSection", "Recipe", "flat", "make", "read", "read_recorded", "role_of"]


def read(path: Path | None, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply ``section.key=value`` settings; without a file, the defaults.

    Raises
    ------
    RecipeError
        If the file cannot be read, or the recipe is not valid.
    """
    if path is None:
        return make({}, settings)
    raw = _read_toml(path)
    try:
        return make(raw, settings)
    except InputError as error:
        msg = f"{path}: {error}"
        raise RecipeError(msg) from error


def read_recorded(path: Path) -> Recipe:
    """Read the recipe of a run whose method may have been an object: its class is not loaded.

    Raises
    ------
    RecipeError
        If the file cannot be read, or the recipe is not valid.
    """
    try:
        return Recipe.model_validate(_read_toml(path))
    except ValidationError as error:
        msg = f"{path}: {_first(error, Recipe)}"
        raise RecipeError(msg) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"there is no recipe {path}; `fedgist list recipes` lists those of fedgist"
        raise RecipeError(msg) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        msg = f"{path}: {error}"
        raise RecipeError(msg) from error


def make(raw: Mapping[str, Any], settings: Sequence[str] = ()) -> Recipe:
    """Make a recipe from nested dictionaries and ``section.key=value`` settings.

    Raises
    ------
    RecipeError
        If the recipe is not valid: one line that names the key, the value and the choices.
    """
    changes = dict(_setting(text) for text in settings)
    merged = _with_method_table(raw, changes)
    for key, value in changes.items():
        _put(merged, key, value)
    if "paper" in merged:
        departs = list(_table(merged, "paper").get("departs", []))
        for key, value in changes.items():
            if role_of(key) is None and key != "method.name":
                departs.append(f"{key} = {value}")
        _put(merged, "paper.departs", departs)
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        raise RecipeError(_first(error, Recipe)) from error
    build_method(recipe.method.name, recipe.method.options)
    return recipe


def _with_method_table(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the table ``[methods.NAME]`` of the method that runs, and leave out the others."""
    merged = {key: value for key, value in raw.items() if key != "methods"}
    tables = _table(raw, "methods")
    _check_tables(tables)
    given = _table(raw, "method")
    name = changes.get("method.name", given.get("name", MethodSection().name))
    table = dict(tables.get(name, {})) if isinstance(name, str) else {}
    train = table.pop("train", {})
    beside = given if given.get("name", name) == name else {}
    merged["method"] = {**table, **beside, "name": name}
    merged["train"] = {**_table(raw, "train"), **train}
    return merged


def _table(raw: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, Mapping):
        msg = f"{prefix}{key} = {value!r}: expected a table"
        raise RecipeError(msg)
    return value


def _check_tables(tables: Mapping[str, Any]) -> None:
    for name in tables:
        table = _table(tables, name, "methods.")
        build_method(name, {k: v for k, v in table.items() if k != "train"}, f"methods.{name}")
        try:
            TrainSection.model_validate(table.get("train", {}))
        except ValidationError as error:
            msg = f"methods.{name}.train.{_first(error, TrainSection)}"
            raise RecipeError(msg) from error


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        msg = f"--set {text}: expected section.key=value"
        raise RecipeError(msg)
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # a bare word is a string


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        inner = raw.get(part, {})
        if isinstance(inner, str):  # a name that stands for a table
            inner = {"name": inner}
        if not isinstance(inner, Mapping):
            msg = f"--set {key}: {part} is not a section"
            raise RecipeError(msg)
        raw[part] = dict(inner)
        raw = raw[part]
    raw[last] = value


def _first(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first problem in one line: the key, the value, and what is accepted."""
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    where = ".".join(
        part for part in loc if part not in {"float", "str", "constrained-int", "dict[str,any]"}
    )
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key{did_you_mean(loc[-1], _keys(model, loc[:-1]))}"
    return f"{where} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


def _keys(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    for part in loc:
        inner = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a recipe's settings by dotted key."""
    out: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        out |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return out
