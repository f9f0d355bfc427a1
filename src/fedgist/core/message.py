"""Messages: the only values that cross between server and clients.

A message is a frozen dataclass of tensors. This module defines its cost: the bytes of its tensors
in their own types, or in the wire form that a field declares (:mod:`fedgist.core.wire_form`). The
ledger of a run, the papers' "communication cost" and every engine use this number.

>>> @message(reduce="sum")
... class Sums:
...     total: torch.Tensor
>>> payload_bytes(Sums(torch.zeros(10, 51)))
2040

A message from another machine is checked against a :class:`Form` before it is used. A form states
the type, the names, the element types and the shapes of a valid message.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast, dataclass_transform

import safetensors
import safetensors.torch
import torch

from fedgist.core import wire_form
from fedgist.core.counts import CountRange, impossible
from fedgist.core.tree import Tree, build, map_leaves, named, tree
from fedgist.errors import MessageError

T = TypeVar("T")
Reduce = Literal["sum", "each"]
Scope = Literal["all", "architecture"]  # the clients that a sum runs over

SUMMED = (torch.float32, torch.float64)  # the element types that uploads may be summed in

_TYPES: dict[str, type] = {}  # every declared message type, by its registered name


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def message(*, reduce: Reduce, over: Scope = "all") -> Callable[[type[T]], type[T]]:
    """Declare a message, and register its type under :func:`type_name`.

    With ``reduce="sum"`` the server sees totals only: one total over all clients, or, with
    ``over="architecture"`` (for weights, whose shapes differ), one total per architecture. With
    ``reduce="each"`` it sees one message per client.
    """

    def declare(cls: type[T]) -> type[T]:
        declared = cast("Any", tree(cls))
        wire_form.check(declared)
        declared.reduce, declared.over = reduce, over  # constants of the class, not fields
        declared.registered_name = f"{cls.__module__}:{cls.__qualname__}"
        _TYPES[type_name(declared)] = declared
        return cast("type[T]", declared)

    return declare


def type_name(kind: type) -> str:
    """Return the name under which a message type is registered."""
    name: str = cast("Any", kind).registered_name
    return name


def registered(name: str) -> type:
    """Return the message type of this name.

    Only types that this process has declared are registered: no module is imported because another
    machine names it.

    Raises
    ------
    MessageError
        If no such type was declared.
    """
    if name not in _TYPES:
        raise MessageError(
            f"unknown message type {name!r}: import the module that declares it on both sides"
        )
    return _TYPES[name]


@message(reduce="sum")
class Nothing:
    """A message without content, for a method that sends nothing."""


def reduction(kind: type) -> Reduce:
    """Return whether messages of this type are summed or reach the server one by one.

    Raises
    ------
    TypeError
        If ``kind`` was not declared with :func:`message`.
    """
    how: Reduce | None = getattr(kind, "reduce", None)
    if how is None:
        raise TypeError(
            f"{kind.__name__} is not a message: declare it with @message(reduce='sum' | 'each')"
        )
    return how


def scope(kind: type) -> Scope:
    """Return over which clients messages of this type are summed."""
    over: Scope = getattr(kind, "over", "all")
    return over


def payload_bytes(value: object) -> int:
    """Return the bytes of a message: elements times element size, or its wire form's size."""
    return int(wire_form.wire_bytes(type(value), named(value)))


def payloads(stack: object, count: int) -> list[int]:
    """Return the bytes of each of ``count`` messages in a stack of ``(count, ...)`` arrays."""
    sizes: list[int] = (
        wire_form.wire_bytes(type(stack), named(stack), lead=1).expand(count).tolist()
    )
    return sizes


def pack(value: object) -> bytes:
    """Serialize a message (or a state) as safetensors bytes: named arrays, never code."""
    arrays = {name: leaf.detach().cpu() for name, leaf in named(value).items()}
    return safetensors.torch.save(separate(wire_form.to_wire(type(value), arrays)))


def separate(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return arrays of any shape by name, with copies of those that share memory.

    Safetensors refuses arrays that share memory.
    """
    seen: set[int] = set()
    out = {}
    for name, array in arrays.items():
        storage = array.untyped_storage()
        alone = storage.data_ptr() not in seen and storage.nbytes() == array.nbytes
        seen.add(storage.data_ptr())
        whole = alone and array.is_contiguous()
        out[name] = array if whole else array.clone(memory_format=torch.contiguous_format)
    return out


def unpack(kind: type[T], blob: bytes, limit: int | None = None) -> T:
    """Read a message of type ``kind`` from bytes; refuse arrays of more than ``limit`` bytes.

    Raises
    ------
    MessageError
        If ``blob`` is not such a message.
    """
    try:
        arrays = wire_form.from_wire(kind, safetensors.torch.load(blob), limit)
        value: T = build(kind, arrays)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MessageError(f"not a {kind.__name__}: {error}") from error
    return value


Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def shapes(value: object) -> Shapes:
    """Return the element type and shape of every array, by name."""
    return {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in named(value).items()}


@dataclass(frozen=True)
class Form:
    """The form of a valid message: its type, and the element type and shape of each array.

    ``terms`` is the number of such messages that may be summed: no number may exceed the largest
    number of its type divided by ``terms``, so that no message can overflow the sum. ``counts`` is
    the range of counts that the message may hold (:mod:`fedgist.core.counts`); None allows any.
    ``max_norm`` bounds the L2 norm of all numbers together.
    """

    kind: type
    arrays: Shapes
    terms: int = field(default=1, compare=False)
    counts: CountRange | None = field(default=None, compare=False)
    max_norm: float = field(default=math.inf, compare=False)

    @staticmethod
    def of(value: object) -> Form:
        """Return the form of a valid message."""
        return Form(type(value), shapes(value))

    def zeros(self, device: torch.device) -> Tree:
        """Return a message of zeros of this form, which adds nothing to a total."""
        arrays = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (dtype, shape) in self.arrays.items()
        }
        return build(self.kind, arrays)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a message of this form in memory: an upper bound of the bytes on the wire."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.arrays.values())


def why_refused(value: object, form: Form) -> str | None:
    """Return why a message is unacceptable, or None: the one check that all messages pass.

    It checks the type, the arrays' names, element types and shapes (and so the size). It checks
    that every number is finite and small enough for a sum of such messages, that the message fits
    its type's declaration (:func:`why_not_as_declared`), and its norm.
    """
    if type(value) is not form.kind:
        return f"it is a {type(value).__name__}, not a {form.kind.__name__}"
    arrays, expected = named(value), form.arrays
    if missing := sorted(set(expected) - set(arrays)):
        return f"{missing[0]} is missing"
    if extra := sorted(set(arrays) - set(expected)):
        return f"{extra[0]} was not asked for"
    reasons = (
        _refuse_array(name, array, *expected[name], form.terms) for name, array in arrays.items()
    )
    reason = next((reason for reason in reasons if reason), None) or why_not_as_declared(
        arrays, form
    )
    return reason or _refuse_norm(arrays, form.max_norm)


def why_not_as_declared(arrays: Mapping[str, torch.Tensor], form: Form) -> str | None:
    """Return why a message, or a stack of messages, contradicts its type's declaration, or None.

    It must have a wire form, and its counts must be possible. ``arrays`` are those of the message
    by name, of any shape; of a stack, (clients, ...).
    """
    if reason := wire_form.why_not_decodable(form.kind, arrays):
        return reason
    return None if form.counts is None else impossible(form.kind, arrays, form.counts)


def why_not_summable(form: Form) -> str | None:
    """Return why uploads of this form cannot be summed, or None: integers wrap, halves overflow."""
    if reduction(form.kind) != "sum":
        return None
    types = {name: dtype for name, (dtype, _) in form.arrays.items()}
    wrong = [name for name, dtype in types.items() if dtype not in SUMMED]
    if not wrong:
        return None
    return (
        f"{wrong[0]} of {form.kind.__name__} is {_short(types[wrong[0]])}, and is to be summed: "
        "sums are of float32 or float64"
    )


def is_finite(array: torch.Tensor) -> bool:
    """Return whether all numbers of an array of any shape are finite.

    They are finite exactly if their sum in double precision is.
    """
    return are_finite([array])


def are_finite(arrays: Iterable[torch.Tensor]) -> bool:
    """Return whether all numbers of arrays on one device are finite, which waits for a GPU once.

    The arrays have any shapes.
    """
    finite = [_finite(array) for array in arrays if array.is_floating_point()]
    return not finite or bool(finite[0] if len(finite) == 1 else torch.stack(finite).all())


def _finite(array: torch.Tensor) -> torch.Tensor:
    if array.dtype == torch.float64:  # whose sum may overflow
        return torch.isfinite(array).all()
    return torch.isfinite(array.sum(dtype=torch.float64))


def _refuse_norm(arrays: Mapping[str, torch.Tensor], most: float) -> str | None:
    if math.isinf(most):
        return None
    norm = math.sqrt(math.fsum(float(a.double().square().sum()) for a in arrays.values()))
    return f"its norm is {norm:.4g}, above clients.max_norm = {most:g}" if norm > most else None


def can_be_summed(array: torch.Tensor, terms: int) -> bool:
    """Return whether all numbers are finite, and a sum of ``terms`` such arrays stays finite.

    ``array`` has any shape.
    """
    if terms == 1 or array.dtype not in SUMMED or not array.numel():
        return is_finite(array)
    most = torch.finfo(array.dtype).max / terms
    least, largest = array.aminmax()  # NaN, if one is, which no comparison holds for
    return bool(-most <= least) and bool(largest <= most)


def _refuse_array(
    name: str, array: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], terms: int
) -> str | None:
    if array.dtype != dtype:
        return f"{name} is {_short(array.dtype)}, not {_short(dtype)}"
    if tuple(array.shape) != shape:
        return f"{name} has shape {list(array.shape)}, not {list(shape)}"
    if can_be_summed(array, terms):
        return None
    if not is_finite(array):
        return f"{name} is not finite"
    return f"{name} holds a number of which the sum over {terms} clients would not be finite"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def total(values: list[T]) -> T:
    """Add messages of one type, in the order given."""
    return functools.reduce(lambda a, b: map_leaves(torch.add, a, b), values)
