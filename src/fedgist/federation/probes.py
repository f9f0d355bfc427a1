"""Probes: how well classes can be told from the features of a frozen body.

The features of all training rows are made once; what is learnt on them is scored on those of all
test rows, so that bodies are compared by what they see, whatever head was trained on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgist.core import random
from fedgist.core.net import Net
from fedgist.core.tree import take
from fedgist.data.examples import Examples
from fedgist.errors import RecipeError
from fedgist.federation.round_loop import EVALUATE, Federation
from fedgist.federation.trained_models import client_nets
from fedgist.federation.world import World

ROWS_AT_ONCE = 512
EPOCHS, BATCH, RATE, MOMENTUM = 60, 256, 0.03, 0.9  # FLESD, section 5.1
DROPS, DROP = (30, 50), 0.1  # of the rate, after these epochs
NEIGHBORS = 20


@dataclass(frozen=True, eq=False)
class Encoded:
    """Features (rows, m) of training and test rows, and their labels (rows,)."""

    train: Tensor
    y: Tensor
    test: Tensor
    y_test: Tensor
    num_classes: int


def sgd(encoded: Encoded, seed: int) -> float:
    """Return the accuracy of a linear layer that SGD trains, from zeros, as in FLESD.

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
    model = LogisticRegression(max_iter=1000, random_state=seed)
    return _fitted(make_pipeline(StandardScaler(), model), encoded)


def knn(encoded: Encoded, seed: int) -> float:
    """Return the accuracy of the 20 nearest neighbours by cosine, all alike."""
    del seed  # nothing is drawn
    count = min(NEIGHBORS, len(encoded.y))
    return _fitted(KNeighborsClassifier(count, metric="cosine"), encoded)


PROBES: Mapping[str, Callable[[Encoded, int], float]] = MappingProxyType(
    {"sgd": sgd, "logistic": logistic, "knn": knn}
)


def probed(
    federation: Federation, world: World, clients: Sequence[int], kinds: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each client's accuracies by kind of probe, then those of the server's models.

    Raises
    ------
    RecipeError
        If there are no test rows, or the data are texts.
    """
    data, population, seed = world.data, world.population, world.server.recipe.seed
    if data.text or not len(data.y_test):
        lack = "texts" if data.text else "no test rows"
        msg = f"{data.name} has {lack}: a probe tells the classes of test rows"
        raise RecipeError(msg)
    if not (population.examples.complete and population.test_examples.complete):
        msg = "data.normalize = 'client': some rows are nobody's, and nothing says how to see them"
        raise RecipeError(msg)
    names = world.partition.names
    ctx = federation.context(EVALUATE)
    servers = federation.method.models(federation.server, ctx) or {}
    nets = zip(clients, client_nets(federation, clients), strict=True)
    named = [(names[i] if names else str(i), net) for i, net in nets]
    named += [(f"server/{name}", net) for name, net in servers.items()]
    for name, net in named:
        encoded = _encoded(net, population.examples, population.test_examples, data.num_classes)
        yield name, {kind: PROBES[kind](encoded, seed) for kind in kinds}


def _encoded(net: Net, train: Examples, test: Examples, num_classes: int) -> Encoded:
    return Encoded(
        _features(net, train), train.y.cpu(), _features(net, test), test.y.cpu(), num_classes
    )


def _features(net: Net, examples: Examples) -> Tensor:
    pieces = torch.split(torch.arange(len(examples)), ROWS_AT_ONCE)
    with torch.no_grad():
        return torch.cat(
            [net.features(take(examples.batch(p.unsqueeze(0)), 0).x.cpu()) for p in pieces]
        )


def _fitted(model: LogisticRegression | KNeighborsClassifier, encoded: Encoded) -> float:
    model.fit(encoded.train.numpy(), encoded.y.numpy())
    return float(model.score(encoded.test.numpy(), encoded.y_test.numpy()))
