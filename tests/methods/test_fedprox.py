"""FedProx's loss on logistic regression: its gradient, and the point where that vanishes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import scipy.optimize
import scipy.special
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.message import Nothing
from fedgist.core.method import Batch, Context, Task, Training
from fedgist.core.nets.net import split_head
from fedgist.core.objectives.classes import Classes
from fedgist.methods.common.averaging import Weights
from fedgist.methods.fedprox import FedProx
from fedgist.models import MODELS

Floats = npt.NDArray[np.float64]

ARCH = split_head(lambda: MODELS["logistic"]((4,), 3), (4,), 3)
START = ARCH.start(1)
ROWS = 12
X = random.normal(random.key(0), (ROWS, 4))
Y = random.integers(random.key(1), (ROWS,), 3)
MASK = torch.arange(ROWS) < 9
CTX = Context(
    random.key(0),
    Task((4,), 3, 1, {}, {}, Training(num_rounds=1, batch_size=8), Classes(3)),
    1,
    "train",
)


def method_loss(mu: float, params: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the method's loss and gradient."""
    live = {n: p.clone().requires_grad_() for n, p in params.items()}
    value = FedProx(mu=mu).loss(
        START.with_arrays(live), Batch(X, Y, MASK), Nothing(), Weights(START.state()), CTX
    )
    grads = torch.autograd.grad(value, list(live.values()))
    return float(value.detach()), dict(zip(live, grads, strict=True))


def numpy_loss(flat: Floats, mu: float) -> tuple[float, Floats]:
    """Return F(w) + mu / 2 |w - w0|^2 and its gradient, by hand."""
    w, w0 = flat.reshape(3, 5), matrix(START.params)
    x = np.concatenate([X[MASK].double().numpy(), np.ones((9, 1))], axis=1)
    y = Y[MASK].numpy()
    logits = x @ w.T
    loss = (scipy.special.logsumexp(logits, axis=1) - logits[np.arange(9), y]).mean() + mu / 2 * (
        (w - w0) ** 2
    ).sum()
    errors = scipy.special.softmax(logits, axis=1) - np.eye(3)[y]
    return float(loss), (errors.T @ x / 9 + mu * (w - w0)).ravel()


def matrix(params: dict[str, Tensor]) -> Floats:
    return np.concatenate(
        [params["1.weight"].double().numpy(), params["1.bias"].double().numpy()[:, None]], axis=1
    )


def params_of(w: Floats) -> dict[str, Tensor]:
    w = w.reshape(3, 5)
    return {
        "1.weight": torch.from_numpy(w[:, :4]).float(),
        "1.bias": torch.from_numpy(w[:, 4]).float(),
    }


@pytest.mark.parametrize("mu", [0.0, 0.01, 3.0])
def test_loss_and_gradient_are_those_of_eq_2(mu: float) -> None:
    # rejects mu |w - w0|^2 without the half, and a pull by |w - w0| without its sign
    w = matrix(START.params) + np.random.default_rng(0).normal(size=(3, 5))
    value, grads = method_loss(mu, params_of(w))
    expected, slope = numpy_loss(w.ravel(), mu)
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(matrix(grads).ravel(), slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_the_loss_stands_still_where_scipy_stops(mu: float) -> None:
    optimum = scipy.optimize.minimize(
        numpy_loss, matrix(START.params).ravel(), args=(mu,), jac=True, tol=1e-12
    )
    _, grads = method_loss(mu, params_of(optimum.x))
    assert abs(matrix(grads)).max() < 1e-5
    _, without = method_loss(0.0, params_of(optimum.x))
    pull = mu * (optimum.x.reshape(3, 5) - matrix(START.params))
    # the data pull as hard as the anchor
    np.testing.assert_allclose(matrix(without), -pull, atol=1e-5)
    assert abs(pull).max() > 0.01


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method\.mu = -0\.1: must be at least 0"):
        FedProx(mu=-0.1)
