"""pFedMe beside a loop in NumPy, and personal models at the minimum of their envelope."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drifting_clients import LR, Clients, Floats, personal, run, shared, start_of
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.testing.small_worlds import trace, world

OPTIONS: dict[str, Any] = {"lam": 2.0, "inner_steps": 3, "inner_lr": 0.1}


def by_hand(
    clients: Clients,
    w: Floats,
    rounds: int,
    steps: int,
    *,
    rate: float = 1.0,
    by_rows: bool = False,
) -> tuple[Floats, list[Floats]]:
    """Algorithm 1 with all clients, full batches and plain steps: w, and personal models."""
    count, own = len(clients.x), [w] * len(clients.x)
    weigh = [len(x) if by_rows else 1 for x in clients.x]
    for _ in range(rounds):
        local = []
        for i in range(count):
            mine = w
            for _ in range(steps):
                theta = mine
                for _ in range(OPTIONS["inner_steps"]):
                    pull = OPTIONS["lam"] * (theta - mine)
                    theta = theta - OPTIONS["inner_lr"] * (clients.gradient(i, theta) + pull)
                mine, own[i] = mine - LR * OPTIONS["lam"] * (mine - theta), theta
            local.append(mine)
        w = (1 - rate) * w + rate * np.average(local, axis=0, weights=weigh)
    return w, own


@pytest.mark.parametrize("rate", [1.0, 1.5])
@pytest.mark.parametrize("epochs", [1, 4])
def test_rounds_are_those_of_algorithm_1(epochs: int, rate: float) -> None:
    # rejects a mean by rows
    clients = Clients.drawn(9, 14, 20)
    about = {"name": "pfedme", "server_rate": rate} | OPTIONS
    done = run(about, clients, 3, local_epochs=epochs)
    w, own = by_hand(clients, start_of(done), 3, epochs, rate=rate)
    np.testing.assert_allclose(shared(done), w, atol=3e-6)
    for client, theta in enumerate(own):
        np.testing.assert_allclose(personal(done, client), theta, atol=1e-5)
    wrong, _ = by_hand(clients, start_of(done), 3, epochs, rate=rate, by_rows=True)
    assert abs(shared(done) - wrong).max() > 1e-3


def test_many_inner_steps_reach_the_envelopes_minimum() -> None:
    # rejects an envelope without the half's factor, and one around the average after the round
    clients, lam = Clients.drawn(10, 13, seed=2), 0.7
    about = {"name": "pfedme", "lam": lam, "inner_steps": 200, "inner_lr": 0.3}
    done, before = run(about, clients, 6), run(about, clients, 5)
    w = shared(before)  # what the last round sent
    for client in range(2):
        theta = personal(done, client)
        np.testing.assert_allclose(clients.gradient(client, theta), lam * (w - theta), atol=2e-5)
        assert abs(theta - w).max() > 0.05


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"train": {"optimizer": "adam"}}, r"train\.optimizer = 'adam'.*must be 'sgd'"),
        ({"train": {"optimizer": "sgd", "clip_norm": 1.0}}, r"train\.clip_norm = 1\.0.*must be 0"),
    ],
)
def test_other_steps_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        world("pfedme", **section)


def test_running_statistics_move_to_the_clients_mean_at_any_rate() -> None:
    # rejects a rate beyond the mean: variances would fall below zero
    about: dict[str, Any] = {"model": {"name": "drifting_clients:batch_normed"}}
    plain, fast = (
        trace(world("pfedme", options={"server_rate": rate}, **about), Plan(5), rounds=1).state
        for rate in (1.0, 4.0)
    )
    names = [name for name in plain if name.startswith("server") and "running" in name]
    assert len(names) == 2
    for name in names:
        assert torch.equal(fast[name], plain[name])
