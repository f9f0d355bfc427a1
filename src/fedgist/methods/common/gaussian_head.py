"""FedLog's algebra for numbers: the Gaussian form, whose MAP head is ridge regression.

The paper's conjugate prior needs an exponential family (Yu, Zhang, Poupart, eqs. 1 to 3). With
y | phi ~ N(eta phi, 1) for standardized numbers y, the family's sufficient statistics are phi
phi^T and phi y. They add up over rows and clients, so one exchange gives the head of all rows
together (docs/methods/fedlog.md#numbers).

=======  ==========================================================================================
here
=======  ==========================================================================================
phi      features with the constant 1 put first, m + 1 numbers
G, C     ``sum_i phi_i phi_i^T`` (m + 1, m + 1), and ``sum_i y_i phi_i`` (m + 1,) of each number
nu       precision of the prior N(0, 1/nu) of each weight; the bias has a flat prior
=======  ==========================================================================================

Statistics are packed in rows of one matrix: the upper triangle of G, whose first entry is the
number of rows, then C. Without missing numbers there is one row: G, and the C of every number. With
them, each number has its own row, since its G is over the rows that have it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.methods.common.triangles import symmetric, triangle


def packed_width(m: int, crosses: int) -> int:
    """Return the number of entries of a row: a triangle of m + 1, and ``crosses`` vectors C."""
    return (m + 1) * (m + 2) // 2 + crosses * (m + 1)


def gaussian_sums(phi: Tensor, y: Tensor, weight: Tensor, *, apart: bool) -> Tensor:
    """Return the packed statistics, (1, entries), or (numbers, entries) if ``apart``.

    ``phi`` is (batch, m + 1), ``y`` (batch, numbers) with NaN for missing ones, and ``weight``
    (batch,) is 0 for absent rows.
    """
    present = ~y.isnan()
    y = torch.where(present, y, 0.0)
    if not apart:
        return _packed(phi, y, weight).unsqueeze(0)
    weights = present * weight.unsqueeze(1)
    pairs = zip(y.mT.unsqueeze(2).unbind(0), weights.unbind(1), strict=True)
    return torch.stack([_packed(phi, of_number, own) for of_number, own in pairs])


def _packed(phi: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return a packed row (entries,) by one product, which holds no pairs of a single row."""
    product = (phi * weight.unsqueeze(1)).mT @ torch.cat([phi, y], dim=1)
    m = phi.shape[1]
    return torch.cat([triangle(product[:, :m]), product[:, m:].mT.flatten()])


def ridge_head(sums: Tensor, m: int, nu: float) -> Tensor:
    """Return the MAP head (numbers, m + 1) of packed statistics, in their precision.

    Each number's eta maximizes ``-|y - eta phi|^2 / 2 - nu |w|^2 / 2``, with w its weights without
    the bias: (G + nu D) eta = C, where D is the identity with 0 for the bias. Without rows, eta
    is 0. With nu = 0, G may be singular: then it is the solution of least norm.
    """
    entries = packed_width(m, 0)
    cross, gram = sums[:, entries:], symmetric(sums[:, :entries], m + 1)
    penalty = torch.full((m + 1,), nu, dtype=sums.dtype, device=sums.device)
    penalty[0] = 0.0
    # the bias of no rows would be undetermined: any penalty gives 0
    penalty = penalty + torch.eye(m + 1, dtype=sums.dtype, device=sums.device)[0] * (
        sums[:, :1] <= 0
    )
    system, right = gram + torch.diag_embed(penalty), cross.reshape(len(sums), -1, m + 1).mT
    if nu > 0:
        eta: Tensor = torch.linalg.solve(system, right)
    else:
        eta = torch.linalg.pinv(system, rtol=RANK, hermitian=True) @ right
    return eta.mT.reshape(-1, m + 1)


RANK = 1e-7  # relative size of an eigenvalue that counts as 0: the rounding of single precision
