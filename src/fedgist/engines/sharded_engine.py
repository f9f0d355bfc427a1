"""The engine whose clients are hosted elsewhere, a shard in each place, as on a Ray cluster.

It gives the same bits as the local engine with the same number of shards.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from fedgist.core.method import Context, Method, Order, Task
from fedgist.core.objectives.objective import RowPredictions
from fedgist.core.tree import Tree, build, leaves
from fedgist.engines.client_host import ClientHost
from fedgist.engines.engine import Answer, Scores, ScoreTable, Split
from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import HostSettings, Population
from fedgist.engines.process_control import as_workers_do
from fedgist.engines.scoring import Separate, score_models
from fedgist.engines.sharding import by_shard, divided, in_order, joined, merged
from fedgist.errors import WorkerError
from fedgist.training.cohort import Clients

Value: TypeAlias = Any  # what a host's function takes or returns


@dataclass(frozen=True)
class Moment:
    """The round and the stage of a request: a context's key and task stay where they are."""

    round: int
    stage: str

    @staticmethod
    def of(ctx: Context) -> Moment:
        """Return the moment of a context."""
        return Moment(ctx.round, ctx.stage)


@dataclass(frozen=True)
class Sent:
    """Orders to clients of one shard; order i has the download ``which[i]``, sent once."""

    orders: tuple[Order, ...]
    which: tuple[int, ...]
    tuned_only: bool = False

    def downs(self, downs: Sequence[Tree]) -> list[Tree]:
        """Return each order's download."""
        return [downs[i] for i in self.which]


@dataclass(frozen=True)
class Call:
    """A call of a function of one shard's host, with the downloads that it reads."""

    shard: int
    function: str
    arguments: tuple[object, ...] = ()
    downs: tuple[Tree, ...] = ()


class Cluster(Protocol):
    """The places of the hosts, one for each shard: functions of ``runs/ray_engine.py``."""

    def start(self) -> None:
        """Make the hosts."""

    def run(self, calls: Sequence[Call]) -> list[Value]:
        """Call the hosts, all at once; return what they return, in the order of the calls."""

    def close(self) -> None:
        """End the hosts."""


class HostsHere:
    """Hosts in this process, made when they are first needed: for models, after a cluster's end."""

    def __init__(self, make: Callable[[int], Value], shards: int) -> None:
        self.make, self.shards = make, shards
        self.hosts: list[Value] = []

    def start(self) -> None:
        """Make the hosts."""
        with as_workers_do():
            self.hosts = [self.make(shard) for shard in range(self.shards)]

    def run(self, calls: Sequence[Call]) -> list[Value]:
        """Call the hosts, one after the other."""
        with as_workers_do():
            return [
                getattr(self.hosts[call.shard], call.function)(*call.arguments, *call.downs)
                for call in calls
            ]

    def close(self) -> None:
        """Let the hosts go."""
        self.hosts = []


class ShardedEngine:
    """All clients, in the hosts of a cluster, one for each shard."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: HostSettings,
        plans: Mapping[str, Plan],
        shards: int,
        cluster: Cluster,
        later: Cluster,
    ) -> None:
        """Host a population on a cluster. Here it is only measured, and no client trains.

        After the cluster has stopped, models are used with the hosts of ``later``.
        """
        self.task, self.settings, self.shards, self.cluster = task, settings, shards, cluster
        self.host = ClientHost(method, task, population, settings, plans)
        self.later, self.started, self.peak_bytes = later, False, 0
        # how the hosts come to their state when they start, and where it was last written
        self.resumes: Callable[[], object] = lambda: None
        self.saved: tuple[Path, Mapping[str, str]] | None = None

    def start(self) -> None:
        """Make the hosts now; a function that needs them does so, too."""
        if not self.started:
            self.cluster.start()
            self.started = True
            self.resumes()

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Let each shard train the clients of its orders; return all uploads."""
        self.saved = None
        requests = self._requests(orders, downs)
        answers = self._run("ask", [(s, (Moment.of(ctx), r), d) for s, r, d in requests])
        return joined(answers, self.settings.device)

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Evaluate each client's model after this download, as the local engine does."""
        return score_models(self, self.host, ctx, orders, downs, split)

    def score_each(
        self, ctx: Context, requests: Sequence[Separate], split: Split
    ) -> list[Mapping[str, ScoreTable]]:
        """Let each shard evaluate its clients' own models; return tables by name of the model."""
        calls = [
            (shard, (Moment.of(ctx), replace(sent, tuned_only=part.tuned_only), split), downs)
            for part in requests
            for shard, sent, downs in self._requests(part.orders, part.downs)
        ]
        return [table for tables in self._run("score_each", calls) for table in tables]

    def predict(
        self, ctx: Context, orders: Sequence[Order], down: Tree, split: Split, rows: Tensor
    ) -> RowPredictions:
        """Let each shard predict its part of rows (rows,) by the model that these clients share."""
        groups = by_shard(self.host.population, split, rows, orders, self.shards)
        calls = [
            (self._shard(order.client), (Moment.of(ctx), order, split, rows[at]), (down,))
            for order, at in groups
        ]
        return in_order(self._run("predict", calls), [at for _, at in groups])

    def client(self, ctx: Context, order: Order, down: Tree) -> Clients:
        shard = self._shard(order.client)
        ((net, own, memory),) = self._run("client", [(shard, (Moment.of(ctx), order), (down,))])
        start = self.host.task.starts[order.architecture]
        return Clients(start.with_arrays(net), build(self.host.own_type, own), memory)

    def state(self) -> dict[str, Tensor]:
        """Return the state of all clients, (clients, ...) by architecture and name."""
        return merged(self._run_all("state"), self.host.population.clients)

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the state of all clients, (clients, ...) by name, from a checkpoint."""
        self.saved = None
        parts = divided(arrays, self.host.population.clients, self.shards)
        self._run("restore", [(s, (), (part,)) for s, part in enumerate(parts)])

    @property
    def state_bytes(self) -> int:
        """The size of the state of all clients."""
        stores = self.host.stores.values()
        return sum(array.nbytes for store in stores for array in store.arrays.values())

    def shares(self, folder: Path) -> bool:
        """Return whether every host can read what is written into ``folder`` here."""
        token, word = folder / f"token-{os.getpid()}", secrets.token_hex(16)
        token.write_text(word, encoding="utf-8")
        try:
            return all(self._run_all("reads", token, word))
        finally:
            token.unlink(missing_ok=True)

    def save_parts(self, folder: Path) -> dict[str, str]:
        """Let the hosts write their clients' state into ``folder``; return digests by file name."""
        files: dict[str, str] = {}
        for part in self._run_all("save_part", folder):
            files |= part
        self.saved = folder, files
        return files

    def restore_parts(self, folder: Path, files: Mapping[str, str]) -> None:
        """Let the hosts restore their clients' state from the files that they wrote."""
        self._run_all("restore_part", folder, dict(files))
        self.saved = folder, files

    def close(self) -> None:
        """End the hosts; what is asked later, about the models, is answered in this process."""
        if self.started:
            with contextlib.suppress(WorkerError):  # of a cluster that has died
                self.peak_bytes = max(self._run_all("peak_memory"))
                self.resumes = self._resuming()
        self.started = False
        self.cluster.close()
        self.cluster = self.later

    def _resuming(self) -> Callable[[], object]:
        """Return a function that gives the state of now to hosts that start later."""
        if self.saved is not None:  # it may be larger than this machine's memory
            return functools.partial(self.restore_parts, *self.saved)
        return functools.partial(self.restore, self.state())

    def _shard(self, client: int) -> int:
        return self.host.population.place[client] % self.shards

    def _requests(
        self, orders: Sequence[Order], downs: Sequence[Tree]
    ) -> list[tuple[int, Sent, tuple[Tree, ...]]]:
        """Divide orders among the shards, each with its distinct downloads."""
        first: dict[object, Tree] = {}  # downloads of the same tensors are one
        downs = [first.setdefault(_identity(down), down) for down in downs]
        groups: dict[int, list[int]] = {}
        for i, order in enumerate(orders):
            groups.setdefault(self._shard(order.client), []).append(i)
        requests = []
        for shard, members in sorted(groups.items()):
            distinct = {id(downs[i]): downs[i] for i in members}
            place = {name: at for at, name in enumerate(distinct)}
            which = tuple(place[id(downs[i])] for i in members)
            sent = Sent(tuple(orders[i] for i in members), which)
            requests.append((shard, sent, tuple(distinct.values())))
        return requests

    def _run(
        self, function: str, calls: Sequence[tuple[int, tuple[object, ...], tuple[Tree, ...]]]
    ) -> list[Value]:
        self.start()
        return self.cluster.run([Call(s, function, arguments, d) for s, arguments, d in calls])

    def _run_all(self, function: str, *arguments: object) -> list[Value]:
        return self._run(function, [(shard, arguments, ()) for shard in range(self.shards)])


def _identity(value: Tree) -> object:
    """Return a key that is equal for trees of one type that hold the same tensor objects."""
    return type(value), *(id(leaf) for leaf in leaves(value))
