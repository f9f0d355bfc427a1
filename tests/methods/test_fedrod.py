"""FedROD beside a loop in NumPy: a balanced generic head, and a personal head of its own."""

from __future__ import annotations

import numpy as np
import pytest
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
from fedgist.errors import RecipeError
from fedgist.testing.small_worlds import world


def by_hand(
    clients: Clients, w: Floats, rounds: int, steps: int, *, balanced: bool = True
) -> tuple[Floats, list[Floats]]:
    """All clients, full batches and plain steps: the generic head, and clients' sums of both."""
    heads = [np.zeros_like(w) for _ in clients.x]
    for _ in range(rounds):
        local = []
        for i, (rows, y) in enumerate(zip(clients.x, clients.y, strict=True)):
            x, labels, generic = with_one(rows), np.eye(CLASSES)[y], w
            prior = np.log(np.maximum(labels.sum(0), 1e-30)) if balanced else 0.0
            for _ in range(steps):
                errors = softmax(x @ generic + prior, axis=1) - labels
                own = softmax(x @ (generic + heads[i]), axis=1) - labels
                generic = generic - LR * (x.T @ errors / len(x) + DECAY * generic)
                heads[i] = heads[i] - LR * (x.T @ own / len(x) + DECAY * heads[i])
            local.append(len(rows) * generic)
        w = np.sum(local, axis=0) / sum(map(len, clients.x))
    return w, [w + head for head in heads]


@pytest.mark.parametrize("epochs", [1, 4])
def test_rounds_are_those_of_both_losses(epochs: int) -> None:
    # rejects a generic loss without the prior, and a personal head that begins again in each round
    clients = Clients.drawn(9, 14, 20)
    assert any(set(y.tolist()) != set(range(CLASSES)) for y in clients.y)  # a class without rows
    done = run({"name": "fedrod"}, clients, 3, local_epochs=epochs)
    w, both = by_hand(clients, start_of(done), 3, epochs)
    np.testing.assert_allclose(shared(done), w, atol=5e-6)
    for client, expected in enumerate(both):
        np.testing.assert_allclose(personal(done, client), expected, atol=1e-5)
    wrong, _ = by_hand(clients, start_of(done), 3, epochs, balanced=False)
    assert abs(shared(done) - wrong).max() > 1e-2


def test_with_equal_classes_the_shared_model_is_fedavgs() -> None:
    drawn = Clients.drawn(9, 12, 6)
    clients = Clients(drawn.x, [np.arange(len(x)) % CLASSES for x in drawn.x])
    ours = run({"name": "fedrod"}, clients, 3, local_epochs=2)
    fedavg = run({"name": "fedavg"}, clients, 3, local_epochs=2)
    np.testing.assert_allclose(shared(ours), shared(fedavg), atol=2e-6)
    assert abs(personal(ours, 0) - shared(ours)).max() > 1e-2


def test_single_rows_are_not_protected_by_it() -> None:
    with pytest.raises(RecipeError, match="reads each client's rows of every class"):
        world("fedrod", privacy={"unit": "record", "epsilon": 2.0, "delta": 0.01, "clip": 3.0})
