"""Every option of training obeys the laws: stacks, workers, resuming and wires do not matter."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedgist
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Phase
from fedgist.core.training import Optimizer
from fedgist.core.tree import Tree
from fedgist.engines.method_check import check_loss_settings, check_method
from fedgist.engines.plans.plan import Plan
from fedgist.errors import InputError, MethodError, RecipeError
from fedgist.testing import LAWS, Law, MethodUnderTest, laws
from fedgist.testing.small_worlds import ALONE, federation, trace, world
from fedgist.training import local_training
from fedgist.world.world import World
from method_objects import METHOD_OBJECTS, each

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "weight_decay": 0.3},
    "cosine": {"lr_schedule": {"name": "cosine", "warmup_rounds": 1, "min_factor": 0.1}},
    "step": {"lr_schedule": {"name": "step", "step_rounds": 1, "step_factor": 0.5}},
    "clip_norm": {"clip_norm": 0.3},
    "class_weights": {"class_weights": "balanced"},
    "label_smoothing": {"label_smoothing": 0.2},
    "memory": {"optimizer": "momentum", "optimizer_memory": "run"},
    "bfloat16": {"precision": "bfloat16"},
}
TOGETHER = [name for name in OPTIONS if name not in {"adamw", "step", "memory", "bfloat16"}]
ALL = {key: value for name in TOGETHER for key, value in OPTIONS[name].items()}
SUBJECTS = {
    name: MethodUnderTest(METHOD_OBJECTS[name], {"train": ALL})
    for name in ("fedlog", "fedprox", "relay", "two_stages")
}
EVERY = pytest.mark.parametrize("option", OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name.split()[0])
@pytest.mark.parametrize("name", each(SUBJECTS, ("two_stages",)))
def test_laws_hold_with_all_options_at_once(name: str, law: Law) -> None:
    law.try_on(SUBJECTS[name])


@pytest.mark.slow
@EVERY
def test_an_option_changes_the_result_and_stacks_and_workers_do_not(option: str) -> None:
    options = OPTIONS[option]
    alone = trace(world("local", train=options), ALONE)
    coarse = 3 * torch.finfo(torch.bfloat16).eps / laws.EPSILON
    roundings = coarse if option == "bfloat16" else laws.ROUNDINGS
    for size in (2, 5):
        together = trace(world("local", train=options), Plan(size)).state
        assert laws.close(alone.state, together, roundings)
    one, two = (trace(world("local", train=options, engine={"workers": n})) for n in (1, 2))
    assert laws.equal(one.state, two.state)
    assert one.rounds == two.rounds
    assert not laws.close(one.state, trace(world("local")).state, 10 * laws.ROUNDINGS)


def by_torch(one_world: World, client: int, rounds: int) -> dict[str, Tensor]:
    """A client's parameters by torch's own optimizer, scheduler, clipping and loss."""
    side, population = one_world.server, one_world.population
    (start,) = side.task.starts.values()
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    names = list(start.params)
    for p, value in zip(module.parameters(), start.params.values(), strict=True):
        p.data.copy_(value)
    batch = population.examples.batch(population.train.table([client]))
    x, y = batch.x[0], batch.y[0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.3)
    at_once = torch.optim.lr_scheduler
    warm = at_once.LinearLR(optimizer, start_factor=1 / 2, total_iters=1)
    cosine = at_once.CosineAnnealingLR(optimizer, rounds - 1, eta_min=0.005)
    rates = at_once.SequentialLR(optimizer, [warm, cosine], milestones=[1])
    counts = y.bincount(minlength=3)
    weights = len(y) / ((counts > 0).sum() * counts.clamp(min=1))
    for _ in range(rounds):
        optimizer.state.clear()  # it lives for a round
        for _ in range(2):
            optimizer.zero_grad()
            rows = F.cross_entropy(module(x), y, reduction="none", label_smoothing=0.2)
            (weights[y] * rows).mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            optimizer.step()
        rates.step()
    return {n: p.detach() for n, p in zip(names, module.parameters(), strict=True)}


def test_all_options_together_are_torchs_own_client_by_client() -> None:
    # rejects: the gradient of a whole stack clipped, class weights of all clients' rows, and a
    # schedule that moves with steps
    options = {**ALL, "optimizer": "adamw", "weight_decay": 0.3, "batch_size": 20}
    one_world = world("local", train=options)
    state = trace(one_world, Plan(5)).state
    for client in range(5):
        for name, expected in by_torch(one_world, client, 3).items():
            ours = state[f"clients/mlp/net/{name}"][client]
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class OwnRate(Method):
    """A method whose phase has an optimizer of its own, and which is fine-tuned before a test."""

    lr: float = 0.5
    trains: bool = True

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(optimizer=Optimizer("sgd", lr=self.lr)),) if self.trains else ()

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(steps=1),)


def test_a_schedule_multiplies_the_rate_of_a_phase_but_not_of_one_before_a_test() -> None:
    halved = {"lr_schedule": {"warmup_rounds": 1}}
    scheduled = trace(world(OwnRate(0.5), train=halved), rounds=1).state
    assert laws.equal(scheduled, trace(world(OwnRate(0.25)), rounds=1).state)
    untrained = OwnRate(trains=False)
    tested = [trace(world(untrained, train=t), rounds=1).rounds for t in ({}, halved)]
    assert tested[0] == tested[1]
    assert "eval/client/finetuned_accuracy_mean" in tested[0][0]


@dataclass(frozen=True)
class OwnLoss(Method):
    """A method that learns by a loss of its own."""

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Tree, ctx: Context) -> Tensor:
        far = (net(batch.x) - F.one_hot(batch.y, 3)).square().sum(1)
        return torch.where(batch.mask, far, 0.0).sum() / batch.mask.sum().clamp(min=1)


@pytest.mark.parametrize("option", ["class_weights", "label_smoothing"])
@pytest.mark.parametrize("method", METHOD_OBJECTS)
def test_every_method_heeds_the_settings_of_the_tasks_loss(method: str, option: str) -> None:
    subject = MethodUnderTest(METHOD_OBJECTS[method], {"train": OPTIONS[option]})
    if (method, option) == ("fedrod", "label_smoothing"):
        # seen: the smoothed share of a class that a client lacks grew without end
        with pytest.raises(InputError, match=r"label_smoothing = 0\.2: FedROD's balanced loss"):
            subject.world()
        return
    fed = federation(subject.world())
    if (method, option) == ("analytic", "label_smoothing"):  # it has sums, and no loss
        with pytest.raises(MethodError, match=r"label_smoothing = 0\.2 would have no effect"):
            check_loss_settings(subject.method, fed.task, fed.server, fed.context("").key)
        return
    check_loss_settings(subject.method, fed.task, fed.server, fed.context("").key)


@pytest.mark.parametrize("method", ["fedala", "fedmd", "cs_fl", "fedavg"])
def test_optimizers_that_cannot_live_for_the_run_are_refused(method: str) -> None:
    # seen: FedMD's digest went on with the momentum of training, which itself began anew
    options = {"first_phase": 0.5} if method == "cs_fl" else {}
    fed = federation(world(method, options=options, train=OPTIONS["memory"] | {"num_rounds": 4}))
    check = functools.partial(check_method, fed.method, fed.task, fed.server, fed.context("").key)
    if method == "fedavg":
        check()
        return
    with pytest.raises(MethodError, match=r"optimizer_memory = 'run': the phases of .* in round"):
        check()


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_late_uploads_are_refused_where_clients_count_on_each(method: str) -> None:
    # seen: SCAFFOLD's control variates were off by 1.8 times their size, and accuracy fell by half
    about = {"method": {"name": method}, "clients": {"num_clients": 3, "delay": 0.3}}
    recipe = about | {"data": {"train_rows": 60}, "train": {"num_rounds": 1, "optimizer": "sgd"}}
    with pytest.raises(RecipeError, match=r"clients.delay = 0\.3: late uploads are dropped"):
        fedgist.run(recipe | {"engine": {"workers": 1}})


@pytest.mark.parametrize("method", [OwnLoss(), OwnRate(trains=False)])
def test_a_method_that_would_ignore_a_setting_of_the_tasks_loss_is_refused(method: Method) -> None:
    for option, says in {
        "class_weights": "train.class_weights = 'balanced' would have no effect: Own",
        "label_smoothing": r"train.label_smoothing = 0.2 would have no effect: Own",
    }.items():
        fed = federation(world(method, train=OPTIONS[option]))
        with pytest.raises(MethodError, match=says) as caught:
            check_loss_settings(method, fed.task, fed.server, fed.context("").key)
        assert "\n" not in str(caught.value)
    plain = federation(world(method))
    check_loss_settings(method, plain.task, plain.server, plain.context("").key)


SGDS: dict[str, dict[str, Any]] = {
    "one step": {"local_epochs": 1},
    "steps of some": {"local_epochs": 2, "batch_size": 4},
    "decay and clipped": {"weight_decay": 0.3, "clip_norm": 0.3},
    "counted": {"optimizer_memory": "run"},
    "anew each epoch": {"optimizer_memory": "epoch", "local_epochs": 3},
}


@pytest.mark.parametrize("option", SGDS)
@pytest.mark.parametrize("method", ["fedavg", "lg_fedavg"])
def test_a_model_that_clients_share_is_trained_as_copies_of_it(
    method: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rejects a first step of the wrong sign, without decay or uncounted; a write to the server's
    # model; and a step of parameters that the clients keep, which differ
    def small() -> World:
        return world(method, train={"optimizer": "sgd", "lr": 0.1, **SGDS[option]})

    shared: list[bool] = []
    rule = local_training._are_shared

    def noted(*about: Any) -> bool:
        shared.append(rule(*about))
        return shared[-1]

    monkeypatch.setattr(local_training, "_are_shared", noted)
    found = trace(small(), Plan(5))
    assert set(shared) == {method == "fedavg"}
    monkeypatch.setattr(local_training, "_are_shared", lambda *_: False)
    expected = trace(small(), Plan(5))
    assert laws.equal(found.state, expected.state)
    assert found.rounds == expected.rounds
