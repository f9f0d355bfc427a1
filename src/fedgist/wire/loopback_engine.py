"""The loop-back engine: sites in one process, each with only its own rows of one data set.

Every message is sent as bytes and validated as over a network. Only the wire is different. The
engine is a simulation as well: it can read its sites' state and save it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from torch import Tensor

from fedgist.core.method import Context, Method, Order, Task
from fedgist.core.tree import Tree, below, take
from fedgist.data.sources.optional_packages import need
from fedgist.engines.client_requests import SentCohort
from fedgist.engines.engine import Answer, Engine, Scores, Split
from fedgist.engines.population import HostSettings, Population
from fedgist.engines.process_control import as_workers_do
from fedgist.training import cohort as cohorts
from fedgist.training.cohort import Clients
from fedgist.wire.outline import Outline
from fedgist.wire.remote_engine import RemoteEngine
from fedgist.wire.site import Site, population_of_one
from fedgist.wire.wire import LoopbackWire, Wire

RUN = "loopback"
NEED = "federation.sums = 'secure' needs cryptography: pip install 'fedgist[federation]'"


class LoopbackEngine:
    """A site for each client, all in this process; messages are bytes, as over a network."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: HostSettings,
        rounds_kept: int = 2,
        wire: Wire | None = None,
        *,
        secure: bool = False,
    ) -> None:
        """Make a site for each client; ``wire`` replaces the loop-back wire and must reach them.

        With ``secure`` their messages are added up so that the server sees totals alone.
        """
        self.sites = {
            client.id: Site(
                method,
                task_of_site(task, client.architectures),
                population_of_one(population, place),
                settings,
                run=RUN,
                rounds_kept=rounds_kept,
            )
            for place, client in enumerate(population.clients)
        }
        self.handlers: dict[int, Callable[[bytes], bytes]]
        self.handlers = {client: site.handle for client, site in self.sites.items()}
        if secure:
            self.handlers = _secure().secure_handlers(self.sites)
        self.remote = RemoteEngine(method, wire or LoopbackWire(self.handlers), run=RUN)
        self.asked: Engine = _secure().SecureEngine(self.remote) if secure else self.remote

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Send each order with its download; return the replies."""
        with as_workers_do():
            return self.asked.ask(ctx, orders, downs)

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Let each site score its model after this download."""
        with as_workers_do():
            return self.remote.score(ctx, orders, downs, split)

    def client(self, ctx: Context, order: Order, down: Tree) -> Clients:
        host = self.sites[order.client].host
        ids = (order.client,)
        sent = SentCohort(ctx.round, ctx.stage, ids, order.architecture, broadcast=True, down=down)
        return take(host.whole(cohorts.receive(host.cohort(sent), host.clients(sent))), 0)

    def state(self) -> dict[str, Tensor]:
        """Return the state of all sites: arrays (1, ...) by client, architecture and name."""
        return {
            f"{client}/{name}": array
            for client, site in self.sites.items()
            for name, array in site.host.state().items()
        }

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the state of every site, arrays (1, ...) by name, from a checkpoint."""
        for client, site in self.sites.items():
            site.rewind(below(f"{client}/", arrays))

    def close(self) -> None:
        """Close the wire."""
        self.remote.close()


def _secure() -> ModuleType:
    """Return the module of secure sums, which needs a package that is not always there."""
    need("cryptography", NEED)
    return importlib.import_module("fedgist.wire.secure.local_keys")


def task_of_site(task: Task, architectures: Sequence[str]) -> Task:
    """Return a site's task: its own architectures, and none of the server's rows."""
    starts = dict.fromkeys([*architectures, task.main])  # sites with private models lack the main
    return replace(
        task,
        architectures={name: task.architectures[name] for name in architectures},
        starts={name: task.starts[name] for name in starts if name in task.starts},
        test_sets={},
    )


def outlined(task: Task) -> Task:
    """Return the task of a server that does not know its clients' bodies, with outlines."""
    outlines = {
        name: replace(Outline.of(arch), name=name).architecture()
        for name, arch in task.architectures.items()
    }
    starts = {name: arch.start(0) for name, arch in outlines.items()}
    return replace(task, architectures=outlines, starts=starts)
