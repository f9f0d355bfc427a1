"""Trees: values made of tensors, as frozen dataclasses and dictionaries.

Messages, states and nets are *trees*: dataclasses whose fields are tensors, dictionaries of
tensors, or other trees. A class declared with :func:`tree` passes through ``torch.func.vmap`` like
a tensor does. It flattens to named arrays (``"weights/conv1.weight"``) for files and messages.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import torch
from torch import Tensor

# The registry that torch.func.vmap itself consults; torch has no public function that registers
# types with fields which are not tensors.
from torch.utils import _pytree

from fedgist.errors import MethodError, first_line

T = TypeVar("T")
SEPARATOR = "/"
#: The type of messages, states and summaries: any class declared with :func:`tree`.
Tree: TypeAlias = Any
_FIELDS = "__tree_fields__"  # attribute of a class that names its fields of tensors
_REGISTRATION = "__tree_registration__"  # attribute of a class, for classes that are pickled
STATIC = {"static": True}  # metadata of a field that vmap does not map over


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def tree(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass that vmap maps over.

    A field declared ``field(metadata=STATIC)`` is not mapped over. Every other field holds tensors.
    Two trees are equal if they have the same class and contents: equal static fields, and tensors
    of one element type, device and shape with equal elements. Trees have no hash.

    Raises
    ------
    MethodError
        If a field cannot be of a tree; the message names the class and the field.
    """
    try:
        frozen = dataclasses.dataclass(frozen=True, eq=False)(cls)
    except (TypeError, ValueError) as error:
        raise MethodError(f"{cls.__name__}: {first_line(error)}") from None
    _check_fields(frozen)
    # a dataclass's own equality needs one truth value of a tensor comparison
    for name, value in (("__eq__", _equal_trees), ("__hash__", None)):
        setattr(frozen, name, value)
    fields = dataclasses.fields(frozen)  # type: ignore[arg-type]  # it is a dataclass now
    leaves = tuple(f.name for f in fields if not f.metadata.get("static"))
    static = [f.name for f in fields if f.metadata.get("static")]

    setattr(frozen, _FIELDS, leaves)
    setattr(frozen, _REGISTRATION, _Registration(frozen, leaves, static))
    return frozen


def _check_fields(cls: type) -> None:
    """Raise MethodError if a field is neither of tensors nor static, as far as types are known.

    A type that is not yet defined, or only within a function, is checked when a tree is built.
    """
    typed = vars(cls)["__dataclass_fields__"]  # constants of the class, too
    bare = [n for n, value in vars(cls).items() if isinstance(value, Tensor) and n not in typed]
    if bare:
        raise MethodError(f"{cls.__name__}.{bare[0]} has no type: write {bare[0]}: Tensor")
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        return
    for field in dataclasses.fields(typing.cast("Any", cls)):
        if not field.metadata.get("static") and (problem := _why_not_of_a_tree(hints[field.name])):
            raise MethodError(
                f"{cls.__name__}.{field.name} is {problem}: use Tensor, dict[str, Tensor] or a "
                "class declared with @tree; what is no tensor is field(metadata=STATIC) of a state"
            )


def _why_not_of_a_tree(kind: object) -> str | None:
    """Return what is wrong with the type of a field, or None."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        inner = [each for each in args if each is not type(None)]
        return _why_not_of_a_tree(inner[0]) if len(inner) == 1 else _title(kind)
    if origin in {dict, Mapping}:
        return _title(kind) if args[0] is not str else _why_not_of_a_tree(args[1])
    if kind in {Tensor, Tree} or hasattr(kind, _FIELDS):
        return None
    lacks = ", which lacks @tree" if dataclasses.is_dataclass(kind) else ""
    return _title(kind) + lacks


class _Registration:
    """The entry of a tree's class in torch's registry.

    A class that is unpickled with its code, as one of a script is on a cluster, brings it along.
    """

    def __init__(self, cls: type, leaves: tuple[str, ...], static: list[str]) -> None:
        self.parts = cls, leaves, static
        if cls in _pytree.SUPPORTED_NODES:
            return

        def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
            # vmap would treat None as a tensor
            filled = tuple(n for n in leaves if getattr(value, n) is not None)
            fixed = (getattr(value, n) for n in static)
            return [getattr(value, n) for n in filled], (filled, *fixed)

        def unflatten(children: Iterable[Any], context: tuple[Any, ...]) -> object:
            filled, *fixed = context
            tensors = dict.fromkeys(leaves) | dict(zip(filled, children, strict=True))
            return cls(**tensors, **dict(zip(static, fixed, strict=True)))

        _pytree.register_pytree_node(cls, flatten, unflatten)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return _Registration, self.parts


def _equal_trees(first: object, second: object) -> bool:
    return type(first) is type(second) and _equal(vars(first), vars(second))


def _equal(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        alike = first.dtype == second.dtype and first.device == second.device
        return first is second or (alike and torch.equal(first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(first[k], second[k]) for k in first)
    return bool(first == second)


def leaves(value: object) -> list[Tensor]:
    """Return the tensors of a tree, its leaves of any shape, in a fixed order."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def map_leaves(function: Callable[..., Any], value: T, *others: T) -> T:
    """Apply ``function`` to each tensor of ``value`` with its counterparts in ``others``.

    Leaves have any shape. The result is a tree of the same form.
    """
    return typing.cast("T", _mapped(function, value, others))


def _mapped(function: Callable[..., object], value: Tree, others: tuple[Tree, ...]) -> Tree:
    # by hand: torch's own function, which knows more kinds of values, takes three times as long
    if isinstance(value, Tensor):
        return function(value, *others)
    if type(value) is dict:
        if not others:
            return {k: _mapped(function, v, ()) for k, v in value.items()}
        if any(value.keys() != other.keys() for other in others):
            raise ValueError("trees of different keys have no common form")
        return {k: _mapped(function, v, tuple(o[k] for o in others)) for k, v in value.items()}
    names = getattr(type(value), _FIELDS, None)
    if names is None:
        return _pytree.tree_map(function, value, *others)
    children = {name: child for name in names if (child := getattr(value, name)) is not None}
    new = object.__new__(type(value))  # of the same class, so its fields need no check
    vars(new).update(vars(value))
    for name, child in children.items():
        rest = tuple(getattr(other, name) for other in others)
        vars(new)[name] = _mapped(function, child, rest)
    return new


def take(value: T, rows: Tensor | slice | int) -> T:
    """Return rows of a stacked tree: every leaf (K, ...) is indexed along its first dimension.

    Row numbers (n,) give leaves (n, ...), and a whole number gives leaves (...).
    """
    return map_leaves(lambda leaf: leaf[rows], value)


def stack(values: list[T]) -> T:
    """Stack K trees of equal shapes: every leaf (...) becomes (K, ...)."""
    return map_leaves(lambda *leaf: torch.stack(leaf), *values)


def same(first: object, second: object) -> bool:
    """Return whether two trees hold identical tensor objects, as for a broadcast."""
    if first is second:
        return True
    a, b = leaves(first), leaves(second)
    return (
        type(first) is type(second)
        and len(a) == len(b)
        and all(x is y for x, y in zip(a, b, strict=True))
    )


def named(value: object, prefix: str = "") -> dict[str, Tensor]:
    """Flatten a tree to arrays of any shape by name; names join fields and keys with ``/``.

    Raises
    ------
    TypeError
        If the tree holds something else than tensors, dictionaries and trees.
    ValueError
        If a key is empty or contains ``/``.
    """
    if isinstance(value, Tensor):
        return {prefix: value}
    if value is None:
        return {}
    if isinstance(value, Mapping):
        items: Iterable[tuple[str, object]] = value.items()
    elif dataclasses.is_dataclass(value):
        items = (
            (f.name, getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not f.metadata.get("static")
        )
    else:
        raise TypeError(
            f"{prefix or 'a tree'} holds a {type(value).__name__}; it may hold tensors, "
            "dictionaries and trees"
        )
    out: dict[str, Tensor] = {}
    for name, child in items:
        if not name or SEPARATOR in name:
            raise ValueError(f"the key {name!r} is empty or contains {SEPARATOR!r}")
        out |= named(child, f"{prefix}{SEPARATOR}{name}" if prefix else name)
    return out


def under(prefix: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return arrays of any shape with a prefix before each name; :func:`below` is the inverse."""
    return {prefix + name: array for name, array in arrays.items()}


def below(prefix: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays, of any shape, whose names begin with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def build(kind: Any, arrays: Mapping[str, Tensor], prefix: str = "") -> Any:
    """Rebuild a tree of type ``kind`` from arrays by name: the inverse of :func:`named`.

    The arrays have any shape.

    Raises
    ------
    ValueError
        If an array is missing, or one is left over.
    TypeError
        If ``kind`` is not a tree.
    """
    used: set[str] = set()
    value = _build(kind, arrays, prefix, used)
    if extra := sorted(set(arrays) - used):
        raise ValueError(f"{_title(kind)} has no field for {extra[0]!r}")
    return value


def _build(kind: Any, arrays: Mapping[str, Tensor], prefix: str, used: set[str]) -> Any:
    def below(name: str) -> str:
        return f"{prefix}{SEPARATOR}{name}" if prefix else name

    origin = typing.get_origin(kind)
    if origin in {typing.Union, types.UnionType}:  # X | None
        present = prefix in arrays or any(k.startswith(prefix + SEPARATOR) for k in arrays)
        inner = next(a for a in typing.get_args(kind) if a is not type(None))
        return _build(inner, arrays, prefix, used) if present else None
    if kind is Tensor:
        if prefix not in arrays:
            raise ValueError(f"the array {prefix!r} is missing")
        used.add(prefix)
        return arrays[prefix]
    if origin in {dict, Mapping}:
        start = prefix + SEPARATOR if prefix else ""
        keys = dict.fromkeys(
            k[len(start) :].split(SEPARATOR)[0] for k in arrays if k.startswith(start)
        )
        if "" in keys:
            raise ValueError(f"a key below {prefix or 'the tree'!r} is empty")
        return {k: _build(typing.get_args(kind)[1], arrays, below(k), used) for k in keys}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        fields = [f for f in dataclasses.fields(kind) if not f.metadata.get("static")]
        return kind(**{f.name: _build(hints[f.name], arrays, below(f.name), used) for f in fields})
    raise TypeError(
        f"{_title(kind)} is not a tree: use Tensor, dict[str, ...] or a class declared with @tree"
    )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError as error:
        fields = dataclasses.fields(typing.cast("Any", kind))
        names = [f.name for f in fields if str(error.name) in str(f.type)]
        raise MethodError(
            f"{kind.__name__}.{names[0] if names else '?'}: {error.name} is not defined in "
            f"{kind.__module__}; declare the class of a field outside of functions"
        ) from None


def _title(kind: Any) -> str:
    return str(kind) if typing.get_args(kind) else str(getattr(kind, "__name__", kind))
