"""The scores that a remote engine received in one evaluation, and why other clients have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedgist.core.counts import MOST_ROWS
from fedgist.core.finite_scores import LOST
from fedgist.core.message import is_finite
from fedgist.core.metrics import LOSS, Metric
from fedgist.core.tree import Tree
from fedgist.engines.engine import FINETUNED, TRAINED, Score, Scores, ScoreTable, collect
from fedgist.errors import MessageError, shown

OWN = "score-"  # the name of the message with the score of a client's own model
NAMES = frozenset(OWN + model for model in ("", FINETUNED, TRAINED))


@dataclass
class Scoring:
    """One evaluation of these ``clients``.

    ``tables`` holds each client's scores by name of the model. ``reasons`` says why another client
    has none so far. ``final`` holds the refusals that asking again cannot change.
    """

    clients: frozenset[int]
    tables: dict[int, Mapping[str, ScoreTable]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    final: dict[int, str] = field(default_factory=dict)

    @property
    def waiting(self) -> frozenset[int]:
        """The clients that neither have a score nor refuse for good."""
        return self.clients - self.tables.keys() - self.final.keys()

    def add(self, client: int, tables: Mapping[str, ScoreTable]) -> None:
        """Add the scores of a client."""
        self.tables[client] = tables

    def refuse(self, client: int, reason: str, *, final: bool = False) -> None:
        """Add the reason why a client has no score; an answer before it counts."""
        if client in self.waiting:
            (self.final if final else self.reasons)[client] = reason

    def scores(self) -> Scores:
        """Return the scores of all models, and the clients without one."""
        by_model: dict[str, list[ScoreTable]] = {}
        for client in sorted(self.tables):
            for model, table in self.tables[client].items():
                by_model.setdefault(model, []).append(table)
        why = {**self.reasons, **self.final}
        missing = tuple(
            (client, why[client]) for client in sorted(self.clients - self.tables.keys())
        )
        return Scores({model: collect(parts) for model, parts in by_model.items()}, missing=missing)


def tables_of(
    client: int, messages: Mapping[str, Tree], metrics: Mapping[str, Metric], classes: int
) -> dict[str, ScoreTable]:
    """Return a client's scores, a table of one row for each of its models, by name.

    A score of no rows has no values.

    Raises
    ------
    MessageError
        If a message is no score, or its values are not possible.
    """
    if OWN not in messages or not messages.keys() <= NAMES:
        raise MessageError("it holds no score")
    tables = {}
    for name, score in messages.items():
        if reason := _fault(score, metrics, classes):
            raise MessageError(f"its score is not valid: {reason}")
        received = score.values if int(score.rows) else {}
        values = {m: received[m].view(1).double() for m in metrics if m in received}
        table = ScoreTable((client,), score.rows.view(1), values, score.confusion)
        tables[name.removeprefix(OWN)] = table
    return tables


def _fault(score: Tree, metrics: Mapping[str, Metric], classes: int) -> str:
    """Return why a message is no score; an empty text if its values and counts are possible."""
    if not isinstance(score, Score):
        return f"it is a {type(score).__name__}"
    for name, v in score.values.items():
        if name not in metrics:
            return f"there is no metric {shown(name)}"
        lost = name == LOSS.name and len(score.values) == 1 and v.shape == () and v == LOST
        if lost and v.is_floating_point():
            continue
        if not (v.shape == () and v.is_floating_point() and is_finite(v)):
            return f"{name} is not a finite number"
        if not metrics[name].allows(float(v)):
            return f"{name} = {float(v):g} is not possible"
    shapes: list[tuple[str, Tensor, tuple[int, ...]]] = [("rows", score.rows, ())]
    if score.confusion is not None:
        shapes.append(("confusion", score.confusion, (classes, classes)))
    for name, counts, shape in shapes:
        whole = counts.dtype == torch.int64 and counts.shape == shape
        if not whole or not bool(((counts >= 0) & (counts <= MOST_ROWS)).all()):
            return f"{name} are no counts of rows"
    return ""
