"""APFL beside a loop in NumPy: the shared model is FedAvg's, mixtures are each client's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drifting_clients import DECAY, LR, Clients, Floats, personal, run, shared, start_of
from fedgist.engines.plans.plan import Plan
from fedgist.methods.apfl import APFL
from fedgist.methods.fedavg import FedAvg
from fedgist.testing import check_reduces_to
from fedgist.testing.small_worlds import SIZES, trace, world


def by_hand(
    clients: Clients, w: Floats, rounds: int, steps: int, *, alpha: float = 0.5, every: int = 0
) -> tuple[Floats, list[Floats], list[float]]:
    """Algorithm 1 with all clients, full batches and plain steps: w, mixtures, shares.

    The share is learned at the first step of a round, or also at ``every`` further one.
    """
    count = len(clients.x)
    own, shares = [w] * count, [alpha] * count

    def slope(i: int, v: Floats) -> Floats:
        return clients.gradient(i, v) - DECAY * v

    for _ in range(rounds):
        local = []
        for i in range(count):
            mine, v, a = w, own[i], shares[i]
            for step in range(steps):
                at = slope(i, a * v + (1 - a) * mine)
                if step == 0 or (every and step % every == 0):
                    a = min(1.0, max(0.0, a - LR * float(((v - mine) * at).sum())))
                at = slope(i, a * v + (1 - a) * mine)
                v = v - LR * (a * at + DECAY * v)
                mine = mine - LR * clients.gradient(i, mine)
            own[i], shares[i] = v, a
            local.append(len(clients.x[i]) * mine)
        w = np.sum(local, axis=0) / sum(map(len, clients.x))
    return w, [a * v + (1 - a) * w for a, v in zip(shares, own, strict=True)], shares


@pytest.mark.parametrize("epochs", [1, 4])
def test_rounds_are_those_of_algorithm_1(epochs: int) -> None:
    # rejects a share that each step learns, and a gradient of v without its share
    clients = Clients.drawn(9, 14, 20)
    done = run({"name": "apfl"}, clients, 5, local_epochs=epochs)
    w, mixtures, shares = by_hand(clients, start_of(done), 5, epochs)
    np.testing.assert_allclose(shared(done), w, atol=3e-6)
    found = [personal(done, client) for client in range(3)]
    for mixture, expected in zip(found, mixtures, strict=True):
        np.testing.assert_allclose(mixture, expected, atol=1e-5)
    assert max(abs(share - 0.5) for share in shares) > 0.01
    if epochs > 1:
        _, each_step, _ = by_hand(clients, start_of(done), 5, epochs, every=1)
        assert max(abs(a - b).max() for a, b in zip(found, each_step, strict=True)) > 1e-3


def test_the_shared_model_is_fedavgs_bit_for_bit() -> None:
    check_reduces_to(APFL(adaptive=False), FedAvg())


def test_a_share_of_1_is_local_training() -> None:
    """To rounding, in whole batches: each phase draws its own order."""
    train = {"batch_size": max(SIZES)}
    options = {"alpha": 1.0, "adaptive": False}
    ours = trace(world("apfl", options=options, train=train), Plan(5), rounds=3).state
    alone = trace(world("local", train=train), Plan(5), rounds=3).state
    for key, array in alone.items():
        if key.startswith("clients/mlp/net/"):
            mine = ours[key.replace("/net/", "/own/v/params/")]
            torch.testing.assert_close(mine, array, atol=2e-6, rtol=1e-5)


def test_shares_stay_between_0_and_1() -> None:
    # rejects a share above 1, and one that rises from 1 no more than it falls
    clients = Clients.drawn(9, 14, 20)
    done = run({"name": "apfl", "alpha": 0.98}, clients, 8, local_epochs=20)
    _, mixtures, shares = by_hand(clients, start_of(done), 8, 20, alpha=0.98)
    assert max(shares) == 1.0
    kept = done.server_run.checkpoint().clients["logistic/own/alpha"]
    np.testing.assert_allclose(kept, shares, atol=1e-5)
    for client, expected in enumerate(mixtures):
        np.testing.assert_allclose(personal(done, client), expected, atol=2e-5)
