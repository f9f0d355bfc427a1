"""Errors that quote a recipe's own values say so: the user typed only what --set says."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from fedgist.cli.recipe_files import DEFAULT, find_recipe
from fedgist.errors import DataError, MethodError, RecipeError, shown
from fedgist.recipe.reading import OF_A_METHOD, defaults, flat, read_toml

Command = TypeVar("Command", bound=Callable[..., None])


def naming_origins(command: Command) -> Command:
    """Return a command whose errors say which quoted values are the recipe's, or defaults.

    The command has the options ``recipe`` and ``settings``, and perhaps ``axes`` and ``seed``. A
    user's own recipe without settings needs no such words, nor does a resumed run.
    """

    @functools.wraps(command)
    def named(**options: object) -> None:
        try:
            command(**options)
        except (RecipeError, DataError, MethodError) as error:
            name, typed = str(options["recipe"] or DEFAULT), _typed(options)
            if options.get("resume") or (Path(name).is_file() and not typed):
                raise
            text = with_origins(str(error), name, typed)
            if text == str(error):
                raise
            raise RecipeError(text) from error

    return cast("Command", named)


def with_origins(text: str, name: str, typed: Sequence[str]) -> str:
    """Return an error's text with the origin of each quoted value whose key is not in ``typed``.

    A value is quoted as "key = value", or as "key must be ..., not value".

    >>> with_origins("train.num_rounds = 10 is too many", "demo", ["train.lr"])
    'train.num_rounds = 10 (of the recipe demo) is too many; --set train.num_rounds=... changes it'
    """
    changes: list[str] = []
    for key, value, origin in _values(name):
        if any(key == other or key.startswith(f"{other}.") for other in typed):
            continue
        quoted = rf"(?<![\w.]){re.escape(key)}( = |[^=;]* not ){re.escape(shown(value))}(?![\w.])"
        if match := re.search(quoted, text):
            changes.append(key)
            text = f"{text[: match.end()]} ({origin}){text[match.end() :]}"
    if not changes:
        return text
    return f"{text}; --set {' or '.join(f'{key}=...' for key in changes)} changes it"


def _values(name: str) -> Iterator[tuple[str, object, str]]:
    """Yield key, value and origin of each value that a recipe states, and of each default."""
    stated = flat(read_toml(find_recipe(name)))
    for key, value in stated.items():
        yield key, value, f"of the recipe {name}"
        # a method's own table replaces keys of the sections
        if own := re.fullmatch(r"methods\.[^.]+\.((\w+).*)", key):
            prefix = "" if own[2] in OF_A_METHOD else "method."
            yield prefix + own[1], value, f"of the recipe {name}"
    for key, value in defaults().items():
        if key not in stated:
            yield key, value, "the default"


def _typed(options: Mapping[str, object]) -> list[str]:
    """Return the keys that the user typed: of --set, --grid and --seed."""
    lists = [options.get("settings"), options.get("axes")]
    texts = [str(text) for texts in lists if isinstance(texts, list) for text in texts]
    keys = [text.partition("=")[0].strip() for text in texts]
    return [*keys, "seed"] if options.get("seed") is not None else keys
