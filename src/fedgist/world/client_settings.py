"""Settings of single clients: from a simulation's recipe, or from the file of a real site.

A method declares its client settings as a frozen dataclass of plain values
(``PeerMethod.own_settings``). In a recipe, a table ``[clients.settings.NAME]`` holds values for a
share of the clients, or for clients listed by number. With any method it may hold a table
``train``, which says how long these clients train. All other clients have the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, PositiveInt
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import Fraction, check_bounds
from fedgist.core.method import Method, Settings, Task
from fedgist.core.peer_method import PeerMethod
from fedgist.core.training import Work
from fedgist.engines.population import OwnSettings
from fedgist.errors import MethodError, RecipeError
from fedgist.options import CLOSED, check_options, checked
from fedgist.recipe.model_factories import ClientList, StatedClients
from fedgist.world.client_lists import numbers_of

Tables = Mapping[str, Mapping[str, object]]
WHOSE = ("share", "clients")
TRAIN = "train"
EXCESS = 1e-9  # of shares that add up to all clients, by rounding


def client_settings(
    tables: Tables,
    method: Method,
    task: Task,
    num_clients: int,
    key: Tensor,
    names: Sequence[str] = (),
) -> dict[int, OwnSettings]:
    """Return the settings of the clients that do not have the defaults, by client number.

    ``key`` () draws the clients of tables with a share. ``names`` are the clients' names.
    """
    order = random.permutation(key, num_clients).tolist()
    given: dict[int, OwnSettings] = {}
    drawn = 0.0
    for name, table in tables.items():
        source = f"clients.settings.{name}"
        values = {key: value for key, value in table.items() if key not in WHOSE}
        settings = _made(values, method, source)
        share, listed = _whose(table, source)
        members = numbers_of(listed, names, f"{source}.clients")
        first, drawn = round(drawn * num_clients), drawn + share
        for client in (*members, *order[first : round(drawn * num_clients)]):
            if client in given or client >= num_clients:
                why = "has other settings" if client in given else "does not exist"
                raise RecipeError(f"{source}: client {client} {why}")
            _check(client, settings.method, method, task, source)
            given[client] = settings
    if drawn > 1.0 + EXCESS:
        raise RecipeError(
            f"clients.settings: the shares add up to {drawn:g}, more than all clients"
        )
    return given


def _whose(table: Mapping[str, object], source: str) -> tuple[float, ClientList]:
    """Return the share of all clients that a table applies to, and the clients it lists."""
    if ("share" in table) == ("clients" in table):
        raise RecipeError(f"{source}: give share or clients: whose settings are these?")
    if "share" in table:
        return checked(Fraction, table["share"], f"{source}.share"), ()
    return 0.0, checked(StatedClients, table["clients"], f"{source}.clients")


def settings_in(
    values: Mapping[str, object], client: int, method: Method, task: Task, source: str
) -> OwnSettings:
    """Return the settings in a table of values; ``source`` names the table in errors."""
    settings = _made(values, method, source)
    _check(client, settings.method, method, task, source)
    return settings


def works_in(tables: Tables) -> list[Work]:
    """Return how long the clients of a recipe's tables train, where a table says."""
    stated = ((f"clients.settings.{name}.{TRAIN}", t.get(TRAIN)) for name, t in tables.items())
    return [_work(table, source) for source, table in stated if table is not None]


class OwnTraining(BaseModel):
    """How long single clients train: one of the two."""

    model_config = CLOSED

    local_epochs: PositiveInt | None = None
    """Number of passes over its rows that such a client makes in a round."""
    local_steps: PositiveInt | None = None
    """Number of local steps that such a client takes in a round."""


def _made(values: Mapping[str, object], method: Method, source: str) -> OwnSettings:
    of_method = {key: value for key, value in values.items() if key != TRAIN}
    work = _work(values[TRAIN], f"{source}.{TRAIN}") if TRAIN in values else None
    if not of_method and work is not None:
        return OwnSettings(None, work)
    kind = method.own_settings if isinstance(method, PeerMethod) else None
    name = type(method).__name__
    if kind is None:
        raise RecipeError(f"{source}: clients of {name} have no settings of their own but {TRAIN}")
    options = check_options(kind, of_method, f"the clients' settings of {name}", source)
    return OwnSettings(kind(**options), work)


def _work(table: object, source: str) -> Work:
    """Return how long clients train, as a table says."""
    stated: OwnTraining = checked(OwnTraining, table, source)
    epochs, steps = stated.local_epochs, stated.local_steps
    if (epochs is None) == (steps is None):
        raise RecipeError(f"{source}: give local_epochs or local_steps")
    return Work(steps=steps) if epochs is None else Work(epochs)


def _check(client: int, settings: Settings, method: Method, task: Task, source: str) -> None:
    if settings is None:
        return
    try:
        check_bounds(settings, source)
        if isinstance(method, PeerMethod):
            method.check_client(client, settings, task)
    except MethodError as error:
        text = str(error)
        raise RecipeError(text if text.startswith(source) else f"{source}: {text}") from error
