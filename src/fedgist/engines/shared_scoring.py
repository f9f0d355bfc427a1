"""Scoring of a model that several clients share: each row is predicted only once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.core.method import Context
from fedgist.core.objective import RowPredictions
from fedgist.core.tree import map_leaves
from fedgist.engines.client_host import ClientHost, score_table
from fedgist.engines.client_requests import PredictRequest, SentCohort
from fedgist.engines.engine import ScoreTable, Split, collect
from fedgist.engines.worker_pool import WorkerPool

ROWS_PER_REQUEST = 2048  # rows that one worker predicts at a time
SCORES_AT_ONCE = 1 << 22  # the most numbers of scores measured together: bounds memory


def score_shared(
    host: ClientHost, pool: WorkerPool, sent: SentCohort, split: Split, *, alone: bool
) -> tuple[ScoreTable, Mapping[str, float] | None]:
    """Score one model on its clients' rows, and on the whole test set if it is the only one.

    The rows are predicted by the workers of ``pool``. ``alone`` says that no other model is in use.
    """
    population = host.population
    examples = population.examples_of(split)
    lines = population.test if split == "test" else population.rows(split)
    merged = host.method.merges_clients  # one model, but every client's rows
    ids = tuple(range(len(lines))) if merged else sent.ids
    places = ids if merged else [population.place[client] for client in ids]
    rows_of = None if split == "test" else [lines[place] for place in places]
    everything = torch.arange(len(examples.y))
    on_all = alone and split in {"client", "test"} and examples.complete
    to_predict = everything if on_all or rows_of is None else torch.unique(torch.cat(rows_of))
    one_client = replace(sent, ids=sent.ids[:1])
    pieces = torch.split(to_predict, ROWS_PER_REQUEST)
    parts = pool.run([PredictRequest(one_client, split, piece) for piece in pieces])
    predictions: RowPredictions = map_leaves(
        lambda *leaf: torch.cat([a.cpu() for a in leaf]), *parts
    )
    ctx = Context(host.key, host.task, sent.round, sent.stage)
    y = examples.y.cpu()
    whole = None
    if on_all:
        line = map_leaves(lambda leaf: leaf.unsqueeze(0), predictions)
        values = score_table(ctx, (0,), line, everything.unsqueeze(0), y).values
        whole = {name: float(value) for name, value in values.items()}
    if rows_of is None:  # all clients are tested on the whole set with one model
        line = map_leaves(lambda leaf: leaf.unsqueeze(0), predictions)
        return _repeated(score_table(ctx, (0,), line, everything.unsqueeze(0), y), ids), whole
    return _measured(ctx, ids, rows_of, to_predict, predictions, y), whole


def _repeated(table: ScoreTable, ids: Sequence[int]) -> ScoreTable:
    count = len(ids)
    return ScoreTable(
        tuple(ids),
        table.rows.expand(count),
        {name: value.expand(count) for name, value in table.values.items()},
        None if table.confusion is None else table.confusion * count,
    )


def _measured(
    ctx: Context,
    ids: Sequence[int],
    rows_of: Sequence[Tensor],
    predicted: Tensor,
    predictions: RowPredictions,
    y: Tensor,
) -> ScoreTable:
    """Measure each client's own rows, for a bounded number of clients at a time."""
    place = torch.zeros(len(y), dtype=torch.int64)
    place[predicted] = torch.arange(len(predicted))
    longest = max(len(rows) for rows in rows_of)
    task = ctx.task
    of_row = math.prod(task.places) if task.places else task.num_classes
    at_once = max(1, SCORES_AT_ONCE // max(1, longest * of_row))
    tables = []
    for start in range(0, len(ids), at_once):
        chunk = rows_of[start : start + at_once]
        table = torch.nn.utils.rnn.pad_sequence(list(chunk), batch_first=True, padding_value=-1)
        lines = map_leaves(lambda leaf, t=table: leaf[place[t.clamp(min=0)]], predictions)
        tables.append(score_table(ctx, ids[start : start + at_once], lines, table, y))
    return collect(tables)
