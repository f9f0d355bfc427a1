"""Private local steps (DP-SGD): each row's gradient is clipped, and noise is added to the sum.

Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1, with independently
sampled rows. A stack of K clients with b rows each is trained as K * b clients of one row, so the
gradient of each one-row client is the per-example gradient.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.nets.net import Net
from fedgist.core.privacy import PrivateSteps, clip_factor, noised_array, shrunk
from fedgist.core.tree import Tree, map_leaves
from fedgist.data.client_rows import ABSENT

GRADIENTS_AT_ONCE = 1 << 25  # the most numbers in stored per-example gradients: bounds memory
EXACT_AT_ONCE = 1 << 17  # the most of these in float64 at once, so that they stay in the cache
Tensors = dict[str, Tensor]
Loss = Callable[[Tensors, Net, Tree, Tree, Batch, Tensor], tuple[Tensor, Tree]]


def drawn_rows(table: Tensor, draws: Tensor, rate: float) -> Tensor:
    """Return the rows of one step, (clients, batch), each sampled with probability ``rate``.

    ``table`` is (clients, rows), -1 for absent rows. ``draws`` are uniform numbers of the same
    shape. The batch is as wide as the longest sample, and at least 1 wide.
    """
    table = torch.cat([table, table.new_full((len(table), 1), ABSENT)], dim=1)
    draws = torch.cat([draws, draws.new_ones(len(draws), 1)], dim=1)
    drawn = (draws < rate) & (table >= 0)
    first = torch.argsort((~drawn).to(torch.int8), dim=1, stable=True)
    rows = torch.where(drawn.gather(1, first), table.gather(1, first), ABSENT)
    return rows[:, : max(1, int(drawn.sum(1).max()))]


def private_gradients(
    loss: Loss,
    params: Mapping[str, Tensor],
    state: tuple[Net, Tree, Tree],
    batch: Batch,
    keys: Tensor,
    *,
    broadcast: bool,
    stack: bool,
    steps: PrivateSteps,
) -> tuple[Tensor, Tensors]:
    """Return each client's mean loss, (K,), and the sum of its rows' clipped gradients.

    Parameters
    ----------
    loss
        The losses of stacked clients, and new batch norm statistics (none here).
    params
        The trained tensors, each (K, ...).
    state
        Net, own state and download, stacked; a ``broadcast`` download is unstacked.
    batch
        ``x`` (K, b, ...); absent rows have weight 0.
    keys
        Each client's key of the step, (K,).
    stack
        Whether clients can be stacked; otherwise K is 1 and rows are trained one by one.
    """
    exact = torch.float64 if steps.grid else None  # exact for sums of multiples of the grid
    sums = {name: torch.zeros_like(p, dtype=exact) for name, p in params.items()}
    total = torch.zeros(len(keys), device=keys.device)
    for piece in _pieces(params, batch.mask.shape, stack=stack):
        rows = map_leaves(operator.itemgetter((slice(None), piece)), batch)
        place = torch.arange(piece.start, piece.stop, device=keys.device)
        row_keys = random.fold(keys.unsqueeze(1), "row", place).flatten()
        losses, row_gradients = _of_rows(loss, params, state, rows, row_keys, broadcast=broadcast)
        weight = torch.where(rows.mask, _scale(row_gradients, steps).view(rows.mask.shape), 0.0)
        for name, gradient in row_gradients.items():
            by_client = gradient.reshape(*weight.shape, -1)
            present = torch.where((weight > 0).unsqueeze(2), by_client, 0.0)
            sums[name] += _summed(present, weight, steps.grid).view_as(sums[name])
        total += torch.where(weight > 0, losses.view(rows.mask.shape), 0.0).sum(1)
    return total / batch.mask.sum(1).clamp(min=1), sums


def with_noise(sums: Mapping[str, Tensor], steps: PrivateSteps, keys: Tensor) -> Tensors:
    """Return sums of gradients, each (K, ...), with noise; ``keys`` (K,) serve noise by seed."""
    return {
        name: noised_array(values, steps.deviation, random.fold(keys, "noise", place), steps.grid)
        for place, (name, values) in enumerate(sums.items())
    }


def _summed(rows: Tensor, weight: Tensor, grid: float) -> Tensor:
    """Return the sum (K, p) of rows (K, b, p) weighted by ``weight`` (K, b)."""
    if not grid:
        return torch.einsum("kb,kbp->kp", weight.to(rows.dtype), rows)
    at_once = max(1, EXACT_AT_ONCE // max(1, rows.shape[2]))
    sums = []
    for part, factors in zip(torch.split(rows, at_once), torch.split(weight, at_once), strict=True):
        total = torch.zeros_like(part[:, 0], dtype=torch.float64)
        for row, factor in zip(part.unbind(1), factors.unbind(1), strict=True):
            total += shrunk(row.double(), factor.unsqueeze(1), grid)
        sums.append(total)
    return torch.cat(sums)


def _pieces(params: Mapping[str, Tensor], shape: torch.Size, *, stack: bool) -> Iterator[slice]:
    clients, width = shape
    numbers = clients * sum(p[0].numel() for p in params.values())
    at_once = max(1, GRADIENTS_AT_ONCE // max(1, numbers)) if stack else 1
    return (slice(start, min(start + at_once, width)) for start in range(0, width, at_once))


def _of_rows(
    loss: Loss,
    params: Mapping[str, Tensor],
    state: tuple[Net, Tree, Tree],
    rows: Batch,
    keys: Tensor,
    *,
    broadcast: bool,
) -> tuple[Tensor, Tensors]:
    """Return the loss (K * b,) and gradient (K * b, ...) of every row, as one-row clients."""
    count = rows.mask.shape[1]

    def repeated(leaf: Tensor) -> Tensor:
        return leaf.unsqueeze(1).expand(-1, count, *leaf.shape[1:]).flatten(0, 1)

    net, own, down = state
    net, own = map_leaves(repeated, net), map_leaves(repeated, own)
    down = down if broadcast else map_leaves(repeated, down)
    alone = map_leaves(lambda leaf: leaf.flatten(0, 1).unsqueeze(1), rows)
    values = {name: repeated(p.detach()).requires_grad_() for name, p in params.items()}
    with torch.enable_grad():
        losses, _ = loss(values, net, own, down, alone, keys)
    gradients = torch.autograd.grad(losses.sum(), list(values.values()), materialize_grads=True)
    return losses.detach(), dict(zip(values, gradients, strict=True))


def _scale(gradients: Mapping[str, Tensor], steps: PrivateSteps) -> Tensor:
    """Return the factor of each row's gradient, (rows,), that clips its norm.

    It is 0 for a gradient that is not finite, which would tell that there is such a row.
    """
    norm_of = _exact_norm if steps.grid else functools.partial(torch.linalg.vector_norm, dim=1)
    norms = torch.stack([norm_of(gradient.flatten(1)) for gradient in gradients.values()])
    norm = torch.linalg.vector_norm(norms, dim=0)
    return torch.where(norm.isfinite(), clip_factor(norm, steps.clip), 0.0)


def _exact_norm(rows: Tensor) -> Tensor:
    """Return the norm of each row (rows, p) in float64."""
    parts = torch.split(rows, max(1, EXACT_AT_ONCE // max(1, rows.shape[1])))
    return torch.cat([part.double().square().sum(1) for part in parts]).sqrt()
