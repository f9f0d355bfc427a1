"""The requests to a host of clients, and the answer to a request for training."""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from fedgist.core.tree import STATIC, Tree, tree
from fedgist.engines.engine import Split


@tree
class SentCohort:
    """A cohort and its download: plain numbers and messages, so that it can cross processes."""

    round: int = field(metadata=STATIC)
    stage: str = field(metadata=STATIC)
    ids: tuple[int, ...] = field(metadata=STATIC)
    architecture: str = field(metadata=STATIC)
    broadcast: bool = field(metadata=STATIC)  # one download for all; else stacked
    down: Tree


@tree
class TrainRequest:
    """A request to train and upload; answered by :class:`Trained`."""

    sent: SentCohort


@tree
class ScoreRequest:
    """A request to score clients' models on a split; answered by a table for each model.

    With ``tuned_only``, only the copies trained in the phases before a test are scored.
    """

    sent: SentCohort
    split: Split = field(metadata=STATIC)
    tuned_only: bool = field(default=False, metadata=STATIC)


@tree
class PredictRequest:
    """A request to predict ``rows`` (rows,) with the model that all clients share.

    It is answered by the objective's per-row results.
    """

    sent: SentCohort
    split: Split = field(metadata=STATIC)
    rows: Tensor


@tree
class Trained:
    """The accepted uploads or their sum, refused clients, mean losses (K,), and upload bytes.

    There are no losses if nothing is trained. ``steps`` are those of each phase.
    """

    accepted: tuple[int, ...] = field(metadata=STATIC)  # places in the cohort
    refused: dict[int, str] = field(metadata=STATIC)
    message: Tree
    losses: Tensor | None
    payload_bytes: int = field(metadata=STATIC)  # of the accepted uploads
    steps: tuple[int, ...] = field(metadata=STATIC)
