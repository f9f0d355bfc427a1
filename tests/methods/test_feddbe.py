"""FedDBE against torch.optim on plain modules with a bias on their features."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core import random
from fedgist.core.method import Batch, Context, Task, Training
from fedgist.core.nets.net import split_head
from fedgist.core.objectives.classes import Classes
from fedgist.engines.plans.plan import Plan
from fedgist.methods.common.averaging import Weights
from fedgist.methods.feddbe import Bias, Common, FeatureSum, FedDBE
from fedgist.models import MODELS
from fedgist.testing.small_worlds import SIZES, federation, trace, world
from fedgist.world.world import World
from plain_clients import EPOCHS, EVERYBODY, Plain, held, two_models

KAPPA = 3.0
Far = Callable[[Tensor, Tensor, Tensor], Tensor]  # of features, bias and consensus


def mean_squared(z: Tensor, bias: Tensor, consensus: Tensor) -> Tensor:
    del bias
    return F.mse_loss(z.mean(0), consensus)


def plain_rounds(
    subject: World, far: Far = mean_squared, consensus_of: str = "trained", bias: str = "as_net"
) -> tuple[Plain, list[Tensor]]:
    """Return the clients after the rounds, and their biases."""
    plain, before = Plain(subject), Plain(subject)
    biases = [torch.zeros(5, requires_grad=True) for _ in EVERYBODY]
    consensus: dict[int, Tensor] = {}
    if consensus_of == "trained":
        for k in EVERYBODY:
            before.learn(k, slice(None), EPOCHS)
    for group in before.within():
        z = torch.cat([before.features(k, before.rows[k][0]).detach() for k in group])
        consensus |= {k: z.mean(0) for k in group}

    def work(k: int) -> None:
        def loss(z: Tensor, y: Tensor) -> Tensor:
            task_loss = F.cross_entropy(plain.layers[k][-1](z + biases[k]), y)
            return task_loss + KAPPA * far(z, biases[k], consensus[k])

        also = {"also" if bias == "as_net" else "without_momentum": [biases[k]]}
        plain.learn(k, slice(None), EPOCHS, loss, **also)

    return plain.rounds(work, slice(None), plain.within()), biases


@pytest.mark.parametrize("consensus", ["trained", "start"])
@pytest.mark.parametrize("bias", ["sgd", "as_net"])
def test_net_and_bias_learn_together_by_the_regularized_loss(consensus: str, bias: str) -> None:
    subject = two_models("feddbe", kappa=KAPPA, consensus=consensus, bias=bias)
    plain, biases = plain_rounds(subject, consensus_of=consensus, bias=bias)
    other = "start" if consensus == "trained" else "trained"
    assert not plain_rounds(subject, consensus_of=other, bias=bias)[0].agrees(held(subject))
    for plan in (Plan(5), Plan(1, stack=False)):
        found = held(subject, plan)
        assert plain.agrees(found)
        for client, own in zip(found, biases, strict=True):
            assert torch.allclose(client.own.bias, own, atol=2e-5)


WRONG: list[Far] = [
    lambda z, bias, c: (z.mean(0) - c).square().sum(),  # a sum over features
    lambda z, bias, c: F.mse_loss((z + bias).mean(0), c),  # of the personal features
    lambda z, bias, c: (z - c).square().mean(),  # of each row
]


@pytest.mark.parametrize("far", WRONG)
def test_other_regularizations_are_rejected(far: Far) -> None:
    subject = two_models("feddbe", kappa=KAPPA)
    assert not plain_rounds(subject, far)[0].agrees(held(subject))


def test_the_bias_is_added_before_the_head_in_predictions() -> None:
    subject = two_models("feddbe", kappa=KAPPA)
    plain, biases = plain_rounds(subject)
    x = (subject.data.x_test - 0.5) / 2.0
    losses = []
    for k in EVERYBODY:
        rows = subject.population.test[k]
        logits = plain.layers[k][-1](plain.features(k, x[rows]) + biases[k])
        losses.append(float(F.cross_entropy(logits, subject.data.y_test[rows]).detach()))
    line = trace(subject, rounds=2).rounds[-1]
    expected = math.fsum(losses) / len(losses)
    assert line["eval/client/loss_mean"] == pytest.approx(expected, rel=1e-4)


ARCH = split_head(lambda: MODELS["mlp"]((4,), 3, hidden=[5]), (4,), 3)
START = ARCH.start(1)
X = random.normal(random.key(0), (6, 4))
Y = random.integers(random.key(1), (6,), 3)
CONSENSUS = FeatureSum(torch.arange(5.0), torch.tensor(10.0))
TASK = Task((4,), 3, 1, {}, {}, Training(num_rounds=1, batch_size=8), Classes(3))
CTX = Context(random.key(0), TASK, 1, "train")


def loss_and_gradients(x: Tensor, mask: Tensor, consensus: FeatureSum) -> list[Tensor]:
    params = {n: p.clone().requires_grad_() for n, p in START.params.items()}
    bias = torch.full((5,), 0.3, requires_grad=True)
    down = Common(Weights(START.state()), consensus)
    value = FedDBE(kappa=7.0).loss(
        START.with_arrays(params), Batch(x, Y, mask), Bias(bias), down, CTX
    )
    grads = torch.autograd.grad(value, [*params.values(), bias])
    return [value.detach(), *grads]


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_absent_rows_weigh_nothing_and_one_row_is_a_batch(rows: int) -> None:
    mask = torch.arange(6) < rows
    x = torch.where(mask.unsqueeze(1), X, 1e6)
    value, *grads = loss_and_gradients(x, mask, CONSENSUS)
    params = {n: p.clone().requires_grad_() for n, p in START.params.items()}
    bias = torch.full((5,), 0.3, requires_grad=True)
    z = torch.relu(F.linear(X[:rows], params["1.weight"], params["1.bias"]))
    logits = F.linear(z + bias, params["4.weight"], params["4.bias"])
    expected = F.cross_entropy(logits, Y[:rows])
    expected = expected + 7.0 * F.mse_loss(z.mean(0), torch.arange(5.0) / 10)
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    for mine, theirs in zip(
        grads, torch.autograd.grad(expected, [*params.values(), bias]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_without_a_consensus_there_is_no_regularization() -> None:
    nobody = FeatureSum(torch.zeros(5), torch.zeros(()))
    value = loss_and_gradients(X, torch.ones(6, dtype=torch.bool), nobody)[0]
    z = START.features(X)
    assert value == pytest.approx(float(F.cross_entropy(START.logits(z + 0.3), Y)), rel=1e-5)


def test_everybody_tells_its_mean_in_round_0_and_what_is_sent_is_counted() -> None:
    subject = world("feddbe", train={"fraction_train": 0.4})
    fed = federation(subject)
    zero, _ = fed.do_round(0)
    assert zero["comm/up_bytes"] == 4 * (5 + 1) * len(SIZES)
    assert zero["comm/down_bytes"] == 0
    one, _ = fed.advance()
    numbers = 5 * 6 + 5 + 3 * 5 + 3
    assert one["comm/up_bytes"] == 4 * (numbers + 1) * 2  # two fifths of the clients
    assert one["comm/down_bytes"] == 4 * (numbers + 5 + 1) * 2
