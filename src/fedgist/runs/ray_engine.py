"""The engine of a simulation whose clients are trained on the machines of a Ray cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fedgist.core.method import Context, Order
from fedgist.core.objectives.objective import RowPredictions
from fedgist.core.tree import Tree, named
from fedgist.engines.engine import Answer, ScoreTable, Split
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.plans.kernel_building import have_kernels
from fedgist.engines.plans.layout import with_kernels
from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import HostSettings
from fedgist.engines.process_control import peak_bytes
from fedgist.engines.scoring import Separate
from fedgist.engines.sharded_engine import HostsHere, Moment, Sent, ShardedEngine
from fedgist.engines.sharding import Shard, added, shard_of
from fedgist.engines.stop_signals import stoppable
from fedgist.errors import RecipeError
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe
from fedgist.recipe.resolve import resolve
from fedgist.runs.files.state_parts import Parts, write_part
from fedgist.world.world import World, make_world


@dataclass(frozen=True)
class HostRecipe:
    """What a host makes its shard from: the recipe, a user's objects, and what the run chose."""

    recipe: Recipe
    given: Overrides
    settings: HostSettings
    plans: Mapping[str, Plan]
    shards: int


class ShardHost:
    """The clients of one shard, somewhere on a cluster, with a local engine of its own.

    It makes the run's world from the recipe, so it opens its own rows, and keeps only its shard's.
    """

    def __init__(self, source: HostRecipe, number: int) -> None:
        """Make the shard of this number."""
        world = make_world(resolve(source.recipe, source.given))
        side = world.server
        tests = side.setup.recipe.evaluate.on == "test"
        self.shard: Shard = shard_of(world.population, number, source.shards, all_tests=tests)
        self.number, self.shards = number, source.shards
        if any(plan.kernels for plan in source.plans.values()):
            have_kernels(lambda _: None)  # this machine may not have built any yet
        self.task = with_kernels(side.task, source.plans)
        settings = replace(source.settings, workers=1, readers=source.settings.readers or 0)
        population = self.shard.population
        self.engine = LocalEngine(side.method, self.task, population, settings, source.plans)
        self.engine.start()

    def ask(self, moment: Moment, sent: Sent, *downs: Tree) -> Answer:
        """Train the clients of these orders; return their uploads, added up if there are shards."""
        answer = self.engine.ask(self._context(moment), sent.orders, sent.downs(downs))
        if self.shards == 1:
            return answer
        return replace(answer, subtotals=added((0, part) for part in answer.subtotals))

    def score_each(
        self, moment: Moment, sent: Sent, split: Split, *downs: Tree
    ) -> list[dict[str, ScoreTable]]:
        """Evaluate the own models of the clients of these orders."""
        request = Separate(sent.orders, sent.downs(downs), sent.tuned_only)
        return self.engine.score_each(self._context(moment), [request], split)

    def predict(
        self, moment: Moment, order: Order, split: Split, rows: Tensor, down: Tree
    ) -> RowPredictions:
        """Return the per-row results of rows (rows,), which are numbered among all clients'."""
        ctx, rows = self._context(moment), self.shard.rows_here(split, rows)
        return self.engine.predict(ctx, [order], down, split, rows)

    def client(
        self, moment: Moment, order: Order, down: Tree
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tree]:
        """Return a client's net, own state and optimizers after this download."""
        clients = self.engine.client(self._context(moment), order, down)
        return clients.net.state(), named(clients.own), clients.memory

    def state(self) -> dict[str, Tensor]:
        """Return the state of the shard's clients, (clients, ...) by architecture and name."""
        return self.engine.state()

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the state of the shard's clients, (clients, ...) by name."""
        self.engine.restore(arrays)

    def peak_memory(self) -> int:
        """Return the most memory that this process has used, in bytes."""
        return peak_bytes()

    def reads(self, path: Path, text: str) -> bool:
        """Return whether a file can be read here, and holds this text."""
        try:
            return path.read_text(encoding="utf-8") == text
        except OSError:
            return False

    def save_part(self, folder: Path) -> dict[str, str]:
        """Write the state of the shard's clients; return its digest by the file's name."""
        arrays = self.engine.state()
        return write_part(folder, self.number, arrays) if arrays else {}

    def restore_part(self, folder: Path, files: Mapping[str, str]) -> None:
        """Restore the state of the shard's clients from its file, if clients keep any."""
        parts = Parts(folder, files)
        self.engine.restore(parts.read_one(self.number) if files else {})

    def _context(self, moment: Moment) -> Context:
        return Context(self.engine.host.key, self.task, moment.round, moment.stage)


def ray_engine(
    world: World, settings: HostSettings, say: Callable[[str], None]
) -> tuple[ShardedEngine, int]:
    """Connect to the recipe's cluster; return an engine on it, and its number of shards.

    Raises
    ------
    RecipeError
        If Ray is not installed, or no cluster answers.
    """
    try:
        from fedgist.engines.ray_cluster import Connection, RayCluster
    except ModuleNotFoundError as error:
        needs = "engine.name = 'ray' needs Ray: pip install 'fedgist[ray]'"
        raise RecipeError(needs) from error
    side, section = world.server, world.server.setup.recipe.engine
    with stoppable(lambda: None) as stopping:  # Ray does not bear an exception while it starts
        connection = Connection(section.address)
    if stopping():
        connection.close()
        raise KeyboardInterrupt
    if section.shards != "auto":
        shards = section.shards
    else:
        shards = max(1, min(connection.slots(side.setup.device), len(side.clients)))
    recipe, device = side.setup.recipe, side.setup.device.partition(":")[0]  # an actor sees one GPU
    recipe, settings = recipe.changed({"engine.device": device}), replace(settings, device=device)
    source = HostRecipe(recipe, side.setup.given, settings, side.plans, shards)
    make = functools.partial(ShardHost, source)
    cluster = RayCluster(connection, make, shards, side.setup.device, say)
    here = replace(settings, device=side.setup.device)
    parts = side.method, side.task, world.population, here, side.plans
    later = HostsHere(make, shards)
    return ShardedEngine(*parts, shards=shards, cluster=cluster, later=later), shards
