"""Sums of second moments: one product of a batch, against the products of each row added up.

FedLog's clients send them for numbers. The sums of each row were how fedgist did it at first: for
a batch of ROWS rows they hold ROWS x m^2 / 2 numbers, which are counted and not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedgist.engines.process_control import as_workers_do
from fedgist.methods.common.gaussian_head import gaussian_sums

ROWS = 256
WIDTHS = (32, 128, 512, 1280)


def moments(repeats: int) -> dict[str, float]:
    """Return how many times as fast the product is, and the memory of the sums by rows in MB."""
    figures = {}
    draw = torch.Generator().manual_seed(0)
    with as_workers_do():
        for width in WIDTHS:
            phi = torch.randn(ROWS, width + 1, dtype=torch.float64, generator=draw)
            y, weight = phi[:, :1].clone(), torch.ones(ROWS, dtype=torch.float64)
            arrays = (phi, y, weight)
            torch.testing.assert_close(_product(*arrays), _by_rows(*arrays))
            best = {way: min(_seconds(way, arrays) for _ in range(repeats)) for way in WAYS}
            figures[f"moments: m = {width}, by rows / product"] = best[_by_rows] / best[_product]
            figures[f"moments: m = {width}, product, ms"] = 1000 * best[_product]
            pairs = 8e-6 * ROWS * (width + 1) * (width + 2) / 2
            figures[f"moments: m = {width}, by rows, MB"] = pairs
    return figures


def _product(phi: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return gaussian_sums(phi, y, weight, apart=False)[0]


def _by_rows(phi: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    row, column = torch.triu_indices(phi.shape[1], phi.shape[1])
    weighted = weight.unsqueeze(1)
    pairs = (phi[:, row] * phi[:, column] * weighted).sum(0)
    return torch.cat([pairs, ((y * weighted).mT @ phi).flatten()])


WAYS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (_product, _by_rows)


def _seconds(way: Callable[..., Tensor], arrays: tuple[Tensor, ...]) -> float:
    begin = time.perf_counter()
    way(*arrays)
    return time.perf_counter() - begin
