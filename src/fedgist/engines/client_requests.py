"""The requests that a host of clients answers, and the answer to a request to train."""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from fedgist.core.tree import STATIC, Tree, tree
from fedgist.engines.engine import Split


@tree
class Sent:
    """A cohort and what it was sent: plain numbers and messages, so that it can cross processes."""

    round: int = field(metadata=STATIC)
    stage: str = field(metadata=STATIC)
    ids: tuple[int, ...] = field(metadata=STATIC)
    architecture: str = field(metadata=STATIC)
    broadcast: bool = field(metadata=STATIC)  # one download for all; else stacked
    down: Tree


@tree
class TrainRequest:
    """Train and upload; answered by :class:`Trained`."""

    sent: Sent


@tree
class ScoreRequest:
    """Score each client's model on its rows of a split; answered by a table for each model.

    With ``tuned_only``, score only what the models become in the phases before a test.
    """

    sent: Sent
    split: Split = field(metadata=STATIC)
    tuned_only: bool = field(default=False, metadata=STATIC)


@tree
class MarkRequest:
    """Mark rows by the model that all clients share; answered by :class:`Marks`."""

    sent: Sent
    split: Split = field(metadata=STATIC)
    rows: Tensor


@tree
class Trained:
    """The accepted uploads or their sum, who was refused and why, mean losses (K,), and bytes."""

    accepted: tuple[int, ...] = field(metadata=STATIC)  # places in the cohort
    refused: dict[int, str] = field(metadata=STATIC)
    message: Tree
    losses: Tensor
    payload_bytes: int = field(metadata=STATIC)  # of the accepted uploads
