"""The steps of a federation with limited time, from its record: a simulation takes them again."""

from __future__ import annotations

from pathlib import Path

from fedgist.engines.population import StepsKey
from fedgist.errors import RecipeError
from fedgist.runs.files.columns import STEPS
from fedgist.runs.files.record import ROUNDS, read_lines
from fedgist.world.server_context import ServerContext


def repeated_steps(side: ServerContext) -> dict[StepsKey, tuple[int, ...]] | None:
    """Return the steps of each client's phases in the run that a recipe names, if it names one.

    Raises
    ------
    RecipeError
        If the training's time is limited and no run is named, or the other way round, or if there
        is no such run.
    """
    train = side.setup.recipe.train
    if train.round_seconds is None and not train.steps_of:
        return None
    if not train.steps_of:
        raise RecipeError(
            "train.round_seconds limits the sites of a federation; a simulation repeats one with "
            "train.steps_of = its run directory, and has train.local_steps and clients.settings"
        )
    if train.round_seconds is None:
        raise RecipeError("train.steps_of is of a federation with train.round_seconds: give both")
    path = Path(train.steps_of) / ROUNDS
    if not path.is_file():
        raise RecipeError(f"train.steps_of = {train.steps_of!r}: there is no {path}")
    models = {client.id: client.architectures for client in side.clients}
    return {
        (line["round"], entry["stage"], entry["client"], name): tuple(entry["steps"])
        for line in read_lines(path)
        for entry in line.get(STEPS, [])
        for name in models.get(entry["client"], ())
        if entry.get("pool", name) == name
    }
