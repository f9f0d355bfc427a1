"""FedGen beside torch's own layers and optimizer, and FedAvg's and LG-FedAvg's heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from torch import nn

from drifting_clients import CLASSES, LR, Clients, matrix, run, start_of, with_one
from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.method import Context, Nothing
from fedgist.core.nets.layers import Pass
from fedgist.core.replies import Subtotal, gather
from fedgist.methods.common.linear_head import LinearHead
from fedgist.methods.fedgen import FedGen, Generator, WeightedHead
from fedgist.methods.lg_fedavg import LGFedAvg
from fedgist.testing import check_reduces_to
from fedgist.testing.small_worlds import world

COUNTS = torch.tensor([5.0, 0.0, 15.0])


def at_server() -> Context:
    task = world("fedgen").server.task
    return Context(random.key(7), task, 1, "train")


def test_without_the_generator_it_is_lg_fedavg_bit_for_bit() -> None:
    check_reduces_to(FedGen(weight=0.0), LGFedAvg())


def test_heads_are_averaged_by_rows_and_round_1_learns_from_rows_alone() -> None:
    clients = Clients.drawn(9, 14, 20)
    done = run({"name": "fedgen"}, clients, 1)
    start, count = start_of(done), [len(x) for x in clients.x]
    local = [start - LR * clients.gradient(i, start) for i in range(3)]
    expected = sum(n * w for n, w in zip(count, local, strict=True)) / sum(count)
    server = done.server_run.server
    found = matrix({"1.weight": server.head.weight, "1.bias": server.head.bias})
    np.testing.assert_allclose(found, expected, atol=3e-6)
    of_class = np.bincount(np.concatenate(clients.y), minlength=CLASSES)
    np.testing.assert_array_equal(server.counts.numpy(), of_class)


def test_the_generator_is_trained_as_torch_would() -> None:
    # rejects softmax of each head before the mean, noise without distances, and another optimizer
    ctx, method = at_server(), FedGen(rows=9, noise=4, hidden=7, steps=6, lr=0.02, diversity=0.6)
    before = method.init_server(ctx)
    width = before.head.weight.shape[1]
    eta = torch.randn(3, width + 1)
    message = WeightedHead(COUNTS.sum() * eta, COUNTS)
    replies = gather([Subtotal("mlp", (0,), 1, "train", message)], ())
    after = method.server_update(before, replies, ctx)
    torch.testing.assert_close(after.head.eta, eta)

    layers = nn.Linear(7, 7), nn.Linear(7, width)
    for layer, ours in zip(layers, vars(before.generator).values(), strict=True):
        layer.weight.data, layer.bias.data = ours[:, 1:].clone(), ours[:, 0].clone()
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    rule = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in range(6):
        key = ctx.draw("step", number)
        _, y, noise = method.made(before.generator, COUNTS, key)
        z = model(torch.cat([noise, nn.functional.one_hot(y, 3)], dim=1))
        value = nn.functional.cross_entropy(z @ eta[:, 1:].T + eta[:, 0], y)
        pairs = [(i, j) for i in range(9) for j in range(9)]
        spread = [
            (z[i] - z[j]).abs().mean() * (noise[i] - noise[j]).square().mean() for i, j in pairs
        ]
        value = value + 0.6 * torch.exp(-torch.stack(spread).mean())
        learned = list(model.parameters())
        for p, slope in zip(learned, torch.autograd.grad(value, learned), strict=True):
            p.grad = slope
        rule.step()
    for layer, ours in zip(layers, vars(after.generator).values(), strict=True):
        torch.testing.assert_close(ours[:, 1:], layer.weight.data, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours[:, 0], layer.bias.data, atol=1e-5, rtol=1e-4)


def test_generated_features_come_to_belong_to_their_classes() -> None:
    ctx, method = at_server(), FedGen(steps=150, lr=0.01)
    before = method.init_server(ctx)
    message = WeightedHead(COUNTS.sum() * before.head.eta, COUNTS)
    after = method.server_update(
        before, gather([Subtotal("mlp", (0,), 1, "train", message)], ()), ctx
    )
    losses = [
        float(method.generator_loss(g, before.head, COUNTS, random.key(1)))
        for g in (before.generator, after.generator)
    ]
    assert losses[1] < 0.5 * losses[0]
    z, y, _ = method.made(after.generator, COUNTS, random.key(2))
    logits = z @ before.head.weight.T + before.head.bias
    assert (logits.argmax(1) == y).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=6).filter(any), st.integers(0, 99))
def test_classes_are_drawn_as_often_as_clients_have_rows(rows: list[int], seed: int) -> None:
    # rejects classes that nobody has, and classes that are equally likely
    method, counts = FedGen(rows=4000, noise=1, hidden=1), torch.tensor(rows).float()
    layers = Generator(torch.zeros(1, 1 + len(rows) + 1), torch.zeros(1, 2))
    _, y, _ = method.made(layers, counts, random.key(seed))
    share = np.bincount(y.numpy(), minlength=len(rows)) / len(y)
    expected = np.array(rows) / sum(rows)
    assert not share[expected == 0].any()
    np.testing.assert_allclose(share, expected, atol=5 * 0.5 / np.sqrt(len(y)))


@pytest.mark.parametrize("weight", [0.4, 1.0])
def test_a_clients_head_learns_generated_features_and_its_body_does_not(weight: float) -> None:
    ctx, method = at_server(), FedGen(weight=weight, rows=9, noise=4, hidden=7)
    (net,) = ctx.task.starts.values()
    down = replace(method.init_server(ctx), counts=COUNTS, head=LinearHead(torch.randn(3, 6)))
    mask = torch.ones(5, dtype=torch.bool)
    batch = Batch(torch.randn(5, *ctx.task.input_shape), torch.arange(5) % 3, mask)
    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    learner = replace(net.with_arrays(params), run=Pass(mask, ctx.key))
    slopes = []
    for rule in (method, FedGen(weight=0.0)):
        value = rule.loss(learner, batch, Nothing(), down, ctx)
        slopes.append(
            dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True))
        )
    z, y, _ = method.made(down.generator, COUNTS, ctx.draw("features"))
    x = with_one(z.double().numpy())
    name = net.arch.head
    head = matrix({f"1.{k}": net.params[f"{name}.{k}"] for k in ("weight", "bias")})
    expected = x.T @ (softmax(x @ head, axis=1) - np.eye(3)[y.numpy()]) / len(x)
    for name in params:
        extra = (slopes[0][name] - slopes[1][name]).double().numpy()
        if name in net.body:
            assert not extra.any(), name
        else:
            wanted = expected[-1] if extra.ndim == 1 else expected[:-1].T
            np.testing.assert_allclose(extra, weight * wanted, atol=1e-6)
