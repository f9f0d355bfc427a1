"""Whole methods against independent computations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fedgist.core.tree import named
from fedgist.engines.plans.plan import Plan
from fedgist.testing.small_worlds import SIZES, federation, trace, world
from fedgist.world.world import World


def module(small_world: World) -> nn.Module:
    """Return the model at the common start as a plain module."""
    net = small_world.server.task.starts["mlp"]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Identity(), nn.Linear(5, 3))
    plain.load_state_dict({k: v.clone() for k, v in net.params.items()})
    return plain


def inputs(small_world: World) -> torch.Tensor:
    return (small_world.data.x - 0.5) / 2.0


def test_fedavg_with_one_step_on_all_rows_is_one_centralized_gradient_step() -> None:
    # rejects an average that does not weigh clients by their rows: SIZES are uneven
    small_world = world("fedavg", train={"local_epochs": 1, "batch_size": max(SIZES), "lr": 0.3})
    state = trace(small_world, Plan(3), rounds=1).state
    plain = module(small_world)
    torch.autograd.backward(F.cross_entropy(plain(inputs(small_world)), small_world.data.y))
    for name, p in plain.named_parameters():
        assert p.grad is not None
        assert torch.allclose(
            state[f"server/weights/mlp/arrays/{name}"], p.detach() - 0.3 * p.grad, atol=1e-6
        )


def test_centralized_training_is_sgd_on_all_rows() -> None:
    small_world = world(
        "centralized", train={"local_epochs": 1, "batch_size": sum(SIZES), "lr": 0.3}
    )
    state = trace(small_world, Plan(1), rounds=3).state
    plain = module(small_world)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(plain(inputs(small_world)), small_world.data.y))
        optimizer.step()
    for name, p in plain.named_parameters():
        assert torch.allclose(state[f"clients/mlp/net/{name}"][0], p.detach(), atol=1e-5)


def test_local_training_is_each_clients_own_sgd_and_sends_nothing() -> None:
    small_world = world("local", train={"local_epochs": 3, "batch_size": max(SIZES), "lr": 0.2})
    result = trace(small_world, Plan(5), rounds=2)
    for client in range(len(SIZES)):
        plain = module(small_world)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
        rows = small_world.population.train[client]
        for _ in range(6):
            optimizer.zero_grad()
            torch.autograd.backward(
                F.cross_entropy(plain(inputs(small_world)[rows]), small_world.data.y[rows])
            )
            optimizer.step()
        for name, p in plain.named_parameters():
            assert torch.allclose(
                result.state[f"clients/mlp/net/{name}"][client], p.detach(), atol=1e-5
            )
    assert all(line["comm/up_bytes"] == line["comm/down_bytes"] == 0 for line in result.rounds)


def test_fedprox_with_mu_zero_is_fedavg_and_a_large_mu_holds_clients_back() -> None:
    plain = trace(world("fedavg"), rounds=2).state
    zero = trace(world("fedprox", options={"mu": 0.0}), rounds=2).state
    assert all(torch.allclose(plain[k], zero[k], atol=1e-6) for k in plain)
    start = world("fedavg").server.task.starts["mlp"].params
    held = trace(world("fedprox", options={"mu": 15.0}), rounds=1).state

    def moved(state: dict[str, torch.Tensor]) -> float:
        return math.fsum(
            float((state[f"server/weights/mlp/arrays/{n}"] - p).square().sum())
            for n, p in start.items()
        )

    assert moved(held) < 0.5 * moved(trace(world("fedavg"), rounds=1).state)


def test_fedlog_sends_the_class_sums_of_its_trained_bodies_and_keeps_the_head_fixed() -> None:
    small_world = world("fedlog")
    fed = federation(small_world, Plan(2))
    before = named(fed.server)["eta"]
    line, _ = fed.advance()
    assert line["comm/up_bytes"] == line["comm/down_bytes"] == 3 * (5 + 1) * 4 * len(SIZES)
    # the sums of all clients, computed by hand from the bodies that they keep
    state = fed.checkpoint().clients
    s = torch.zeros(3, 6, dtype=torch.float64)
    for client in range(len(SIZES)):
        rows = small_world.population.train[client]
        w, b = (state[f"mlp/net/1.{n}"][client] for n in ("weight", "bias"))
        z = torch.relu(inputs(small_world)[rows] @ w.T + b)
        for phi, y in zip(z, small_world.data.y[rows], strict=True):
            s[y] += torch.cat([torch.ones(1), phi]).double()
    eta = named(fed.server)["eta"].double()
    t = 1.0 + len(small_world.data.y)
    p = torch.softmax(eta.square().sum(1) / 4, 0)
    # stationarity of eq. 14
    assert torch.allclose(t * p.unsqueeze(1) * eta / 2, s, rtol=1e-4, atol=1e-3)
    assert not torch.equal(before, named(fed.server)["eta"])


def test_fedlogs_exchange_is_round_0_with_its_bytes_and_no_download() -> None:
    lines = trace(world("fedlog", options={"head_start": "exchange"})).rounds
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["comm/up_bytes"] == 3 * 6 * 4 * len(SIZES)
    assert lines[0]["comm/down_bytes"] == 0


def test_batches_of_stateful_models_start_from_the_head_that_was_sent() -> None:
    # rejects a client that goes on with the previous round's head: with almost no learning, only
    # the head changes
    small_world = world("fedlog", train={"lr": 1e-12})
    fed = federation(small_world)
    fed.advance()
    first_head = named(fed.server)["eta"].clone()
    fed.advance()
    assert torch.allclose(first_head, named(fed.server)["eta"], atol=1e-5)
