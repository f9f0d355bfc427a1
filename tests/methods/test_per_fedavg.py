"""Per-FedAvg beside a loop in NumPy: the gradient after a step, and its bend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from drifting_clients import LR, Clients, Floats, matrix, run, shared, start_of
from fedgist.core.batch import Batch, dealt
from fedgist.core.method import Context, Nothing, Phase
from fedgist.methods.common.averaging import Weights
from fedgist.methods.per_fedavg import PerFedAvg
from fedgist.testing.small_worlds import world

ALPHA = 0.3
FREE = {"weight_decay": 0.0}


def own_gradient(clients: Clients, parts: list[int], w: Floats, delta: float) -> Floats:
    """Line 8 of algorithm 1; ``parts`` are D, D' and D'', written as clients."""
    inner, second, third = parts

    def slope(part: int, at: Floats) -> Floats:
        return clients.gradient(part, at)

    g = slope(second, w - ALPHA * slope(inner, w))
    if not delta:
        return g
    return g - ALPHA * (slope(third, w + delta * g) - slope(third, w - delta * g)) / (2 * delta)


def batch_of(clients: Clients, order: np.ndarray[Any, Any]) -> Batch:
    x = torch.from_numpy(np.concatenate(clients.x)[order]).float()
    y = torch.from_numpy(np.concatenate(clients.y)[order])
    return Batch(x, y, torch.ones(len(y), dtype=torch.bool))


@pytest.mark.parametrize("hessian", ["none", "differences"])
def test_a_steps_gradient_is_that_of_line_8(monkeypatch: pytest.MonkeyPatch, hessian: Any) -> None:
    # rejects one batch for all parts, a bend of the other sign, and one at w'
    monkeypatch.setattr("drifting_clients.DECAY", 0.0)
    clients = Clients.drawn(7, 7, 7, seed=4)
    count = 2 if hessian == "none" else 3
    rows = [np.arange(7) + 7 * part for part in range(count)]
    done = run({"name": "per_fedavg"}, Clients.drawn(9, 9), 1, **FREE)
    side, w = done.server_run.side, start_of(done)
    (net,) = side.task.starts.values()
    params = {k: p.clone().requires_grad_() for k, p in net.params.items()}
    ctx = Context(torch.tensor(3), side.task, 1, "train", architecture="logistic")
    method = PerFedAvg(alpha=ALPHA, hessian=hessian, difference=0.01)
    batch = batch_of(clients, np.stack(rows, 1).ravel())
    loss = method.loss(replace(net, params=params), batch, Nothing(), Weights({}), ctx)
    slopes = torch.autograd.grad(loss, list(params.values()))
    found = matrix(dict(zip(params, slopes, strict=True)))
    delta = 0.0 if hessian == "none" else 0.01
    expected = own_gradient(clients, [0, 1, 2], w, delta)
    np.testing.assert_allclose(found, expected, atol=3e-5)
    for wrong in ([0, 0, 0], [1, 0, 2], [1, 1, 1]):
        assert abs(found - own_gradient(clients, wrong, w, delta)).max() > 1e-3
    other = own_gradient(clients, [0, 1, 2], w, 0.01 - delta)
    assert abs(found - other).max() > 1e-3


@pytest.mark.parametrize(
    ("alpha", "hessian"), [(0.0, "none"), (ALPHA, "none"), (ALPHA, "differences")]
)
def test_rounds_are_those_of_algorithm_1(
    monkeypatch: pytest.MonkeyPatch, alpha: float, hessian: str
) -> None:
    """On clients whose rows are alike, so that every batch is the client's whole data.

    Without an inner step it is plain averaging.
    """
    monkeypatch.setattr("drifting_clients.DECAY", 0.0)
    rows = Clients.drawn(1, 1, 1, seed=1).x
    clients = Clients([np.repeat(x, 6, 0) for x in rows], [np.repeat(y, 6) for y in range(3)])
    about = {"name": "per_fedavg", "alpha": alpha, "hessian": hessian, "difference": 0.01}
    done = run(about, clients, 3, batch_size=3, local_epochs=2, **FREE)
    w = start_of(done)
    for _ in range(3):
        local = []
        for i in range(3):
            mine = w
            for _ in range(2):  # 6 rows: a step of two or three batches in each epoch
                delta = 0.0 if hessian == "none" else 0.01
                slope = own_gradient(clients, [i, i, i], mine, delta)
                mine = mine - LR * (slope if alpha else clients.gradient(i, mine))
            local.append(mine)
        w = np.mean(local, axis=0)
    np.testing.assert_allclose(shared(done), w, atol=1e-5)


def test_a_client_tests_a_copy_after_one_step() -> None:
    clients = Clients.drawn(9, 14)
    far = run({"name": "per_fedavg", "alpha": 5.0}, clients, 1, lr=1e-9)
    near = run({"name": "per_fedavg", "alpha": 0.0}, clients, 1, lr=1e-9)
    key, tuned = "eval/client/loss_mean", "eval/client/finetuned_loss_mean"
    (first,), (second,) = far.rounds[-1:], near.rounds[-1:]
    assert first[key] == pytest.approx(second[key], rel=1e-6)
    assert second[tuned] == second[key]
    assert abs(first[tuned] - first[key]) > 0.1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_are_dealt_out_evenly(count: int) -> None:
    clients = Clients.drawn(11)
    whole = batch_of(clients, np.arange(11))
    parts = dealt(whole, count)
    sizes = [len(part.y) for part in parts]
    assert sum(sizes) == 11
    assert max(sizes) - min(sizes) <= 1
    rows, same = (torch.cat([part.x for part in some]) for some in (parts, dealt(whole, 1)))
    torch.testing.assert_close(rows[rows[:, 0].argsort()], same[same[:, 0].argsort()])


def test_a_step_needs_rows_for_all_its_batches() -> None:
    task = world("per_fedavg").server.task  # batches of 4, two epochs
    rows = torch.tensor([2, 3, 13, 15, 27])
    for batches, steps in ((1, [2, 2, 8, 8, 14]), (3, [0, 2, 2, 4, 6])):
        assert Phase(batches=batches).steps_of(rows, task, "mlp").tolist() == steps
