"""FedGH: the server's head beside a loop in NumPy, and at scikit-learn's optimum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression

from drifting_clients import CLASSES, Clients, Floats, matrix, run, start_of, with_one


def means_of(clients: Clients) -> tuple[Floats, Floats]:
    """All class means with a 1, (means, features + 1), and their classes as unit rows."""
    pairs = [
        (x[y == c].mean(0), c)
        for x, y in zip(clients.x, clients.y, strict=True)
        for c in range(CLASSES)
        if (y == c).any()
    ]
    means, classes = zip(*pairs, strict=True)
    return with_one(np.stack(means)), np.eye(CLASSES)[list(classes)]


def head_of(done: Any) -> Floats:
    """The server's head, (features + 1, classes)."""
    head = done.server_run.server
    return matrix({"1.weight": head.weight, "1.bias": head.bias})


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_head_is_trained_on_class_means(epochs: int) -> None:
    # rejects means of all rows, weights by rows, and a mean over clients before the steps
    clients = Clients.drawn(9, 14, 20)
    options = {"server_lr": 0.3, "server_epochs": epochs, "batch_size": 99}
    done = run({"name": "fedgh"} | options, clients, 3)
    z, of_class = means_of(clients)
    head = start_of(done)
    for _ in range(3 * epochs):
        head = head - 0.3 * z.T @ (softmax(z @ head, axis=1) - of_class) / len(z)
    np.testing.assert_allclose(head_of(done), head, atol=3e-6)


def test_many_steps_reach_logistic_regression_on_class_means() -> None:
    rng = np.random.default_rng(5)
    x = [rng.normal(size=(12, 3)) for _ in range(15)]
    clients = Clients(x, [rng.integers(0, CLASSES, 12) for _ in x])  # classes overlap
    options = {"server_lr": 1.0, "server_epochs": 2000, "batch_size": 99}
    done = run({"name": "fedgh"} | options, clients, 2)
    z, of_class = means_of(clients)
    wanted = LogisticRegression(C=np.inf, tol=1e-9).fit(z[:, :-1], of_class.argmax(1))
    probabilities = softmax(z @ head_of(done), axis=1)
    np.testing.assert_allclose(probabilities, wanted.predict_proba(z[:, :-1]), atol=1e-4)


def test_small_batches_visit_every_mean_once_in_a_pass() -> None:
    clients = Clients.drawn(9, 14, 20)
    alone, together = (
        run({"name": "fedgh", "server_lr": 1e-4, "batch_size": size}, clients, 1)
        for size in (1, 99)
    )
    z, _ = means_of(clients)
    start = start_of(alone)
    steps = head_of(alone) - start
    # to first order, a pass of single means is as many times the step of their mean
    np.testing.assert_allclose(steps, len(z) * (head_of(together) - start), atol=5e-6)
