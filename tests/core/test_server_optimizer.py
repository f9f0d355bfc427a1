"""Optimizers of a server: Reddi et al.'s formulas in NumPy, and torch.optim where it has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.methods.common.server_optimizer import ServerOptimizer, ServerRule, init, step

GRADS = np.random.default_rng(5).normal(size=(6, 4))
START = np.array([0.5, -1.0, 2.0, 0.0])


def ours(optimizer: ServerOptimizer, grads: np.ndarray, lr: float) -> np.ndarray:
    """Return the parameters after each of some steps, (steps, m)."""
    params = {"w": torch.tensor(START)}
    moments, out = init(optimizer, params), []
    for grad in grads:
        params, moments = step(optimizer, lr, params, {"w": torch.tensor(grad)}, moments)
        out.append(params["w"].numpy())
    return np.stack(out)


def printed(rule: str, grads: np.ndarray, lr: float, o: ServerOptimizer) -> np.ndarray:
    """Return the same by algorithm 2 as printed, whose Delta_t is minus the gradient."""
    x, m, v = START.copy(), np.zeros(4), np.full(4, o.start)
    out = []
    for delta in -grads:
        m = o.beta1 * m + (1 - o.beta1) * delta
        if rule == "adagrad":
            v = v + delta**2
        elif rule == "yogi":
            v = v - (1 - o.beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = o.beta2 * v + (1 - o.beta2) * delta**2
        x = x + lr * m / (np.sqrt(v) + o.eps)
        out.append(x.copy())
    return np.stack(out)


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_adaptive_rules_are_those_printed(rule: ServerRule) -> None:
    optimizer = ServerOptimizer(rule, beta2=0.9, eps=0.05, start=0.01)
    expected = printed(rule, GRADS, 0.3, optimizer)
    np.testing.assert_allclose(ours(optimizer, GRADS, 0.3), expected, rtol=1e-6)
    # it would be seen if the step were along the gradient, or with another rule's moments
    others = [printed(other, GRADS, 0.3, optimizer) for other in ("adagrad", "adam", "yogi")]
    assert sum(np.allclose(ours(optimizer, GRADS, 0.3), other, rtol=1e-3) for other in others) == 1


@pytest.mark.parametrize(
    ("optimizer", "name", "settings"),
    [
        (ServerOptimizer("sgd"), "SGD", {}),
        (ServerOptimizer("momentum", beta1=0.8), "SGD", {"momentum": 0.8}),
        (
            ServerOptimizer("adagrad", beta1=0.0, eps=1e-3, start=0.1),
            "Adagrad",
            {"eps": 1e-3, "initial_accumulator_value": 0.1},
        ),
        (
            ServerOptimizer(beta2=0.999, eps=1e-5, bias_correction=True),
            "Adam",
            {"betas": (0.9, 0.999), "eps": 1e-5},
        ),
    ],
)
def test_rules_are_torchs(optimizer: ServerOptimizer, name: str, settings: dict[str, Any]) -> None:
    w = torch.nn.Parameter(torch.tensor(START))
    theirs = getattr(torch.optim, name)([w], lr=0.3, **settings)
    for grad, mine in zip(GRADS, ours(optimizer, GRADS, 0.3), strict=True):
        w.grad = torch.tensor(grad)
        theirs.step()
        np.testing.assert_allclose(mine, w.detach().numpy(), rtol=1e-6)


def test_without_a_gradient_nothing_moves_and_nothing_breaks() -> None:
    rules: tuple[ServerRule, ...] = ("sgd", "momentum", "adagrad", "adam", "yogi")
    optimizers = [ServerOptimizer(rule) for rule in rules]
    for optimizer in [*optimizers, ServerOptimizer(bias_correction=True)]:
        assert (ours(optimizer, np.zeros((3, 4)), 0.3) == START).all()


@settings(max_examples=30)
@given(
    lr=st.floats(1e-4, 1.0), final=st.floats(0.0, 1.0), rounds=st.integers(1, 50), data=st.data()
)
def test_rates_fall_evenly(lr: float, final: float, rounds: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, rounds))
    optimizer = ServerOptimizer(lr={"small": lr, "large": 2 * lr}, final_factor=final)
    expected = lr * np.interp(number, [1, rounds + 1], [1.0, final])
    assert optimizer.rate("small", number, rounds) == pytest.approx(expected)
    assert optimizer.rate("large", number, rounds) == pytest.approx(2 * expected)


def test_a_correction_that_nothing_reads_is_refused() -> None:
    ServerOptimizer(bias_correction=True).check(["a"])
    with pytest.raises(ValueError, match="bias_correction: rule = 'yogi' has none, 'adam' does"):
        ServerOptimizer("yogi", bias_correction=True).check(["a"])


def test_a_pool_without_a_rate_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown pool in method.server.lr 'huge'; known: small"):
        ServerOptimizer(lr={"small": 0.1}).rate("huge", 1, 1)
