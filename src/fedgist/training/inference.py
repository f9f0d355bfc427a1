"""Computations of a cohort without training: summaries, uploads, predictions and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.method import Batch, Count, Labels, Method, Net, Task
from fedgist.core.objectives.objective import RowPredictions
from fedgist.core.peer_method import PeerMethod
from fedgist.core.privacy import clipped_message, noised
from fedgist.core.task import fake_batch
from fedgist.core.tree import Tree, leaves, map_leaves, take
from fedgist.data.examples import Examples, labels_of
from fedgist.training.cohort import Clients, Cohort

Columns = dict[str, Tensor]
EVALUATED_AT_ONCE = 1024  # the most rows of a stack that are evaluated together: bounds memory
OUTPUTS_AT_ONCE = 1 << 22  # the most numbers in the outputs of its models
INPUTS_AT_ONCE = (
    1 << 20
)  # the most numbers in its inputs; a layer of ResNet18 has twenty times more


def upload(cohort: Cohort, clients: Clients) -> tuple[Tree, Clients]:
    """Summarize all rows of each client, batch by batch, and make the uploads, (K, ...)."""
    method = cohort.method

    def one_client(net: Net, own: Tree, sums: Tree, down: Tree, key: Tensor) -> tuple[Any, Any]:
        return method.upload(net, own, sums, down, cohort.at(key))

    with torch.no_grad():
        sums = _summaries(cohort, clients)
        dims = (0, 0, 0, cohort.down_dim, 0)
        message, own = cohort.lift(one_client, dims)(
            clients.net, clients.own, sums, cohort.down, cohort.keys
        )
    return message, replace(clients, own=own)


def protected_upload(cohort: Cohort, message: Tree) -> Tree:
    """Return the uploads (K, ...) after clipping and local noise, as they may leave the clients."""
    privacy = cohort.ctx.task.privacy
    if privacy is None or not leaves(message):
        return message

    with torch.no_grad():
        if privacy.unit == "client":
            message = cohort.lift(lambda single: clipped_message(single, privacy), (0,))(message)
        if privacy.where == "local":
            keys = cohort.private_keys("upload")
            message = noised(message, privacy.deviation, keys, privacy.grid)
    return message


def _summaries(cohort: Cohort, clients: Clients) -> Tree:
    method = cohort.method
    if type(method).summarize is Method.summarize:  # counting needs no examples
        return Count((cohort.table >= 0).sum(1).to(torch.float32))

    def one_client(net: Net, batch: Batch, own: Tree, down: Tree, key: Tensor) -> Tree:
        return method.summarize(net, batch, own, down, cohort.at(key))

    summarize = cohort.lift(one_client, (0, 0, 0, cohort.down_dim, 0))
    picks, at = _picks(cohort, clients), 0
    sums: Tree = None
    for count, rows, batch in _batches(cohort, cohort.table, cohort.examples):
        first, down = _first(cohort, clients, count)
        chosen = None if picks is None else picks[:count, at : at + rows.shape[1]]
        whole = replace(cohort.weighted(batch), picks=chosen)
        part = summarize(first.net, whole, first.own, down, cohort.keys[:count])
        at += rows.shape[1]
        sums = part if sums is None else map_leaves(_add_first, sums, part)
    return sums


def _picks(cohort: Cohort, clients: Clients) -> Tensor | None:
    """Return each client's choices among its rows, (K, rows, choices), or None without choices."""
    method = cohort.method
    if not isinstance(method, PeerMethod) or type(method).pick is PeerMethod.pick:
        return None

    def one_client(rows: Labels, own: Tree, key: Tensor) -> Tensor:
        return method.pick(rows, own, cohort.at(key))

    table = cohort.table
    if not table.shape[1]:  # as in pieces: one absent row
        table = table.new_full((len(table), 1), -1)
    mask = table >= 0
    examples = cohort.examples
    fates = None if examples.fates is None else examples.fates[table.clamp(min=0)]
    rows = Labels(labels_of(examples.y, table), mask, examples.annotated(table), fates)
    picks: Tensor = cohort.lift(one_client, (0, 0, 0))(rows, clients.own, cohort.keys)
    return picks


def _add_first(total: Tensor, part: Tensor) -> Tensor:
    return torch.cat([total[: len(part)] + part, total[len(part) :]])


def _first(cohort: Cohort, clients: Clients, count: int) -> tuple[Clients, Tree]:
    if count == len(cohort.ids):
        return clients, cohort.down
    first = slice(0, count)
    return take(clients, first), cohort.down if cohort.broadcast else take(cohort.down, first)


def rows_at_once(task: Task) -> int:
    """Return the number of rows evaluated together: fewer for large inputs or outputs."""
    inputs = math.prod(task.input_shape)
    outputs = math.prod(task.places) * task.objective.outputs
    return max(1, min(EVALUATED_AT_ONCE, INPUTS_AT_ONCE // inputs, OUTPUTS_AT_ONCE // outputs))


def _pieces(table: Tensor, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Split a table of rows (K, rows) into pieces of ``at_once`` rows over all clients.

    Each piece comes with the number of leading clients that have rows in it.
    """
    width = max(1, at_once // max(1, len(table)))
    no_rows = table.new_full((len(table), 1), -1)
    pieces = torch.split(table, width, dim=1) if table.shape[1] else [no_rows]
    for index, rows in enumerate(pieces):
        with_rows = (rows >= 0).any(1).nonzero()
        count = len(table) if index == 0 or not len(with_rows) else int(with_rows[-1]) + 1
        yield count, rows[:count]


def _batches(
    cohort: Cohort, table: Tensor, examples: Examples
) -> Iterator[tuple[int, Tensor, Batch]]:
    """Yield the pieces of a table (K, rows): their clients, their rows and their batches."""
    pieces = _pieces(table, rows_at_once(cohort.ctx.task))
    for rows, _, batch in examples.batches((rows, None) for _, rows in pieces):
        yield len(rows), rows, batch


def predict(cohort: Cohort, clients: Clients, table: Tensor, examples: Examples) -> RowPredictions:
    """Predict the rows of a table (K, rows); return the per-row results, (K, rows, ...).

    The results of absent rows (-1) are zeros.
    """
    objective = cohort.ctx.task.objective

    def one_client(net: Net, own: Tree, down: Tree, batch: Batch, key: Tensor) -> RowPredictions:
        logits = cohort.method.predict(net, own, down, batch.x, cohort.at(key))
        return objective.predict_rows(logits, batch)

    lifted = cohort.lift(one_client, (0, 0, cohort.down_dim, 0, 0))
    if not table.shape[1]:
        return _no_predictions(cohort)
    pieces = []
    with torch.no_grad():
        for count, _, batch in _batches(cohort, table, examples):
            first, down = _first(cohort, clients, count)
            piece = lifted(first.net, first.own, down, batch, cohort.keys[:count])
            pieces.append(map_leaves(lambda leaf: _filled(leaf, len(table)), piece))
    whole: RowPredictions = map_leaves(lambda *leaf: torch.cat(leaf, 1), *pieces)
    predictions: RowPredictions = map_leaves(lambda leaf: leaf[:, : table.shape[1]], whole)
    return predictions


def measure(cohort: Cohort, clients: Clients, table: Tensor, examples: Examples) -> Columns:
    """Return the method's own metrics of each client, (K,): means over rows with a defined value.

    ``table`` (K, rows) holds the clients' rows.
    """
    method = cohort.method
    if not isinstance(method, PeerMethod) or not method.metrics:
        return {}

    def one_client(net: Net, batch: Batch, own: Tree, down: Tree, key: Tensor) -> Columns:
        values = dict(method.measure(net, batch, own, down, cohort.at(key)))
        return {name: torch.where(batch.mask, row, torch.nan) for name, row in values.items()}

    lifted = cohort.lift(one_client, (0, 0, 0, cohort.down_dim, 0))
    sums: Columns = {}
    with torch.no_grad():
        for count, _, batch in _batches(cohort, table, examples):
            first, down = _first(cohort, clients, count)
            piece = lifted(first.net, batch, first.own, down, cohort.keys[:count])
            for name, row in piece.items():
                whole = _filled(torch.stack([row.nansum(1), (~row.isnan()).sum(1)], 1), len(table))
                sums[name] = sums.get(name, 0.0) + whole.to(torch.float64)
    return {name: total[:, 0] / total[:, 1] for name, total in sums.items()}


def _no_predictions(cohort: Cohort) -> RowPredictions:
    """Return the per-row results of no rows, (K, 0, ...), in the objective's shapes."""
    task, key = cohort.ctx.task, cohort.ctx.key
    batch = fake_batch(task, key, 1)
    logits = torch.zeros(1, *task.places, task.objective.outputs, device=key.device)
    predictions = task.objective.predict_rows(logits, batch)
    clients = len(cohort.ids)
    return map_leaves(lambda leaf: leaf[:0].expand(clients, 0, *leaf.shape[1:]), predictions)


def _filled(leaf: Tensor, clients: int) -> Tensor:
    """Append rows of zeros, up to (clients, ...), for the clients without rows in a piece."""
    absent = leaf.new_zeros(clients - len(leaf), *leaf.shape[1:])
    return torch.cat([leaf, absent]) if len(absent) else leaf
