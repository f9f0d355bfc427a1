"""Messages: the only values that cross between server and clients.

A message is a frozen dataclass of tensors. What it costs is defined here, once: the bytes of its
tensors, in the types they have. The ledger of a run, the papers' "communication cost" and every
engine use this number; a method that sends half precision or packed signs puts such tensors into
its message.

>>> @message(reduce="sum")
... class Sums:
...     total: torch.Tensor
>>> payload_bytes(Sums(torch.zeros(10, 51)))
2040
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, dataclass_transform

import safetensors
import safetensors.torch
import torch

from fedgist.core.tree import build, leaves, map_leaves, named, tree

T = TypeVar("T")
Reduce = Literal["sum", "each"]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def message(*, reduce: Reduce) -> Callable[[type[T]], type[T]]:
    """Declare a message.

    ``reduce="sum"``: the server only ever sees the total over clients. ``reduce="each"``: it sees
    one per client.
    """

    def declare(cls: type[T]) -> type[T]:
        made = tree(cls)
        made.reduce = reduce  # type: ignore[attr-defined]  # a class constant, not a field
        return made

    return declare


@message(reduce="sum")
class Nothing:
    """A message without content: what a method sends that sends nothing."""


def reduction(kind: type) -> Reduce:
    """Return how messages of this type reach the server.

    Raises
    ------
    TypeError
        If ``kind`` was not declared with :func:`message`.
    """
    how: Reduce | None = getattr(kind, "reduce", None)
    if how is None:
        msg = f"{kind.__name__} is no message: declare it with @message(reduce='sum' | 'each')"
        raise TypeError(msg)
    return how


def payload_bytes(value: object) -> int:
    """Bytes of a message: the sum over its tensors of elements times element size."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(value))


def pack(value: object) -> bytes:
    """Serialize a message (or a state) as safetensors bytes: named arrays, never code."""
    # copies: safetensors refuses arrays that share memory, as rows of one tensor do
    arrays = {
        k: v.detach().cpu().clone(memory_format=torch.contiguous_format)
        for k, v in named(value).items()
    }
    return safetensors.torch.save(arrays)


def unpack(kind: type[T], blob: bytes) -> T:
    """Read a message of type ``kind`` back.

    Raises
    ------
    ValueError
        If ``blob`` is no such message.
    """
    try:
        arrays = safetensors.torch.load(blob)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        msg = f"not a {kind.__name__}: {error}"
        raise ValueError(msg) from error
    value: T = build(kind, arrays)
    return value


Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def shapes(value: object) -> Shapes:
    """What a valid message looks like: type and shape of every array, by name."""
    return {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in named(value).items()}


def refuse(value: object, expected: Shapes) -> str | None:
    """Say why a message is unacceptable, or return None: the one gate that all of them pass.

    Checked: the arrays' names, element types and shapes (and so the size), and that every number is
    finite.
    """
    arrays = named(value)
    if missing := sorted(set(expected) - set(arrays)):
        return f"{missing[0]} is missing"
    if extra := sorted(set(arrays) - set(expected)):
        return f"{extra[0]} was not asked for"
    for name, array in arrays.items():
        dtype, shape = expected[name]
        if array.dtype != dtype:
            return f"{name} is {_short(array.dtype)}, not {_short(dtype)}"
        if tuple(array.shape) != shape:
            return f"{name} has shape {list(array.shape)}, not {list(shape)}"
        if not bool(torch.isfinite(array).all()):
            return f"{name} is not finite"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def total(values: list[T]) -> T:
    """Add messages of one type, in the order given."""
    return functools.reduce(lambda a, b: map_leaves(torch.add, a, b), values)
