"""Probes: the accuracy of simple classifiers on the features of a frozen body.

The features of all training rows are made once; what is learnt on them is scored on those of all
test rows, so that bodies are compared by what they see, whatever head was trained on them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgist.core import random
from fedgist.core.nets.net import Net
from fedgist.core.objectives.metrics import ALL_ROWS, PROBE
from fedgist.core.tree import map_leaves, take
from fedgist.data.examples import Examples
from fedgist.engines.engine import EVALUATE, Engine, Simulation
from fedgist.errors import RecipeError
from fedgist.runs.evaluation import MOST_ROWS
from fedgist.runs.files.columns import (
    LEAST,
    MEAN,
    NEWCOMER,
    STD,
    of_all,
    of_server,
    over_clients,
    over_models,
)
from fedgist.runs.files.record import Line
from fedgist.runs.finished.trained_models import client_nets, server_nets
from fedgist.runs.round import ServerRun
from fedgist.world.objective_choice import clients_with_too_few_rows
from fedgist.world.world import World

if TYPE_CHECKING:
    from sklearn.base import ClassifierMixin

PROBED_AT_ONCE = 128
EPOCHS, BATCH, RATE, MOMENTUM = 60, 256, 0.03, 0.9  # FLESD, section 5.1
DROPS, DROP = (30, 50), 0.1  # of the rate, after these epochs
NEIGHBORS = 20


@dataclass(frozen=True, eq=False)
class Encoded:
    """Standardized features (rows, m) of training and test rows, and their labels (rows,)."""

    train: Tensor
    y: Tensor
    test: Tensor
    y_test: Tensor
    num_classes: int


def sgd(encoded: Encoded, seed: int) -> float:
    """Return the accuracy of a linear layer that SGD trains, from zeros, with FLESD's settings.

    60 epochs of batches of 256, momentum 0.9, rate 0.03, a tenth after 30 epochs and after 50.
    """
    weight = torch.zeros(encoded.num_classes, encoded.train.shape[1], requires_grad=True)
    bias = torch.zeros(encoded.num_classes, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, DROPS, DROP)
    for epoch in range(EPOCHS):
        order = random.permutation(random.key(seed, "probe", epoch), len(encoded.y))
        for rows in torch.split(order, BATCH):
            loss = cross_entropy(encoded.train[rows] @ weight.T + bias, encoded.y[rows])
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        answers = (encoded.test @ weight.T + bias).argmax(1)
    return float((answers == encoded.y_test).double().mean())


def logistic(encoded: Encoded, seed: int) -> float:
    """Return the accuracy of scikit-learn's logistic regression on standardized features."""
    from sklearn.linear_model import LogisticRegression

    return _fitted(LogisticRegression(max_iter=1000, random_state=seed), encoded)


def knn(encoded: Encoded, seed: int) -> float:
    """Return the accuracy of a vote of the 20 nearest neighbours by cosine similarity."""
    from sklearn.neighbors import KNeighborsClassifier

    del seed  # nothing is drawn
    count = min(NEIGHBORS, len(encoded.y))
    return _fitted(KNeighborsClassifier(count, metric="cosine"), encoded)


PROBES: Mapping[str, Callable[[Encoded, int], float]] = MappingProxyType(
    {"sgd": sgd, "logistic": logistic, "knn": knn}
)


def probe_of(world: World, engine: Engine) -> Callable[[ServerRun], tuple[Line, list[Line]]] | None:
    """Return the function that probes models during a run, if its recipe asks for it."""
    settings = world.server.setup.recipe.evaluate
    if settings.probe == "none":
        return None
    check_probes(world)
    kinds = (settings.probe, *settings.probes_beside)
    if not isinstance(engine, Simulation):
        raise RecipeError(
            f"evaluate.probe = {settings.probe!r}: the clients' models are at their sites"
        )
    return functools.partial(evaluated, world, kinds)


def evaluated(world: World, kinds: Sequence[str], server_run: ServerRun) -> tuple[Line, list[Line]]:
    """Return the results of probes: columns of the round's line, and lines of clients.

    The first of ``kinds`` is called ``probe``, others ``probe_sgd`` and so on. Clients' models are
    left out where the server's alone are scored, and those of clients that have too few rows to
    learn. Statistics are over the models whose features are finite.
    """
    task, population = world.server.task, world.population
    nets = [[task.architectures[name] for name in c.architectures] for c in population.clients]
    few = clients_with_too_few_rows(population.train, server_run.method, task.objective, nets)
    everybody = [c.id for c in server_run.side.clients if world.population.place[c.id] not in few]
    clients = [] if world.server.setup.recipe.evaluate.on == "global" else everybody
    accuracies = [values for _, values in probed(server_run, world, clients, kinds)]
    ctx = server_run.context(EVALUATE)
    names = list(server_run.method.models(server_run.server, ctx) or {})
    line: Line = {}
    splits = [NEWCOMER if client in task.newcomers else "client" for client in clients]
    details: list[Line] = [
        {"round": server_run.round, "split": split, "client": client}
        for split, client in zip(splits, clients, strict=True)
    ]
    for kind in kinds:
        title = PROBE.name if kind == kinds[0] else f"{PROBE.name}_{kind}"
        values = [of_kind[kind] for of_kind in accuracies]
        own = values[: len(clients)]
        line |= _of_servers(title, dict(zip(names, values[len(clients) :], strict=True)))
        for split in dict.fromkeys(splits):
            some = [value for value, of in zip(own, splits, strict=True) if of == split]
            line |= _of_clients(split, title, torch.tensor(some, dtype=torch.float64))
        for detail, value in zip(details, own, strict=True):
            detail[title] = value
    return line, details


def _of_servers(title: str, accuracies: Mapping[str, float]) -> Line:
    line: Line = {of_server(name, ALL_ROWS, title): value for name, value in accuracies.items()}
    if accuracies:
        together = of_all if len(accuracies) == 1 else over_models
        line[together(title)] = sum(accuracies.values()) / len(accuracies)
    return line


def _of_clients(split: str, title: str, accuracies: Tensor) -> Line:
    defined = accuracies[~accuracies.isnan()]
    if not len(defined):
        return {}
    statistics = {MEAN: defined.mean(), STD: defined.std(correction=0), LEAST: defined.min()}
    return {
        over_clients(split, title, statistic=name): float(value)
        for name, value in statistics.items()
    }


def check_probes(world: World) -> None:
    """Raise RecipeError if there are no labelled test rows for probes."""
    data, population = world.data, world.population
    if data.target != "class" or not len(data.y_test):
        lack = "no classes" if data.target != "class" else "no test rows"
        raise RecipeError(f"{data.name} has {lack}: a probe tells the classes of test rows")
    if not (population.examples.complete and population.test_examples.complete):
        raise RecipeError(
            "data.normalize = 'client': some rows are nobody's, and nothing says how to see them"
        )


def probed(
    server_run: ServerRun,
    world: World,
    clients: Sequence[int],
    kinds: Sequence[str],
    *,
    starts: bool = False,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each client's accuracies by kind of probe, then those of the server's models.

    A body that several have is probed once; of features that are not finite it is NaN. With
    ``starts``, bodies as they were before any training follow, one for each architecture.
    """
    check_probes(world)
    seed, names = world.server.setup.recipe.seed, world.partition.names
    nets = zip(clients, client_nets(server_run, clients), strict=True)
    named = ((names[i] if names else str(i), net) for i, net in nets)
    done: list[tuple[Net, dict[str, float]]] = []
    others = server_nets(server_run)
    if starts:
        others |= {f"start/{name}": net for name, net in world.server.task.starts.items()}
    for name, net in (*named, *others.items()):
        values = next((values for other, values in done if _same_body(net, other)), None)
        if values is None:
            encoded = _encoded(net, world)
            good = all(bool(z.isfinite().all()) for z in (encoded.train, encoded.test))
            values = {kind: PROBES[kind](encoded, seed) if good else math.nan for kind in kinds}
            done.append((net, values))
        yield name, values


def _same_body(net: Net, other: Net) -> bool:
    if net.arch.layers.names != other.arch.layers.names:
        return False
    arrays, others = net.state("body"), other.state("body")
    return all(torch.equal(array, others[name]) for name, array in arrays.items())


def _encoded(net: Net, world: World) -> Encoded:
    train, test = world.population.examples, world.population.test_examples
    z, z_test = _standardized(_features(net, train), _features(net, test))
    return Encoded(z, train.y.cpu(), z_test, test.y.cpu(), world.data.num_classes)


def _standardized(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Return features by the training rows' mean and deviation: no probe then sees their scale."""
    mean, std = train.mean(0), train.std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    return (train - mean) / std, (test - mean) / std


def _features(net: Net, examples: Examples) -> Tensor:
    """Return the features of all rows, computed on the device of the rows."""
    device = examples.y.device
    at_once = PROBED_AT_ONCE if device.type == "cpu" else MOST_ROWS
    there: Net = map_leaves(lambda leaf: leaf.to(device), net)
    pieces = torch.split(torch.arange(len(examples)), at_once)
    with torch.no_grad():
        features = [there.features(take(examples.batch(p.unsqueeze(0)), 0).x).cpu() for p in pieces]
    return torch.cat(features)


def _fitted(model: ClassifierMixin, encoded: Encoded) -> float:
    model.fit(encoded.train.numpy(), encoded.y.numpy())
    return float(model.score(encoded.test.numpy(), encoded.y_test.numpy()))
