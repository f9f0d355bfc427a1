"""A gradient within a loss: that of autograd, stacked or alone, without a trace in the net."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drifting_clients import batch_normed
from fedgist.core import random
from fedgist.core.nets.inner_gradient import gradient_and_value, landing
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import Net, split_head, stacked
from fedgist.core.tree import map_leaves

ROWS = 6


def net_of(*, convolves: bool) -> Net:
    def build() -> nn.Module:
        if not convolves:
            return batch_normed((4,), 3)
        layers = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))

    return split_head(build, (1, 4, 4) if convolves else (4,), 3).start(1)


def rows_of(net: Net) -> tuple[Tensor, Tensor]:
    x = random.normal(random.key(3), (ROWS, *net.arch.input_shape))
    return x, torch.arange(ROWS) % 3


@pytest.mark.parametrize("convolves", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_it_is_autograds_and_the_nets_pass_stays_as_it_is(*, convolves: bool, each: bool) -> None:
    net = net_of(convolves=convolves)
    net = replace(net, arch=net.arch.with_layout(each=each))
    x, y = rows_of(net)

    def loss(other: Net) -> Tensor:
        return F.cross_entropy(other(x), y)

    mask, found = torch.ones(ROWS, dtype=torch.bool), []
    for whole in (False, True):
        run = Pass(mask, random.key(5), whole=whole)
        slopes, value = gradient_and_value(loss, replace(net, run=run), net.params)
        assert not run.all_updates  # statistics of a client's net are of its own passes
        found.append((slopes, value))

    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    expected = loss(replace(net.with_arrays(params), run=Pass(mask, random.key(5))))
    wanted = dict(zip(params, torch.autograd.grad(expected, list(params.values())), strict=True))
    for slopes, value in found:
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(slopes, wanted, atol=1e-6, rtol=1e-5)

    several = map_leaves(torch.clone, stacked(net, 2))

    def of_one(one: Net) -> dict[str, Tensor]:
        return gradient_and_value(loss, replace(one, run=Pass(mask, random.key(5))), one.params)[0]

    both: dict[str, Tensor] = torch.func.vmap(of_one)(several)
    second = {name: slopes[1] for name, slopes in both.items()}
    torch.testing.assert_close(second, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_a_gradient_of_the_head_alone_leaves_the_statistics(*, whole: bool) -> None:
    net = net_of(convolves=False)
    x, y = rows_of(net)
    run = Pass(torch.ones(ROWS, dtype=torch.bool), random.key(5), whole=whole)
    head = {name: p for name, p in net.params.items() if name not in net.body}
    slopes, _ = gradient_and_value(
        lambda other: F.cross_entropy(other(x), y), replace(net, run=run), head
    )
    assert slopes.keys() == head.keys()
    assert not run.all_updates
    assert not run.draws


def test_nothing_flows_through_it() -> None:
    net = net_of(convolves=False)
    x, y = rows_of(net)
    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    slopes, value = gradient_and_value(lambda other: F.cross_entropy(other(x), y), net, params)
    assert not value.requires_grad
    assert not any(slope.requires_grad for slope in slopes.values())


@pytest.mark.parametrize("rate", [1e-4, 0.3, 7.0])
def test_a_plain_step_lands_on_its_target(rate: float) -> None:
    start = {"a": torch.randn(4), "b": torch.randn(2, 3)}
    target = {"a": torch.randn(4), "b": start["b"].clone()}
    params = {name: p.clone().requires_grad_() for name, p in start.items()}
    value = landing(params, target, rate)
    slopes = torch.autograd.grad(value, list(params.values()))
    assert value == 0
    for (name, p), slope in zip(params.items(), slopes, strict=True):
        torch.testing.assert_close(p.detach() - rate * slope, target[name])
    assert not slopes[1].any()
