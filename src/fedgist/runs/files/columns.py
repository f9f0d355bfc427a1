"""The columns of a record: their names and their metrics.

Only this file composes and parses column names.

- ``eval/<split>/count`` is the number of clients with a score, over which the means are taken.
  ``eval/<split>/missing`` is the number of all others, if there are any. A metric that is defined
  for fewer clients has its own ``<metric>_count``.
- ``eval/<split>/<metric>_mean`` and ``_std`` are statistics over clients; probes also have
  ``_min``. The prefix ``finetuned_`` before the metric stands for copies of the models that went
  through the phases before a test, and ``trained_`` for copies after the next round's local
  training.
- ``eval/global/<metric>`` belongs to the one model that serves all clients, on the whole test set.
- ``eval/global/<model>/<set>/<metric>`` belongs to a model of the server on one of its test sets.
- ``eval/global/<metric>_mean`` is the mean over all models of the server on all test rows.
- ``eval/validation/<metric>_mean`` is the mean over the server's models if the server holds out
  rows itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedgist.core.objectives.metrics import ALL_ROWS, LOSS, METRICS, PROBES_BESIDE, Metric

MEAN, STD, LEAST, FINETUNED, CONFUSION = "_mean", "_std", "_min", "finetuned_", "confusion"
TRAINED = "trained_"
NEWCOMER = "newcomer"  # the split of clients that never train
COUNT, MISSING, COUNT_OF = "count", "missing", "_count"
# of a round in which not all replied: clients that did in all stages, and clients that were needed
COMPLETE, EXPECTED = "clients/complete", "clients/expected"
UNSCORED = "unscored"  # key of a line: the clients without a score, with the reasons
STEPS = "steps"  # key of a line: the steps that clients with limited time took
DIVERGED = "diverged"  # key of a line: the models that are not finite, with the reasons
TRAIN_LOSS = "train/loss"
UP_BYTES, DOWN_BYTES = "comm/up_bytes", "comm/down_bytes"
EPSILON = "privacy/epsilon"
OTHERS = {
    TRAIN_LOSS: Metric("train loss", "Training loss", LOSS.unit, LOSS.better),
    UP_BYTES: Metric("sent up", "Sent up", "bytes", "lower"),
    DOWN_BYTES: Metric("sent down", "Sent down", "bytes", "lower"),
    EPSILON: Metric("epsilon", "Privacy spent", "", "lower"),
    "time/train_s": Metric("training", "Training", "seconds", "lower"),
    "time/round_s": Metric("round", "Round", "seconds", "lower"),
}


def over_clients(split: str, metric: str, model: str = "", statistic: str = MEAN) -> str:
    """Return the name of a metric's mean (or another statistic) over clients.

    >>> over_clients("client", "accuracy")
    'eval/client/accuracy_mean'
    """
    prefix = f"{model}_" if model else ""
    return f"eval/{split}/{prefix}{metric}{statistic}"


def tuned_over_clients(metric: str) -> str:
    """Return the name of a metric's mean over clients' models that were fine-tuned for the test."""
    return over_clients("client", FINETUNED + metric)


def of_all(metric: str) -> str:
    """Return the name of a metric of the one model that serves all clients."""
    return f"eval/global/{metric}"


def over_models(metric: str) -> str:
    """Return the name of a metric's mean over the server's models, if it has several models.

    >>> over_models("accuracy")
    'eval/global/accuracy_mean'
    """
    return over_clients("global", metric)


def of_main(metric: str) -> tuple[str, ...]:
    """Return the columns that may hold a run's main metric, the mean over clients first."""
    return over_clients("client", metric), of_all(metric), over_models(metric)


def of_server(model: str, test_set: str, metric: str) -> str:
    """Return the name of a metric of a model of the server on one of its test sets."""
    return f"eval/global/{model}/{test_set}/{metric}"


def is_of_server(column: str, metric: str) -> bool:
    """Return whether a column holds a metric of one of the server's models on one of its sets."""
    return column.startswith("eval/global/") and column.endswith(f"/{metric}")


def is_of_clients(column: str) -> bool:
    """Return whether a column is a statistic over clients, not a metric of a server's model."""
    return not column.startswith("eval/global/")


def models_of(columns: Iterable[str], metric: str) -> list[str]:
    """Return the names of the server's models with a metric on all test rows, if several have it.

    >>> models_of(["eval/global/small/all/accuracy", "eval/global/large/all/accuracy"], "accuracy")
    ['small', 'large']
    """
    start, end = "eval/global/", f"/{ALL_ROWS}/{metric}"
    scored = [c for c in columns if c.startswith(start) and c.endswith(end)]
    names = [column.removeprefix(start).removesuffix(end) for column in scored]
    return names if len(names) > 1 else []  # one serves all: see :func:`of_all`


def clients_in(line: Mapping[str, Any], column: str) -> tuple[int, int] | None:
    """Return over how many clients a mean of a line is taken, and how many clients there are.

    None stands for a column that is no mean over clients, and for a line that does not say.

    >>> line = {"eval/client/count": 2, "eval/client/missing": 1}
    >>> clients_in(line, "eval/client/accuracy_mean")
    (2, 3)
    """
    split, _, name = column.rpartition("/")
    statistic = next((s for s in (MEAN, STD, LEAST) if name.endswith(s)), None)
    count = line.get(f"{split}/{COUNT}")
    if statistic is None or not is_of_clients(column) or not isinstance(count, int):
        return None
    own = line.get(f"{split}/{name.removesuffix(statistic)}{COUNT_OF}", count)
    return own, count + (line.get(f"{split}/{MISSING}") or 0)


def ends_lost(lines: Iterable[Mapping[str, Any]], column: str) -> int | None:
    """Return the first round without a score for divergence, after the last score of a column.

    None stands for a run of which a model had a score to the end.

    >>> lost = {"round": 2, "eval/client/count": 0, "diverged": [{"client": 0}]}
    >>> ends_lost([{"round": 1, "eval/client/loss_mean": 0.1}, lost], "eval/client/loss_mean")
    2
    """
    since = None
    for line in lines:
        if line.get(column) is not None:
            since = None
        elif line.get(DIVERGED) and any(name.startswith("eval/") for name in line):
            since = line["round"] if since is None else since
    return since


def is_count(column: str) -> bool:
    """Return whether a column of an evaluation counts clients, so that it is no score."""
    name = column.rpartition("/")[2]
    return column.startswith("eval/") and (name in {COUNT, MISSING} or name.endswith(COUNT_OF))


def is_confusion(column: str) -> bool:
    """Return whether a column holds counts (true class, predicted class), not a number.

    >>> is_confusion("eval/client/finetuned_confusion")
    True
    """
    return metric_of(column) == CONFUSION


def metric_of(column: str) -> str:
    """Return the last part of a column's name without the prefix of a copy of the models.

    >>> metric_of("eval/client/trained_accuracy_mean")
    'accuracy_mean'
    """
    return column.rpartition("/")[2].removeprefix(FINETUNED).removeprefix(TRAINED)


ACCURACY = over_clients("client", "accuracy")
ACCURACY_SPREAD = over_clients("client", "accuracy", statistic=STD)
VALIDATION_ACCURACY = over_clients("validation", "accuracy")


def measured(column: str, metrics: Mapping[str, Metric] = METRICS) -> Metric:
    """Return the metric of a column.

    ``metrics`` holds the metrics of the run's objective by name. A column without a known metric,
    for instance a method's own number, has its name as title, and higher is better.

    >>> measured("eval/client/finetuned_loss_mean").better
    'lower'
    """
    if column in OTHERS:
        return OTHERS[column]
    if is_count(column):
        return Metric(column, "Clients", "", "higher")
    if column.startswith(f"{TRAIN_LOSS}/"):  # of one pool
        return OTHERS[TRAIN_LOSS]
    full = name = metric_of(column)
    for statistic in (MEAN, STD, LEAST):
        name = name.removesuffix(statistic)
    metrics_by_name = {**PROBES_BESIDE, **metrics}
    if column.startswith("eval/") and name in metrics_by_name:
        metric = metrics_by_name[name]
        # clients are more alike where the spread is smaller
        return replace(metric, better="lower") if full.endswith(STD) else metric
    return Metric(column, column, "", "higher")


def spread_of(column: str) -> str | None:
    """Return the column with the spread of a mean over clients; None for another column."""
    return f"{column.removesuffix(MEAN)}{STD}" if column.endswith(MEAN) else None


DESCRIBED = ("name", "title", "unit", "better")  # of a metric, in a run's folder


def described(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return metrics as plain values, for a run's ``metrics.json``."""
    return {
        name: {key: getattr(metric, key) for key in DESCRIBED} for name, metric in metrics.items()
    }


def read_described(table: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics that a run describes; damaged descriptions are left out."""
    metrics = {}
    for name, values in table.items():
        if isinstance(values, Mapping) and _describes_a_metric(values):
            metrics[str(name)] = Metric(**values)
    return dict(METRICS) | metrics


def _describes_a_metric(values: Mapping[str, Any]) -> bool:
    whole = set(values) == set(DESCRIBED)
    texts = all(isinstance(value, str) for value in values.values())
    return whole and texts and values["better"] in {"higher", "lower"}
