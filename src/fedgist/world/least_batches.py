"""Batches of one row, which batch norm over one value per channel cannot be trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedgist.core.net import Architecture
from fedgist.core.replies import ClientInfo
from fedgist.core.task import Task
from fedgist.errors import RecipeError


def check_batch_size(batch_size: int, nets: Iterable[Architecture]) -> None:
    """Raise RecipeError if batches have fewer rows than a model can be trained on."""
    if few := [net for net in nets if batch_size < net.least_rows]:
        raise RecipeError(
            f"train.batch_size = {batch_size}: the batch norm of {few[0].name} sees one "
            "value per channel of a row, and its mean of one value tells nothing: use at least 2, "
            "or group norm"
        )


def notes_on_last_batches(
    task: Task, clients: Sequence[ClientInfo], row_counts: Sequence[int] | None
) -> list[str]:
    """Return a note if a last batch of one row joins the batch before it.

    ``row_counts`` are the clients' numbers of training rows, or None if the server has bounds only.
    """
    size, notes = task.training.batch_size, []
    for name in task.architectures:
        if task.least_rows(name) == 1:
            continue
        members = [i for i, client in enumerate(clients) if name in client.architectures]
        rule = f"model {name}: batch norm sees one value per channel of a row, so a last batch of "
        rule += "one row joins the batch before it"
        if row_counts is None:
            notes.append(rule)
        elif count := sum(row_counts[i] % size == 1 and row_counts[i] > size for i in members):
            notes.append(f"{rule}: {count} of {len(members)} clients")
    return notes
