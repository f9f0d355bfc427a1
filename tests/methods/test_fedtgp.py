"""FedTGP: the server's steps beside a loop with torch's own modules; FedProto without steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drifting_clients import CLASSES, FEATURES, Clients, run
from fedgist.methods.fedproto import FedProto
from fedgist.methods.fedtgp import FedTGP
from fedgist.testing import check_reduces_to


def test_without_steps_it_is_fedproto() -> None:
    ours = FedTGP(lam=0.7, server_epochs=0, inference="prototype")
    check_reduces_to(ours, FedProto(lam=0.7, aggregate="plain"))


def by_modules(start: Any, z: torch.Tensor, y: torch.Tensor, tau: float, passes: int) -> Any:
    """The server of one round by torch's layers and the formulas of the paper, in float64."""
    points = nn.Parameter(start.points.double())
    first, last = (nn.Linear(FEATURES, FEATURES).double() for _ in range(2))
    layers = nn.Sequential(first, nn.ReLU(), last)
    with torch.no_grad():
        for layer, both in ((first, start.first), (last, start.last)):
            layer.weight.copy_(both[:, 1:])
            layer.bias.copy_(both[:, 0])
    means = [z[y == c].mean(0) for c in range(CLASSES)]
    largest = max(float((a - b).norm()) for a in means for b in means)
    margin = min(largest, tau)
    optimizer = torch.optim.SGD([points, *layers.parameters()], lr=0.05)
    for _ in range(passes):
        made = layers(points)
        losses = []
        for one, c in zip(z, y.tolist(), strict=True):
            away = [(one - made[k]).norm() for k in range(CLASSES)]
            own = torch.exp(-(away[c] + margin))
            others = sum(torch.exp(-away[k]) for k in range(CLASSES) if k != c)
            losses.append(-torch.log(own / (own + others)))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return layers(points).detach(), margin


@pytest.mark.parametrize("tau", [100.0, 0.5])
def test_a_round_of_the_server_is_that_of_the_paper(tau: float) -> None:
    # rejects squared distances, a margin of all classes, and one that is not bounded
    drawn = Clients.drawn(9, 14, 20)
    clients = Clients(drawn.x, [np.arange(len(x)) % CLASSES for x in drawn.x])
    about = {"name": "fedtgp", "threshold": tau, "server_lr": 0.05, "server_epochs": 30}
    done = run(about | {"batch_size": 99}, clients, 1)
    method, ctx = done.server_run.method, done.server_run.context("init", 0)
    z = torch.stack(
        [
            torch.from_numpy(x[y == c].mean(0))
            for x, y in zip(clients.x, clients.y, strict=True)
            for c in range(CLASSES)
        ]
    )
    y = torch.arange(CLASSES).repeat(3)
    expected, margin = by_modules(method.init_server(ctx), z, y, tau, 30)
    made = done.server_run.server.prototypes.mean
    torch.testing.assert_close(made.double(), expected, atol=2e-5, rtol=1e-5)
    assert tau in {margin, 100.0}
    other, _ = by_modules(method.init_server(ctx), z, y, 50.5 - tau / 2, 30)
    assert (made - other).abs().max() > 1e-3


def test_prototypes_keep_farther_apart_than_the_class_means() -> None:
    drawn = Clients.drawn(9, 14, 20)
    clients = Clients(drawn.x, [np.arange(len(x)) % CLASSES for x in drawn.x])

    def apart(epochs: int) -> float:
        options = {"server_epochs": epochs, "server_lr": 0.05}
        done = run({"name": "fedtgp"} | options, clients, 1)
        return float(torch.pdist(done.server_run.server.prototypes.mean).min())

    assert apart(0) < 0.9 * apart(300)


def test_a_class_that_no_client_has_gets_no_prototype() -> None:
    drawn = Clients.drawn(9, 14)
    clients = Clients(drawn.x, [np.arange(len(x)) % 2 for x in drawn.x])
    method = FedTGP(server_epochs=3)
    made, exists = torch.randn(CLASSES, FEATURES), torch.tensor([1.0, 1.0, 0.0])
    z, y = torch.randn(4, FEATURES), torch.tensor([0, 1, 1, 0])
    value = method.contrast(made, exists, z, y, torch.tensor(2.0))
    other = method.contrast(made * torch.tensor([[1.0], [1], [9]]), exists, z, y, torch.tensor(2.0))
    assert value == other
    assert math.isfinite(value)
    assert len(clients.x) == 2
