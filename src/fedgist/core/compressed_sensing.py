"""Compressed sensing: few random measurements of a long sparse vector, and the way back.

The measurements are a subsampled randomized Hadamard transform (Ailon and Chazelle 2009, Tropp
2011): flip signs by random, transform, keep some of the numbers. It takes n log n additions and no
matrix, and is the same to the last bit for one vector and for a stack of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedgist.core import random

HALVINGS = 8  # of a step that does not bring a reconstruction nearer
NEAR = 1e-10  # of the square of what was measured: the rounding of single precision


@dataclass(frozen=True)
class Measurement:
    """A random linear map A from n numbers to m, with columns of length 1.

    ``flips`` (n,) are +1 or -1; ``places`` (m,) are the numbers of the transform that are kept.
    """

    flips: Tensor
    places: Tensor

    @staticmethod
    def draw(key: Tensor, n: int, m: int) -> Measurement:
        """Draw a map by key."""
        flips = 2 * random.integers(random.fold(key, "flips"), (n,), 2) - 1
        places = random.permutation(random.fold(key, "places"), _length(n))[:m]
        return Measurement(flips.to(torch.float32), places)

    def __call__(self, x: Tensor) -> Tensor:
        """Return A x, (m,), of ``x`` (n,)."""
        n, m = len(self.flips), len(self.places)
        mixed = hadamard(pad(self.flips * x, (0, _length(n) - n)))
        return mixed[self.places] / math.sqrt(m)

    def adjoint(self, y: Tensor) -> Tensor:
        """Return A^T y, (n,), of ``y`` (m,)."""
        n, m = len(self.flips), len(self.places)
        whole = torch.zeros(_length(n), dtype=y.dtype, device=y.device)
        spread = whole.index_copy(0, self.places, y)
        return self.flips * hadamard(spread)[:n] / math.sqrt(m)


def hadamard(x: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of ``x``, whose length is a power of two, without scale.

    Its matrix is symmetric, holds +1 and -1, and its square is the length times the identity.
    """
    half = 1
    while half < len(x):
        a, b = x.view(-1, 2, half).unbind(1)
        x = torch.stack([a + b, a - b], dim=1).flatten()
        half *= 2
    return x


def sparse(x: Tensor, count: int) -> Tensor:
    """Return ``x`` (n,) with its ``count`` largest entries, by magnitude, and zeros elsewhere."""
    places = x.abs().topk(count).indices
    return torch.zeros_like(x).scatter(0, places, x.gather(0, places))


def hard_thresholding(measure: Measurement, y: Tensor, count: int, steps: int) -> Tensor:
    """Return a vector with ``count`` entries whose measurements are near ``y`` (m,).

    Iterative hard thresholding, normalized: a gradient step on ``|y - A x|^2``, the best one on the
    entries in use, then all but ``count`` entries are dropped (Blumensath and Davies 2010). A step
    that leads away is halved; when none leads nearer, or none is needed, the search is over.
    """
    x = torch.zeros_like(measure.flips)
    rest, enough = y, NEAR * y.square().sum()
    for _ in range(steps):
        if bool(rest.square().sum() <= enough):
            break
        gradient = measure.adjoint(rest)
        in_use = x != 0 if bool(x.any()) else sparse(gradient, count) != 0
        slope = torch.where(in_use, gradient, 0.0)
        step = slope.square().sum() / measure(slope).square().sum().clamp(min=1e-30)
        for _ in range(HALVINGS):
            new = sparse(x + step * gradient, count)
            new_rest = y - measure(new)
            if nearer := bool(new_rest.square().sum() < rest.square().sum()):
                break
            step = step / 2
        if not nearer:
            break
        x, rest = new, new_rest
    return x


def stackable_thresholding(measure: Measurement, y: Tensor, count: int, steps: int) -> Tensor:
    """Return what :func:`hard_thresholding` looks for, by a fixed number of steps.

    There is no branch on numbers, so clients can be stacked, and a server that takes the same steps
    comes to the same vector. No step is halved; of the vectors tried, the nearest is returned.
    """
    best = x = torch.zeros_like(measure.flips)
    rest = y
    least = y.square().sum()
    for _ in range(steps):
        gradient = measure.adjoint(rest)
        in_use = torch.where(x.abs().amax() > 0, x, sparse(gradient, count)) != 0
        slope = torch.where(in_use, gradient, 0.0)
        step = slope.square().sum() / measure(slope).square().sum().clamp(min=1e-30)
        x = sparse(x + step * gradient, count)
        rest = y - measure(x)
        far = rest.square().sum()
        best, least = torch.where(far < least, x, best), torch.minimum(far, least)
    return best


def binary_hard_thresholding(measure: Measurement, y: Tensor, count: int, steps: int) -> Tensor:
    """Return a vector with ``count`` entries whose measurements have the signs ``y`` (m,).

    Binary iterative hard thresholding (Jacques, Laska, Boufounos, Baraniuk 2013): a step on the
    signs that are wrong, then all but ``count`` entries are dropped. The vector with the fewest
    wrong signs is returned. Signs do not tell a length: the mean square of its entries is 1. A sign
    0 is one that nobody knows.
    """
    root = math.sqrt(len(y))
    best = x = sparse(measure.adjoint(y), count) / root
    fewest = len(y) + 1
    for _ in range(steps + 1):
        wrong = torch.where(y == 0, 0.0, y - measure(x).sign())
        if (number := int((wrong != 0).sum())) < fewest:
            best, fewest = x, number
        x = sparse(x + measure.adjoint(wrong) / root, count)
    length = best.square().sum().sqrt().clamp(min=1e-30)
    return best * (math.sqrt(count) / length)


def _length(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
