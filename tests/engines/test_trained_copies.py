"""Copies of the models that are tested after the local training of the next round."""

from __future__ import annotations

import pytest
import torch

from fedgist.testing.small_worlds import (
    ALONE,
    PAIRS,
    Trace,
    federation,
    local_engine,
    loopback,
    trace,
    world,
)

TRAINED = "eval/client/trained_accuracy_mean"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedlog", "local"])
def test_they_are_tested_when_asked_for_and_change_nothing(name: str) -> None:
    plain = trace(world(name), PAIRS)
    tested = trace(world(name, evaluate={"trained_every": 2}), PAIRS)
    assert [TRAINED in line for line in tested.rounds] == [False, True, True]
    assert all(torch.equal(plain.state[k], tested.state[k]) for k in plain.state)
    rest = [{k: v for k, v in x.items() if "trained_" not in k} for x in tested.rounds]
    assert rest == plain.rounds
    for other in (trace(world(name, evaluate={"trained_every": 2}), ALONE), wired(name)):
        for one, two in zip(tested.rounds, other.rounds, strict=True):
            assert one.get(TRAINED) == pytest.approx(two.get(TRAINED))


def wired(name: str) -> Trace:
    return trace(world(name, evaluate={"trained_every": 2}), ALONE, make_engine=loopback)


def test_they_are_what_one_more_round_of_plain_gradient_descent_makes() -> None:
    # FedAvg with one batch of all rows: a copy is one step from the average, on the client's rows
    train = {"lr": 0.3, "local_epochs": 1, "batch_size": 100, "num_rounds": 1}
    small = world("fedavg", train=train, evaluate={"trained_every": 1})
    fed = federation(small, PAIRS, local_engine)
    line, _ = fed.advance()
    (weights,) = fed.server.weights.values()
    right = []
    for client in range(5):
        params = {k: v.clone().requires_grad_() for k, v in weights.arrays.items()}
        rows, tests = small.population.train[client], small.population.test[client]

        def logits(x: torch.Tensor, p: dict[str, torch.Tensor] = params) -> torch.Tensor:
            z = torch.relu(((x - 0.5) / 2) @ p["1.weight"].T + p["1.bias"])
            return z @ p["4.weight"].T + p["4.bias"]

        y = small.data.y[rows]
        loss = torch.nn.functional.cross_entropy(logits(small.data.x[rows]), y)
        grads = torch.autograd.grad(loss, list(params.values()))
        stepped = {k: p - 0.3 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        found = logits(small.data.x_test[tests], stepped).argmax(1)
        right.append(float((found == small.data.y_test[tests]).double().mean()))
    assert line[TRAINED] == pytest.approx(sum(right) / 5)
