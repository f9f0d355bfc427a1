"""MOON's contrast beside eq. 3 in NumPy, and where it is ln 2 without a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.optimize import approx_fprime

from fedgist.core import random
from fedgist.core.method import Batch, Context, Net, Task, Training
from fedgist.core.nets.net import split_head
from fedgist.core.nets.second_net import SecondNet
from fedgist.core.objectives.classes import Classes
from fedgist.methods.common.averaging import Weights
from fedgist.methods.fedavg import FedAvg
from fedgist.methods.moon import Before, Moon
from fedgist.models import MODELS
from fedgist.testing import check_reduces_to

Floats = npt.NDArray[np.float64]
ROWS, SHAPE = 7, (4,)
ARCH = split_head(lambda: MODELS["mlp"](SHAPE, 3, hidden=[5]), SHAPE, 3)
X = random.normal(random.key(0), (ROWS, *SHAPE))
Y = random.integers(random.key(1), (ROWS,), 3)
MASK = torch.arange(ROWS) < 6
CTX = Context(
    random.key(0),
    Task(SHAPE, 3, 1, {}, {}, Training(num_rounds=1, batch_size=8), Classes(3)),
    1,
    "train",
)
BODY = "1.weight"


def term(net: Net, glob: Net, prev: Net, **options: float) -> torch.Tensor:
    """The contrast alone: the method's loss without the task's."""
    own, down = Before(SecondNet.of(prev)), Weights(glob.state())
    batch = Batch(X, Y, MASK)
    with_it, without = (Moon(mu=mu, **options).loss(net, batch, own, down, CTX) for mu in (1, 0))
    return with_it - without


def by_hand(flat: Floats, glob: Net, prev: Net, bias: Floats, tau: float) -> float:
    """Eq. 3 of one hidden layer, by NumPy."""

    def features(weight: Any, offset: Any) -> Floats:
        z: Floats = np.maximum(X.double().numpy() @ np.asarray(weight).T + np.asarray(offset), 0)
        return z

    def cosine(a: Floats, b: Floats) -> Floats:
        scale = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        out: Floats = (a * b).sum(1) / np.maximum(scale, 1e-8)
        return out

    z = features(flat.reshape(5, 4), bias)
    near, far = (
        cosine(z, features(*(other.params[f"1.{n}"].double() for n in ("weight", "bias"))))
        for other in (glob, prev)
    )
    each = -np.log(np.exp(near / tau) / (np.exp(near / tau) + np.exp(far / tau)))
    return float(each[MASK.numpy()].mean())


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_the_contrast_and_its_gradient_are_those_of_eq_3(tau: float) -> None:
    # rejects a gradient through the other models, and roles that are swapped
    net, glob, prev = (ARCH.start(seed) for seed in (1, 2, 3))
    weight = net.params[BODY].clone().requires_grad_()
    value = term(net.with_arrays({BODY: weight}), glob, prev, temperature=tau)
    flat, bias = weight.detach().double().numpy().ravel(), net.params["1.bias"].double().numpy()
    number = float(value.detach())
    assert number == pytest.approx(by_hand(flat, glob, prev, bias, tau), rel=1e-5)
    (slope,) = torch.autograd.grad(value, [weight])
    expected = approx_fprime(flat, by_hand, 1e-6, glob, prev, bias, tau)
    np.testing.assert_allclose(slope.double().numpy().ravel(), expected, rtol=1e-4, atol=1e-4)
    assert abs(expected).max() > 1e-2
    swapped = by_hand(flat, prev, glob, bias, tau)
    assert abs(number - swapped) > 1e-3


def test_in_round_1_it_is_ln_2_without_a_gradient() -> None:
    start = ARCH.start(1)
    weight = start.params[BODY].clone().requires_grad_()
    value = term(start.with_arrays({BODY: weight}), start, start)
    assert float(value.detach()) == pytest.approx(np.log(2), rel=1e-6)
    (slope,) = torch.autograd.grad(value, [weight])
    assert float(slope.abs().max()) < 1e-7


def test_without_its_term_it_is_fedavg_bit_for_bit() -> None:
    check_reduces_to(Moon(mu=0.0), FedAvg())
