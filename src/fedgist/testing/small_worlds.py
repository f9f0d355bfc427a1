"""Tiny worlds for tests of methods and engines, with uneven clients and two architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.method import Method
from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.engines.engine import Engine
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.plans.plan import Plan
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe, make
from fedgist.recipe.resolve import resolve
from fedgist.runs.evaluation import check_evaluation
from fedgist.runs.files.checkpoint import Checkpoint
from fedgist.runs.files.record import Line
from fedgist.runs.prepare import hosting_of
from fedgist.runs.round import ServerRun, start_server
from fedgist.wire.loopback_engine import LoopbackEngine
from fedgist.wire.wire import Wire
from fedgist.world.world import World, make_world

CLASSES, OUTPUTS = 3, 2
FEATURES = 6
#: The number of rows of each client: one has a single row, and none has every class.
SIZES = (11, 1, 7, 4, 9)
TEST_ROWS = 30
SHARES = {"wide": 0.4, "flat": 0.6}  # the architectures' shares of the clients
ALONE = Plan(1, stack=False)
PAIRS = Plan(2)


def blobs(seed: int = 0, features: int = FEATURES, classes: int = CLASSES) -> Dataset:
    """Return a data set of noisy class centres; the training rows are sorted by class."""
    key = random.key(seed, "blobs")
    centers = 2 * random.normal(random.fold(key, 0), (classes, features))
    y = torch.arange(sum(SIZES)) * classes // sum(SIZES)
    y_test = torch.arange(TEST_ROWS) % classes
    x = centers[y] + random.normal(random.fold(key, 1), (len(y), features))
    x_test = centers[y_test] + random.normal(random.fold(key, 2), (TEST_ROWS, features))
    mean, std = (0.5,) * features, (2.0,) * features
    return Dataset("blobs", x, y, x_test, y_test, classes, mean=mean, std=std)


def of_task(data: Dataset, objective: str) -> Dataset:
    """Return the same rows with the labels of an objective: classes, numbers or several labels."""
    if objective not in {"regression", "multilabel"}:
        return data
    ys = [_outputs(y, data.num_classes) for y in (data.y, data.y_test)]
    if objective == "multilabel":
        ys = [(y > 0).float() for y in ys]
    target: Target = "numbers" if objective == "regression" else "labels"
    return replace(data, y=ys[0], y_test=ys[1], num_classes=OUTPUTS, target=target)


def _outputs(y: Tensor, classes: int) -> Tensor:
    """Return two numbers for each row, (rows, 2), which depend on its class and its place."""
    place = torch.arange(len(y)) / max(len(y), 1)
    return torch.stack([y - classes / 2 + place, classes / 3 - y + 2 * place], 1)


def rows() -> list[Tensor]:
    """Return the row numbers of each client, (rows,), which are contiguous."""
    return list(torch.split(torch.arange(sum(SIZES)), list(SIZES)))


def public_rows() -> Tensor:
    """Return public rows (rows, features): more than a batch of any method's default."""
    return torch.cat([blobs(seed).x for seed in range(1, 6)])


TRAIN = {"num_rounds": 3, "local_epochs": 2, "batch_size": 4, "lr": 0.05, "optimizer": "sgd"}


def world(
    method: str | Method = "fedavg", *, given: Mapping[str, Any] | None = None, **sections: Any
) -> World:
    """Return a world of five uneven clients; ``sections`` change the recipe.

    ``method`` is an object, or a name with its hyper-parameters in the section ``options``. With
    the objective ``regression`` or ``multilabel``, rows have such labels.
    """
    options = sections.pop("options", {})
    raw: dict[str, Any] = {
        "clients": {
            "num_clients": len(SIZES),
            "architectures": sections.pop("architectures", {}),
        },
        "train": TRAIN,
        "engine": {"workers": 1, "checkpoint_every": 1},
    }
    if not raw["clients"]["architectures"] and "name" not in (sections.get("model") or {}):
        raw["model"] = {"name": "mlp", "hidden": [5]}
    objects: dict[str, Any] = {"data": blobs(), "clients": rows()}
    objects["public"] = public_rows()
    objects["clients_test"] = list(torch.split(torch.arange(TEST_ROWS), TEST_ROWS // len(SIZES)))
    if isinstance(method, str):
        raw["method"] = {"name": method, **options}
    else:
        objects["method"] = method
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values} if isinstance(values, dict) else values
    objects |= dict(given or {})
    recipe = make(raw)
    objects["data"] = of_task(objects["data"], recipe.objective.name)
    made = world_of(recipe, Overrides(**objects))
    check_evaluation(made.server)
    return made


def world_of(recipe: Recipe, given: Overrides | None = None) -> World:
    """Return the world of a recipe and of a user's objects."""
    return make_world(resolve(recipe, given))


def two_architectures(method: Method) -> dict[str, dict[str, object]]:
    """Return two models with features of one width, or none if the method merges clients."""
    if method.merges_clients:
        return {}
    return {
        "wide": {"model": "mlp", "hidden": [7, 6, 5], "share": SHARES["wide"]},
        "flat": {"model": "mlp", "hidden": [6, 5], "share": SHARES["flat"]},
    }


def nets(
    method: Method, tables: Mapping[str, Mapping[str, object]], *, alone: bool = False
) -> dict[str, object]:
    """Return the sections of a world whose clients have these architectures.

    They have only the first if ``alone``, or if the method merges clients.
    """
    if not (alone or method.merges_clients):
        return {"architectures": {name: dict(table) for name, table in tables.items()}}
    table = {k: v for k, v in next(iter(tables.values())).items() if k != "share"}
    return {"architectures": {}, "model": {"name": table.pop("model"), **table}}


def sections(
    method: Method, *, model: Mapping[str, object] | None, architectures: int, frozen: bool
) -> dict[str, object]:
    """Return the sections of a world as :func:`fedgist.testing.check_laws` is told; {}: as usual.

    With two ``architectures``, 2 of 5 clients and the others have models of their own.
    """
    if model is None and architectures == len(SHARES) and not frozen:
        return {}
    about: dict[str, object] = {"frozen": True} if frozen else {}
    one_model: dict[str, object] = {"model": {**(model or {}), **about}, "architectures": {}}
    if architectures == 1 or method.merges_clients:
        return one_model
    if model is None:
        return nets(method, {n: {**t, **about} for n, t in two_architectures(method).items()})
    table = {("model" if k == "name" else k): v for k, v in model.items()}
    return nets(method, {n: {**table, **about, "share": s} for n, s in SHARES.items()})


def law_world(method: Method, **sections: Any) -> World:
    """Return the world for the laws: clients have one batch or two."""
    train = {"batch_size": 6, **sections.pop("train", {})}
    architectures = sections.pop("architectures", two_architectures(method))
    return world(method, architectures=architectures, train=train, **sections)


def local_engine(small_world: World, plan: Plan = PAIRS, shards: int = 1) -> LocalEngine:
    """Return a local engine with the same execution plan for all architectures."""
    side = small_world.server
    plans = dict.fromkeys(side.task.architectures, plan)
    settings = hosting_of(small_world)
    parts = side.method, side.task, small_world.population, settings, plans
    return LocalEngine(*parts, shards=shards)


def loopback(
    small_world: World, plan: Plan = ALONE, wire: Wire | None = None, *, secure: bool = False
) -> LoopbackEngine:
    """Return the loop-back engine of a world; its sites are never stacked, so no plan is used."""
    del plan
    side = small_world.server
    settings = hosting_of(small_world)
    about = side.method, side.task, small_world.population, settings, 4, wire
    return LoopbackEngine(*about, secure=secure)


def federation(
    small_world: World,
    plan: Plan = PAIRS,
    make_engine: Callable[[World, Plan], Engine] = local_engine,
) -> ServerRun:
    """Return a federation before its first round."""
    return ServerRun(
        small_world.server, make_engine(small_world, plan), start_server(small_world.server)
    )


@dataclass(frozen=True)
class Trace:
    """The result of a short run: its lines without times, and the state after each round."""

    rounds: list[Line]
    clients: list[Line]
    saved: list[Checkpoint]

    @property
    def state(self) -> dict[str, Tensor]:
        """The arrays of the last checkpoint, by name."""
        return self.saved[-1].arrays()

    def until(self, number: int) -> Trace:
        """Return the result of the run up to this round."""

        def kept(lines: list[Line]) -> list[Line]:
            return [line for line in lines if line["round"] <= number]

        return Trace(kept(self.rounds), kept(self.clients), self.saved[:number])


def without_times(line: Line) -> Line:
    """Return a line without the columns that differ from run to run."""
    return {k: v for k, v in line.items() if not k.startswith(("time/", "comm/wire"))}


def trace(
    small_world: World,
    plan: Plan = PAIRS,
    rounds: int = 3,
    make_engine: Callable[[World, Plan], Engine] = local_engine,
) -> Trace:
    """Run this many rounds, after round 0 if the method has one; return the result."""
    fed = federation(small_world, plan, make_engine)
    result = Trace([], [], [])
    try:
        if fed.method.stages(fed.context("", 0)):
            result.rounds.append(without_times(fed.do_round(0)[0]))
        for _ in range(rounds):
            line, of_clients = fed.advance()
            result.rounds.append(without_times(line))
            result.clients.extend(of_clients)
            result.saved.append(fed.checkpoint().copied())
        return result
    finally:
        fed.engine.close()


def state_of(fed: ServerRun) -> dict[str, Tensor]:
    """Return a copy of the arrays of a checkpoint, by name."""
    return fed.checkpoint().copied().arrays()


def with_method(small_world: World, method: Method) -> World:
    """Return the same world with another method object."""
    return replace(small_world, server=replace(small_world.server, method=method))
