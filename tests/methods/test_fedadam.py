"""FedAdam in whole rounds: a step by hand, FedAvg as a special case, what resuming keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedgist
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.testing.small_worlds import Trace, trace, world

PLAN = Plan(5)
WEIGHTS = "server/averages/weights/mlp/arrays/"


def traced(rounds: int = 2, **options: Any) -> Trace:
    return trace(world("fedadam", options=options), PLAN, rounds=rounds)


def weights(state: dict[str, torch.Tensor], prefix: str = WEIGHTS) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def test_plain_steps_with_rate_one_are_fedavg() -> None:
    ours = weights(traced(server={"rule": "sgd", "lr": 1.0}).state)
    fedavg = trace(world("fedavg"), PLAN, rounds=2).state
    for name, array in weights(fedavg, "server/weights/mlp/arrays/").items():
        torch.testing.assert_close(ours[name], array, atol=1e-6, rtol=1e-5)


def test_the_first_step_is_that_of_the_formula() -> None:
    # rejects a step away from the mean, and moments that start full
    start = world("fedadam").server.task.starts["mlp"].params
    mean = weights(trace(world("fedavg"), PLAN, rounds=1).state, "server/weights/mlp/arrays/")
    ours = weights(traced(1, server={"lr": 0.1, "eps": 0.01, "start": 1e-4}).state)
    for name, w in start.items():
        delta = mean[name] - w
        m, v = 0.1 * delta, 0.99 * 1e-4 + 0.01 * delta**2
        expected = w + 0.1 * m / (v.sqrt() + 0.01)
        torch.testing.assert_close(ours[name], expected, atol=1e-6, rtol=1e-4)
        assert not torch.equal(ours[name], w)


def test_the_proximal_term_holds_clients_back() -> None:
    def moved(mu: float) -> float:
        start = world("fedadam").server.task.starts["mlp"].params
        ours = weights(traced(1, server={"rule": "sgd", "lr": 1.0}, mu=mu).state)
        return sum(float((ours[n] - w).square().sum()) for n, w in start.items())

    assert moved(15.0) < 0.5 * moved(0.0)


def test_each_architecture_has_a_rate_and_moments_of_its_own() -> None:
    models = {
        "wide": {"model": "mlp", "hidden": [7, 5], "share": 1},
        "flat": {"model": "logistic", "share": 1},
    }
    rates = {"wide": 0.1, "flat": 1e-12}
    small_world = world("fedadam", options={"server": {"lr": rates}}, architectures=models)
    result = trace(small_world, Plan(2), rounds=2)
    for name, start in small_world.server.task.starts.items():
        now = weights(result.state, f"server/averages/weights/{name}/arrays/")
        far = max(float((now[n] - w).abs().max()) for n, w in start.params.items())
        assert (far > 1e-3) == (name == "wide")
    assert [line["server/lr/wide"] for line in result.rounds] == [0.1, 0.1]


def test_a_pool_without_a_rate_is_refused_at_the_start() -> None:
    models = {name: {"model": "logistic", "share": 1} for name in ("small", "large")}
    with pytest.raises(RecipeError, match=r"unknown pool in method\.server\.lr 'large'; known: sm"):
        world("fedadam", options={"server": {"lr": {"small": 0.1}}}, architectures=models)


def test_a_rate_that_falls_is_in_the_record_and_rounds_cannot_be_added(tmp_path: Any) -> None:
    recipe = {
        "partition": {"name": "iid"},
        "clients": {"num_clients": 3},
        "train": {"num_rounds": 2},
        "method": {"name": "fedadam", "server": {"lr": 0.02, "final_factor": 0.0}},
        "engine": {"workers": 1, "plans": {"mlp": {"cohort_size": 3}}},
    }
    result = fedgist.run(recipe, out=tmp_path / "run")
    assert [line["server/lr"] for line in result.rounds] == [0.02, 0.01]
    with pytest.raises(RecipeError, match="method fedadam depends on it, and round 2 would"):
        fedgist.run(recipe, out=tmp_path / "run", resume=True, rounds=4)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("method.server.lr=0", r"method.server.lr = 0: must be greater than 0"),
        ("method.server.lr.mlp=-1", r"method.server.lr.mlp = -1: must be greater than 0"),
        ("method.server.beta2=1.5", r"method.server.beta2 = 1.5: must be at most 1"),
        ("method.server.eps=0", r"method.server.eps = 0: must be greater than 0"),
        ("method.server.rule=adan", r"method.server.rule = 'adan': must be .*'adam'"),
        (
            "method.server.rate=1",
            r"method.server.rate: unknown key of fedadam's server; .*known: rule, lr",
        ),
    ],
)
def test_what_is_wrong_is_named(setting: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        resolve(make({}, ["method.name=fedadam", setting]))
    assert "\n" not in str(caught.value)
