"""Methods by name: they are built from a recipe, and described for the record.

A user's own method is named ``package.module:Class``, as a model is; its fields are its keys. A
method that is passed as an object is recorded by the same name and its fields, so that its runs can
be distinguished, resumed, compared and searched like any others.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from fedgist.core.method import Method
from fedgist.core.peer_method import PeerMethod
from fedgist.errors import InputError, MethodError, RecipeError, first_line, nearest, one_of
from fedgist.methods import METHODS, base_name
from fedgist.options import check_options
from fedgist.recipe.own_code import load_own

# a method's author may define other functions than the vocabulary's, but a name that is almost one
# of the vocabulary's is taken for a spelling mistake
VOCABULARY = tuple(
    name
    for name, _ in inspect.getmembers(PeerMethod, inspect.isfunction)
    if not name.startswith("_")
)
CONSTANTS = tuple(  # what a method says of itself, not a recipe
    name
    for name, value in (*vars(Method).items(), *vars(PeerMethod).items())
    if not name.startswith("_") and (isinstance(value, property) or not callable(value))
)
SLIP = 0.75  # from this similarity on (difflib's ratio), a name is taken for a spelling mistake


def method_class(name: str) -> type[Method]:
    """Return the class of a registered method, or of a method named ``package.module:Class``.

    A variant ``NAME@VARIANT`` has the class of the method ``NAME``.
    """
    name = base_name(name)
    if ":" not in name:
        try:
            return METHODS[one_of(name, METHODS, "method")]
        except InputError as error:
            raise RecipeError(
                f"method.name: {error} (or your own: 'package.module:Class')"
            ) from error
    loaded = load_own("method.name", name)
    return checked_class(loaded, name)


def checked_class(cls: Any, name: str) -> type[Method]:
    """Return ``cls`` if it is a usable method class.

    Raises
    ------
    MethodError
        If ``cls`` is no method class, misspells a function of :class:`~fedgist.core.method.Method`,
        or declares its fields incorrectly.
    """
    if isinstance(cls, Method):
        raise MethodError(
            f"method {name} is an object; name its class, and give its fields as keys"
        )
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise MethodError(f"method {name} is not a method: derive it from fedgist.Method")
    for attribute, value in vars(cls).items():
        if attribute in VOCABULARY and not hasattr(cls.__base__, attribute):
            raise MethodError(
                f"method {name} defines {attribute!r}, which is called on methods derived from "
                "fedgist.core.peer_method.PeerMethod"
            )
        if attribute in VOCABULARY or attribute.startswith("_") or not callable(value):
            continue
        if meant := misspelt(attribute):
            raise MethodError(
                f"method {name} defines {attribute!r}, which is never called; did you mean "
                f"{meant!r}?"
            )
    if constant := next((name for name in field_names(cls) if name in CONSTANTS), None):
        raise MethodError(
            f"method {name}: {constant} is no hyper-parameter: declare it as "
            f"{constant}: ClassVar[...], or leave its annotation out"
        )
    if dataclasses.is_dataclass(cls) or not inspect.get_annotations(cls):
        return cls
    raise MethodError(
        f"method {name} has fields but is not a dataclass: put @dataclass(frozen=True) above it"
    )


def misspelt(name: str) -> str | None:
    """Return the vocabulary's function that ``name`` looks like a misspelling of, if any."""
    return None if name in VOCABULARY else nearest(name, VOCABULARY, SLIP)


def build_method(name: str, options: Mapping[str, Any], table: str = "method") -> Method:
    """Return the method with its hyper-parameters checked."""
    cls = method_class(name)
    if not field_names(cls) and not options:
        return cls()
    try:
        return cls(**check_options(cls, options, base_name(name), table))
    except ValueError as error:
        text = first_line(error)  # a method says "method.mu must be ..."
        raise RecipeError(
            text.replace("method.", f"{table}.", 1) if "method." in text else f"{table}: {text}"
        ) from error


def identity(method: Method) -> tuple[str, dict[str, Any]]:
    """Return how a method object is recorded: its name, and its fields in a recipe's types."""
    cls = type(method)
    registered = {registered: name for name, registered in METHODS.items()}
    name = registered.get(cls) or f"{cls.__module__}:{cls.__qualname__}"
    values = {field: getattr(method, field) for field in field_names(cls)}
    return name, {field: _plain(value) for field, value in values.items()}


def field_names(cls: type[Method]) -> list[str]:
    """Return the hyper-parameters of a method."""
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _plain(value: Any) -> Any:
    """Return a value in a recipe's types; a value that a recipe cannot hold becomes its repr."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return repr(value)
