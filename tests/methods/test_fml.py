"""FML beside a loop in NumPy: memes are averaged, own models stay, each learns from the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import softmax

from drifting_clients import (
    CLASSES,
    DECAY,
    LR,
    Clients,
    Floats,
    personal,
    run,
    shared,
    start_of,
    with_one,
)
from fedgist.core.batch import Batch
from fedgist.core.method import Context
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.second_net import SecondNet
from fedgist.engines.plans.plan import Plan
from fedgist.methods.fml import FML, Meme
from fedgist.testing.small_worlds import trace, world

NORMED = {"normed": {"model": "drifting_clients:batch_normed", "share": 1}}


def by_hand(
    clients: Clients, start: Floats, rounds: int, steps: int, alpha: float, beta: float
) -> tuple[Floats, list[Floats]]:
    """Algorithm 1 with all clients, full batches and plain steps: the average meme, own models."""
    count = len(clients.x)
    own, average = [start] * count, start
    for _ in range(rounds):
        sent = []
        for i, (x, y) in enumerate(zip(map(with_one, clients.x), clients.y, strict=True)):
            w, v, labels = own[i], average, np.eye(CLASSES)[y]
            for _ in range(steps):
                p, q = softmax(x @ w, axis=1), softmax(x @ v, axis=1)
                of_w = alpha * (p - labels) + (1 - alpha) * (p - q)
                of_v = beta * (q - labels) + (1 - beta) * (q - p)
                w = w - LR * (x.T @ of_w / len(x) + DECAY * w)
                v = v - LR * (x.T @ of_v / len(x) + DECAY * v)
            own[i] = w
            sent.append(len(x) * v)
        average = np.sum(sent, axis=0) / sum(map(len, clients.x))
    return average, own


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.9, 0.2), (0.0, 1.0)])
def test_rounds_are_those_of_algorithm_1(alpha: float, beta: float) -> None:
    # rejects the other direction of KL, a gradient through the other model, and weights exchanged
    clients = Clients.drawn(9, 14, 20)
    done = run({"name": "fml", "alpha": alpha, "beta": beta}, clients, 4, local_epochs=3)
    average, own = by_hand(clients, start_of(done), 4, 3, alpha, beta)
    np.testing.assert_allclose(shared(done), average, atol=3e-6)
    for client, expected in enumerate(own):
        np.testing.assert_allclose(personal(done, client), expected, atol=3e-6)
        assert abs(expected - average).max() > 0.02


@pytest.mark.parametrize("model", ["mlp", "normed"])
def test_without_scores_they_are_local_training_and_fedavg_bit_for_bit(model: str) -> None:
    """With running statistics."""
    sections: dict[str, Any] = {} if model == "mlp" else {"architectures": NORMED}
    alone = {"alpha": 1.0, "beta": 1.0}
    ours = trace(world("fml", options=alone, **sections), Plan(5), rounds=3).state
    local = trace(world("local", **sections), Plan(5), rounds=3).state
    averaged = trace(world("fedavg", **sections), Plan(5), rounds=3).state
    nets = {key: array for key, array in local.items() if "/net/" in key}
    memes = {k.split("/arrays/")[1]: a for k, a in averaged.items() if "/arrays/" in k}
    assert nets
    assert len(memes) == len(nets)
    for key, array in nets.items():
        assert torch.equal(ours[key], array), key
    for name, array in memes.items():
        assert torch.equal(ours[f"server/arrays/{name}"], array), name


def test_a_meme_of_another_architecture_learns_in_its_own_statistics() -> None:
    # rejects statistics that are lost, and a meme of the client's own architecture
    tables = {"first": NORMED["normed"] | {"share": 0.4}, "mlp": {"model": "mlp", "share": 0.6}}
    small = world("fml", architectures=tables)
    task = small.server.task
    assert task.main == "first"
    assert {arch.least_rows for arch in task.architectures.values()} == {2}
    net, other, mask = task.starts["mlp"], task.starts["first"], torch.ones(5, dtype=torch.bool)
    batch = Batch(torch.randn(5, *task.input_shape), torch.arange(5) % 3, mask)
    own, ctx = Meme(SecondNet.of(other)), Context(torch.tensor(3), task, 1, "train")
    run_of_step = Pass(mask, ctx.key)
    method = FML(alpha=0.7, beta=0.4)
    params = {
        where: {k: p.clone().requires_grad_() for k, p in these.items()}
        for where, these in (("net", net.params), ("meme", own.meme.params))
    }
    value = method.loss(
        replace(net.with_arrays(params["net"]), run=run_of_step),
        batch,
        Meme(replace(own.meme, params=params["meme"])),
        method.init_server(ctx),
        ctx,
    )
    flat = [p for these in params.values() for p in these.values()]
    found = torch.autograd.grad(value, flat)

    mine = net.with_arrays(params["net"])(batch.x)
    theirs = replace(other, params=params["meme"], run=Pass(mask, ctx.key))(batch.x)
    log_p, log_q = mine.log_softmax(-1), theirs.log_softmax(-1)
    expected = (
        0.7 * F.cross_entropy(mine, batch.y)
        + 0.3 * F.kl_div(log_p, log_q.exp().detach(), reduction="batchmean")
        + 0.4 * F.cross_entropy(theirs, batch.y)
        + 0.6 * F.kl_div(log_q, log_p.exp().detach(), reduction="batchmean")
    )
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, flat))
    mean = run_of_step.all_updates["own.meme.buffers.2.running_mean"]
    assert not torch.equal(mean, other.buffers["2.running_mean"])
    state = trace(small, Plan(2), rounds=2).state
    assert {k for k in state if k.startswith("server/arrays/")} == {
        f"server/arrays/{name}" for name in other.state()
    }
    assert not torch.equal(state["server/arrays/2.running_mean"], other.buffers["2.running_mean"])
