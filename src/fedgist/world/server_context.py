"""The server's view of a run: settings, method, task, and clients, but no rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedgist.core.method import ClientInfo, Method, Task
from fedgist.engines.plans.plan import Plan
from fedgist.recipe.reading import Recipe
from fedgist.recipe.resolve import Setup
from fedgist.world.graph import Neighbors
from fedgist.world.privacy_budget import PrivacyBudget

Online = Callable[[int], list[ClientInfo]]  # in a round
NeighborsByRound = Callable[[int], Neighbors] | None  # by round


@dataclass(frozen=True, eq=False)
class ServerContext:
    """The settings, the method, the task, the clients, and the clients online in each round.

    ``num_clients`` counts the clients before a method merges them. ``data_name`` is the name of the
    data. ``holds_out`` says whether clients hold out training rows for validation. ``notes`` are
    messages for the user before the first round. ``spending`` is the privacy budget of a private
    run. ``neighbors`` returns each client's neighbors in a round, if clients are peers. ``plans``
    holds the execution plan of each architecture. ``server_threads`` is the number of torch threads
    for the server's own work. ``shards`` is the number of parts into which clients are divided.
    ``data_summary`` names the inputs and the classes in one line. ``client_names`` are the names of
    the clients, if they have any.
    """

    setup: Setup
    num_clients: int
    method: Method
    task: Task
    clients: tuple[ClientInfo, ...]
    online: Online
    data_name: str
    data_summary: str = ""
    client_names: tuple[str, ...] = ()
    holds_out: bool = False
    notes: tuple[str, ...] = ()
    spending: PrivacyBudget | None = None
    neighbors: NeighborsByRound = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    server_threads: int = 1
    shards: int = 1

    @property
    def recipe(self) -> Recipe:
        """The recipe as it is recorded, with the values that the machine and the data determine."""
        return self.setup.recorded(
            num_clients=self.num_clients,
            plans=self.plans,
            server_threads=self.server_threads,
            shards=self.shards,
        )
