"""FedMD beside a loop in NumPy: scores of public rows, their mean, and steps toward it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedgist
from drifting_clients import DECAY, FEATURES, LR, Clients, Floats, personal, start_of, with_one
from fedgist.core.method import Context, Nothing
from fedgist.errors import RecipeError
from fedgist.methods.fedmd import Consensus, FedMD
from fedgist.testing.small_worlds import world

PUBLIC = np.random.default_rng(8).normal(size=(12, FEATURES))


def run(options: dict[str, Any], clients: Clients, rounds: int, **train: Any) -> fedgist.Result:
    """Run FedMD with full batches and plain steps of softmax regression."""
    data, rows = clients.data()
    recipe = {
        "method": {"name": "fedmd"} | options,
        "model": {"name": "logistic"},
        "data": {"normalize": "none"},
        "train": {"num_rounds": rounds, "lr": LR, "optimizer": "sgd", "weight_decay": DECAY}
        | {"batch_size": max(map(len, rows))}
        | train,
        "evaluate": {"every": rounds},
        "engine": {"workers": 1, "cohort_size": len(rows)},
    }
    tests = [torch.arange(6)] * len(rows)
    public = torch.from_numpy(PUBLIC).float()
    return fedgist.run(recipe, data=data, clients=rows, clients_test=tests, public=public)


def test_one_round_is_scores_and_a_mean_and_the_next_digests_it() -> None:
    clients = Clients.drawn(9, 14, 20)
    done = run({}, clients, 1)
    start = start_of(done)
    x = with_one(PUBLIC)
    local = [start - LR * clients.gradient(i, start) for i in range(3)]
    order = FedMD().chosen(torch.tensor(1.0), done.server_run.side.task).numpy()
    mean = np.mean([x @ w for w in local], axis=0)[order]
    found = done.server_run.server
    np.testing.assert_allclose(found.mean.double().numpy(), mean, atol=3e-6)
    assert float(found.number) == 1.0
    for client, w in enumerate(local):
        np.testing.assert_allclose(personal(done, client), w, atol=3e-6)


def test_a_step_of_digestion_is_toward_the_consensus() -> None:
    # rejects squares, rows and scores that do not belong together, and softmax before the mean
    done = run({}, Clients.drawn(9, 14), 1)
    task, method = done.server_run.side.task, FedMD(rows=5, digest_batch_size=64)
    (net,) = task.starts.values()
    ctx = Context(torch.tensor(3), task, 2, "train", architecture="logistic")
    number = torch.tensor(1.0)
    rows, scores = method.chosen(number, task), torch.randn(5, 3)
    params = {k: p.clone().requires_grad_() for k, p in net.params.items()}
    batch: Any = None
    down = Consensus(scores, number)
    value = method.digest(replace(net, params=params), batch, Nothing(), down, ctx)
    # 5 draws of 5 rows: which ones, is the key's; each value is a mean over drawn rows
    each = (net(task.public_rows.seen(rows)) - scores).abs().mean(1)
    assert each.min() - 1e-6 <= value <= each.max() + 1e-6
    mean_of_many = np.mean(
        [
            float(method.digest(net, batch, Nothing(), down, replace(ctx, key=torch.tensor(k))))
            for k in range(400)
        ]
    )
    assert mean_of_many == pytest.approx(float(each.mean()), rel=0.05)
    unknown = Consensus(scores, torch.tensor(0.0))
    assert method.digest(net, batch, Nothing(), unknown, ctx) == 0


def test_digestion_brings_clients_together() -> None:
    clients = Clients.drawn(9, 14, 20)

    def apart(epochs: int) -> float:
        done = run({"digest_epochs": epochs, "digest_batch_size": 4}, clients, 4)
        models: list[Floats] = [personal(done, i) for i in range(3)]
        return float(max(abs(with_one(PUBLIC) @ (models[0] - m)).max() for m in models))

    assert apart(30) < 0.7 * apart(1)


def test_rows_of_rounds_differ_and_do_not_repeat() -> None:
    task = world("fedmd").server.task
    method, count = FedMD(rows=7), len(task.public_rows)
    drawn = [method.chosen(torch.tensor(float(n)), task).tolist() for n in (1, 2, 2)]
    assert drawn[1] == drawn[2] != drawn[0]
    assert all(len(set(rows)) == 7 and max(rows) < count for rows in drawn)
    with pytest.raises(RecipeError, match=rf"method\.rows = {count + 1}: there are {count} public"):
        world("fedmd", options={"rows": count + 1})
