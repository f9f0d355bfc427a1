"""FedDF beside a loop in NumPy: averages that learn the mean scores of the clients' models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

import fedgist
from drifting_clients import DECAY, FEATURES, LR, Clients, Floats, shared, start_of, with_one
from fedgist.engines.plans.plan import Plan
from fedgist.testing.small_worlds import trace, world

PUBLIC = np.random.default_rng(8).normal(size=(12, FEATURES))


def run(clients: Clients, rounds: int, **options: Any) -> fedgist.Result:
    """Run FedDF with full batches and plain steps of softmax regression."""
    data, rows = clients.data()
    train = {"num_rounds": rounds, "lr": LR, "optimizer": "sgd", "weight_decay": DECAY}
    recipe = {
        "method": {"name": "feddf", "distillation": options},
        "model": {"name": "logistic"},
        "data": {"normalize": "none"},
        "train": train | {"batch_size": max(map(len, rows))},
        "evaluate": {"every": rounds},
        "engine": {"workers": 1, "cohort_size": len(rows)},
    }
    tests, public = [torch.arange(6)] * len(rows), torch.from_numpy(PUBLIC).float()
    return fedgist.run(recipe, data=data, clients=rows, clients_test=tests, public=public)


def by_hand(
    clients: Clients, w: Floats, rounds: int, steps: int, lr: float, *, of: str = "logits"
) -> Floats:
    """Algorithm 1: local steps, an average by rows, and Adam on the KL divergence."""
    x = with_one(PUBLIC)
    for _ in range(rounds):
        local = [w - LR * clients.gradient(i, w) for i in range(len(clients.x))]
        w = np.average(local, axis=0, weights=[len(rows) for rows in clients.x])
        scores = [x @ v for v in local]
        target = softmax(np.mean(scores, axis=0), axis=1)
        if of == "probabilities":
            target = np.mean([softmax(s, axis=1) for s in scores], axis=0)
        m, v = np.zeros_like(w), np.zeros_like(w)
        for step in range(steps):
            rate = lr * (1 + np.cos(np.pi * (step // 25 * 25) / steps)) / 2
            g = x.T @ (softmax(x @ w, axis=1) - target) / len(x)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            near, wide = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
            w = w - rate * near / (np.sqrt(wide) + 1e-8)
    return w


@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_are_those_of_algorithm_1(rounds: int) -> None:
    # rejects a mean of probabilities, and a rate that does not fall
    clients = Clients.drawn(9, 14, 20)
    done = run(clients, rounds, steps=60, batch_size=99, lr=0.02)
    start = start_of(done)
    expected = by_hand(clients, start, rounds, 60, 0.02)
    np.testing.assert_allclose(shared(done), expected, atol=2e-4)
    wrong = by_hand(clients, start, rounds, 60, 0.02, of="probabilities")
    assert abs(shared(done) - wrong).max() > 5 * abs(shared(done) - expected).max()


def test_a_client_alone_learns_nothing_new() -> None:
    clients = Clients.drawn(12, 14)
    alone = Clients([clients.x[0]] * 2, [clients.y[0]] * 2)
    done = run(alone, 1, steps=50, batch_size=99, lr=1e-3)
    start = start_of(done)
    # Adam makes steps of rounding errors: far less than fifty steps of its rate
    assert abs(shared(done) - (start - LR * alone.gradient(0, start))).max() < 0.005


def test_unlike_models_come_to_one_opinion() -> None:
    models = {
        "wide": {"model": "mlp", "hidden": [9], "share": 0.5},
        "flat": {"model": "logistic", "share": 0.5},
    }

    def apart(steps: int) -> float:
        options = {"distillation": {"steps": steps, "lr": 0.01}}
        small = world("feddf", options=options, architectures=models)
        server = trace(small, Plan(2), rounds=2).state
        nets = {
            name: net.with_arrays(
                {
                    k.split("/")[-1]: v
                    for k, v in server.items()
                    if k.startswith(f"server/averages/weights/{name}/arrays/")
                }
            )
            for name, net in small.server.task.starts.items()
        }
        public = small.server.task.public_rows
        seen = public.seen(torch.arange(len(public)))
        one, other = (net(seen).softmax(1) for net in nets.values())
        return float((one - other).abs().mean())

    assert apart(200) < 0.7 * apart(1)
