"""Reads the pickles of data sets without running what they contain.

A pickle is a program. Here it may only build numbers, strings, lists, dictionaries and arrays of
bytes; for arrays, stand-ins take the place of NumPy's own functions, so that none of NumPy's code
runs on what a file says either.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from fedgist.data.sources.locations import first_line
from fedgist.errors import DataError

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


def read_pickle(path: Path) -> dict[str, object]:
    """Read a pickled dictionary of numbers, strings, lists and byte arrays.

    Raises
    ------
    DataError
        If the file is corrupt, or names anything else.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        with path.open("rb") as file:
            found = _Reader(file, name).load()
        return {
            as_text(key): value.array if isinstance(value, _Array) else value
            for key, value in found.items()
        }
    except DataError:
        raise
    except _BROKEN as error:
        msg = f"{name} is truncated or corrupt: {first_line(error)}"
        raise DataError(msg) from error


def as_text(value: object) -> str:
    """Return text that may be Python 2's, bytes to Python 3."""
    match value:
        case bytes():
            return value.decode("latin1")
        case str():
            return value
        case _:
            msg = f"{type(value).__name__} in the place of a name"
            raise pickle.UnpicklingError(msg)


class _Array:
    """Stands for a NumPy array while unpickling."""

    array: np.ndarray | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (_, tuple(shape), _Bytes(), fortran, bytes(content)):
                self.array = np.frombuffer(content, np.uint8).reshape(
                    shape, order="F" if fortran else "C"
                )
            case _:
                msg = "an array whose parts do not fit"
                raise pickle.UnpicklingError(msg)


class _Bytes:
    """Stands for NumPy's dtype of bytes while unpickling."""

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment: bytes have none."""


class _Allowed:
    """Stands for a function that a batch may call; the batch cannot change it."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        return self._call(*args)

    def __setstate__(self, state: object) -> None:
        msg = "it would change a function"
        raise pickle.UnpicklingError(msg)


def _array(*_: object) -> _Array:
    return _Array()


def _dtype(kind: object, *_: object) -> _Bytes:
    if as_text(kind) != "u1":
        msg = f"an array of dtype {as_text(kind)}, not of bytes"
        raise pickle.UnpicklingError(msg)
    return _Bytes()


def _encode(text: str, encoding: str) -> bytes:
    """Undo what protocol 2 does to bytes."""
    if encoding != "latin1":
        msg = f"bytes encoded as {encoding}"
        raise pickle.UnpicklingError(msg)
    return text.encode("latin1")


_ALLOWED: Mapping[str, object] = MappingProxyType(
    {
        "numpy.ndarray": object(),
        "numpy.dtype": _Allowed(_dtype),
        "numpy.core.multiarray._reconstruct": _Allowed(_array),
        "numpy._core.multiarray._reconstruct": _Allowed(_array),
        "_codecs.encode": _Allowed(_encode),
    }
)


class _Whole:
    """A file that fails where it ends too early."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int, /) -> bytes:
        """Return exactly so many bytes."""
        content = self._file.read(size)
        if len(content) != size:
            raise EOFError(_EARLY)
        return content

    def readline(self) -> bytes:
        """Return a line with its end."""
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise EOFError(_EARLY)
        return line


class _Reader(pickle._Unpickler):  # noqa: SLF001 - the one in C makes room for as many objects as a wrong byte says
    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(_Whole(file), encoding="bytes")
        self._name = name

    def find_class(self, module: str, name: str, /) -> object:
        """Return a stand-in for one of the few things that an array needs."""
        if (found := _ALLOWED.get(f"{module}.{name}")) is None:
            msg = f"{self._name} would run {module}.{name}; refused"
            raise DataError(msg)
        return found
