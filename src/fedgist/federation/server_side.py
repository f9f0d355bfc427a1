"""What a server knows, and all it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedgist.core.method import ClientInfo, Method, Task
from fedgist.federation.recipe import Recipe


@dataclass(frozen=True, eq=False)
class ServerSide:
    """The recipe, the method, the task, who there is, and who is online in a round.

    ``holds_out`` says whether clients keep validation rows of their training rows; ``data_name`` is
    what the data are called.
    """

    recipe: Recipe
    method: Method
    task: Task
    clients: tuple[ClientInfo, ...]
    online: Callable[[int], list[ClientInfo]]
    data_name: str
    holds_out: bool = False
