"""Recipes: the complete, typed description of a run.

A recipe is TOML. Everything is checked when it is read: an unknown key, an impossible value or an
unknown name is a :class:`RecipeError` of one line that names the key, the value and the choices.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedgist.core.objectives.metrics import CHOSEN_METRICS, Metric
from fedgist.core.training import Training
from fedgist.errors import InputError, RecipeError, did_you_mean, first_line, shown
from fedgist.methods import base_name
from fedgist.models import PREFIX
from fedgist.options import DEEPEST, checked
from fedgist.recipe.own_code import holds_module, modules_from
from fedgist.recipe.schema import (
    MethodSection,
    ModelSection,
    ObjectiveSection,
    Recipe,
    role_of,
)

__all__ = ["Recipe", "defaults", "flat", "make", "read", "read_recorded", "role_of"]

CODE_FOLDER = "engine.code_folder"
OPEN = frozenset({"model", "method"})  # sections whose keys depend on what they name
QUOTED = re.compile(r""" "(?:[^"\\]|\\.)*+"? | '[^']*+'? """, re.VERBOSE)  # also to a line's end
# sections that a method may have of its own, in its table
OF_A_METHOD = MappingProxyType({"train": Training, "objective": ObjectiveSection})


def read(
    path: Path | None,
    settings: Sequence[str] = (),
    own: Mapping[str, object] = MappingProxyType({}),
) -> Recipe:
    """Read a recipe file and apply ``section.key=value`` settings.

    Without a file, the settings are applied to the defaults. ``own`` holds values by dotted key
    that are treated as part of the file.

    Raises
    ------
    RecipeError
        If the file cannot be read, or the recipe is not valid.
    """
    if path is None:
        return make({}, settings)
    raw = read_toml(path)
    try:
        for key, value in own.items():
            _put(raw, key, value)
        recipe = make(raw, settings, path.parent)
    except InputError as error:
        raise RecipeError(f"{path}: {error}") from error
    return recipe.noting(recipe.dropped, path)


def _code_folder(
    beside: Path | None, raw: Mapping[str, object], settings: Sequence[str]
) -> Path | None:
    """Return the folder of a recipe's own code: as stated, or the recipe's own folder."""
    changes = dict(_setting(text) for text in settings)
    stated = changes.get(CODE_FOLDER, _table(raw, "engine").get("code_folder"))
    if not isinstance(stated, str):
        return beside and beside.resolve()
    return ((beside or Path()) / stated).resolve()


def models_named(recipe: Recipe) -> list[str]:
    """Return the names of all models in a recipe."""
    clients = recipe.clients
    tables = [*clients.architectures.items(), *clients.pools.items()]
    models = [t.get("model", k) if isinstance(t, Mapping) else k for k, t in tables]
    models += [recipe.model.name] if recipe.model else []
    return [str(name) for name in models]


def own_places(recipe: Recipe) -> list[str]:
    """Return all ``package.module:thing`` that a recipe names."""
    named = [base_name(recipe.method.name), *models_named(recipe), *recipe.objective.metrics]
    named += [recipe.objective.name, recipe.data.name]
    return [name for name in named if ":" in name and not name.startswith(PREFIX)]


def read_recorded(path: Path) -> Recipe:
    """Read the recipe of a recorded run without loading its method or its models.

    Parts of a recorded run may have been Python objects, which its recipe cannot load.

    Raises
    ------
    RecipeError
        If the file cannot be read, or the recipe is not valid.
    """
    try:
        return _recorded(read_toml(path))
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def recorded(text: str) -> Recipe:
    """Return a recorded recipe from its text, without loading its method or its models.

    Raises
    ------
    RecipeError
        If the recipe is not valid.
    """
    try:
        return _recorded(tables_of(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"the recipe is not TOML: {first_line(error)}") from error


def tables_of(text: str) -> dict[str, Any]:
    """Return the tables of TOML that may be another's.

    The time and the memory that tomllib takes for a dotted key are the square of its parts.

    Raises
    ------
    TOMLDecodeError
        If it is not TOML, or a key has more parts than tables may be deep.
    """
    bare = (QUOTED.sub("", line).partition("#")[0] for line in text.split("\n"))
    if any(line.partition("=")[0].count(".") >= DEEPEST for line in bare):
        raise tomllib.TOMLDecodeError(f"a key has more than {DEEPEST} parts")
    return tomllib.loads(text)


def _recorded(raw: Mapping[str, object]) -> Recipe:
    # a run's recipe has no [model] where clients.architectures or pools say it
    recipe: Recipe = checked(Recipe, {"model": None, **raw})
    return recipe


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a recipe file; raise RecipeError if it cannot be read."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise RecipeError(f"{path} is not a file")
    try:
        return tables_of(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise RecipeError(
            f"there is no recipe {path}; `fedgist list recipes` lists those of fedgist"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"{path}: {first_line(error)}") from error


def make(
    raw: Mapping[str, Any], settings: Sequence[str] = (), beside: Path | None = None
) -> Recipe:
    """Make a recipe from nested dictionaries and ``section.key=value`` settings.

    The recipe's method and models are checked later, when the recipe is resolved. The user's own
    modules are looked for in the folder ``beside``, unless the recipe states another.

    Raises
    ------
    RecipeError
        If the recipe is not valid: one line that names the key, the value and the choices.
    """
    changes = dict(_setting(text) for text in settings)
    all_tables = _table(raw, "methods")
    tables = {name: _table(all_tables, name, "methods.") for name in all_tables}
    merged, changed, left_over = _merged(raw, tables, changes)
    recipe: Recipe = checked(Recipe, merged)
    for key, section in OF_A_METHOD.items():
        checked(section, _table(raw, key), key)  # also what the method's own table replaces
        for name, table in tables.items():
            checked(section, table.get(key, {}), f"methods.{name}.{key}")
    if "paper" in merged:
        recipe = _departing(recipe, changes)
    # what the recipe names loads torch, so a mistake in its own keys is told before
    from fedgist.recipe.section_options import check_tables, with_checked_options

    folder = _code_folder(beside, raw, settings)
    with modules_from(folder):
        check_tables(tables, OF_A_METHOD, _table(raw, "objective").get("name"))
        recipe = with_checked_options(recipe, changed)
    if folder and any(holds_module(folder, place) for place in own_places(recipe)):
        recipe = recipe.changed({CODE_FOLDER: str(folder)})
    return recipe.noting([*left_over, *recipe.dropped])


def check_parts(recipe: Recipe) -> None:
    """Raise RecipeError if a recipe's method or models cannot be made. This loads torch."""
    from fedgist.recipe.resolve import resolve

    resolve(recipe)


def first_metric(recipe: Recipe) -> Metric:
    """Return the first metric of a recipe, by which its runs are compared. This loads torch."""
    from fedgist.recipe.resolve import resolve

    first = resolve(recipe).metrics[0]
    return CHOSEN_METRICS[first] if isinstance(first, str) else first.describes


def _departing(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a paper's recipe with a list of this run's settings that differ from the paper's."""
    departs = [
        f"{key} = {value}"
        for key, value in changes.items()
        if role_of(key) is None and key != "method.name"
    ]
    return recipe.changed({"paper.departs": (*recipe.paper.departs, *departs)})


def _merged(
    raw: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """Merge the running method's table and the user's settings into a recipe's sections.

    Return the merged sections, the keys that the merge set, and notes on keys that were dropped.
    """
    merged = {key: value for key, value in raw.items() if key != "methods"}
    given = _table(raw, "method")
    name = changes.get("method.name", given.get("name", MethodSection().name))
    _check_variant(name, given.get("name"), tables)
    table = tables.get(name, {}) if isinstance(name, str) else {}
    own = {key: _table(table, key, f"methods.{name}.") for key in OF_A_METHOD}
    options = {key: value for key, value in table.items() if key not in own}
    beside = given if given.get("name", name) == name else {}
    notes = [
        f"method.{key} = {shown(value)} is dropped: it belongs to {shown(given['name'])}"
        for key, value in given.items()
        if key not in beside and key != "name"
    ]
    merged["method"] = {**options, **beside, "name": name}
    merged |= {key: {**_table(raw, key), **section} for key, section in own.items()}
    for key, value in changes.items():
        _put(merged, key, value)
    return merged, {*changes, *(f"{part}.{key}" for part in own for key in own[part])}, notes


def _check_variant(name: object, given: object, tables: Mapping[str, object]) -> None:
    """Raise RecipeError if the method to run is a variant without a table in the recipe.

    If the recipe has no tables of variants, its own ``[method]`` defines the variant. Recorded
    recipes of runs are of this form.
    """
    if not isinstance(name, str) or "@" not in name or name in tables:
        return
    base = base_name(name)
    variants = [table for table in tables if "@" in table and base_name(table) == base]
    if variants or name != given:
        raise RecipeError(
            f"method.name: this recipe has no [methods.{json.dumps(name)}]"
            + did_you_mean(name, variants)
        )


def _table(raw: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, Mapping):
        raise RecipeError(f"{prefix}{key} = {shown(value)}: must be a table")
    return value


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {text}: expected section.key=value")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return key.strip(), value.strip()  # a bare word is a string


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        inner = raw.get(part, {})
        if isinstance(inner, str):  # a name that stands for a table
            inner = {"name": inner}
        if not isinstance(inner, Mapping):
            raise RecipeError(f"--set {key}: {part} is not a section")
        raw[part] = dict(inner)
        raw = raw[part]
    raw[last] = value


@functools.cache
def defaults() -> Mapping[str, object]:
    """Return the defaults of the keys that every recipe has, by dotted key.

    A run that was recorded before a key existed is treated as a run with the key's default.
    """
    recipe = Recipe()
    aside = {name for name in type(recipe).model_fields if role_of(name) or name in OPEN}
    sections = recipe.model_dump(mode="json", exclude=aside, exclude_none=True)
    sections["model"] = ModelSection().model_dump(exclude={"name"}, exclude_none=True)
    return {k: v for k, v in flat(sections).items() if k not in recipe.left_open}


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a recipe's settings by dotted key."""
    out: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        out |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return out
