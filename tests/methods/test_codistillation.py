"""Codistillation against plain torch modules: targets, frozen teachers, merged steps, resuming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.core import random
from fedgist.core.batch import NO_WORD, Batch
from fedgist.core.method import Context, Net
from fedgist.engines.plans.plan import Plan
from fedgist.engines.worker_pool import default_workers
from fedgist.errors import InputError, MethodError, RecipeError
from fedgist.methods.common import codistillation
from fedgist.methods.common.codistillation import Distillation
from fedgist.methods.merged_codist import MergedCodist, merge
from fedgist.methods.periodic_codist import PeriodicCodist
from fedgist.recipe.reading import make, read
from fedgist.runs import run_rounds as rounds
from fedgist.runs.files import checkpoint
from fedgist.runs.files.record import read_lines
from fedgist.runs.round import ServerRun
from fedgist.runs.round_record import PartialRound, RoundRecord
from fedgist.testing.small_worlds import (
    SIZES,
    blobs,
    federation,
    public_rows,
    trace,
    without_times,
    world,
    world_of,
)
from fedgist.world.world import World
from interrupted import CTRL_C, KILL, goes_on

HIDDEN = {"small": [4], "large": [8, 6], "other": [5]}
MEMBERS = {"small": None, "large": [1, 3, 4], "other": [0, 2]}
PUBLIC = len(public_rows())
PLAN = Plan(2)


def pooled(
    method: str, *, pools: Sequence[str] = ("small", "large"), given: Any = None, **options: Any
) -> World:
    tables: dict[str, dict[str, object]] = {n: {"model": "mlp", "hidden": HIDDEN[n]} for n in pools}
    for name, members in MEMBERS.items():
        if name in pools and members:
            tables[name]["clients"] = members
    sections = {"clients": {"num_clients": len(SIZES), "pools": tables}, "model": None}
    train = {"num_rounds": options.pop("rounds", 4)}
    return world(method, given=given, options=options, train=train, **sections)


def module(name: str, arrays: Mapping[str, Tensor]) -> nn.Module:
    """Return a pool's model as a plain module."""
    widths = [6, *HIDDEN[name]]
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    plain = nn.Sequential(*layers, nn.Linear(widths[-1], 3))
    values = dict(zip(plain.state_dict(), arrays.values(), strict=True))
    plain.load_state_dict({name: value.clone() for name, value in values.items()})
    return plain


def seen() -> Tensor:
    """Return the public rows as models see them."""
    return (public_rows() - 0.5) / 2.0


def distilled(
    weights: Mapping[str, Mapping[str, Tensor]],
    steps: int,
    temperatures: Mapping[str, float],
    r: float = 0.0,
    *,
    frozen: bool = True,
) -> dict[str, list[Tensor]]:
    """Return the parameters of each student after full-batch steps, by plain modules.

    With ``frozen`` false, a student learns from the others as they are when its turn comes.
    """
    first = {name: module(name, arrays) for name, arrays in weights.items()}
    students = {name: module(name, arrays) for name, arrays in weights.items()}
    out = {}
    for name, student in students.items():
        optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
        teachers = first if frozen else students
        for _ in range(steps):
            soft = [
                torch.softmax(teachers[other](seen()) / temperatures[other], 1).detach()
                for other in students
                if other != name
            ]
            own = torch.softmax(first[name](seen()), 1).detach()
            target = (1 - r) * sum(soft) / len(soft) + r * own
            log_q = torch.log_softmax(student(seen()), 1)
            loss = (target * (target.log() - log_q)).sum(1).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        out[name] = [p.detach() for p in student.parameters()]
    return out


def weights_of(fed: ServerRun) -> dict[str, dict[str, Tensor]]:
    found = fed.server.averages.weights
    return {name: {n: a.clone() for n, a in w.arrays.items()} for name, w in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "pools",
    [
        ("small", "large", "other"),
        pytest.param(("small", "large"), marks=pytest.mark.environment),
    ],
)
def test_students_learn_from_frozen_copies_of_the_others(pools: Sequence[str]) -> None:
    # rejects: the second student taught by the first's result; a mean that holds the student
    # itself; a student's own temperature in place of its teachers'
    temperatures = dict(zip(pools, (0.5, 0.8, 1.3), strict=False))
    options: dict[str, Any] = {"steps": 30, "batch_size": PUBLIC, "lr": 0.02, "final_factor": 1.0}
    options |= {"temperature": temperatures, "regularization": 0.2}
    small_world = pooled("periodic_codist", pools=pools, period=2, distillation=options)
    fed = federation(small_world, PLAN)
    fed.advance()
    before = trace(pooled("fedadam", pools=pools), PLAN, rounds=2).state
    line, _ = fed.advance()
    fed.engine.close()
    weights = {
        pool: {
            name: before[f"server/averages/weights/{pool}/arrays/{name}"]
            for name in weights_of(fed)[pool]
        }
        for pool in pools
    }
    expected, one_by_one = (
        distilled(weights, 30, temperatures, 0.2, frozen=f) for f in (True, False)
    )
    for pool, arrays in weights_of(fed).items():
        for array, right, wrong in zip(
            arrays.values(), expected[pool], one_by_one[pool], strict=True
        ):
            torch.testing.assert_close(array, right, atol=2e-4, rtol=1e-3)
            assert pool == "small" or not torch.allclose(array, wrong, atol=2e-4, rtol=1e-3)
        assert line[f"server/distillation/{pool}"] > 0


def test_moments_are_forgotten_after_a_distillation() -> None:
    small_world = pooled("periodic_codist", period=2, distillation={"steps": 2, "batch_size": 4})
    fed = federation(small_world, PLAN)
    fed.advance()
    assert all(float(m.count) == 1 for m in fed.server.moments.values())
    fed.advance()
    for moments in fed.server.moments.values():
        assert float(moments.count) == 0
        assert not any(bool(m.any()) for m in moments.first.values())
    fed.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["merged_codist", "periodic_codist"])
@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_without_a_distillation_it_is_fedadam_bit_for_bit(method: str, mu: float) -> None:
    options = {"alpha": 1.0} if method == "merged_codist" else {"period": 100}
    ours = trace(pooled(method, mu=mu, **options), PLAN).state
    fedadam, other = (trace(pooled("fedadam", mu=m), PLAN).state for m in (mu, 2.0 - mu))
    names = [name for name in fedadam if name.startswith("server/")]
    assert all(torch.equal(fedadam[name], ours[name]) for name in names)
    assert not all(torch.equal(other[name], ours[name]) for name in names)


def test_merged_steps_are_along_both_directions() -> None:
    # rejects: delta of another sign, or not as long as g
    options = {"steps": 3, "batch_size": PUBLIC, "lr": 0.02, "final_factor": 1.0}
    server = {"rule": "sgd", "lr": 0.7}
    fed = federation(pooled("merged_codist", alpha=0.3, server=server, distillation=options), PLAN)
    start = weights_of(fed)
    mean = trace(pooled("fedavg"), PLAN, rounds=1).state
    fed.advance()
    fed.engine.close()
    students = distilled(start, 3, dict.fromkeys(start, 1.0))
    for pool, old in start.items():
        g = [w - mean[f"server/weights/{pool}/arrays/{n}"] for n, w in old.items()]
        delta = [w - s for w, s in zip(old.values(), students[pool], strict=True)]
        long, as_long = (torch.cat([a.flatten() for a in arrays]).norm() for arrays in (g, delta))
        for w, gi, di, now in zip(
            old.values(), g, delta, weights_of(fed)[pool].values(), strict=True
        ):
            step = 0.3 * gi + 0.7 * di * long / as_long
            torch.testing.assert_close(now, w - 0.7 * step, atol=1e-4, rtol=1e-3)


@settings(max_examples=40)
@given(alpha=st.floats(0, 1), g=st.floats(0, 1e6), delta=st.floats(0, 1e6))
def test_merging_is_finite_and_as_long_as_the_clients_step_at_most(
    alpha: float, g: float, delta: float
) -> None:
    directions = ({"w": g * torch.tensor([0.6, 0.8])}, {"w": delta * torch.tensor([-0.8, 0.6])})
    merged = merge(*directions, alpha)["w"]
    assert torch.isfinite(merged).all()
    assert float(merged.norm()) <= g * (1 + 1e-5)


def test_alpha_moves_evenly() -> None:
    method = MergedCodist(alpha=0.4, first_alpha=1.0, alpha_rounds=3)
    assert [method.alpha_of(r) for r in (1, 2, 3, 4, 9)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.4])
    assert [len(method.stages(context(number))) for number in (1, 2)] == [1, 3]


def context(number: int) -> Context:
    return Context(random.key(0), pooled("fedadam").server.task, number, "train")


@pytest.mark.parametrize("method", ["merged_codist", "periodic_codist"])
def test_rounds_without_clients_do_no_harm(method: str) -> None:
    options: dict[str, Any] = {"distillation": {"steps": 2, "batch_size": 4}}
    options |= {"period": 2} if method == "periodic_codist" else {}
    fed = federation(pooled(method, **options), PLAN)
    fed.advance()
    before = weights_of(fed)
    fed.side = replace(fed.side, online=lambda _: [])
    line, _ = fed.advance()
    moved = {name: not torch.equal(a, before["small"][name]) for name, a in small(fed).items()}
    # a distillation that is due needs no client; a merged step needs a direction
    assert all(moved.values()) == any(moved.values()) == (method == "periodic_codist")
    assert line["clients/asked"] == 0
    fed.side = replace(fed.side, online=lambda _: list(fed.side.clients[:1]))
    fed.advance()  # the large pool is silent
    fed.engine.close()
    assert all(bool(torch.isfinite(a).all()) for a in fed.checkpoint().server.values())


def small(fed: ServerRun) -> dict[str, Tensor]:
    return weights_of(fed)["small"]


def test_a_gradient_of_zeros_moves_nothing() -> None:
    small_world = pooled("merged_codist", alpha=0.5, distillation={"steps": 2, "batch_size": 4})
    training = small_world.server.task.training.model_copy(update={"lr": 0.0})
    task = replace(small_world.server.task, training=training)
    fed = federation(replace(small_world, server=replace(small_world.server, task=task)), PLAN)
    before = weights_of(fed)
    fed.advance()
    fed.engine.close()
    for pool, arrays in weights_of(fed).items():
        for name, array in arrays.items():
            torch.testing.assert_close(array, before[pool][name], atol=2e-6, rtol=1e-5)


def test_labels_are_mixed_into_the_target_where_there_are_some() -> None:
    d = Distillation(1, labels=0.25)
    logits = {"a": torch.tensor([[0.0, 0.0, 0.0]]), "b": torch.tensor([[2.0, 0.0, -1.0]])}
    truth = torch.tensor([[0.0, 1.0, 0.0]])
    expected = 0.75 * torch.softmax(logits["b"], 1) + 0.25 * truth
    torch.testing.assert_close(d.target("a", logits, truth), expected)
    torch.testing.assert_close(d.target("a", logits, None), torch.softmax(logits["b"], 1))


def test_rows_and_their_labels_are_mixed_with_others_by_the_same_share() -> None:
    small_world = pooled("merged_codist")
    task = replace(small_world.server.task, public=small_world.population.examples)
    ctx = Context(random.key(0), task, 1, "distill-0")
    (first,) = codistillation._lessons(Distillation(1, 9, labels=0.5), [0], ctx)
    plain, none = first.batch, first.truth
    (second,) = codistillation._lessons(Distillation(1, 9, labels=0.5, mixup=2), [0], ctx)
    found, truth = second.batch, second.truth
    assert none is not None
    assert truth is not None
    partners = []
    for i in range(9):
        far = plain.x - plain.x[i]  # (9, d): towards each other row
        along = (found.x[i] - plain.x[i]) @ far.mT / far.square().sum(1).clamp(min=1e-9)
        missed = (plain.x[i] + along.unsqueeze(1) * far - found.x[i]).abs().amax(1)
        j = int(missed.argmin())
        assert missed[j] < 1e-5
        expected = none[i] + along[j] * (none[j] - none[i])
        torch.testing.assert_close(truth[i], expected, atol=1e-4, rtol=1e-4)
        partners.append(j if along[j] > 0 else i)
    assert sum(j != i for i, j in enumerate(partners)) > 4


def test_places_of_texts_that_are_not_counted_teach_nothing() -> None:
    logits = random.normal(random.key(0), (2, 3, 4))
    target = torch.softmax(random.normal(random.key(1), (2, 3, 4)), -1)
    y = torch.tensor([[1, 2, NO_WORD], [3, NO_WORD, NO_WORD]])
    batch = Batch(torch.zeros(2, 3), y, torch.ones(2, dtype=torch.bool))
    far = (target * (target.log() - logits.log_softmax(-1))).sum(-1)
    expected = (far[0, 0] + far[0, 1] + far[1, 0]) / 3

    def net(_: Tensor) -> Tensor:
        return logits

    far_apart = codistillation._divergence(cast("Net", net), batch, target)
    torch.testing.assert_close(far_apart, expected)


@pytest.mark.parametrize("parameter", [1, 2, 5])
def test_shares_of_mixed_rows_are_of_a_beta_distribution(parameter: int) -> None:
    draws = codistillation._beta(random.key(3), 4000, parameter).numpy()
    assert scipy.stats.kstest(draws, scipy.stats.beta(parameter, parameter).cdf).pvalue > 0.01
    assert np.unique(draws).size > 3900


@pytest.mark.slow
def test_a_pool_of_few_rows_learns_from_one_of_many() -> None:
    def accuracy(method: str) -> float:
        settings = [f"method.name={method}", "evaluate.every=40", "engine.workers=1"]
        settings += ["engine.server_threads=1"]  # cores are shared with other tests
        recipe = read(find_recipe("codistillation/digits"), settings)
        found: float = fedgist.run(recipe).rounds[-1]["eval/global/large/all/accuracy"]
        return found

    alone = accuracy("fedadam")
    assert accuracy("merged_codist") > alone + 0.02
    assert accuracy("periodic_codist") > alone + 0.05


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["clients.pools={}", "model.name=mlp"], "codistillation needs two pools or more"),
        (["method.distillation.labels=0.5"], "labels needs data.public.labelled = true"),
        (["method.distillation.lr.a=0.1"], "unknown pool in method.distillation.lr 'b'"),
        (["method.distillation.temperature=0"], "temperature = 0: must be at least 1e-06"),
        (["method.alpha=1.5"], "method.alpha = 1.5: must be at most 1"),
    ],
)
def test_what_is_wrong_is_named(settings: list[str], says: str) -> None:
    raw = {
        "data": {"public": {"rows": 50}},
        "clients": {"pools": {"a": {"model": "mlp"}, "b": {"model": "logistic"}}},
        "method": {"name": "merged_codist"},
    }
    with pytest.raises(InputError, match=says) as caught:
        world_of(make(raw, settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["merged_codist", "periodic_codist"])
def test_a_distillation_that_diverges_ends_the_run_and_names_the_pool(
    method: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"distillation": {"steps": 30, "lr": 1e30}}
    options |= {"period": 2} if method == "periodic_codist" else {"alpha_rounds": 1}
    small = {"public": {"rows": 50}, "train_rows": 200}
    pools = {"a": {"model": "mlp"}, "b": {"model": "logistic"}}
    raw = {
        "data": small,
        "clients": {"pools": pools},
        "method": {"name": method, **options},
        "train": {"num_rounds": 2},
        "engine": {"workers": 1, "server_threads": 1, "cohort_size": 10},
    }
    with pytest.raises(MethodError, match=r"round 2: the student of pool 'a' came to numbers in"):
        fedgist.run(raw, out=tmp_path / "run")
    assert [line["round"] for line in read_lines(tmp_path / "run" / "rounds.jsonl")] == [1]


def test_without_public_data_it_is_refused() -> None:
    with pytest.raises(RecipeError, match="codistillation needs public data"):
        pooled("merged_codist", given={"public": None})
    assert PeriodicCodist().distillation.steps == 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stopping when")  # that is how a notebook is told
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (PeriodicCodist, KILL),
        (MergedCodist, CTRL_C),
        pytest.param(PeriodicCodist, CTRL_C, marks=pytest.mark.environment),
        pytest.param(MergedCodist, KILL, marks=pytest.mark.environment),
    ],
)
def test_stopped_within_a_distillation_it_goes_on_with_the_same_bits(
    kind: type[PeriodicCodist | MergedCodist],
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "SAVE_AFTER_S", 0.0)
    # not in the order of the alphabet, in which a checkpoint's arrays come back
    pools = {"b": {"model": "mlp"}, "a": {"model": "logistic"}}
    recipe = {
        "clients": {"num_clients": 4, "pools": pools},
        "train": {"num_rounds": 5},
        "engine": {
            "workers": 1,
            "server_threads": 1,
            "checkpoint_every": 1,
            "plans": {name: {"cohort_size": 4} for name in "ab"},
        },
    }
    schedule = {"period": 2} if kind is PeriodicCodist else {"alpha": 0.5}
    method = kind(distillation=Distillation(80, 8), **schedule)
    parts: dict[str, Any] = {"data": blobs(), "public": blobs(seed=1).x}
    place = (4, "distill-1")
    saved = goes_on(method, how, place, recipe, parts, tmp_path, monkeypatch)
    assert saved.under_way is not None  # of train, distill-0 to distill-3
    assert saved.under_way["done"] == (3 if how == CTRL_C else 2)


def test_what_is_left_of_a_round_is_copied_with_a_state_and_read_by_no_other_round() -> None:
    arrays = {"x": torch.zeros(2)}
    left = {"done": 1}
    assert checkpoint.Checkpoint(3, arrays, arrays, under_way=left).copied().under_way == left
    small_world = pooled("merged_codist")
    fresh, stale = federation(small_world, PLAN), federation(small_world, PLAN)
    stale.under_way = PartialRound(RoundRecord(4, ("small", "large")), [], done=2)
    assert without_times(stale.do_round(1)[0]) == without_times(fresh.do_round(1)[0])


def test_the_server_keeps_its_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    learn = codistillation.learn

    def watched(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return learn(*args)

    monkeypatch.setattr(codistillation, "learn", watched)
    recipe = {
        "clients": {"num_clients": 2, "pools": {"a": {"model": "mlp"}, "b": {"model": "logistic"}}},
        "engine": {"workers": 1, "plans": {name: {"cohort_size": 2} for name in "ab"}},
    }
    method = MergedCodist(distillation=Distillation(1, 8))
    parts: dict[str, Any] = {"data": blobs(), "public": blobs(seed=1).x, "method": method}
    engine = recipe["engine"] | {"server_threads": 3}
    run = {"train": {"num_rounds": 1}}
    fedgist.run(recipe | run | {"engine": engine}, out=tmp_path / "run", **parts)
    fedgist.run(recipe | run, out=tmp_path / "run", resume=True, rounds=2, **parts)
    assert seen == [3, 3]  # the run was begun with three
    assert read(tmp_path / "run" / "recipe.toml").engine.server_threads == seen[0]
    seen.clear()
    fedgist.run(recipe | run, out=tmp_path / "other", **parts)
    assert seen == [default_workers("cpu")]


@pytest.mark.parametrize("method", ["periodic_codist", "merged_codist"])
def test_the_rate_of_a_distillation_stays_where_the_recipe_does_not_say_how_it_falls(
    method: str,
) -> None:
    # rejects a fall to 0, by which the distillations of the last rounds do nothing
    options: dict[str, Any] = {"distillation": {"steps": 1, "batch_size": 8}, "rounds": 2}
    lines = trace(pooled(method, **options), PLAN, rounds=2).rounds
    assert [line["server/distillation/lr/small"] for line in lines] == [1e-3, 1e-3]
