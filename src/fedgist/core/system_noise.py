"""Noise and draws that nobody can repeat: bits of the operating system, and the discrete Gaussian.

Noise in floating point tells of the numbers under it: which numbers can come out depends on what
went in (Mironov 2012, "On significance of the least significant bits for differential privacy").
So the numbers of a release are multiples of a *grid*, a power of two, and noise is a whole number
of it: of the discrete Gaussian, whose chance of x goes as exp(-x^2 / (2 sigma^2)) (Canonne, Kamath,
Steinke 2020, "The discrete Gaussian for differential privacy").
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from decimal import Decimal, localcontext
from types import ModuleType

import torch
from torch import Tensor

from fedgist.errors import MethodError

SLICES = 16  # of a deviation, at least: the finer, the fewer draws are thrown away
FARTHEST = 12  # deviations; what lies behind has a chance of 1e-31
AT_ONCE = 1 << 17  # numbers that are drawn together: what is worked on stays in the cache
DIGITS = 40  # of the table's chances, before they are rounded to 63 bits


def bits(shape: tuple[int, ...]) -> Tensor:
    """Return 64 random bits for each place, int64: ChaCha20 under a key that is used this once.

    Its 256 bits come from the operating system, so two processes, forked or not, never share them.
    """
    ciphers, count = _ciphers(), math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=torch.int64)
    key = ciphers.algorithms.ChaCha20(os.urandom(32), nonce=bytes(16))
    stream = ciphers.Cipher(key, mode=None).encryptor()
    drawn = bytearray(stream.update(bytes(8 * count)))
    return torch.frombuffer(drawn, dtype=torch.int64).view(shape)


@functools.cache
def _ciphers() -> ModuleType:
    """Return the module of cryptography, an extra, that has ChaCha20."""
    try:
        return importlib.import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise MethodError(
            "privacy.noise = 'system' needs cryptography: pip install 'fedgist[privacy]'"
        ) from error


def uniform(shape: tuple[int, ...]) -> Tensor:
    """Return multiples of 2^-53 from 0 to just below 1, float64."""
    return _high(bits(shape), 53).to(torch.float64) * 2.0**-53


def discrete_gaussian(sigma: float, shape: tuple[int, ...]) -> Tensor:
    """Return whole numbers of the discrete Gaussian, int64, for ``sigma`` from 0.01 to 2^48.

    The numbers from 0 on are cut into slices of one width. A slice is drawn from a table by the
    chance of its first number, the place in it evenly, and both are kept with the chance that the
    number has beside the slice's first. A sign is drawn, too; minus 0 is thrown away. The table has
    63 bits, and a chance 53: each number's chance is right to 2^-51 of itself and 2^-63 altogether.
    """
    width = 2 ** max(0, math.floor(math.log2(sigma / SLICES)))
    table, found, missing = _table(sigma, width), [], math.prod(shape)
    while missing:
        wanted = min(missing, AT_ONCE)
        words = bits((3, wanted + wanted // 16 + 8))  # about one in thirty is thrown away
        first = torch.searchsorted(table, _high(words[0], 63), right=True) * width
        place = words[1] & (width - 1)
        exponent = place.double() * (2 * first + place).double() / (2 * sigma**2)
        kept = _high(words[2], 53).double() * 2.0**-53 < torch.exp(-exponent)
        negative = words[1] < 0  # its highest bit: the place has the lowest
        value = first + place
        kept &= ~(negative & (value == 0))
        numbers = torch.where(negative, -value, value)[kept][:wanted]
        found.append(numbers)
        missing -= len(numbers)
    return torch.cat(found).view(shape) if found else torch.zeros(shape, dtype=torch.int64)


@functools.lru_cache(maxsize=16)
def _table(sigma: float, width: int) -> Tensor:
    """Return the chance of all slices up to each, but for the last, in units of 2^-63."""
    with localcontext() as exact:
        exact.prec = DIGITS
        ratio = Decimal(width) / Decimal(sigma)
        count = math.ceil(FARTHEST / ratio) + 1
        weights = [(-((slice_ * ratio) ** 2) / 2).exp() for slice_ in range(count)]
        total, up_to, ends = sum(weights), Decimal(0), []
        for weight in weights[:-1]:
            up_to += weight
            ends.append(min(int(up_to / total * 2**63), 2**63 - 1))
    return torch.tensor(ends, dtype=torch.int64)


def _high(words: Tensor, count: int) -> Tensor:
    """Return the highest bits of each word, as a number from 0 to 2^count - 1."""
    return (words >> (64 - count)) & ((1 << count) - 1)
