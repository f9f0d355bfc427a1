"""Recorded programs beside the calculations that they repeat, and calculations that are none."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from fedgist.core.recorded import Unread, UnrecordableError, record

CONSTANT = torch.tensor([2.0, -1.0, 0.5])
Calculation = Callable[..., Sequence[Tensor]]


def gradients(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return (torch.nn.functional.linear(x, weight).relu().logsumexp(-1) * CONSTANT).sum()

    return [vmap(grad(loss))(weight, x)]


def backward(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    value = weight.detach().requires_grad_()
    with torch.enable_grad():
        losses = vmap(lambda w, x: (x @ w.T).square().mean())(value, x)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), [value])]


def in_place(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    total = weight.clone()
    view = total.view(total.shape)  # another name of the same numbers
    view[..., 0] = 7.0
    view.add_(x[..., :1, :].expand_as(view))
    return [total, total.detach()]


def several(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    top, places = x.topk(2, -1)
    first, second = weight.chunk(2, -2)
    return [top, places, torch.cat([second, first], -2), x]


CALCULATIONS = [gradients, backward, in_place, several]


def drawn(seed: int, clients: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(clients, 3, 5, generator=draw), torch.randn(clients, 3, 5, generator=draw)]


@pytest.mark.parametrize("calculation", CALCULATIONS)
@given(st.integers(1, 4), st.integers(0, 10_000))
def test_a_program_has_the_bits_of_its_calculation(
    calculation: Calculation, clients: int, seed: int
) -> None:
    # rejects a program that keeps numbers of the inputs with which it was recorded
    inputs = drawn(seed, clients)
    program, results = record(calculation, inputs)
    for values in (inputs, drawn(seed + 1, clients)):
        for a, b in zip(program(*values), calculation(*values), strict=True):
            assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(results, calculation(*inputs), strict=True))


def test_one_tensor_that_is_given_twice_is_two_inputs() -> None:
    # rejects a program that takes both from the place of one
    x = torch.ones(3)
    program, _ = record(lambda a, b: [a - b], [x, x])
    assert torch.equal(program(torch.tensor([3.0]), torch.tensor([1.0]))[0], torch.tensor([2.0]))


def test_an_input_that_is_changed_in_place_is_changed_by_the_program() -> None:
    def adds(x: Tensor) -> Sequence[Tensor]:
        return [x.add_(1)]

    program, _ = record(adds, [torch.zeros(2)])
    x = torch.zeros(2)
    assert program(x)[0].tolist() == x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "calculation",
    [
        lambda x: [x * float(x.sum())],
        lambda x: [x if x.sum() > 0 else -x],
        lambda x: [x * torch.equal(x, x)],
        lambda x: [x * python_random.random()],
        lambda x: [x * float(np.random.rand())],  # noqa: NPY002  # as a user's model may
        lambda x: [x + torch.rand(3)],
    ],
    ids=[
        "a number",
        "a condition",
        "a comparison",
        "Python's draw",
        "numpy's draw",
        "torch's draw",
    ],
)
def test_what_is_more_than_operations_is_refused(calculation: Calculation) -> None:
    with pytest.raises(UnrecordableError):
        record(calculation, [torch.ones(3)])


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n == 3,
        lambda n: n != 3,
        lambda n: n > 3,
        lambda n: n >= 3,
        lambda n: n % 2,
        lambda n: 7 // n,
        lambda n: n + 1,
        lambda n: 1 - n,
        lambda n: 2 * n,
        lambda n: n / 5,
        lambda n: 2**n,
        lambda n: -n,
        float,
        int,
        bool,
        str,
        list,
        len,
        range,
        hash,
        repr,
        "{}".format,
        lambda n: torch.ones(2) * n,
        lambda n: torch.full((2,), n),
        lambda n: {n: 1},
        lambda n: [1, 2][n],
        lambda n: min(n, 3),
    ],
)
def test_what_may_differ_later_cannot_be_read(use: Callable[[object], object]) -> None:
    with pytest.raises((UnrecordableError, TypeError)):
        use(Unread())
