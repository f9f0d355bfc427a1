"""Wire forms: compact encodings of a message's fields for transfer.

Most fields are sent unchanged, every number in its type. A field can declare a smaller encoding::

    @message(reduce="sum")
    class Votes:
        signs: Tensor = field(metadata=SIGNS)  # +1 or -1, one bit each

    @message(reduce="sum")
    class Means:
        total: Tensor = field(metadata=rows_where("count"))  # only rows with a count
        count: Tensor = field(metadata=NONZERO)  # one bit each, and the numbers that are not 0

In memory these are ordinary floats, which can be added, checked and noised. A row that is not sent
is zero in memory. Noise makes the row's count nonzero, so the row is then sent. Sums in 8 or 16
bits are in :mod:`fedgist.core.rounded_numbers`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedgist.core.rounded_numbers import META as _META
from fedgist.core.rounded_numbers import Rounded

BYTE = 8  # bits
_AFTER = "|"  # between an array's name and its shape, which packed bits do not contain
_NUMBERS = "numbers"
_EXACT, _CODES = "exact", "codes"


@dataclass(frozen=True)
class Bits:
    """Numbers that are ``low`` or ``high``, sent as one bit each, eight to a byte."""

    low: float
    high: float


@dataclass(frozen=True)
class Nonzero:
    """Numbers of which only the nonzero ones are sent, with a bit per number."""


@dataclass(frozen=True)
class SparseRows:
    """Rows of which only those with a nonzero field ``where`` are sent."""

    where: str


WireForm = Bits | Nonzero | SparseRows | Rounded
Arrays = Mapping[str, Tensor]

SIGNS = {_META: Bits(-1.0, 1.0)}
FLAGS = {_META: Bits(0.0, 1.0)}
NONZERO = {_META: Nonzero()}


def rows_where(field: str) -> dict[str, WireForm]:
    """Return the metadata of a field whose rows are sent only if ``field`` is not 0.

    The leading dimensions of the rows are the shape of ``field``, a tensor of the same message. If
    both are dictionaries, each array has a tensor of its name.
    """
    return {_META: SparseRows(field)}


@functools.cache
def forms_of(kind: type) -> Mapping[str, WireForm]:
    """Return the wire forms that a message type and its trees declare, by the paths of fields."""
    if not dataclasses.is_dataclass(kind):
        return {}
    fields = dataclasses.fields(kind)
    forms = {field.name: field.metadata[_META] for field in fields if _META in field.metadata}
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a class of a function, whose trees cannot be found
        return forms
    for field in fields:
        if isinstance(inner := hints[field.name], type):
            forms |= {f"{field.name}/{path}": form for path, form in forms_of(inner).items()}
    return forms


def check(kind: type) -> None:
    """Raise TypeError if a wire form of a message type depends on a missing field."""
    names = {field.name for field in dataclasses.fields(kind)}
    for name, form in forms_of(kind).items():
        if isinstance(form, SparseRows) and "/" not in name and form.where not in names:
            raise TypeError(
                f"the rows of {kind.__name__}.{name} are those of {form.where}, which is no field"
            )


def form_of(kind: type, name: str) -> WireForm | None:
    """Return the wire form of the array ``name`` of a message type; None: sent unchanged."""
    return forms_of(kind).get(_path(kind, name))


def _path(kind: type, name: str) -> str:
    """Return the path of the field that declares an array's wire form, or ""."""
    return next((p for p in forms_of(kind) if f"{name}/".startswith(f"{p}/")), "")


def _flags(kind: type, name: str, form: SparseRows, arrays: Arrays) -> Tensor:
    """Return the tensor, of any shape, that says which rows of the array ``name`` are sent."""
    path = _path(kind, name)
    where = path.removesuffix(path.split("/")[-1]) + form.where
    own = where + name.removeprefix(path)
    return arrays[own if own in arrays else where]


def wire_bytes(kind: type, arrays: Arrays, lead: int = 0) -> Tensor:
    """Return the bytes of a message on the wire, (); for a stack (``lead`` = 1) of each, (K,)."""
    total = torch.zeros((), dtype=torch.int64)
    for name, array in arrays.items():
        form, shape = form_of(kind, name), array.shape[lead:]
        if isinstance(form, Bits):
            total = total + _bytes(math.prod(shape))
        elif isinstance(form, Nonzero):
            there = (array != 0).flatten(lead).sum(-1).cpu()
            total = total + _bytes(math.prod(shape)) + there * array.element_size()
        elif isinstance(form, SparseRows):
            there = _flags(kind, name, form, arrays) != 0
            row = math.prod(array.shape[there.dim() :]) * array.element_size()
            total = total + there.flatten(lead).sum(-1).cpu() * row
        elif isinstance(form, Rounded):
            total = total + form.wire_bytes(*shape)
        else:
            total = total + math.prod(shape) * array.element_size()
    return total


def why_not_decodable(kind: type, arrays: Arrays) -> str | None:
    """Return why a message, or a stack of messages, contradicts its wire form, or None."""
    for name, array in arrays.items():
        form = form_of(kind, name)
        if isinstance(form, Bits) and not bool(((array == form.low) | (array == form.high)).all()):
            return f"{name} holds something else than {form.low:g} and {form.high:g}"
        if isinstance(form, Rounded) and not torch.equal(form.rounded(array), array):
            return f"{name} holds numbers that have no code in {form.code}"
        if isinstance(form, SparseRows):
            left_out = _flags(kind, name, form, arrays) == 0
            if array.shape[: left_out.dim()] != left_out.shape:
                return f"{name} must begin with the shape of {form.where}"
            if bool(array[left_out].any()):
                return f"{name} is not zero where {form.where} is"
    return None


def to_wire(kind: type, arrays: Arrays) -> dict[str, Tensor]:
    """Return the arrays of a message as they are sent.

    ``arrays`` have any shape, by field. Of a field with a wire form, the bits are sent as uint8
    (bytes,), the nonzero numbers as (numbers,), rows as (rows sent, ...), and codes beside scales.
    """
    out = {}
    for name, array in arrays.items():
        form = form_of(kind, name)
        if form is None:
            out[name] = array
        elif isinstance(form, SparseRows):
            out[name] = array[_flags(kind, name, form, arrays) != 0]
        elif isinstance(form, Rounded):
            exact = form.exact(array)
            out[name + _AFTER + _EXACT] = exact
            out[name + _AFTER + _CODES] = form.sent(form.codes(array, exact))
        else:
            bits = array == form.high if isinstance(form, Bits) else array != 0
            out[name + _AFTER + "x".join(str(length) for length in array.shape)] = _packed(bits)
            if isinstance(form, Nonzero):
                out[name + _AFTER + _NUMBERS] = array[bits]
    return out


def from_wire(kind: type, arrays: Arrays, limit: int | None = None) -> dict[str, Tensor]:
    """Return the arrays of a message as they are in memory: the inverse of :func:`to_wire`.

    Both hold arrays of any shape, by name.
    No decoded array may take more than ``limit`` bytes.
    """
    out = {}
    for name, array in arrays.items():
        bare, _, after = name.rpartition(_AFTER)
        form = form_of(kind, bare) or form_of(kind, name)
        if form is None or isinstance(form, SparseRows):
            out[name] = array
        elif isinstance(form, Rounded):
            if after == _CODES:
                _check_memory(bare, 4 * array.numel(), limit)
                out[bare] = form.received(arrays[bare + _AFTER + _EXACT], array)
        elif after != _NUMBERS:
            bits = _unpacked(bare, array, after, limit)
            if isinstance(form, Bits):
                out[bare] = torch.where(bits, form.high, form.low)
            else:
                out[bare] = _spread(bare, arrays[bare + _AFTER + _NUMBERS], bits, limit)
    for name, array in out.items():
        if isinstance(form := form_of(kind, name), SparseRows):
            out[name] = _spread(name, array, _flags(kind, name, form, out) != 0, limit)
    return out


def _packed(bits: Tensor) -> Tensor:
    flat = bits.flatten().to(torch.uint8)
    in_bytes = pad(flat, (0, -len(flat) % BYTE)).view(_bytes(len(flat)), BYTE)
    return (in_bytes << torch.arange(BYTE, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _unpacked(name: str, array: Tensor, shape: str, limit: int | None) -> Tensor:
    lengths = [int(length) for length in shape.split("x") if length]
    count = math.prod(lengths)
    wrong = array.dtype != torch.uint8 or array.shape != (_bytes(count),)
    if wrong or any(length < 0 for length in lengths):
        raise ValueError(f"{name} does not hold {count} bits")
    _check_memory(name, 4 * count, limit)
    bits = (array.unsqueeze(1) >> torch.arange(BYTE, dtype=torch.uint8)) & 1
    return bits.flatten()[:count].view(lengths).bool()


def _spread(name: str, array: Tensor, there: Tensor, limit: int | None) -> Tensor:
    """Return the received rows at their positions in ``there``, with zeros elsewhere."""
    if array.shape[:1] != (int(there.sum()),):
        raise ValueError(f"{name} holds {len(array)} rows, but {int(there.sum())} are declared")
    shape = (*there.shape, *array.shape[1:])
    _check_memory(name, math.prod(shape) * array.element_size(), limit)
    whole = array.new_zeros(shape)
    whole[there] = array
    return whole


def _bytes(bits: int) -> int:
    return -(-bits // BYTE)


def _check_memory(name: str, needed: int, limit: int | None) -> None:
    if limit is not None and needed > limit:
        raise ValueError(
            f"{name} would take {needed} bytes of memory; at most {limit} are accepted"
        )
