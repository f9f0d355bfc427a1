"""The Walsh-Hadamard transform, by torch or, if they are built, by the compiled kernels.

Both give the same bits: the sums are the same, in the same order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64

import torch
from torch import Tensor

from fedgist.core.autograd_types import Lot, SavedTensors
from fedgist.core.nets.compiled.kernel_library import library, remove
from fedgist.core.nets.convolution import is_plain
from fedgist.errors import InputError

NEIGHBORS = 128  # numbers of a vector that the transform moves apart, a power of two


def hadamard(x: Tensor) -> Tensor:
    """Return the unscaled Walsh-Hadamard transform, (n,), of ``x`` (n,) with n a power of two.

    Its matrix is symmetric and holds +1 and -1. The square of the matrix is n times the identity.
    """
    if is_plain(x) and library() is not None:
        return _transformed(x)
    return _by_torch(x)


def check() -> None:
    """Compare the compiled transform with torch's operations.

    Raises
    ------
    InputError
        If they differ: the compiler has made wrong code. The library is deleted.
    """
    draw = torch.Generator().manual_seed(0)
    for length in (8, 64, 1 << 14):
        x = torch.randn(length, generator=draw)
        if not torch.equal(_transformed(x), _by_torch(x)):
            remove()
            raise InputError("the compiled kernels give wrong results: try another compiler (CC)")


def _by_torch(x: Tensor) -> Tensor:
    low = min(NEIGHBORS, len(x))
    # transposed, numbers that are added first are not neighbors: the same sums take less time
    turned = _butterflies(x.view(-1, low).T.flatten(), len(x) // low)
    return _butterflies(turned.view(low, -1).T.flatten(), low)


def _butterflies(x: Tensor, half: int) -> Tensor:
    """Replace numbers of ``x`` (n,) that are ``half`` apart by sum and difference; double ``half``.

    This is repeated up to n / 2.
    """
    while half < len(x):
        a, b = x.view(-1, 2, half).unbind(1)
        x = torch.stack([a + b, a - b], dim=1).flatten()
        half *= 2
    return x


class _Compiled(torch.autograd.Function):
    """The transforms of the rows of (..., n), which are their own gradients' transforms."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        kernels, out = library(), x.clone(memory_format=torch.contiguous_format)
        assert kernels is not None  # checked by the caller
        n = out.shape[-1]
        rows = c_int64(out.numel() // n)
        kernels.fedgist_hadamard(rows, c_int64(n), ctypes.c_void_p(out.data_ptr()))
        return out

    @staticmethod
    def setup_context(ctx: SavedTensors, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing: the matrix is symmetric."""

    @staticmethod
    def backward(ctx: SavedTensors, *grads: Tensor) -> Tensor:
        return _transformed(grads[0])

    @staticmethod
    def vmap(info: Lot, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        del info
        return _transformed(x.movedim(in_dims[0], 0)), 0


_transformed: Callable[[Tensor], Tensor] = _Compiled.apply
