"""The server's view of a run: recipe, method, task, and clients, but no rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedgist.core.method import ClientInfo, Method, Task
from fedgist.recipe.reading import Recipe
from fedgist.world.graph import Neighbors
from fedgist.world.privacy_budget import PrivacyBudget

Online = Callable[[int], list[ClientInfo]]  # in a round
NeighborsOf = Callable[[int], Neighbors] | None  # by round


@dataclass(frozen=True, eq=False)
class ServerContext:
    """The recipe, the method, the task, the clients, and which of them are online in a round.

    ``data_name`` is the name of the data; ``holds_out`` says whether clients hold out some of their
    training rows for validation; ``notes`` are what a user should know before the first round;
    ``spending`` says what the run spends of its privacy, if it has any;
    ``hears`` whom each client hears in a round, among peers.
    """

    recipe: Recipe
    method: Method
    task: Task
    clients: tuple[ClientInfo, ...]
    online: Online
    data_name: str
    holds_out: bool = False
    notes: tuple[str, ...] = ()
    spending: PrivacyBudget | None = None
    hears: NeighborsOf = None

    @property
    def server_threads(self) -> int:
        """The number of torch's threads for work of the server."""
        chosen = self.recipe.engine.server_threads
        return 1 if chosen == "auto" else chosen
