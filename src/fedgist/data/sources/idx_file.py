"""Read files in the IDX format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor

from fedgist.data.sources.file_formats import GZIP, format_of
from fedgist.data.sources.file_sizes import check_memory, check_packing, read_up_to
from fedgist.errors import DataError, first_line

_BYTES = 0x08  # the format's code for unsigned bytes


def read_idx(path: Path, dims: int) -> Tensor:
    """Return the uint8 array with ``dims`` dimensions of an IDX file, gzipped or plain.

    Images have 3 dimensions, (rows, height, width), and labels have 1, (rows,).
    """
    try:
        zipped = format_of(path) == GZIP
        with path.open("rb") as file:
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if zipped else file
            head = bytes(read_up_to(stream, 4 + 4 * dims))
            shape = _shape(path, head, dims)
            size, packed = math.prod(shape), path.stat().st_size
            check_memory(size, f"{path} with the shape {shape} of its header")
            if zipped:
                check_packing(packed, size, str(path), "unpack it by gunzip")
            # one more byte than declared, to detect trailing bytes
            content = read_up_to(stream, size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read; it may be truncated or corrupt: {first_line(error)}"
        ) from error
    if len(content) != size:
        state = "is truncated" if len(content) < size else "has trailing bytes"
        actual_size = (
            f"{'more than ' * (len(content) > size)}{len(head) + min(len(content), size)} bytes"
        )
        raise DataError(
            f"{path} {state}: it has {actual_size}, but its header {shape} says {len(head) + size}"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape))


def _shape(path: Path, head: bytes, dims: int) -> list[int]:
    """Return the shape that a header declares."""
    if len(head) < 4 + 4 * dims:
        raise DataError(
            f"{path} is truncated: it has {len(head)} bytes, but its header alone has "
            f"{4 + 4 * dims}"
        )
    magic = bytes([0, 0, _BYTES, dims])
    if head[:4] != magic:
        raise DataError(
            f"{path} begins with {head[:4].hex()}, not {magic.hex()}: it is not an IDX file of "
            f"bytes with {dims} dimensions"
        )
    return [int.from_bytes(head[at : at + 4]) for at in range(4, len(head), 4)]
