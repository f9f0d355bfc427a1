"""SCAFFOLD beside a loop in NumPy, and at the optimum of clients that drift."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from drifting_clients import LR, Clients, Floats, matrix, run, shared
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.methods.scaffold import Controls, Scaffold
from fedgist.testing.small_worlds import trace, world

NAME = "logistic"


def by_hand(clients: Clients, start: Floats, rounds: int, steps: int, server_lr: float) -> Floats:
    """Algorithm 1 with option II, all clients in each round, full batches."""
    count = len(clients.x)
    x, c, own = start.copy(), np.zeros_like(start), [np.zeros_like(start)] * count
    for _ in range(rounds):
        moves, changes = [], []
        for i in range(count):
            y = x.copy()
            for _ in range(steps):
                y = y - LR * (clients.gradient(i, y) - own[i] + c)
            new = own[i] - c + (x - y) / (steps * LR)
            moves.append(y - x)
            changes.append(new - own[i])
            own = [*own[:i], new, *own[i + 1 :]]
        x = x + server_lr * np.mean(moves, axis=0)
        c = c + np.mean(changes, axis=0)
    return x


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize("epochs", [1, 4])
def test_rounds_are_those_of_algorithm_1(epochs: int, server_lr: float) -> None:
    # rejects means by rows, a correction of the other sign, and a K of 1
    clients = Clients.drawn(9, 14, 20)
    done = run({"name": "scaffold", "server_lr": server_lr}, clients, 3, local_epochs=epochs)
    state = done.server_run.server
    assert isinstance(state, Controls)
    start = matrix(done.server_run.side.task.starts[NAME].params)
    expected = by_hand(clients, start, 3, epochs, server_lr)
    found = matrix(state.by_architecture[NAME].arrays)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    for wrong in (by_hand(clients, start, 3, epochs + 1, server_lr), start):
        assert abs(found - wrong).max() > 1e-3


def test_it_reaches_the_optimum_of_all_clients_and_fedavg_does_not() -> None:
    clients = Clients.drawn(12, 12, 12, 12, seed=3)
    best = clients.optimum()
    far = {}
    for method in ("scaffold", "fedavg"):
        done = run({"name": method}, clients, 150, local_epochs=10)
        far[method] = float(abs(shared(done) - best).max())
    assert far["scaffold"] < 1e-3
    assert far["fedavg"] > 0.05


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_the_mean_of_all_control_variates_is_the_servers(fraction: float) -> None:
    """Also if some are absent, if batches differ in number, and for each architecture."""
    models = {
        "wide": {"model": "mlp", "hidden": [7, 5], "share": 1},
        "flat": {"model": "logistic", "share": 1},
    }
    small = world("scaffold", architectures=models, train={"fraction_train": fraction})
    state = trace(small, Plan(2), rounds=3).state
    clients = small.population.clients
    for name in models:
        prefix = f"server/by_architecture/{name}/control/"
        for key, c in ((k, v) for k, v in state.items() if k.startswith(prefix)):
            own = [
                state[f"clients/{name}/own/variate/{key.removeprefix(prefix)}"][i]
                for i in range(sum(name in client.architectures for client in clients))
            ]
            torch.testing.assert_close(torch.stack(own).mean(0), c, atol=1e-6, rtol=1e-5)
            assert c.any()


def test_other_optimizers_are_refused_by_name() -> None:
    with pytest.raises(
        RecipeError, match=r"train\.optimizer = 'adam': SCAFFOLD's control variates"
    ):
        world("scaffold", train={"optimizer": "adam"})
    with pytest.raises(ValueError, match=r"method\.server_lr = 0"):
        Scaffold(server_lr=0.0)
    assert replace(Scaffold(), server_lr=2.0).server_lr == 2.0
