"""Cohorts: K stacked clients of one architecture, with their state, downloads and rows.

Every tensor of the clients has a first dimension K. A method's functions, written for one client,
run under ``torch.func.vmap``. The same code runs one unstacked client (K = 1), for models that
cannot be stacked and for a real site.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import losses, random, system_noise
from fedgist.core.method import Batch, Context, Method, Net
from fedgist.core.nets.net import stacked
from fedgist.core.optim import OptimizerState
from fedgist.core.privacy import PrivateSteps
from fedgist.core.tree import Tree, map_leaves, take, tree
from fedgist.data.examples import Examples
from fedgist.training.recorded_step import Recordings


@tree
class Clients:
    """The state of K stacked clients: nets, own states, and optimizer states by phase.

    Only optimizer states that live for the whole run are stored here.
    """

    net: Net
    own: Tree
    memory: dict[str, OptimizerState]


@dataclass(frozen=True)
class Cohort:
    """K clients of one architecture in one stage: their ids, downloads and rows."""

    method: Method
    ctx: Context  # with the key of the run
    ids: Tensor  # (K,)
    down: Tree  # one message for all clients (broadcast), or stacked
    broadcast: bool
    examples: Examples
    table: Tensor  # (K, rows), -1 where there is none
    stack: bool = True  # False: K = 1, without vmap
    recordings: Recordings | None = None  # of steps, by the host; None: steps are not recorded

    @functools.cached_property
    def keys(self) -> Tensor:
        """Each client's key of this round and stage, (K,)."""
        return random.fold(self.ctx.key, "client", self.ids, self.ctx.round, self.ctx.stage)

    @functools.cached_property
    def keys_on_cpu(self) -> Tensor:
        """The same keys on the CPU, (K,), which waits for a GPU once."""
        return self.keys.cpu()

    @functools.cached_property
    def table_on_cpu(self) -> Tensor:
        """The table on the CPU, (K, rows), which waits for a GPU once."""
        return self.table.cpu()

    @property
    def private_steps(self) -> PrivateSteps | None:
        """The settings of private local steps, or None."""
        privacy = self.ctx.task.privacy
        return None if privacy is None else privacy.steps

    def private_keys(self, *purpose: random.Word) -> Tensor:
        """Return each client's key for noise from the seed, (K,)."""
        return random.fold(self.keys, "privacy", *purpose)

    def private_draws(self, width: int, *purpose: random.Word) -> Tensor:
        """Return uniform numbers (K, width) for the draws that privacy depends on."""
        privacy = self.ctx.task.privacy
        if privacy is not None and privacy.source == "system":
            return system_noise.uniform((len(self.ids), width)).to(self.keys.device)
        return random.uniform(self.private_keys(*purpose).unsqueeze(1), (1, width))

    @functools.cached_property
    def class_weights(self) -> Tensor | None:
        """The weight of each client's rows of a class, (K, classes); None without weights."""
        if self.ctx.task.training.class_weights != "balanced":
            return None
        return losses.balanced_weights(*self._labels)

    @functools.cached_property
    def class_counts(self) -> Tensor | None:
        """Each client's rows of each class, (K, classes), if the method counts them."""
        return losses.class_counts(*self._labels) if self.method.counts_classes else None

    @property
    def _labels(self) -> tuple[Tensor, Tensor, int]:
        """The labels of all rows and a mask of those present, (K, rows); the number of classes."""
        y = self.examples.y[self.table.clamp(min=0)]
        return y, self.table >= 0, self.ctx.task.num_classes

    def weighted(self, batch: Batch) -> Batch:
        """Return a batch (K, ...) with the weights of its rows, if the recipe names them."""
        name = self.ctx.task.training.sample_weights
        return replace(batch, weight=batch.annotations[name]) if name else batch

    def lift(
        self, function: Callable[..., Any], dims: tuple[int | None, ...]
    ) -> Callable[..., Any]:
        """Turn a function of one client into a function of K stacked clients.

        ``dims`` holds, for each argument, the dimension of the clients, or None if they share it.
        """
        if self.stack:
            return torch.func.vmap(function, in_dims=dims)

        def alone(*args: Any) -> Any:
            client_args = [take(a, 0) if d == 0 else a for a, d in zip(args, dims, strict=True)]
            return map_leaves(lambda leaf: leaf.unsqueeze(0), function(*client_args))

        return alone

    @property
    def down_dim(self) -> int | None:
        """The dimension of the clients in the download, or None if they share it."""
        return None if self.broadcast else 0

    def at(self, key: Tensor) -> Context:
        """Return the context of the client with this key, ()."""
        return replace(self.ctx, key=key)


def with_steps(cohort: Cohort, steps: tuple[int, ...]) -> Cohort:
    """Return the cohort, whose clients know how many steps they took in each phase."""
    work = cohort.ctx.work or cohort.ctx.task.training.work
    return replace(cohort, ctx=replace(cohort.ctx, work=replace(work, most=steps)))


def receive(cohort: Cohort, clients: Clients) -> Clients:
    """Return the clients with their downloads installed."""

    def install(net: Net, own: Tree, down: Tree, key: Tensor) -> tuple[Net, Tree]:
        return cohort.method.receive(net, own, down, cohort.at(key))

    with torch.no_grad():
        net, own = cohort.lift(install, (0, 0, cohort.down_dim, 0))(
            clients.net, clients.own, cohort.down, cohort.keys
        )
    return replace(clients, net=net, own=own)


def begin(net: Net, own: Tree, count: int) -> Clients:
    """Return ``count`` clients, (count, ...), with copies of this net and this own state."""
    return Clients(
        stacked(net, count), map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), own), {}
    )
