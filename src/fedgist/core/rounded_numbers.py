"""Rounded numbers: a wire form of sums, which are sent as codes of 8 or 16 bits and scales.

In memory the numbers are float32 values that have a code, so they can be added and checked, and a
server reads what the client computed, bit for bit::

    @message(reduce="sum")
    class Sums:
        counted: Tensor = field(metadata=rounded_rows("int8"))

A client rounds its own message, by the form of its type: ``form_of(Sums, "counted").rounded``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

Code = Literal["float16", "bfloat16", "int8"]

#: The type of a code, and the code of the largest number. A half overflows above 65,504.
CODES: Mapping[str, tuple[torch.dtype, float]] = MappingProxyType(
    {
        "float16": (torch.float16, 2.0**15),
        "bfloat16": (torch.bfloat16, 1.0),
        "int8": (torch.int8, 127.0),
    }
)
LEAST = 1e-30  # a smaller scale is 0, and so are its numbers: quotients of subnormals are inexact


@dataclass(frozen=True)
class Rounded:
    """Numbers ``(..., rows, width)`` sent as codes, with a few in float32.

    With ``triangles``, a row is the upper triangle of a symmetric matrix A with no negative
    eigenvalue. Its diagonal is sent in float32, and other entries are divided by
    ``sqrt(A_ii A_jj)``. Otherwise the first number of a row, a count, is sent in float32, and so is
    the largest size of the others, by which they are divided.
    """

    code: Code
    triangles: bool = False

    def rounded(self, values: Tensor) -> Tensor:
        """Return float32 values (..., rows, width) as a receiver reads them."""
        exact = self.exact(values)
        return self._joined(exact, self.codes(values, exact))

    def exact(self, values: Tensor) -> Tensor:
        """Return what is sent in float32, (..., rows, numbers)."""
        if self.triangles:
            return values[..., _diagonal(values.shape[-1], values.device)]
        return torch.cat([values[..., :1], values[..., 1:].abs().amax(-1, keepdim=True)], -1)

    def codes(self, values: Tensor, exact: Tensor) -> Tensor:
        """Return the codes of all numbers of a row, (..., rows, width); some are not sent."""
        (dtype, largest), scale = CODES[self.code], self._scale(exact, values.shape[-1])
        shares = torch.where(scale > 0, values / scale, 0.0) * largest
        return (shares.round().clamp(-largest, largest) if dtype == torch.int8 else shares).to(
            dtype
        )

    def sent(self, codes: Tensor) -> Tensor:
        """Return the codes (..., rows, width) that are sent, (..., rows, fewer)."""
        return codes[..., _coded(self, codes.shape[-1])]

    def received(self, exact: Tensor, sent: Tensor) -> Tensor:
        """Return the values (..., rows, width) of what :meth:`exact` and :meth:`sent` return.

        Raises
        ------
        ValueError
            If they do not belong together.
        """
        width = sent.shape[-1] + (exact.shape[-1] if self.triangles else 1)
        fits = exact.dtype == torch.float32 and sent.dtype == CODES[self.code][0]
        if not fits or exact.shape != (*sent.shape[:-1], self._in_float32(width)):
            raise ValueError(f"numbers in {self.code} do not fit their scales")
        codes = sent.new_zeros(*sent.shape[:-1], width)
        codes[..., _coded(self, width)] = sent
        return self._joined(exact, codes)

    def wire_bytes(self, rows: int, width: int) -> int:
        """Return the bytes of an array (rows, width) on the wire."""
        whole = self._in_float32(width)
        coded = width - (whole if self.triangles else 1)
        return rows * (4 * whole + coded * CODES[self.code][0].itemsize)

    def _in_float32(self, width: int) -> int:
        return _side(width) if self.triangles else 2

    def _scale(self, exact: Tensor, width: int) -> Tensor:
        """Return the number of which each value is a share, (..., rows, width)."""
        if self.triangles:
            m = _side(width)
            row, column = torch.triu_indices(m, m, device=exact.device)
            root = exact.clamp(min=0.0).sqrt()
            scale = root[..., row] * root[..., column]
        else:
            scale = exact[..., 1:].expand(*exact.shape[:-1], width)
        return torch.where(scale > LEAST, scale, 0.0)

    def _joined(self, exact: Tensor, codes: Tensor) -> Tensor:
        """Return the values (..., rows, width) of codes, with those of float32 in their places."""
        width, largest = codes.shape[-1], CODES[self.code][1]
        values = codes.float() / largest * self._scale(exact, width)
        coded = _coded(self, width).to(exact.device)
        if not self.triangles:
            return torch.where(coded, values, exact[..., :1])
        m = _side(width)
        row, _ = torch.triu_indices(m, m, device=exact.device)
        return torch.where(coded, values, exact[..., row])


def rounded_rows(code: Code) -> dict[str, Rounded]:
    """Return the metadata of a field (rows, 1 + m) that holds counts and sums."""
    return {META: Rounded(code)}


def rounded_triangles(code: Code) -> dict[str, Rounded]:
    """Return the metadata of a field (rows, m (m + 1) / 2) that holds triangles."""
    return {META: Rounded(code, triangles=True)}


META = "wire form"  # the key of a field's metadata


def _side(entries: int) -> int:
    """Return m of a triangle with m (m + 1) / 2 entries.

    Raises
    ------
    ValueError
        If there is none.
    """
    m = (math.isqrt(8 * entries + 1) - 1) // 2
    if m * (m + 1) // 2 != entries:
        raise ValueError(f"{entries} numbers are no triangle")
    return m


def _diagonal(entries: int, device: torch.device) -> Tensor:
    """Return the places of the diagonal in a triangle, (m,)."""
    m = _side(entries)
    i = torch.arange(m, device=device)
    places: Tensor = i * m - i * (i - 1) // 2
    return places


def _coded(form: Rounded, width: int) -> Tensor:
    """Return which numbers of a row are sent as codes, (width,), on the CPU."""
    if not form.triangles:
        return torch.arange(width) > 0
    coded = torch.ones(width, dtype=torch.bool)
    return coded.index_fill(0, _diagonal(width, coded.device), False)
