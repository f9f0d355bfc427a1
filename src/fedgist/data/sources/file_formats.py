"""The format of a file, by the structure of its content and never by its name or one byte.

A first byte says little: a ``.safetensors`` file begins with the length of its header, which can be
any byte, and numbers can look like the end of an archive.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fedgist.data.sources.file_sizes import regular
from fedgist.errors import DataError

SAFETENSORS = "a .safetensors file"
ZIP = "a zip archive (.npz, .xlsx and torch.save make such)"
NPY = "an .npy array"
PARQUET = "a .parquet table"
PICKLE = "a bare pickle"
GZIP = "a gzip file"
UNKNOWN = "of no known format"  # as texts are, which have no structure
_HEAD = 64  # bytes that every test may see
_LONGEST_HEADER = 100_000_000  # of a .safetensors file, by its definition
_PARQUET = b"PAR1"
_OPERATIONS = "".join(operation.code for operation in pickletools.opcodes).encode("latin1")


def _is_safetensors(head: bytes, _: Path) -> bool:
    """Return whether a possible length of a header comes first, and then a table of JSON."""
    return int.from_bytes(head[:8], "little") <= _LONGEST_HEADER and head[8:9] == b"{"


def _is_zip(head: bytes, file: Path) -> bool:
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06")) and zipfile.is_zipfile(file)


def _is_parquet(head: bytes, file: Path) -> bool:
    """Return whether a mark is at both ends, the last after a length that fits the file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        opened.seek(max(0, size - 2 * len(_PARQUET)))
        tail = opened.read()
    fits = int.from_bytes(tail[:4], "little") + 3 * len(_PARQUET) <= size
    return head.startswith(_PARQUET) and tail.endswith(_PARQUET) and fits


def _is_pickle(head: bytes, _: Path) -> bool:
    """Return whether a protocol that has a mark, 2 to 5, comes first, and then an operation."""
    return head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5" and head[2:3] in _OPERATIONS


# the first whose structure fits
_STRUCTURES: Mapping[str, Callable[[bytes, Path], bool]] = MappingProxyType(
    {
        SAFETENSORS: _is_safetensors,
        ZIP: _is_zip,
        NPY: lambda head, _: head.startswith(b"\x93NUMPY"),
        PARQUET: _is_parquet,
        GZIP: lambda head, _: head.startswith(b"\x1f\x8b\x08"),
        "an SQLite database": lambda head, _: head.startswith(b"SQLite format 3\0"),
        "a text in UTF-16": lambda head, _: head.startswith((b"\xff\xfe", b"\xfe\xff")),
        PICKLE: _is_pickle,
    }
)


def format_of(file: Path) -> str:
    """Return the format of a file in words, or ``UNKNOWN``.

    Raises
    ------
    DataError
        If it is no file.
    """
    with regular(file).open("rb") as opened:
        head = opened.read(_HEAD)
    return next((name for name, fits in _STRUCTURES.items() if fits(head, file)), UNKNOWN)


def expect_format(file: Path, needed: str, *formats: str) -> str:
    """Return the format of a file, which must be one of ``formats``: ``needed`` in words."""
    if (form := format_of(file)) not in formats:
        raise DataError(
            f"{file.name} cannot be read: by its content it is {form}; {needed} is needed"
        )
    return form


def expect_text(file: Path, needed: str) -> None:
    """Raise DataError if a file that should hold text has the structure of another format."""
    expect_format(file, f"{needed} in UTF-8", UNKNOWN)
