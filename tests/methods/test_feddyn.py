"""FedDyn beside a loop in NumPy, and at the optimum of clients that drift."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drifting_clients import LR, Clients, Floats, matrix, run, shared
from fedgist.engines.plans.plan import Plan
from fedgist.methods.feddyn import FedDyn
from fedgist.testing.small_worlds import trace, world


def by_hand(clients: Clients, start: Floats, rounds: int, steps: int, alpha: float) -> Floats:
    """Algorithm 1 with all clients in each round, full batches, and gradient steps."""
    count = len(clients.x)
    theta, h, own = start.copy(), np.zeros_like(start), [np.zeros_like(start)] * count
    for _ in range(rounds):
        local = []
        for i in range(count):
            w = theta.copy()
            for _ in range(steps):
                w = w - LR * (clients.gradient(i, w) - own[i] + alpha * (w - theta))
            own = [*own[:i], own[i] - alpha * (w - theta), *own[i + 1 :]]
            local.append(w)
        h = h - alpha * np.mean([w - theta for w in local], axis=0)
        theta = np.mean(local, axis=0) - h / alpha
    return theta


@pytest.mark.parametrize("alpha", [0.1, 0.5])
@pytest.mark.parametrize("epochs", [1, 4])
def test_rounds_are_those_of_algorithm_1(epochs: int, alpha: float) -> None:
    # rejects means by rows, a state of the other sign, and one that is added before its update
    clients = Clients.drawn(9, 14, 20)
    done = run({"name": "feddyn", "alpha": alpha}, clients, 3, local_epochs=epochs)
    start = matrix(done.server_run.side.task.starts["logistic"].params)
    expected = by_hand(clients, start, 3, epochs, alpha)
    np.testing.assert_allclose(shared(done), expected, atol=5e-6)
    for wrong in (by_hand(clients, start, 3, epochs, 2 * alpha), start):
        assert abs(shared(done) - wrong).max() > 1e-3


def test_it_reaches_the_optimum_of_all_clients() -> None:
    clients = Clients.drawn(12, 12, 12, 12, seed=3)
    done = run({"name": "feddyn", "alpha": 0.3}, clients, 150, local_epochs=10)
    assert abs(shared(done) - clients.optimum()).max() < 1e-3
    fedavg = run({"name": "fedavg"}, clients, 150, local_epochs=10)
    assert abs(shared(fedavg) - clients.optimum()).max() > 0.05


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_the_servers_state_is_the_mean_of_the_clients_gradients(fraction: float) -> None:
    """Also if some are absent, and for each architecture."""
    models = {
        "wide": {"model": "mlp", "hidden": [7, 5], "share": 1},
        "flat": {"model": "logistic", "share": 1},
    }
    small = world("feddyn", architectures=models, train={"fraction_train": fraction})
    state = trace(small, Plan(2), rounds=3).state
    for name in models:
        prefix = f"server/by_architecture/{name}/state/"
        for key, h in ((k, v) for k, v in state.items() if k.startswith(prefix)):
            own = state[f"clients/{name}/own/arrays/{key.removeprefix(prefix)}"]
            torch.testing.assert_close(own.mean(0), h, atol=1e-6, rtol=1e-5)
            assert h.any()


def test_a_weight_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method\.alpha = 0"):
        FedDyn(alpha=0.0)
