"""Predictions of each client's model for its own rows, which tables over rows are made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedgist.core.message import are_finite
from fedgist.core.objectives.class_metrics import ClassPredictions
from fedgist.data.lazy_rows import pieces_of
from fedgist.engines.engine import Split
from fedgist.engines.scoring import Scorer
from fedgist.errors import RecipeError
from fedgist.recipe.section import KEPT
from fedgist.runs.files.prediction_file import TEST, VALIDATION, Predictions, joined
from fedgist.runs.round import ServerRun
from fedgist.world.world import World

SPLITS: dict[Split, int] = {"client": TEST, "validation": VALIDATION}


def saves_predictions(world: World, engine: object) -> bool:
    """Return whether a run saves predictions.

    Raises
    ------
    RecipeError
        If the recipe asks for them and the run cannot have them.
    """
    recipe, task = world.server.setup.recipe, world.server.task
    wanted = recipe.evaluate.save_predictions
    problem = ""
    if task.objective.target != "class":
        problem = f"objective.name = {task.objective.name!r} predicts no classes"
    elif not isinstance(engine, Scorer):
        problem = f"engine.name = {recipe.engine.name!r} leaves all rows with their sites"
    if wanted is True and problem:
        raise RecipeError(f"evaluate.save_predictions = true: {problem}")
    if wanted == "auto":
        natural = world.server.setup.given.clients is not None or recipe.partition.name in KEPT
        return natural and recipe.privacy.unit == "none" and not problem
    return wanted


def save(server_run: ServerRun, world: World, folder: Path) -> None:
    """Write the predictions by the models that the run keeps; clients without rows have none.

    Clients whose model is not finite are left out, as they are in all scores.
    """
    if parts := list(_parts(server_run, world)):
        joined(parts).write(folder)


def _parts(server_run: ServerRun, world: World) -> Iterator[Predictions]:
    """Yield the predictions of each client's test rows, then of its validation rows."""
    engine = server_run.engine
    assert isinstance(engine, Scorer)  # it was checked
    orders, downs, ctx = server_run.downloads(server_run.round)
    data, owned = world.data, world.partition
    rows_of = {"client": owned.test, "validation": owned.validation}
    for split, number in SPLITS.items():
        inputs, labels = (
            (data.inputs_test, data.y_test) if split == "client" else (data.inputs, data.y)
        )
        for client in range(len(rows_of[split])):
            rows = rows_of[split][client]
            place = 0 if server_run.method.merges_clients else client
            if not len(rows):
                continue
            predicted = engine.predict(ctx, [orders[place]], downs[place], split, rows)
            assert isinstance(predicted, ClassPredictions)  # of an objective of classes
            if not are_finite([predicted.logits, predicted.loss]):
                continue
            content = [row for piece in pieces_of(inputs[rows]) for row in piece]
            yield Predictions(
                split=np.full(len(rows), number, np.int8),
                client=np.full(len(rows), client, np.int32),
                label=labels[rows].numpy().astype(np.int32),
                row=np.array(_digests(content, labels[rows]), np.int64),
                predicted=predicted.label.cpu().numpy().astype(np.int32),
                log_odds=predicted.log_odds.cpu().numpy().astype(np.float32),
            )


def _digests(inputs: Sequence[Tensor], labels: Tensor) -> list[int]:
    """Return a digest of each row and its label."""
    contents = (
        row.contiguous().numpy().tobytes() + label.to_bytes(8, "little", signed=True)
        for row, label in zip(inputs, labels.tolist(), strict=True)
    )
    digests = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    return [int.from_bytes(digest, "little", signed=True) for digest in digests]
