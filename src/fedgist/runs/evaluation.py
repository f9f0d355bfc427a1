"""Evaluation: scores become columns of the record, and the server's models are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch, RowSet
from fedgist.core.finite_scores import scored
from fedgist.core.method import Context, Net, Task
from fedgist.core.objectives.metrics import ALL_ROWS, HELD_OUT, LOSS
from fedgist.core.objectives.objective import Objective, RowPredictions
from fedgist.core.tree import map_leaves, take
from fedgist.data.examples import as_labels
from fedgist.engines.engine import Scores
from fedgist.errors import RecipeError, listed
from fedgist.recipe.schema import Recipe
from fedgist.runs.best_round import check_selection
from fedgist.runs.files.columns import (
    CONFUSION,
    COUNT,
    COUNT_OF,
    MISSING,
    STD,
    UNSCORED,
    of_all,
    of_server,
    over_clients,
    over_models,
)
from fedgist.runs.files.record import Line
from fedgist.runs.lost_models import NOT_FINITE
from fedgist.training.inference import rows_at_once
from fedgist.world.data import check_moments
from fedgist.world.server_context import ServerContext
from fedgist.world.server_sets import PartialTestSet

MOST_ROWS = 1024  # rows that are evaluated together
NO_ROWS = "no test rows"


def columns(scores: Scores, split: str) -> Line:
    """Return mean and spread over clients of each model's metrics, as ``eval/<split>/...``.

    Each client has the same weight, regardless of its number of rows. A client without rows is in
    no mean, and one without a defined metric is left out of the metric's mean: ``count`` and
    ``missing`` say so. The spread is the population standard deviation over clients.
    """
    line = _counts(scores, split)
    for model, table in scores.models.items():
        for metric, values in table.values.items():
            defined = values[~values.isnan()]
            if not len(defined):
                continue
            if len(defined) != line[f"eval/{split}/{COUNT}"]:
                line[over_clients(split, metric, model, COUNT_OF)] = len(defined)
            line[over_clients(split, metric, model)] = float(defined.mean())
            if metric != LOSS.name:
                spread = float(defined.std(correction=0))
                line[over_clients(split, metric, model, STD)] = spread
        if table.confusion is not None and int(table.confusion.sum()):
            line[over_clients(split, CONFUSION, model, "")] = table.confusion.tolist()
    if scores.whole is not None:
        line |= {of_all(metric): value for metric, value in scores.whole.items()}
    return line


def _counts(scores: Scores, split: str) -> Line:
    """Return the number of clients with scored rows, and that of all others if there are any."""
    table = scores.models.get("")
    rows = [] if table is None else table.rows.tolist()
    count = sum(number > 0 for number in rows)
    missing = len(rows) - count + len(scores.missing)
    others = {f"eval/{split}/{MISSING}": missing} if missing else {}
    return {f"eval/{split}/{COUNT}": count} | others


def unscored(scores: Scores, names: Sequence[str]) -> Line:
    """Return the clients that could have a score and have none, each with the reason."""
    entries = [
        {"client": client, **({"name": names[client]} if names else {}), "reason": reason}
        for client, reason in scores.missing
    ]
    return {UNSCORED: entries} if entries else {}


def not_scored(rounds: Sequence[Line], clients: Sequence[Line], kept: int | None) -> list[Line]:
    """Return the clients that are in no mean of the run's result, each with the reason.

    The result is the last evaluation with any score, up to the round ``kept``.
    """
    column = f"eval/client/{COUNT}"
    lines = [
        line for line in rounds if line.get(column) and (kept is None or line["round"] <= kept)
    ]
    if not lines:
        return []
    last = lines[-1]["round"]
    empty = [
        {key: line[key] for key in ("client", "name") if key in line} | {"reason": NO_ROWS}
        for line in clients
        if (line["round"], line["split"], line.get("rows")) == (last, "client", 0)
    ]
    entries = [*lines[-1].get(UNSCORED, []), *empty]
    return sorted(entries, key=lambda entry: entry["client"])


def not_scored_notes(entries: Sequence[Line]) -> list[str]:
    """Return a note for each reason why clients are in no mean of the result."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        who = str(entry.get("name", f"client {entry['client']}"))
        names.setdefault(entry["reason"], []).append(who)
    return [
        f"{len(some)} client{'s are' if len(some) > 1 else ' is'} in no mean of the result "
        f"({reason}): {listed(some)}"
        for reason, some in names.items()
    ]


def per_client(scores: Scores, number: int, split: str) -> list[Line]:
    """Return one line for each scored client, ordered by client."""
    lines: dict[int, Line] = {}
    for model, table in scores.models.items():
        prefix = f"{model}_" if model else ""
        names = list(table.values)
        numbers = torch.stack([table.values[name] for name in names], 1).tolist() if names else []
        for client, rows, values in zip(table.clients, table.rows.tolist(), numbers, strict=True):
            line = lines.setdefault(client, {"round": number, "client": client, "split": split})
            line["rows"] = rows
            for name, value in zip(names, values, strict=True):
                line[f"{prefix}{name}"] = None if math.isnan(value) else value
    return [lines[client] for client in sorted(lines)]


def models_of_clients(side: ServerContext) -> list[str]:
    """Return the name of each client's model; in pools, the names of all its models."""
    models = [", ".join(client.architectures) for client in side.clients]
    return models * side.num_clients if side.method.merges_clients else models


def with_names(lines: Sequence[Line], side: ServerContext) -> list[Line]:
    """Return lines of clients with each client's name, if it has one, and its model."""
    names, models = side.client_names, models_of_clients(side)

    def who(client: int) -> Line:
        named = {"name": names[client]} if names else {}
        return {"client": client, **named, "model": models[client]}

    return [{"round": line["round"], **who(line["client"]), **line} for line in lines]


def joined(lines: Sequence[Line], more: Sequence[Line]) -> list[Line]:
    """Return the lines of both lists, merging lines of the same client and split."""
    beside = {(line["client"], line["split"]): line for line in more}
    joined_lines = [line | beside.pop((line["client"], line["split"]), {}) for line in lines]
    return [*joined_lines, *beside.values()]


def has_named_sets(task: Task) -> bool:
    """Return whether the server has named test sets besides all test rows and held-out rows."""
    return not set(task.test_sets) <= {ALL_ROWS, HELD_OUT}


def scores_models(recipe: Recipe, task: Task) -> str:
    """Return the setting that requires scores of the server's models; empty if none does."""
    if recipe.evaluate.on == "global":
        return "evaluate.on = 'global'"
    if recipe.data.held_out:
        return f"data.held_out = {recipe.data.held_out}"
    return "evaluate.sets" if has_named_sets(task) else ""


def check_evaluation(side: ServerContext) -> None:
    """Raise RecipeError if nothing would be measured, or the server would see no reply."""
    recipe = side.setup.recipe
    check_moments(recipe, named_sets=has_named_sets(side.task))
    check_selection(recipe, holds_out=side.holds_out)
    least, count = recipe.privacy.min_replies, len(side.clients)
    if least > max(count, 1) and not side.method.merges_clients:
        raise RecipeError(
            f"privacy.min_replies = {least}, but there are {count} clients: nothing would be seen"
        )
    wanted = scores_models(recipe, side.task)
    had = {name for client in side.clients for name in client.architectures}
    had |= {side.task.main} if side.method.trains_main else set()
    nobodys = [name for name in side.task.starts if name not in had]
    looked_at = wanted or recipe.evaluate.probe != "none" or side.method.merges_clients
    if nobodys and not looked_at:
        raise RecipeError(
            f"no client has {nobodys[0]}, and nothing looks at it: use evaluate.on = 'global', "
            "evaluate.sets or evaluate.probe"
        )
    if not wanted:
        return
    ctx = Context(random.key(recipe.seed), side.task, 0, "init")
    if not side.method.models(side.method.init_server(ctx), ctx):
        raise RecipeError(
            f"{wanted}: the server's own models are scored, and method {recipe.method.name} "
            "has none; clients' are, with evaluate.on = 'client' or 'test' and data.validation"
        )
    if recipe.evaluate.on == "global" and not len(side.task.test_sets[ALL_ROWS]):
        raise RecipeError(f"evaluate.on = 'global' needs test rows; {side.data_name} has none")


def scoring_notes(side: ServerContext) -> list[str]:
    """Return a note for the user if no model of the run will be scored on any row."""
    has_rows = side.holds_out or any(len(rows) for rows in side.task.test_sets.values())
    if (
        has_rows
        or side.setup.recipe.evaluate.train
        or not side.setup.recipe.privacy.share_measurements
    ):
        return []
    problem = f"no model will be scored: {side.data_name} has no test rows; "
    given = (
        "give test rows or data.test_fraction"
        if side.setup.given.data is not None
        else "give test rows"
    )
    return [problem + f"{given}, raise data.validation, or set evaluate.train = true"]


def server_columns(models: Mapping[str, Net], ctx: Context) -> tuple[Line, list[Line]]:
    """Return the metrics of each model of the server on each of its test sets, by column.

    Also return the mean over models on the held-out rows and, with several models, on all test
    rows. A model that is not finite has no metrics, and means over models are left out with it:
    the second value has an entry for each such model.
    """
    line: Line = {}
    lost: list[Line] = []
    means: dict[tuple[str, str], list[float]] = {}
    for model, net in models.items():
        scores = _scores(net, ctx)
        if any(math.isinf(values[LOSS.name]) for values in scores.values()):
            lost.append({"model": model, "reason": NOT_FINITE})
            continue
        for name, values in scores.items():
            line |= {of_server(model, name, metric): v for metric, v in values.items()}
            if len(models) == 1 and name == ALL_ROWS:
                line |= {of_all(metric): v for metric, v in values.items()}
            for metric, value in values.items():
                means.setdefault((name, metric), []).append(value)
    for (name, metric), of_models in means.items() if not lost else ():
        column = {ALL_ROWS: over_models(metric)} if len(models) > 1 else {}
        column[HELD_OUT] = over_clients("validation", metric)
        if name in column:
            line[column[name]] = sum(of_models) / len(of_models)
    return line, lost


def _scores(net: Net, ctx: Context) -> dict[str, dict[str, float]]:
    """Return the metrics of one net on each test set. A row in several sets is predicted once."""
    by_set: dict[str, tuple[RowPredictions, Tensor]] = {}
    for name, rows in ctx.task.test_sets.items():
        if isinstance(rows, PartialTestSet):  # of all rows, which come first
            predictions, y = by_set[ALL_ROWS]
            by_set[name] = take(predictions, rows.rows), y[rows.rows]
        else:
            by_set[name] = _set_predictions(net, rows, ctx)
    return {name: _measured(*predicted, ctx.task.objective) for name, predicted in by_set.items()}


def _set_predictions(net: Net, rows: RowSet, ctx: Context) -> tuple[RowPredictions, Tensor]:
    pieces = torch.split(torch.arange(len(rows)), rows_at_once(ctx.task))
    batches: Iterator[Batch] = (take(rows.batch(piece.unsqueeze(0)), 0) for piece in pieces)
    return _predictions(net, batches, ctx.task.objective)


def score_rows(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, objective: Objective
) -> dict[str, float]:
    """Return the metrics of a model on examples ``x`` ``(rows, *input)``, labels ``y`` (rows, ...).

    ``model`` maps ``(batch, *input)`` to logits (batch, ..., outputs). A metric that is not defined
    is NaN. A model that is not finite has none, and an infinite loss.
    """
    at_once = max(1, MOST_ROWS // max(1, y[:1].numel()))
    pieces = zip(torch.split(x, at_once), torch.split(as_labels(y), at_once), strict=True)
    batches = (
        Batch(rows, labels, torch.ones(len(labels), dtype=torch.bool, device=y.device))
        for rows, labels in pieces
    )
    return _measured(*_predictions(model, batches, objective), objective)


def _predictions(
    model: Callable[[Tensor], Tensor], batches: Iterable[Batch], objective: Objective
) -> tuple[RowPredictions, Tensor]:
    """Return the predictions and the labels of all rows in the batches."""
    predictions, labels = [], []
    with torch.no_grad():
        for batch in batches:
            predictions.append(objective.predict_rows(model(batch.x), batch))
            labels.append(batch.y)
    return map_leaves(lambda *leaf: torch.cat(leaf), *predictions), torch.cat(labels)


def _measured(predictions: RowPredictions, y: Tensor, objective: Objective) -> dict[str, float]:
    of_one_client: RowPredictions = map_leaves(lambda leaf: leaf.unsqueeze(0), predictions)
    everyone = torch.ones(1, len(y), dtype=torch.bool, device=y.device)
    measured, _ = scored(objective, of_one_client, y.unsqueeze(0), everyone, confusion=False)
    return {name: float(value) for name, value in measured.items()}
