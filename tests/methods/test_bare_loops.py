"""The bare loops of the benchmark reach the accuracy of the package's methods, on digits."""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import fedgist
from fedgist.data.dataset import Dataset
from fedgist.data.sources.digits import digits

if TYPE_CHECKING:
    import bare_methods as bare
else:  # bench/ is not on the path: its lazy.py would hide the folder tests/lazy
    PATH = Path(__file__).parents[2] / "bench" / "bare_methods.py"
    spec = importlib.util.spec_from_file_location("bare_methods", PATH)
    bare = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bare  # dataclasses look there
    spec.loader.exec_module(bare)

SEEDS = range(8)
MOST = 3.0  # standard errors by which two means may differ
SKEWED, EVEN, POOLED = 10, 10, 40  # numbers of clients


def data() -> Dataset:
    """Digits as models see them, so that neither side normalizes them."""
    source = digits()
    x, x_test = ((rows.float() / 16 - 0.305) / 0.376 for rows in (source.x, source.x_test))
    return Dataset("digits", x, source.y, x_test, source.y_test, 10)


DATA = data()
ALL_TESTS = torch.arange(len(DATA.y_test))
ORDER = torch.randperm(len(DATA.y), generator=torch.Generator().manual_seed(0))
PUBLIC = DATA.x[ORDER[-400:]]


@dataclass(frozen=True)
class Case:
    """A method's recipe and bare loop, the rows of both, and a loop that lacks the exchange.

    ``tests`` are the test rows of each client, or of each pool. ``column`` is the accuracy in the
    record of a run.
    """

    recipe: Mapping[str, Any]
    rounds: int
    rows: Sequence[Tensor]
    tests: Sequence[Tensor]
    loop: Callable[[], bare.Bare]
    control: Callable[[], bare.Bare]
    column: str = "eval/client/accuracy_mean"


def of_classes(order: Tensor, labels: Tensor, client: int) -> Tensor:
    """The rows of ``order`` that belong to a client's three classes."""
    own = torch.tensor([(client + step) % 10 for step in (0, 3, 4)])
    return order[torch.isin(labels[order], own)]


def mlp(hidden: Sequence[int], last: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """The package's mlp in plain layers. Its dropout drops nothing."""
    layers: list[nn.Module] = [nn.Flatten()]
    for place, (width, out) in enumerate(zip((64, *hidden), hidden, strict=False), 1):
        layers += [nn.Linear(width, out), last() if place == len(hidden) else nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.0), nn.Linear(hidden[-1], 10))


def clients_of(
    rows: Sequence[Tensor], module: Callable[[], nn.Sequential], lr: float, epochs: int
) -> bare.Clients:
    of_each = [(DATA.x[at], DATA.y[at]) for at in rows]
    return bare.Clients(of_each, module, 10, batch_size=8, epochs=epochs, lr=lr)


def skewed(method: str, loop: Callable[[bare.Clients], bare.Bare]) -> Case:
    """Ten clients with 24 rows of three classes each."""
    rows = [of_classes(ORDER, DATA.y, client)[:24] for client in range(SKEWED)]
    tests = [of_classes(ALL_TESTS, DATA.y_test, client) for client in range(SKEWED)]
    about = clients_of(rows, lambda: mlp([32]), 2e-3, 2)
    recipe = {
        "method": {"name": method},
        "model": {"name": "mlp", "hidden": [32]},
        "clients": {"init": "shared"},
        "train": {"num_rounds": 4, "local_epochs": 2, "batch_size": 8, "lr": 2e-3},
    }
    return Case(recipe, 4, rows, tests, lambda: loop(about), lambda: bare.bare_local(about))


def sharing() -> Case:
    """Ten clients with 20 rows of all classes each; their Adam keeps its state."""
    rows = list(torch.split(ORDER[: 20 * EVEN], 20))
    about = clients_of(rows, lambda: mlp([32], nn.Tanh), 1e-2, 1)
    train = {"num_rounds": 15, "batch_size": 8, "lr": 1e-2, "optimizer_memory": "run"}
    recipe = {
        "method": {"name": "repshare"},
        "model": {"name": "mlp", "hidden": [32], "last": "tanh"},
        "clients": {"init": "own"},
        "train": train,
    }
    return Case(
        recipe,
        15,
        rows,
        [ALL_TESTS] * EVEN,
        lambda: bare.bare_repshare(about),
        lambda: bare.bare_repshare(about, lambda_kd=0.0),
    )


def codistilled() -> Case:
    """Forty clients with 16 rows each, of which four train a large net as well."""
    rows = list(torch.split(ORDER[: 16 * POOLED], 16))
    few = rows[:4]
    pools = [
        clients_of(rows, lambda: mlp([16]), 0.1, 1),
        clients_of(few, lambda: mlp([64, 32]), 0.1, 1),
    ]
    learning = {"steps": 8, "batch_size": 32, "lr": 3e-3, "temperature": 0.5, "regularization": 0.3}
    made: Callable[..., bare.Codistillation] = bare.Codistillation
    server = made(alpha=0.7, server_lr=0.01, **learning)
    rule = {"bias_correction": True, "beta2": 0.999, "eps": 1e-5, "lr": 0.01}
    large = {"model": "mlp", "hidden": [64, 32], "clients": list(range(len(few)))}
    recipe = {
        "method": {
            "name": "merged_codist",
            "alpha": 0.7,
            "server": rule,
            "distillation": learning,
        },
        "clients": {"pools": {"small": {"model": "mlp", "hidden": [16]}, "large": large}},
        "train": {"num_rounds": 30, "batch_size": 8, "optimizer": "sgd", "lr": 0.1},
        "evaluate": {"on": "global", "every": 30},
    }
    loop = functools.partial(bare.bare_merged_codist, pools, POOLED, PUBLIC)
    without = replace(server, alpha=1.0)
    column = "eval/global/accuracy_mean"
    tests = [ALL_TESTS] * len(pools)
    return Case(recipe, 30, rows, tests, lambda: loop(server), lambda: loop(without), column)


CASES: dict[str, Callable[[], Case]] = {
    "fedlog": lambda: skewed("fedlog", bare.bare_fedlog),
    "fedproto": lambda: skewed("fedproto", bare.bare_fedproto),
    "fedper": lambda: skewed("fedper", bare.bare_fedper),
    "repshare": sharing,
    "merged_codist": codistilled,
}


def of_run(case: Case, seed: int) -> float:
    """The mean accuracy over clients or pools in the last round of a run of the package."""
    fixed = {"evaluate": {"every": case.rounds}, "engine": {"cohort_size": 10}, "seed": seed}
    tests = None if "global" in case.column else list(case.tests)
    public = PUBLIC.numpy() if "pools" in case.recipe["clients"] else None
    run = fedgist.run(
        {**fixed, **case.recipe},
        data=DATA,
        clients=list(case.rows),
        clients_test=tests,
        public=public,
    )
    accuracy: float = run.rounds[-1][case.column]
    return accuracy


def of_loop(make: Callable[[], bare.Bare], case: Case, seed: int) -> float:
    """The mean accuracy over clients or pools after the rounds of a bare loop."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loop = make()
        for _ in range(case.rounds):
            loop.do_round()
    right = [
        loop.predict(number, DATA.x_test[at]).argmax(1) == DATA.y_test[at]
        for number, at in enumerate(case.tests)
    ]
    return statistics.mean(float(line.float().mean()) for line in right)


def apart(some: Sequence[float], others: Sequence[float]) -> float:
    """How many standard errors of their difference two means are apart."""
    variance = sum(statistics.variance(values) / len(values) for values in (some, others))
    return abs(statistics.mean(some) - statistics.mean(others)) / math.sqrt(variance)


@pytest.mark.environment  # it is the benchmark's loops that are tried, not the package
@pytest.mark.slow
@pytest.mark.parametrize("method", CASES)
def test_a_bare_loop_of_the_benchmark_reaches_the_accuracy_of_the_method(method: str) -> None:
    case = CASES[method]()
    ours = [of_run(case, seed) for seed in SEEDS]
    assert apart(ours, [of_loop(case.loop, case, seed) for seed in SEEDS]) < MOST
    # the comparison is sharp enough to notice that nothing was shared
    assert apart(ours, [of_loop(case.control, case, seed) for seed in SEEDS]) > MOST
