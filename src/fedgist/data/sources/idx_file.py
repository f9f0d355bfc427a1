"""Reads files in the IDX format, in which MNIST and Fashion-MNIST come."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.errors import DataError, first_line

_BYTES = 0x08  # the format's code for unsigned bytes
_GZIP = b"\x1f\x8b"


def read_idx(path: Path, dims: int) -> Tensor:
    """Return the uint8 array of an IDX file of bytes with ``dims`` dimensions, gzipped or plain.

    Raises
    ------
    DataError
        If the file is anything but exactly that.
    """
    content = _content(path)
    head = 4 + 4 * dims
    if len(content) < head:
        msg = f"{path} is truncated: it has {len(content)} bytes, but its header alone has {head}"
        raise DataError(msg)
    magic = bytes([0, 0, _BYTES, dims])
    if content[:4] != magic:
        msg = (
            f"{path} begins with {content[:4].hex()}, not {magic.hex()}: it is not an IDX file of "
            f"bytes with {dims} dimensions"
        )
        raise DataError(msg)
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, head, 4)]
    size = head + math.prod(shape)
    if len(content) != size:
        state = "is truncated" if len(content) < size else "has trailing bytes"
        msg = f"{path} {state}: it has {len(content)} bytes, but its header {shape} says {size}"
        raise DataError(msg)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy())


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        msg = f"{path} cannot be read; it may be truncated or corrupt: {first_line(error)}"
        raise DataError(msg) from error
