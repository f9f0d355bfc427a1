"""Selection of the best round and early stopping, by scores on validation data.

Both depend only on the record's lines, so a resumed run decides like an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.core.objectives.metrics import Direction
from fedgist.errors import RecipeError
from fedgist.recipe.schema import Recipe
from fedgist.runs.files.columns import over_clients
from fedgist.runs.files.record import Line
from fedgist.world.server_context import ServerContext


@dataclass(frozen=True)
class Selection:
    """How the best round is selected: a metric column and whether higher or lower is better.

    ``keeps`` says whether the run keeps the best round's models instead of the last round's.
    ``patience`` is the number of rounds without a better score after which the run stops. 0
    disables early stopping.
    """

    column: str
    better: Direction
    keeps: bool
    patience: int

    def best(self, lines: Sequence[Line]) -> Line | None:
        """Return the line of the best round, the first one if tied; None without any score."""
        sign = 1 if self.better == "higher" else -1
        # max takes the first of equals
        return max(self._scored(lines), key=lambda line: sign * line[self.column], default=None)

    def _scored(self, lines: Sequence[Line]) -> list[Line]:
        scores = [(line, line.get(self.column)) for line in lines]
        return [line for line, score in scores if score is not None and math.isfinite(score)]

    def stops(self, lines: Sequence[Line]) -> bool:
        """Return whether the run stops after these lines."""
        best = self.best(lines)
        if not self.patience or best is None:
            return False
        # counted in rounds that are scored: others cannot be better
        since: int = self._scored(lines)[-1]["round"] - best["round"]
        return since >= self.patience

    def outcome(self, lines: Sequence[Line], planned: int) -> dict[str, Any]:
        """Return the result's entry on the selected round: its score and the last round's."""
        best = self.best(lines)
        if best is None:
            return {"stopped_early": False}
        last = self._scored(lines)[-1]
        table = {
            "column": self.column,
            "best_round": best["round"],
            "best": best[self.column],
            "last_round": last["round"],
            "last": last[self.column],
        }
        kept = {"kept_round": best["round"]} if self.keeps else {}
        return {"selection": table, "stopped_early": lines[-1]["round"] < planned, **kept}


def selection_notes(side: ServerContext, lines: Sequence[Line]) -> list[str]:
    """Return notes for the user on an early stop and on the round whose models are kept."""
    selection = selection_of(side)
    best = selection.best(lines) if selection else None
    if selection is None or best is None:
        return []
    metric, done = side.task.objective.metrics[0], lines[-1]["round"]
    score = f"{metric.title.lower()} on validation rows"
    planned, at, reached = side.task.training.num_rounds, best["round"], best[selection.column]
    notes = []
    if done < planned and selection.stops(lines):
        rounds = f"{selection.patience} round{'s' if selection.patience > 1 else ''}"
        notes.append(
            f"stopped early after round {done} of {planned}: for {rounds} no better {score} than "
            f"{metric.text(reached)}, of round {at}"
        )
    keeps = f"the models of round {at} are kept" if selection.keeps else "the last models are kept"
    scores = [f"{metric.text(reached)} in round {at}"]
    if at != done and selection.column in lines[-1]:
        scores.append(f"{metric.text(lines[-1][selection.column])} in round {done}")
    return [*notes, f"{keeps}: {score} {', '.join(scores)}"]


def selection_of(side: ServerContext) -> Selection | None:
    """Return how a run selects its best round; None if it keeps the last round."""
    settings = side.setup.recipe.evaluate
    if settings.keep == "last" and not settings.patience:
        return None
    main = side.task.objective.metrics[0]
    column = over_clients("validation", main.name)
    return Selection(column, main.better, settings.keep == "best_validation", settings.patience)


def check_selection(recipe: Recipe, *, holds_out: bool) -> None:
    """Raise RecipeError if a run lacks the scores by which it selects its best round.

    Only this function decides which privacy settings allow a choice by scores. The server sees the
    scores, and a choice by them releases information about the validation rows that the privacy
    accounting does not cover. A search accounts for its choice separately
    (studies/private_choice.py).
    """
    settings, problem = recipe.evaluate, ""
    if settings.keep == "last" and not settings.patience:
        return
    if recipe.privacy.unit != "none":
        problem = f"privacy.unit = {recipe.privacy.unit!r} does not cover choosing by them"
    elif recipe.data.held_out:  # the server's rows and models: no client has a part in it
        return
    elif not recipe.privacy.share_measurements:
        problem = "scores do not leave the clients with privacy.share_measurements = false"
    elif not holds_out:
        problem = "nobody holds out rows: raise data.validation, or data.held_out at the server"
    elif settings.on == "global":
        problem = "clients are not scored with evaluate.on = 'global': use 'client' or 'test'"
    if problem:
        key = "keep = 'best_validation'" if settings.keep != "last" else "patience"
        raise RecipeError(f"evaluate.{key} needs scores on validation data, and {problem}")
