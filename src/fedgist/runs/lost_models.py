"""Scores without the models that are not finite, which have none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fedgist.core.finite_scores import LOST
from fedgist.core.objectives.metrics import LOSS
from fedgist.engines.engine import Scores, ScoreTable
from fedgist.runs.files.record import Line

NOT_FINITE = "its model is not finite"


def without_lost(scores: Scores) -> Scores:
    """Return the scores without the clients whose models are not finite, which are missing.

    A copy of a model that is not finite after its further training has no defined metric.
    """
    table = scores.models.get("")
    lost = set() if table is None else _lost(table)
    models = {name: _of_others(table, lost) for name, table in scores.models.items()}
    whole = scores.whole
    if whole is not None and math.isinf(whole[LOSS.name]):
        whole = None
    missing = sorted([*scores.missing, *((client, NOT_FINITE) for client in lost)])
    return replace(scores, models=models, whole=whole, missing=tuple(missing))


def _lost(table: ScoreTable) -> set[int]:
    """Return the clients without a score because their models are not finite."""
    losses = table.values.get(LOSS.name, torch.zeros(0)).tolist()
    return {client for client, loss in zip(table.clients, losses, strict=False) if loss == LOST}


def _of_others(table: ScoreTable, lost: set[int]) -> ScoreTable:
    """Return the scores of the clients that are not lost, NaN for a copy that is."""
    kept = [place for place, client in enumerate(table.clients) if client not in lost]
    clients, rows = tuple(table.clients[place] for place in kept), table.rows[kept]
    values = {name: column[kept] for name, column in table.values.items()}
    if copies := _lost(replace(table, clients=clients, rows=rows, values=values)):
        nothing = torch.tensor([client in copies for client in clients])
        values = {
            name: v.masked_fill(nothing.to(v.device), torch.nan) for name, v in values.items()
        }
    return ScoreTable(clients, rows, values, table.confusion)


def defined(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of one model by name; none if the model is not finite."""
    return {} if math.isinf(values[LOSS.name]) else dict(values)


def lost_clients(scores: Scores, names: Sequence[str]) -> list[Line]:
    """Return an entry of a round's line for each client without a score for this reason."""
    return [
        {"client": client, **({"name": names[client]} if names else {}), "reason": NOT_FINITE}
        for client, reason in scores.missing
        if reason == NOT_FINITE
    ]
