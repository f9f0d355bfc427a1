"""FedNova beside a loop in NumPy, on clients that take unlike numbers of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drifting_clients import LR, Clients, Floats, matrix, run, shared
from fedgist.core.training import MOMENTUM
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.testing.small_worlds import SIZES, trace, world

BATCH, EPOCHS = 8, 2
OPTIMIZERS: list[tuple[dict[str, Any], float]] = [
    ({"optimizer": "sgd"}, 0.0),
    ({"optimizer": "momentum"}, MOMENTUM),
    ({"optimizer": "momentum", "momentum": 0.4}, 0.4),
]


def repeated() -> Clients:
    """Clients of 8, 16 and 24 copies of one row each: all batches are alike, in any order."""
    rng = np.random.default_rng(4)
    x = [np.repeat(rng.normal(size=(1, 3)), count, axis=0) for count in (8, 16, 24)]
    return Clients(x, [np.full(len(rows), place, np.int64) for place, rows in enumerate(x)])


def weight_of(steps: int, momentum: float) -> float:
    """How often a gradient of 1 is in an update of so many steps, counted step by step."""
    total, speed = 0.0, 0.0
    for _ in range(steps):
        speed = momentum * speed + 1
        total += speed
    return total


def by_hand(clients: Clients, start: Floats, rounds: int, momentum: float) -> tuple[Floats, Floats]:
    """Eq. 7 to 9, and FedAvg beside them."""
    sizes = np.array([len(x) for x in clients.x])
    nova, plain, shares = start.copy(), start.copy(), sizes / sizes.sum()
    steps = [EPOCHS * int(size) // BATCH for size in sizes]
    weights = np.array([weight_of(count, momentum) for count in steps])

    def update(i: int, w: Floats) -> Floats:
        y, speed = w.copy(), np.zeros_like(w)
        for _ in range(steps[i]):
            speed = momentum * speed + clients.gradient(i, y)
            y = y - LR * speed
        return y - w

    for _ in range(rounds):
        each = [update(i, nova) for i in range(len(sizes))]
        divided = sum(p * u / a for p, u, a in zip(shares, each, weights, strict=True))
        nova = nova + float(shares @ weights) * divided
        plain = plain + sum(p * update(i, plain) for i, p in enumerate(shares))
    return nova, plain


@pytest.mark.parametrize(("optimizer", "momentum"), OPTIMIZERS)
def test_rounds_are_those_of_eq_7(optimizer: dict[str, Any], momentum: float) -> None:
    # rejects plain averages, equal shares, and a count of steps under momentum
    clients = repeated()
    how = {"local_epochs": EPOCHS, "batch_size": BATCH} | optimizer
    done = run({"name": "fednova"}, clients, 3, **how)
    start = matrix(done.server_run.side.task.starts["logistic"].params)
    nova, plain = by_hand(clients, start, 3, momentum)
    np.testing.assert_allclose(shared(done), nova, atol=5e-6)
    assert abs(nova - plain).max() > 1e-2
    fedavg = run({"name": "fedavg"}, clients, 3, **how)
    np.testing.assert_allclose(shared(fedavg), plain, atol=5e-6)


@pytest.mark.parametrize(("optimizer", "momentum"), OPTIMIZERS)
def test_an_update_is_divided_by_the_weights_of_its_gradients(
    optimizer: dict[str, Any], momentum: float
) -> None:
    """Of clients with short last batches, beside the nets of local training."""
    ours = trace(world("fednova", train=optimizer), Plan(5), rounds=1).state
    local = trace(world("local", train=optimizer), Plan(5), rounds=1).state
    share = torch.tensor(SIZES, dtype=torch.float32) / sum(SIZES)
    steps = [2 * -(-size // 4) for size in SIZES]  # two epochs in batches of four
    weights = torch.tensor([weight_of(count, momentum) for count in steps])
    for name, w in world("fedavg").server.task.starts["mlp"].params.items():
        moves = local[f"clients/mlp/net/{name}"] - w
        divided = (moves * (share / weights).view(-1, *(1 for _ in w.shape))).sum(0)
        expected = w + (share @ weights) * divided
        torch.testing.assert_close(ours[f"server/weights/mlp/arrays/{name}"], expected)


def test_with_as_many_steps_each_it_is_fedavg() -> None:
    clients = Clients.drawn(9, 14, 20)
    ours, theirs = (shared(run({"name": name}, clients, 3)) for name in ("fednova", "fedavg"))
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"optimizer": "adam"}, r"train\.optimizer = 'adam': FedNova divides"),
        ({"optimizer": "momentum", "optimizer_memory": "run"}, r"optimizer_memory = 'run'"),
    ],
)
def test_steps_of_unknown_weight_are_refused(train: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        world("fednova", train=train)
