"""Counter-based randomness in tensor operations.

A *key* is an int64 tensor: a scalar (), or one key per client, (K,). :func:`fold` derives a new key
from a key and some words. A draw mixes the key with the position of each number. A key () gives
numbers of the ``shape`` of the draw. Keys of K clients need a dimension of 1 for each of ``shape``:
keys (K, 1) and ``shape`` (n,) give (K, n).

There is no state, so the same key gives the same numbers stacked under vmap or unstacked, in any
order and on any device: integers and uniforms bit for bit, normals up to the device's logarithm.

The mixer is the finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit integer
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685

Word = int | str | Tensor


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros: torch's own shift of signed integers fills with the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _number(word: Word) -> int | Tensor:
    return zlib.crc32(word.encode()) + (1 << 32) if isinstance(word, str) else word


def key(seed: int, *words: Word) -> Tensor:
    """Make a key, (), from a seed and words: numbers, names, or integer tensors (one key each)."""
    return fold(_mix(torch.tensor(seed, dtype=torch.int64) + _GOLDEN), *words)


def fold(key: Tensor, *words: Word) -> Tensor:
    """Derive a key in the shape of ``key``, a different one for each sequence of words.

    Integer tensors among the words broadcast against the key: a key () and a word (K,) give one key
    per client, (K,).
    """
    for word in words:
        key = _mix((key ^ _number(word)) * 3 + _GOLDEN)
    return key


def _bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    counter = torch.arange(1, math.prod(shape) + 1, device=key.device).view(shape)
    return _mix(key + counter * _GOLDEN)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw uniform float32 numbers of ``shape``, multiples of 2^-24, from 0 to just below 1.

    ``key`` is a scalar (), or has dimensions of 1 at the end, which broadcast against ``shape``.
    """
    return _shift(_bits(key, shape), 40).to(torch.float32) * 2.0**-24


def integers(key: Tensor, shape: tuple[int, ...], high: int) -> Tensor:
    """Draw integers of ``shape`` from 0 to ``high`` - 1, for ``high`` below 2^31."""
    return (_shift(_bits(key, shape), 32) * high) >> 32


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal float32 numbers of ``shape`` (Box-Muller, in double precision)."""
    radius = (_shift(_bits(fold(key, 1), shape), 11).to(torch.float64) + 1.0) * 2.0**-53
    angle = _shift(_bits(fold(key, 2), shape), 11).to(torch.float64) * 2.0**-53
    return (torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)).to(
        torch.float32
    )


def permutation(key: Tensor, length: int) -> Tensor:
    """Draw a random permutation of the numbers from 0 to ``length`` - 1, (length,)."""
    return torch.argsort(_shift(_bits(key, (length,)), 1), stable=True)


def choice(key: Tensor, length: int, size: int) -> list[int]:
    """Draw ``size`` different numbers from 0 to ``length`` - 1, in increasing order.

    They are the first of :func:`permutation`. ``key`` is a scalar ().
    """
    draws = _shift(_bits(key, (length,)), 1)
    return sorted(draws.topk(min(size, length), largest=False).indices.tolist())


def order(key: Tensor, present: Tensor) -> Tensor:
    """Draw, for each row of ``present`` (lines, places), a random order of its true places.

    The false places come last. The result holds the places, (lines, places). ``key`` is (), which
    gives every line the same draws, or (lines, 1).
    """
    draws = _shift(_bits(key, (present.shape[1],)), 1)
    return torch.argsort(
        torch.where(present, draws, torch.iinfo(torch.int64).max), dim=1, stable=True
    )


@contextmanager
def torch_draws(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within a block, for layers that draw without a key.

    On exit, torch's generator is restored to its previous state.
    """
    generator = torch.default_generator  # torch.manual_seed would seed every device
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
