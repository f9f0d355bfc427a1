"""Clients of a tiny world as plain torch modules, trained by torch.optim: oracles for methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.plans.plan import Plan
from fedgist.runs.round import ServerRun
from fedgist.testing.small_worlds import SIZES, federation, world
from fedgist.training.cohort import Clients
from fedgist.world.world import World

HIDDEN = {"wide": [7, 6, 5], "flat": [6, 5]}
MODELS = {name: {"model": "mlp", "hidden": sizes, "share": 1} for name, sizes in HIDDEN.items()}
ROUNDS, EPOCHS, LR = 2, 3, 0.1
EVERYBODY = range(len(SIZES))
Groups = Sequence[Sequence[int]]  # clients whose layers are averaged together


def two_models(method: str, **options: Any) -> World:
    """Return a world of two architectures, in which an epoch is one step over all rows."""
    train = {"local_epochs": EPOCHS, "batch_size": max(SIZES), "lr": LR, "optimizer": "momentum"}
    train["num_rounds"] = ROUNDS
    return world(method, options=options, architectures=MODELS, train=train)


class Plain:
    """The clients of a world as plain modules: their architectures, layers and rows."""

    def __init__(self, small_world: World) -> None:
        self.names = [client.architectures[0] for client in small_world.server.clients]
        self.layers = [layers_of(small_world, name) for name in self.names]
        x = (small_world.data.x - 0.5) / 2.0
        lines = [small_world.population.train[client] for client in EVERYBODY]
        self.rows = [(x[rows], small_world.data.y[rows]) for rows in lines]

    def features(self, client: int, x: Tensor) -> Tensor:
        """Run all layers but the last, with ReLU behind each."""
        for layer in self.layers[client][:-1]:
            x = torch.relu(layer(x))
        return x

    def learn(
        self,
        client: int,
        which: slice,
        epochs: int,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        also: Sequence[Tensor] = (),
        without_momentum: Sequence[Tensor] = (),
    ) -> None:
        """Let some of a client's layers learn with SGD and momentum, from a fresh start of both.

        ``loss`` is one of features and labels, by default the cross-entropy; ``also`` are further
        tensors that learn, as are those ``without_momentum``.
        """
        (x, y), layers = self.rows[client], self.layers[client]
        params = [p for layer in layers[which] for p in layer.parameters()]
        groups: list[dict[str, Any]] = [{"params": [*params, *also], "momentum": 0.9}]
        if without_momentum:
            groups.append({"params": [*without_momentum], "momentum": 0.0})
        optimizer = torch.optim.SGD(groups, LR)
        for _ in range(epochs):
            nn.ModuleList(layers).zero_grad()
            for tensor in (*also, *without_momentum):
                tensor.grad = None
            z = self.features(client, x)
            value = F.cross_entropy(layers[-1](z), y) if loss is None else loss(z, y)
            torch.autograd.backward(value)
            optimizer.step()

    def average(self, which: slice, groups: Groups) -> None:
        """Average these layers over each group of clients, by rows."""
        for group in groups:
            weights = torch.tensor([float(SIZES[k]) for k in group])
            for same in zip(*(self.layers[k][which] for k in group), strict=True):
                for name in ("weight", "bias"):
                    values = torch.stack([getattr(layer, name).detach() for layer in same])
                    mean = torch.einsum("k,k...->...", weights / weights.sum(), values)
                    for layer in same:
                        getattr(layer, name).data.copy_(mean)

    def rounds(self, work: Callable[[int], None], shared: slice, groups: Groups) -> Plain:
        """Let everybody work and average what is shared, round by round."""
        for _ in range(ROUNDS):
            for client in EVERYBODY:
                work(client)
            self.average(shared, groups)
        return self

    def within(self) -> Groups:
        """Return the clients of each architecture."""
        return [[k for k, n in enumerate(self.names) if n == name] for name in HIDDEN]

    def arrays(self, client: int) -> list[Tensor]:
        """Return a client's weights and biases, in the order of its layers."""
        return [p.detach() for layer in self.layers[client] for p in (layer.weight, layer.bias)]

    def agrees(self, found: Sequence[Clients]) -> bool:
        """Return whether clients hold the same weights."""
        return all(
            torch.allclose(a, b, atol=2e-5)
            for k in EVERYBODY
            for a, b in zip(found[k].net.params.values(), self.arrays(k), strict=True)
        )


def layers_of(small_world: World, name: str) -> list[nn.Linear]:
    """Return the common start of an architecture as plain layers."""
    params = small_world.server.task.starts[name].params
    layers = []
    for weight in (n for n in params if n.endswith("weight")):
        layer = nn.Linear(params[weight].shape[1], params[weight].shape[0])
        bias = params[weight.replace("weight", "bias")]
        layer.load_state_dict({"weight": params[weight], "bias": bias})
        layers.append(layer)
    return layers


def held(small_world: World, plan: Plan | None = None) -> list[Clients]:
    """Return what each client holds after the rounds and the next download."""
    fed = federation(small_world, plan or Plan(2))
    if fed.method.stages(fed.context("", 0)):
        fed.do_round(0)
    for _ in range(ROUNDS):
        fed.advance()
    return held_in(fed)


def held_in(fed: ServerRun) -> list[Clients]:
    """Return what each client of a federation holds after its next download."""
    assert isinstance(fed.engine, LocalEngine)
    orders, downs, ctx = fed.downloads(fed.round)
    return [fed.engine.client(ctx, o, d) for o, d in zip(orders, downs, strict=True)]
