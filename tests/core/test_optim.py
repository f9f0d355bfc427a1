"""Optimizers over stacked clients against torch.optim, client by client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core.optim import OptimizerState, clipped_gradients, init, step
from fedgist.core.training import Optimizer, OptimizerName
from fedgist.core.tree import leaves, take

CLIENTS = 3
TURNS = [slice(0, 1)] * 2 + [slice(0, 3)] * 3 + [slice(1, 2)] * 4  # who takes each step
SHAPES: dict[str, tuple[int, ...]] = {"weight": (4, 3), "bias": (4,), "scale": ()}
TOLERANCE = {torch.float32: (3e-6, 1e-7), torch.float64: (1e-13, 1e-14)}  # relative, absolute

SETTINGS = [
    Optimizer("sgd", lr=0.3),
    Optimizer("sgd", lr=0.3, weight_decay=0.2),
    Optimizer("momentum", lr=0.1, momentum=0.8),
    Optimizer("momentum", lr=0.1, weight_decay=0.2),
    Optimizer("adam", lr=0.05),
    Optimizer("adam", lr=0.05, betas=(0.7, 0.9), eps=0.1, weight_decay=0.2),
    Optimizer("adamw", lr=0.05),
    Optimizer("adamw", lr=0.05, betas=(0.7, 0.9), eps=0.1, weight_decay=0.2),
]
EVERY = pytest.mark.parametrize("optimizer", SETTINGS, ids=lambda o: f"{o.name}-{o.weight_decay}")


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(CLIENTS, *s, generator=generator, dtype=dtype) for n, s in SHAPES.items()
    }


def of_torch(optimizer: Optimizer, params: list[Tensor]) -> torch.optim.Optimizer:
    shared: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.name in {"adam", "adamw"}:
        rule = torch.optim.Adam if optimizer.name == "adam" else torch.optim.AdamW
        return rule(params, betas=optimizer.betas, eps=optimizer.eps, **shared)
    return torch.optim.SGD(
        params, momentum=optimizer.momentum if optimizer.name == "momentum" else 0.0, **shared
    )


def go(
    optimizer: Optimizer, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], OptimizerState]:
    """Let each client take the steps that are its turn; return parameters and state."""
    params = numbers(0, dtype)
    state = init(optimizer, params)
    for s, going in enumerate(TURNS):
        step(optimizer, take(params, going), take(numbers(1 + s, dtype), going), take(state, going))
    return params, state


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rule_matches_torch_optim_for_clients_with_different_step_counts(
    optimizer: Optimizer, dtype: torch.dtype
) -> None:
    # rejects: one step counter for all clients, no bias correction, eps inside the root, the decay
    # of Adam in AdamW and the other way round, and momentum that starts from (1 - momentum) g
    params, state = go(optimizer, dtype)
    rtol, atol = TOLERANCE[dtype]
    for client in range(CLIENTS):
        params_alone = {n: p[client].clone().requires_grad_() for n, p in numbers(0, dtype).items()}
        reference = of_torch(optimizer, list(params_alone.values()))
        for s in (s for s, going in enumerate(TURNS) if going.start <= client < going.stop):
            for name, g in numbers(1 + s, dtype).items():
                params_alone[name].grad = g[client]
            reference.step()
        for name, p in params_alone.items():
            torch.testing.assert_close(params[name][client], p.detach(), rtol=rtol, atol=atol)
    assert state.count.tolist() == [5, 7, 3]


@EVERY
def test_clients_that_stop_early_stay_bitwise_untouched(optimizer: Optimizer) -> None:
    params, state = numbers(0), init(optimizer, numbers(0))
    step(optimizer, params, numbers(1), state)
    before = [leaf[2:].clone() for leaf in leaves((params, state))]
    first = slice(0, 2)
    for s in range(5):
        step(optimizer, take(params, first), take(numbers(2 + s), first), take(state, first))
    assert all(
        torch.equal(old, new[2:]) for old, new in zip(before, leaves((params, state)), strict=True)
    )
    assert state.count.tolist() == [6, 6, 1]


@EVERY
def test_a_caller_who_knows_that_counts_are_equal_gets_the_same_bits(optimizer: Optimizer) -> None:
    results = []
    for together in (None, True):
        params, state = numbers(0), init(optimizer, numbers(0))
        for s in range(3):
            step(optimizer, params, numbers(1 + s), state, together=together)
        results.append(leaves((params, state)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "moments"),
    [("sgd", (0, 0)), ("momentum", (3, 0)), ("adam", (3, 3)), ("adamw", (3, 3))],
)
def test_moments_that_a_rule_does_not_use_take_no_room(
    name: OptimizerName, moments: tuple[int, int]
) -> None:
    state = init(Optimizer(name, lr=1e-3), numbers(0))
    assert (len(state.first), len(state.second)) == moments
    assert all(not leaf.any() for leaf in leaves(state))


@EVERY
def test_a_step_leaves_the_gradients_alone(optimizer: Optimizer) -> None:
    grads, params = numbers(1), numbers(0)
    step(optimizer, params, grads, init(optimizer, params))
    assert all(torch.equal(grads[n], g) for n, g in numbers(1).items())


@pytest.mark.parametrize("most", [0.5, 3.0, 1e6])
def test_each_clients_gradient_is_clipped_by_its_own_norm_as_torch_does(most: float) -> None:
    # rejects one norm for the whole stack, a norm for each tensor, and a norm that is always scaled
    # up to the bound
    grads = numbers(1)
    grads["weight"][1] *= 100
    kept = {name: g.clone() for name, g in grads.items()}
    ours = clipped_gradients(grads, most)
    for client in range(CLIENTS):
        alone = [torch.zeros(shape, requires_grad=True) for shape in SHAPES.values()]
        for tensor, g in zip(alone, grads.values(), strict=True):
            tensor.grad = g[client].clone()
        torch.nn.utils.clip_grad_norm_(alone, most)
        for tensor, g in zip(alone, ours.values(), strict=True):
            torch.testing.assert_close(g[client], tensor.grad, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(grads[name], g) for name, g in kept.items())


@EVERY
def test_gradients_may_lie_in_memory_as_they_like(optimizer: Optimizer) -> None:
    # seen: the gradient of a layer without bias comes out transposed, and was read as it lies
    plain, other = numbers(0), numbers(0)
    grads = numbers(1)
    turned = {n: g.mT.contiguous().mT if g.dim() > 2 else g for n, g in grads.items()}
    assert not turned["weight"].is_contiguous()
    for params, given in ((plain, grads), (other, turned)):
        step(optimizer, params, given, init(optimizer, params))
    for name, array in plain.items():
        assert torch.equal(array, other[name])


@EVERY
def test_plain_tensors_learn_by_sgd_beside_any_rule(optimizer: Optimizer) -> None:
    params, state = go(replace(optimizer, plain=("bias", "absent")))
    alone, _ = go(optimizer)
    sgd, _ = go(Optimizer("sgd", lr=optimizer.lr))
    assert torch.equal(params["bias"], sgd["bias"])
    assert torch.equal(params["weight"], alone["weight"])
    assert torch.equal(params["scale"], alone["scale"])
    assert "bias" not in {**state.first, **state.second}
