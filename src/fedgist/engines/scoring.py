"""Scoring of clients' models; a model that several clients share predicts each row once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgist.core.method import Context, Order
from fedgist.core.objectives.objective import RowPredictions
from fedgist.core.tree import Tree, map_leaves, same
from fedgist.engines.client_host import ClientHost, by_row, score_table
from fedgist.engines.engine import Scores, ScoreTable, Split, collect

SCORES_AT_ONCE = 1 << 22  # the most numbers of scores measured together: bounds memory


@dataclass(frozen=True)
class Separate:
    """Clients whose models are scored one by one, with their downloads.

    With ``tuned_only``, only the copies trained in the phases before a test are scored.
    """

    orders: Sequence[Order]
    downs: Sequence[Tree]
    tuned_only: bool = False


@runtime_checkable
class Scorer(Protocol):
    """What an engine computes of a score, in its workers or on a cluster."""

    def score_each(
        self, ctx: Context, requests: Sequence[Separate], split: Split
    ) -> Sequence[Mapping[str, ScoreTable]]:
        """Score each client's own model; return tables of some clients, by name of the model."""

    def predict(
        self, ctx: Context, orders: Sequence[Order], down: Tree, split: Split, rows: Tensor
    ) -> RowPredictions:
        """Return the per-row results of rows (rows,) by the model that these clients share."""


def score_models(
    scorer: Scorer,
    host: ClientHost,
    ctx: Context,
    orders: Sequence[Order],
    downs: Sequence[Tree],
    split: Split,
) -> Scores:
    """Return the scores of the clients' models after these downloads.

    A model that several clients share is evaluated once. Before a second test, each client trains
    its own copy, if the method or the settings require it. Clients that keep their measurements
    have no scores.
    """
    if not host.settings.share_measurements:
        return Scores({})
    tables: dict[str, list[ScoreTable]] = {}
    apart, shared, whole = [], [], None
    names = sorted({o.architecture for o in orders})
    for name in names:
        members = [i for i, order in enumerate(orders) if order.architecture == name]
        if not _is_shared(host, [downs[i] for i in members]):
            apart += members
            continue
        shared += members
        group = Separate([orders[i] for i in members], [downs[members[0]]])
        table, on_all = score_shared(scorer, host, ctx, group, split, alone=len(names) == 1)
        tables.setdefault("", []).append(table)
        whole = on_all or whole
    tuned = shared if host.has_second_tests(ctx, split) else []
    requests = [
        Separate([orders[i] for i in members], [downs[i] for i in members], members is shared)
        for members in (apart, tuned)
    ]
    for result in scorer.score_each(ctx, requests, split):
        for model, table in result.items():
            tables.setdefault(model, []).append(table)
    return Scores({model: collect(parts) for model, parts in tables.items()}, whole)


def _is_shared(host: ClientHost, downs: Sequence[Tree]) -> bool:
    """Return whether clients of one architecture all have the same model after ``downs``."""
    kept = any(store.arrays for store in host.stores.values())
    alike = host.method.keeps == "none" and not kept and all(same(d, downs[0]) for d in downs)
    return host.method.merges_clients or alike


def score_shared(
    scorer: Scorer, host: ClientHost, ctx: Context, shared: Separate, split: Split, *, alone: bool
) -> tuple[ScoreTable, Mapping[str, float] | None]:
    """Score one model on its clients' rows, and on the whole test set if it is the only one.

    ``shared`` has one download for all. ``alone`` says that no other model is in use.
    """
    population = host.population
    examples = population.examples_of(split)
    lines = population.test if split == "test" else population.rows(split)
    merged = host.method.merges_clients  # one model, but every client's rows
    ids = tuple(range(len(lines))) if merged else tuple(order.client for order in shared.orders)
    places = ids if merged else [population.place[client] for client in ids]
    rows_of = None if split == "test" else [lines[place] for place in places]
    everything = torch.arange(len(examples.y))
    on_all = alone and split in {"client", "test"} and examples.complete
    to_predict = everything if on_all or rows_of is None else torch.unique(torch.cat(rows_of))
    predictions = scorer.predict(ctx, shared.orders, shared.downs[0], split, to_predict)
    ctx = Context(host.key, host.task, ctx.round, ctx.stage)
    y = examples.y.cpu()
    whole = None
    if on_all:
        line = map_leaves(lambda leaf: leaf.unsqueeze(0), predictions)
        values = score_table(ctx, (0,), line, everything.unsqueeze(0), y).values
        whole = {name: float(value) for name, value in values.items()}
    if rows_of is None:  # all clients are tested on the whole set with one model
        line = map_leaves(lambda leaf: leaf.unsqueeze(0), predictions)
        return _repeated(score_table(ctx, (0,), line, everything.unsqueeze(0), y), ids), whole
    alone_by_row = by_row(host.task, split)
    return _measured(ctx, ids, rows_of, to_predict, predictions, y, by_row=alone_by_row), whole


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
    *,
    by_row: bool,
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
        members = ids[start : start + at_once]
        tables.append(score_table(ctx, members, lines, table, y, by_row=by_row))
    return collect(tables)
