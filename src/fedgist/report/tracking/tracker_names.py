"""Trackers by their names, as options and arguments give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedgist.errors import ReportError, did_you_mean
from fedgist.report.tracking.mlflow_tracker import MLflow
from fedgist.report.tracking.tensorboard_tracker import TensorBoard
from fedgist.report.tracking.tracker import Tracker
from fedgist.report.tracking.wandb_tracker import WandB

TRACKERS: dict[str, Callable[[str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
FORMS = "tensorboard[:FOLDER], mlflow[:URI] or wandb[:PROJECT]"


def tracker(text: str) -> Tracker:
    """Return the tracker of a text in one of the ``FORMS``.

    Raises
    ------
    ReportError
        If the tracker is unknown, its package is missing, or its target cannot be used.
    """
    name, _, target = text.partition(":")
    if name not in TRACKERS:
        raise ReportError(f"unknown tracker {name!r}{did_you_mean(name, TRACKERS)}")
    return TRACKERS[name](target or None)


def trackers(texts: Iterable[str] | None) -> dict[str, Tracker]:
    """Return the trackers of several texts, each once."""
    return {text: tracker(text) for text in dict.fromkeys(texts or ())}
