"""Softmax regression at clients that differ: in NumPy by hand, and as a run of a method."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.optimize
import torch
from scipy.special import log_softmax, softmax
from torch import nn

import fedgist
from fedgist.data.dataset import Dataset
from fedgist.engines.engine import EVALUATE

Floats = npt.NDArray[np.float64]
FEATURES, CLASSES = 3, 3
LR, DECAY = 0.2, 0.1


@dataclass(frozen=True)
class Clients:
    """Rows of clients whose labels follow other rules: their optima lie apart."""

    x: list[Floats]
    y: list[npt.NDArray[np.int64]]

    @staticmethod
    def drawn(*sizes: int, seed: int = 0) -> Clients:
        """Draw clients of these sizes."""
        rng = np.random.default_rng(seed)
        x = [rng.normal(size=(n, FEATURES)) + rng.normal(size=FEATURES) for n in sizes]
        rules = [rng.normal(size=(FEATURES, CLASSES)) * 2 for _ in sizes]
        return Clients(x, [(a @ b).argmax(1) for a, b in zip(x, rules, strict=True)])

    def gradient(self, client: int, w: Floats) -> Floats:
        """Return the gradient of a client's mean loss, with the decay: (features + 1, classes)."""
        x, y = with_one(self.x[client]), self.y[client]
        errors = softmax(x @ w, axis=1) - np.eye(CLASSES)[y]
        return x.T @ errors / len(x) + DECAY * w

    def optimum(self) -> Floats:
        """Return where the plain mean of the clients' losses is least."""
        shape = (FEATURES + 1, CLASSES)

        def mean_loss(flat: Floats) -> tuple[float, Floats]:
            w = flat.reshape(shape)
            losses = [
                -log_softmax(with_one(x) @ w, axis=1)[np.arange(len(y)), y].mean()
                for x, y in zip(self.x, self.y, strict=True)
            ]
            slope = np.mean([self.gradient(i, w) for i in range(len(self.x))], axis=0)
            return float(np.mean(losses) + DECAY / 2 * (w**2).sum()), slope.ravel()

        start = np.zeros(shape).ravel()
        found = scipy.optimize.minimize(mean_loss, start, jac=True, tol=1e-13)
        return np.asarray(found.x).reshape(shape)

    def data(self) -> tuple[Dataset, list[torch.Tensor]]:
        """Return all rows, and each client's row numbers."""
        x, y = torch.from_numpy(np.concatenate(self.x)).float(), np.concatenate(self.y)
        ends = np.cumsum([0, *map(len, self.x)])
        rows = [torch.arange(a, b) for a, b in itertools.pairwise(ends)]
        labels = torch.from_numpy(y)
        return Dataset("drift", x, labels, x[:6], labels[:6], CLASSES), rows


def with_one(x: Floats) -> Floats:
    """Return rows with a 1 for the bias."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def run(method: dict[str, Any], clients: Clients, rounds: int, **train: Any) -> fedgist.Result:
    """Run a method with full batches and plain steps of softmax regression."""
    data, rows = clients.data()
    about = {"num_rounds": rounds, "lr": LR, "optimizer": "sgd", "weight_decay": DECAY}
    recipe = {
        "method": method,
        "model": {"name": "logistic"},
        "data": {"normalize": "none"},
        "train": about | {"batch_size": max(map(len, rows))} | train,
        "evaluate": {"every": rounds},
        "engine": {"workers": 1, "cohort_size": len(rows)},
    }
    tests = [torch.arange(6)] * len(rows)
    return fedgist.run(recipe, data=data, clients=rows, clients_test=tests)


def matrix(arrays: Any) -> Floats:
    """Return a logistic model's arrays as (features + 1, classes)."""
    weight, bias = (arrays[name].double().numpy() for name in ("1.weight", "1.bias"))
    return np.concatenate([weight.T, bias[None]], axis=0)


def shared(done: fedgist.Result) -> Floats:
    """Return the server's only model."""
    server_run = done.server_run
    ctx = server_run.context(EVALUATE, server_run.round)
    (net,) = server_run.method.models(server_run.server, ctx).values()
    return matrix(net.params)


def personal(done: Any, client: int) -> Floats:
    """Return the model that a client predicts with, from its logits at unit vectors and at 0."""
    with torch.no_grad():
        logits = done.model(client)(torch.cat([torch.eye(FEATURES), torch.zeros(1, FEATURES)]))
    bias = logits[-1].double().numpy()
    weights: Floats = (logits - logits[-1]).double().numpy()
    weights[-1] = bias
    return weights


def start_of(done: fedgist.Result) -> Floats:
    """Return the common start of a run."""
    (net,) = done.server_run.side.task.starts.values()
    return matrix(net.params)


def batch_normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A net with batch norm and without dropout."""
    layers = nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 5), nn.BatchNorm1d(5), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(5, num_classes))
