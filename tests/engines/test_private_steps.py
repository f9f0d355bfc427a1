"""DP-SGD against per-row gradients computed one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from fedgist.core import random
from fedgist.core.method import Phase
from fedgist.core.privacy import Privacy, PrivateSteps
from fedgist.data.dataset import Dataset
from fedgist.engines.plans.plan import Plan
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import ALONE, SIZES, federation, local_engine, world, world_of
from fedgist.training import local_training, private_steps, timetable
from fedgist.training.cohort import Clients, Cohort
from fedgist.world import privacy_budget
from fedgist.world.world import World
from small_cohorts import asked

ALL_IN, SOME = 1.0, 0.5


def private_world(steps: PrivateSteps, **sections: Any) -> World:
    """A world whose bodies learn in private with just this noise."""
    train = {"batch_size": 4, "lr": 0.1, "local_epochs": 1, **sections.pop("train", {})}
    small = world("fedlog", train=train, **sections)
    task = replace(small.server.task, privacy=Privacy("record", "central", 10.0, 0.0, steps))
    return replace(small, server=replace(small.server, task=task))


def trained(small: World, plan: Plan) -> tuple[Cohort, Clients, Clients]:
    """All clients before and after one round's training."""
    cohort, before = asked(small, plan)
    after, *_ = local_training.train(cohort, before, small.server.method.phases(cohort.ctx))
    return cohort, before, after


def gradient_of_row(clients: Clients, client: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """By plain autograd on one row: independent of stacks, masks and keys."""
    params = {n: p[client].clone().requires_grad_() for n, p in clients.net.params.items()}
    z = torch.relu(x @ params["1.weight"].T + params["1.bias"])
    loss = F.cross_entropy((z @ params["4.weight"].T + params["4.bias"]).unsqueeze(0), y.view(1))
    names = ["1.weight", "1.bias"]
    found = torch.autograd.grad(loss, [params[n] for n in names])
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("grid", [0.0, 2.0**-30])
@pytest.mark.parametrize("clip", [1e9, 0.4])
def test_a_step_is_the_sum_of_clipped_gradients_by_the_public_batch_size(
    clip: float, grid: float
) -> None:
    # rejects clipping the mean, dividing by the rows drawn, and clipping layer by layer
    small = private_world(PrivateSteps(clip, 0.1 * grid, ALL_IN, grid))  # the system's would be 0
    cohort, before, after = trained(small, Plan(5))
    for k, client in enumerate(cohort.ids.tolist()):
        rows = small.population.train[client]
        x, y = (small.data.x[rows] - 0.5) / 2.0, small.data.y[rows]
        total = {n: torch.zeros_like(before.net.params[n][k]) for n in ("1.weight", "1.bias")}
        for row in range(len(rows)):
            own = gradient_of_row(before, k, x[row], y[row])
            norm = math.sqrt(sum(float(g.square().sum()) for g in own.values()))
            for name, g in own.items():
                total[name] += g * min(1.0, clip / max(norm, 1e-12))
        for name, g in total.items():
            expected = before.net.params[name][k] - 0.1 * g / 4
            torch.testing.assert_close(after.net.params[name][k], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("size", [2, 5])
def test_stacked_and_alone_agree_with_noise_and_drawn_rows(size: int) -> None:
    steps = PrivateSteps(1.0, 0.3, SOME)
    alone: dict[int, Tensor] = {}
    for plan in (ALONE, Plan(size)):
        small = private_world(steps)
        engine = local_engine(small, plan)
        fed = federation(small, plan, lambda *_: engine)  # noqa: B023
        fed.advance()
        weights = engine.host.stores["mlp"].state()["net/1.weight"]
        if plan is ALONE:
            alone = dict(enumerate(weights.clone()))
        else:
            for client, expected in alone.items():
                torch.testing.assert_close(weights[client], expected, atol=2e-6, rtol=0)


def test_an_empty_draw_is_noise_alone_of_the_right_size() -> None:
    # rejects the same noise in each step
    small = private_world(PrivateSteps(1.0, 5.0, SOME), train={"lr": 1.0, "batch_size": 4})
    cohort, before = asked(small, Plan(5))
    nothing = torch.full_like(cohort.table, -1)
    empty = replace(cohort, table=nothing)
    draws = []
    for seed in range(12):
        keyed = replace(empty, ctx=replace(cohort.ctx, key=random.key(seed)))
        after, losses, _ = local_training.train(
            keyed, before, small.server.method.phases(keyed.ctx)
        )
        assert not losses.any()
        moved = after.net.params["1.weight"] - before.net.params["1.weight"]
        draws.append(moved.flatten())
    # two steps (1 / rate) of deviation 5 / 4 each
    noise = torch.cat(draws).double() / (math.sqrt(2) * 5.0 / 4)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.1)
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-3


def test_the_arrays_of_a_step_have_noise_of_their_own() -> None:
    keys = random.fold(random.key(3), "client", torch.arange(2))
    sums = {name: torch.zeros(2, 10_000) for name in ("weight", "bias")}
    noisy = private_steps.with_noise(sums, PrivateSteps(1.0, 3.0, SOME), keys)
    draws = torch.cat([noisy["weight"], noisy["bias"]]).double() / 3  # of two clients each
    assert float((torch.corrcoef(draws) - torch.eye(4)).abs().max()) < 0.05
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3


def rows_of_steps(small: World) -> tuple[Cohort, list[Tensor]]:
    """All clients, and their rows in each step of a round."""
    cohort, _ = asked(small, Plan(5))
    (phase,) = small.server.method.phases(cohort.ctx)
    return cohort, list(timetable.batches_of(cohort, phase, cohort.keys, "train-0"))


def test_each_step_draws_its_own_rows() -> None:
    # rejects one draw for all steps, which amplifies nothing
    small = private_world(PrivateSteps(1.0, 0.1, SOME), train={"local_epochs": 50})
    cohort, steps = rows_of_steps(small)
    assert len(steps) == 100
    for place, table in enumerate(cohort.table):
        for row in table[table >= 0]:
            drawn = torch.stack([(rows[place] == row).any() for rows in steps]).double()
            assert float(drawn.mean()) == pytest.approx(SOME, abs=0.2)
            again = float((drawn[1:] * drawn[:-1]).mean())  # in two steps one after the other
            assert again == pytest.approx(SOME**2, abs=0.2)


def test_steps_take_the_place_of_whole_passes_over_the_rows() -> None:
    # rejects a number that is rounded down: rows would be seen less often than asked for
    steps = PrivateSteps(1.0, 1.0, 0.4)
    assert [steps.count(epochs) for epochs in (0, 1, 2, 3)] == [0, 3, 5, 8]


def test_all_steps_that_are_taken_are_charged() -> None:
    # rejects steps of the first epoch alone
    small = private_world(PrivateSteps(1.0, 1.0, SOME), train={"local_epochs": 3, "num_rounds": 1})
    charged = privacy_budget._private_steps(small.server.method, small.server.task)
    assert charged == (0, len(rows_of_steps(small)[1])) == (0, 6)


@pytest.mark.parametrize("grid", [0.0, 2.0**-12])
def test_rows_are_drawn_by_the_seed_or_by_the_system(grid: float) -> None:
    small = private_world(PrivateSteps(1.0, 1.0, SOME, grid))
    task = small.server.task
    assert task.privacy is not None
    task = replace(task, privacy=replace(task.privacy, grid=grid))
    cohort, _ = asked(replace(small, server=replace(small.server, task=task)), Plan(5))
    first, second = (cohort.private_draws(100, "rows") for _ in range(2))
    assert first.shape == (5, 100)
    assert torch.equal(first, second) == (not grid)


def test_the_loss_of_a_round_is_the_mean_over_the_rows_seen() -> None:
    # rejects the mean over batches: the last one of 11 rows has 3
    small = world("fedlog", train={"batch_size": 4, "lr": 1e-12, "local_epochs": 1})
    cohort, before = asked(small, Plan(5))
    _, losses, _ = local_training.train(cohort, before, small.server.method.phases(cohort.ctx))
    for k, client in enumerate(cohort.ids.tolist()):
        rows, params = small.population.train[client], before.net.params
        z = torch.relu(
            (small.data.x[rows] - 0.5) / 2.0 @ params["1.weight"][k].T + params["1.bias"][k]
        )
        logits = z @ params["4.weight"][k].T + params["4.bias"][k]
        assert float(losses[k]) == pytest.approx(float(F.cross_entropy(logits, small.data.y[rows])))


def test_rows_are_drawn_one_by_one() -> None:
    table = torch.arange(30).repeat(400, 1)
    table[:, 25:] = -1
    keys = random.fold(random.key(1), "client", torch.arange(400))
    draws = random.uniform(keys.unsqueeze(1), (1, 30))
    rows = private_steps.drawn_rows(table, draws, 0.2)
    counts = (rows >= 0).sum(1)
    assert abs(float(counts.double().mean()) - 5.0) < 0.3
    assert abs(float(counts.double().var()) - 4.0) < 0.8, "binomial, not of one size"
    often = torch.bincount(rows[rows >= 0], minlength=25).double() / 400
    assert float((often - 0.2).abs().max()) < 0.08
    assert all(len(set(r[r >= 0].tolist())) == int((r >= 0).sum()) for r in rows)
    assert private_steps.drawn_rows(table[:, :0], draws[:, :0], 0.2).shape == (400, 1)


def test_gradients_do_not_depend_on_how_many_rows_are_done_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = private_world(PrivateSteps(0.5, 0.1, SOME))
    whole = trained(small, Plan(5))[2].net.params["1.weight"]
    monkeypatch.setattr(private_steps, "GRADIENTS_AT_ONCE", 1)
    pieces = trained(small, Plan(5))[2].net.params["1.weight"]
    torch.testing.assert_close(whole, pieces, atol=1e-6, rtol=0)


def test_clients_differ_in_rows_but_not_in_steps() -> None:
    small = private_world(PrivateSteps(0.5, 0.0, SOME), train={"optimizer": "adam"})
    cohort, _, _ = trained(small, Plan(5))
    assert len(set((cohort.table >= 0).sum(1).tolist())) == len(set(SIZES))
    assert timetable.steps_per_epoch(cohort, Phase()).tolist() == [2] * 5


@pytest.mark.parametrize("plan", [Plan(3), Plan(3, convolutions="each"), ALONE])
def test_convolutions_without_clipping_and_noise_take_the_plain_step(plan: Plan) -> None:
    # all rows, a batch size of as many: the mean gradient of a step without privacy
    draw = torch.Generator().manual_seed(0)
    rows = 6
    x = torch.randn(3 * rows, 1, 28, 28, generator=draw)
    y = torch.arange(3 * rows) % 3
    data = Dataset("random", x, y, x[:3], y[:3], 3, mean=(0.0,), std=(1.0,))
    split = list(torch.split(torch.arange(3 * rows), rows))
    given = {"data": data, "clients": split, "clients_test": [torch.arange(3)] * 3}
    sections: dict[str, Any] = {
        "clients": {"num_clients": 3},
        "model": {"name": "fedlog_mnist", "dropout": 0.0},
        "train": {"batch_size": rows, "lr": 0.1, "local_epochs": 1},
        "given": given,
    }
    moved = []
    for privacy in (None, Privacy("record", "central", 1e3, 0.0, PrivateSteps(1e9, 0.0, ALL_IN))):
        small = convolutional_world(sections)
        task = replace(small.server.task, privacy=privacy)
        small = replace(small, server=replace(small.server, task=task))
        cohort, before, after = trained(small, plan)
        moved.append(after.net.params[next(iter(before.net.params))][:1])
        assert (len(cohort.ids) == 1) == (plan is ALONE)
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=0)


def convolutional_world(sections: dict[str, Any]) -> World:
    raw = {k: v for k, v in sections.items() if k != "given"}
    raw |= {"method": {"name": "fedlog"}, "engine": {"workers": 1}}
    raw["train"] = raw["train"] | {"optimizer": "sgd", "num_rounds": 2}
    return world_of(make(raw), Overrides(**sections["given"]))
