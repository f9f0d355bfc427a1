"""Read pickled data sets without running code from them.

A pickle is a program. The pickles here can only build numbers, strings, lists, dictionaries and
byte arrays. Even for arrays, functions of this module replace NumPy's functions, so no file calls
NumPy with arguments of its choice.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.errors import DataError, first_line

_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
_EARLY = "it ends too early"
_MOST_READS = 5_000_000  # ten times the reads of the largest of these data sets


def read_pickle(path: Path) -> dict[str, object]:
    """Return a pickled dictionary of numbers, strings, lists and byte arrays, with text keys."""
    name = f"{path.parent.name}/{path.name}"
    try:
        with regular(path).open("rb") as file:
            check_memory(2 * path.stat().st_size, name)
            content = _RestrictedUnpickler(file, name).load()
        return {
            as_text(key): value.array if isinstance(value, _ArrayStandIn) else value
            for key, value in content.items()
        }
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(f"{name} is truncated or corrupt: {first_line(error)}") from error


def as_text(value: object) -> str:
    """Return a value as text; text pickled by Python 2 is read as bytes by Python 3."""
    match value:
        case bytes():
            return value.decode("latin1")
        case str():
            return value
        case _:
            raise pickle.UnpicklingError(f"a name is {type(value).__name__}, not text")


class _ArrayStandIn:
    """Replacement of a NumPy array while unpickling."""

    array: np.ndarray | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (_, tuple(shape), _ByteType(), fortran, bytes(content)):
                self.array = np.frombuffer(content, np.uint8).reshape(
                    shape, order="F" if fortran else "C"
                )
            case _:
                raise pickle.UnpicklingError("an array without a shape, a type and bytes")


class _ByteType:
    """Replacement of NumPy's byte dtype while unpickling."""

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment: bytes have none."""


class _AllowedCall:
    """A function that a pickle may call but not change."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        return self._call(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it would change a function")


def _new_array(*_: object) -> _ArrayStandIn:
    return _ArrayStandIn()


def _new_dtype(kind: object, *_: object) -> _ByteType:
    if as_text(kind) != "u1":
        raise pickle.UnpicklingError(f"an array of dtype {as_text(kind)}, not of bytes")
    return _ByteType()


def _encode(text: str, encoding: str) -> bytes:
    """Return the bytes that Python 3 wrote as latin1 text with protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding}, not latin1")
    return text.encode("latin1")


_ALLOWED: Mapping[str, object] = MappingProxyType(
    {
        "numpy.ndarray": object(),
        "numpy.dtype": _AllowedCall(_new_dtype),
        "numpy.core.multiarray._reconstruct": _AllowedCall(_new_array),
        "numpy._core.multiarray._reconstruct": _AllowedCall(_new_array),
        "_codecs.encode": _AllowedCall(_encode),
    }
)


class _CompleteFile:
    """A file whose reads fail at a premature end instead of returning less.

    The number of reads is bounded, which bounds the number of objects: one byte can create one.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        self._reads = 0

    def read(self, size: int, /) -> bytes:
        """Return exactly ``size`` bytes."""
        if size > self._left:  # Python would allocate ``size`` bytes before it reads
            raise EOFError(_EARLY)
        return self._counted(self._file.read(size))

    def readline(self) -> bytes:
        """Return a line that ends with a newline; raise EOFError otherwise."""
        line = self._counted(self._file.readline())
        if not line.endswith(b"\n"):
            raise EOFError(_EARLY)
        return line

    def _counted(self, content: bytes) -> bytes:
        self._left -= len(content)
        self._reads += 1
        if self._reads > _MOST_READS:
            raise pickle.UnpicklingError(
                f"it has more than {_MOST_READS:,} parts, too many for images and labels"
            )
        return content


# The C unpickler allocates memory for any number of objects that a corrupt byte requests.
class _RestrictedUnpickler(pickle._Unpickler):  # noqa: SLF001
    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(_CompleteFile(file), encoding="bytes")
        self._name = name

    def find_class(self, module: str, name: str, /) -> object:
        """Return the replacement of an allowed function; refuse any other function."""
        if (replacement := _ALLOWED.get(f"{module}.{name}")) is None:
            raise DataError(f"{self._name} would run {module}.{name}; refused")
        return replacement
