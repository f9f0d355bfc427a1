"""Masked losses against torch.nn.functional and scipy on the rows that are present."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from fedgist.core import losses

MASK = torch.tensor([True, False, True, True, False])
NONE = torch.zeros(5, dtype=torch.bool)
Y = torch.tensor([2, 0, 1, 2, 3])
WEIGHTS = torch.tensor([3.0, 0.5, 2.0, 1.0])  # of the classes
G = torch.Generator().manual_seed(0)
A = torch.randn(5, 4, generator=G)
B = torch.randn(5, 4, generator=G)

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Loss, Loss]] = {  # ours with a mask, torch's without
    "cross_entropy": (
        lambda a, m: losses.cross_entropy(a, Y, m),
        lambda a, m: F.cross_entropy(a[m], Y[m]),
    ),
    "smoothed": (
        lambda a, m: losses.cross_entropy(a, Y, m, smoothing=0.3),
        lambda a, m: F.cross_entropy(a[m], Y[m], label_smoothing=0.3),
    ),
    "weighted": (
        lambda a, m: losses.cross_entropy(a, Y, m, weight=WEIGHTS[Y]),
        lambda a, m: F.cross_entropy(a[m], Y[m], WEIGHTS, reduction="sum") / m.sum(),
    ),
    "weighted and smoothed": (
        lambda a, m: losses.cross_entropy(a, Y, m, weight=WEIGHTS[Y], smoothing=0.3),
        lambda a, m: (
            WEIGHTS[Y[m]] * F.cross_entropy(a[m], Y[m], reduction="none", label_smoothing=0.3)
        ).mean(),
    ),
    "kl": (
        lambda a, m: losses.kl(B.softmax(1), a, m),
        lambda a, m: F.kl_div(a[m].log_softmax(1), B[m].softmax(1), reduction="batchmean"),
    ),
    "squared_distance": (
        lambda a, m: losses.squared_distance(a, B, m),
        lambda a, m: F.mse_loss(a[m], B[m], reduction="sum") / m.sum(),
    ),
    "masked_mean": (lambda a, m: losses.masked_mean(a[:, 0], m), lambda a, m: a[m, 0].mean()),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


@EVERY
def test_a_loss_and_its_gradient_are_torchs_on_the_rows_present(name: str) -> None:
    # rejects a mean over all rows, absent ones included
    masked_loss, reference_loss = LOSSES[name]
    a, b = A.clone().requires_grad_(), A.clone().requires_grad_()
    value, expected = masked_loss(a, MASK), reference_loss(b, MASK)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, a), torch.autograd.grad(expected, b))


@EVERY
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_absent_rows_weigh_nothing_whatever_their_numbers(name: str, bad: float) -> None:
    masked_loss, reference_loss = LOSSES[name]
    a = torch.where(MASK.unsqueeze(1), A, bad).requires_grad_()
    value = masked_loss(a, MASK)
    torch.testing.assert_close(value, reference_loss(A, MASK))
    (grad,) = torch.autograd.grad(value, a)
    b = A.clone().requires_grad_()
    assert torch.allclose(grad[MASK], torch.autograd.grad(reference_loss(b, MASK), b)[0][MASK])


@EVERY
def test_a_batch_without_rows_costs_nothing_and_teaches_nothing(name: str) -> None:
    a = A.clone().requires_grad_()
    value = LOSSES[name][0](a, NONE)
    assert float(value.detach()) == 0.0
    assert not torch.autograd.grad(value, a)[0].any()


@EVERY
def test_a_loss_is_the_same_stacked_and_alone(name: str) -> None:
    masked_loss, _ = LOSSES[name]
    masks = torch.stack([MASK, NONE, ~MASK])
    inputs = torch.stack([A, B, A + B])
    alone = torch.stack([masked_loss(a, m) for a, m in zip(inputs, masks, strict=True)])
    torch.testing.assert_close(torch.func.vmap(masked_loss)(inputs, masks), alone)


def test_kl_is_scipys_even_where_the_target_has_zeros() -> None:
    # rejects KL the other way round, and 0 log 0 = NaN
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
    q = scipy.special.softmax(A[:3].double().numpy(), axis=1)
    expected = np.mean(
        [scipy.stats.entropy(p, r) for p, r in zip(target.double().numpy(), q, strict=True)]
    )
    value = losses.kl(target, A[:3], torch.ones(3, dtype=torch.bool))
    assert float(value) == pytest.approx(expected, rel=1e-6)
    same = losses.kl(A.softmax(1), A, MASK)
    assert float(same) == pytest.approx(0.0, abs=1e-6)


def test_the_proximal_term_pulls_back_by_mu_times_the_distance() -> None:
    # rejects |w - w0|^2 without the half, and a gradient by absolute values
    anchor = {"a": A, "b": B}
    now = {n: (w + 3.0 * (-1.0) ** i).requires_grad_() for i, (n, w) in enumerate(anchor.items())}
    value = 0.7 * losses.proximal(now, anchor | {"a buffer": A})
    expected = 0.7 / 2 * 9.0 * sum(w.numel() for w in anchor.values())
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6)
    for name, grad in zip(now, torch.autograd.grad(value, list(now.values())), strict=True):
        torch.testing.assert_close(grad, 0.7 * (now[name] - anchor[name]).detach())


def test_balanced_weights_are_those_of_scikit_learn_for_each_client() -> None:
    # rejects: weights by the rows of all clients, classes counted that a client has not, and absent
    # rows counted as class 0
    y = torch.tensor([[0, 0, 1, 3, 0, 0], [2, 2, 2, 2, 1, 0], [3, 3, 0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]).bool()
    expected = np.zeros((3, 4))
    for client in range(3):
        own = y[client][mask[client]].numpy()
        classes = np.unique(own)
        expected[client, classes] = compute_class_weight("balanced", classes=classes, y=own)
    weights = losses.balanced_weights(y, mask, 4)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)
    mean = torch.where(mask, weights.gather(1, y), 0.0).sum(1) / mask.sum(1)
    torch.testing.assert_close(mean, torch.ones(3))
    nobody = losses.balanced_weights(y, torch.zeros_like(mask), 4)
    assert not nobody.any()  # a client without rows: nothing, and no NaN
