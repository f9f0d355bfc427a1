"""Unrepeatable noise and draws: random bits of the operating system, and the discrete Gaussian.

Floating-point noise leaks the protected numbers: the set of possible results depends on the input
(Mironov 2012, "On significance of the least significant bits for differential privacy"). So the
numbers of a release are multiples of a *grid*, a power of two, and noise is a multiple of the grid
as well. Its distribution is the discrete Gaussian, with a probability of x proportional to
exp(-x^2 / (2 sigma^2)) (Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential
privacy").
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

SLICES = 16  # the smallest number of slices per deviation: finer slices reject fewer draws
FARTHEST = 12  # deviations; the tail beyond has probability 1e-31
AT_ONCE = 1 << 17  # numbers per batch of draws, so that arrays stay in the cache
DIGITS = 40  # of the table's probabilities, before they are rounded to 63 bits


def bits(shape: tuple[int, ...]) -> Tensor:
    """Return 64 random bits per element, int64 of ``shape``: ChaCha20 under a fresh key.

    The 256 bits of the key come from the operating system, so two processes, forked or not, never
    share random bits.
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
    """Return the module with ChaCha20 of cryptography, an optional dependency."""
    try:
        return importlib.import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise MethodError(
            "privacy.noise = 'system' needs cryptography: pip install 'fedgist[privacy]'"
        ) from error


def uniform(shape: tuple[int, ...]) -> Tensor:
    """Return multiples of 2^-53 from 0 to just below 1, float64 of ``shape``."""
    return _high(bits(shape), 53).to(torch.float64) * 2.0**-53


def discrete_gaussian(sigma: float, shape: tuple[int, ...]) -> Tensor:
    """Return integers of the discrete Gaussian, int64 of ``shape``, for 0.01 <= ``sigma`` <= 2^48.

    The numbers from 0 on are cut into slices of one width. A slice is drawn from a table with the
    probability of its first number, and a position in the slice uniformly. The draw is accepted
    with the ratio of the number's probability to that of the slice's first number. A sign is drawn
    as well, and minus 0 is rejected. The table has 63 bits and an acceptance probability 53: each
    number's probability is right to a relative error of 2^-51 and an absolute error of 2^-63.
    """
    width = 2 ** max(0, math.floor(math.log2(sigma / SLICES)))
    table, accepted, missing = _table(sigma, width), [], math.prod(shape)
    while missing:
        wanted = min(missing, AT_ONCE)
        words = bits((3, wanted + wanted // 16 + 8))  # about one in thirty is rejected
        first = torch.searchsorted(table, _high(words[0], 63), right=True) * width
        place = words[1] & (width - 1)
        exponent = place.double() * (2 * first + place).double() / (2 * sigma**2)
        kept = _high(words[2], 53).double() * 2.0**-53 < torch.exp(-exponent)
        negative = words[1] < 0  # its highest bit: the place has the lowest
        value = first + place
        kept &= ~(negative & (value == 0))
        numbers = torch.where(negative, -value, value)[kept][:wanted]
        accepted.append(numbers)
        missing -= len(numbers)
    return torch.cat(accepted).view(shape) if accepted else torch.zeros(shape, dtype=torch.int64)


@functools.lru_cache(maxsize=16)
def _table(sigma: float, width: int) -> Tensor:
    """Return the cumulative probabilities of the slices, without the last, in units of 2^-63."""
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
