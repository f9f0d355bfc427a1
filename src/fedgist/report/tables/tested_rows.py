"""What the saved predictions of runs say about their models, on other rows of the same clients.

Models are fixed and rows are drawn, within each client. Methods are compared on the same rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fedgist.report.tables.client_scores import COUNTED, FEW_ROWS, keeps_clients, scores_of
from fedgist.report.tables.comparison import Row, RunGroup
from fedgist.report.tables.stats import Estimate, logit_interval, mean_of_differences, with_error
from fedgist.runs.files.prediction_file import TEST, Numbers, Predictions
from fedgist.runs.finished.finished_run import FinishedRun

MOST_DRAWS, FEWEST_DRAWS = 1000, 100  # of the rows of each client, with replacement
MOST_WORK = 1_000_000  # rows x classes x runs of a row of a study whose metrics are resampled
DRAWN_ROWS = 5_000_000  # in all draws together: of more than 5,000 rows there are fewer draws
RARE_ROWS = 10  # of a client's rarer class, below which a metric of classes has no interval
AT_ONCE = 1 << 22  # numbers of weights held at once


@dataclass(frozen=True, eq=False)
class SiteRows:
    """A client's test rows, each once, and what the models of one row of a study said about them.

    ``rows`` (n,) are digests, in order, and ``labels`` (n,) their classes. Each entry of ``tests``
    holds the places (m,) in ``rows`` that one run tested, and its predictions of them.
    """

    rows: Numbers
    labels: Numbers
    tests: tuple[tuple[Numbers, Predictions], ...]

    @property
    def right(self) -> Numbers:
        """Share of the models that are right about each row, (n,)."""
        right, tested = np.zeros(len(self.rows)), np.zeros(len(self.rows))
        for places, said in self.tests:
            np.add.at(right, places, said.predicted == said.label)
            np.add.at(tested, places, 1)
        return np.asarray(right / tested)

    @property
    def rarest(self) -> int:
        """Number of rows of the rarest class among those that the client has; 0 if it has one."""
        counts = np.unique(self.labels, return_counts=True)[1]
        return int(counts.min()) if len(counts) > 1 else 0


Sites = Mapping[int, SiteRows]  # by client


def sites_of(rows: Sequence[Row | RunGroup]) -> dict[str, Sites]:
    """Return each row's clients with their common test rows: those that all rows of a study have.

    Rows of a study without saved predictions are left out, and all are if clients differ between
    runs.
    """
    whole = {row.label: _of_clients(row.runs) for row in rows}
    said = {label: clients for label, clients in whole.items() if clients}
    if not said or not keeps_clients([run for row in rows for run in row.runs]):
        return {}
    common = {
        client: _common([clients[client] for clients in said.values()])
        for client in set.intersection(*(set(clients) for clients in said.values()))
    }
    return {
        label: {c: _site(of[c], common[c]) for c in sorted(common) if len(common[c])}
        for label, of in said.items()
    }


def left_out(rows: Sequence[Row | RunGroup], sites: Mapping[str, Sites]) -> list[str]:
    """Return the names of the clients that some rows of a study tested, but not all of them."""
    kept = set[int]().union(*sites.values())
    runs = [run for row in rows if row.label in sites for run in row.runs]
    tested = {client for run in runs for client in scores_of(run, run.first)}
    names = (runs[0].split or {}).get("clients") or () if runs else ()
    return [names[c] if c < len(names) else str(c) for c in sorted(tested - kept)]


def _of_clients(runs: Sequence[FinishedRun]) -> dict[int, list[Predictions]]:
    """Return the predictions of each client's test rows by each run; empty if a run has none."""
    of_runs = [run.predictions for run in runs]
    clients: dict[int, list[Predictions]] = {}
    for said in of_runs:
        if said is None:
            return {}
        test = said.of(TEST)
        for client in np.unique(test.client).tolist():
            clients.setdefault(client, []).append(test.take(test.client == client))
    return clients


def _common(of_methods: Sequence[Sequence[Predictions]]) -> Numbers:
    """Return the digests (n,) of the rows that each method was tested on, in order."""
    each = [set(np.concatenate([said.row for said in runs]).tolist()) for runs in of_methods]
    return np.array(sorted(set.intersection(*each)), dtype=np.int64)


def _site(runs: Sequence[Predictions], rows: Numbers) -> SiteRows:
    kept = [said.take(np.isin(said.row, rows)) for said in runs]
    tests = tuple((np.searchsorted(rows, said.row), said) for said in kept)
    labels = np.zeros(len(rows), dtype=np.int64)
    for places, said in tests:
        labels[places] = said.label
    return SiteRows(rows, labels, tests)


Measure = Callable[[Numbers, Predictions], Numbers]  # of weights (draws, m): (draws,)


def _counts(weights: Numbers, said: Predictions) -> tuple[Numbers, Numbers, Numbers]:
    """Return weighted numbers (draws, classes): of right rows, by true, by predicted class."""
    classes = int(max(said.label.max(), said.predicted.max())) + 1

    def count(each: Numbers, weights: Numbers) -> Numbers:
        return np.array([np.bincount(each, draw, classes) for draw in weights])

    right = count(said.label, weights * (said.label == said.predicted))
    return right, count(said.label, weights), count(said.predicted, weights)


def _balanced_accuracy(weights: Numbers, said: Predictions) -> Numbers:
    right, labelled, _ = _counts(weights, said)
    return np.asarray(np.nanmean(right / labelled, 1))


def _macro_f1(weights: Numbers, said: Predictions) -> Numbers:
    right, labelled, predicted = _counts(weights, said)
    return np.asarray(np.nanmean(2 * right / (labelled + predicted), 1))


def _auroc(weights: Numbers, said: Predictions) -> Numbers:
    """Return the area under the ROC curve of each class against the rest, mean over classes."""
    areas = [
        _area(weights, said.label == c, said.log_odds[:, c]) for c in range(said.log_odds.shape[1])
    ]
    return np.asarray(np.nanmean(areas, 0)) if areas else np.full(len(weights), np.nan)


def _area(weights: Numbers, positive: Numbers, score: Numbers) -> Numbers:
    """Return the weighted share of pairs in which the positive row has the higher score."""
    order = np.argsort(score, kind="stable")
    first = np.flatnonzero(np.diff(score[order], prepend=-np.inf))  # of rows with equal scores
    own = np.add.reduceat(np.where(positive[order], weights[:, order], 0), first, axis=1)
    other = np.add.reduceat(np.where(positive[order], 0, weights[:, order]), first, axis=1)
    below = np.cumsum(other, 1) - other / 2
    return np.asarray((own * below).sum(1) / (own.sum(1) * other.sum(1)))


#: The metrics that are resampled, by name.
RESAMPLED: Mapping[str, Measure] = MappingProxyType(
    {"balanced_accuracy": _balanced_accuracy, "macro_f1": _macro_f1, "auroc": _auroc}
)


@dataclass(frozen=True, eq=False)
class Resampled:
    """A metric's mean over clients of one row of a study, and its values for draws of rows."""

    value: float
    draws: Numbers
    has_interval: bool

    @property
    def estimate(self) -> Estimate:
        """The value, with an interval on the logit scale by the spread of the draws."""
        if not self.has_interval:
            return Estimate(1, self.value)
        error = float(np.std(self.draws))
        return Estimate(1, self.value, None, *logit_interval(self.value, error))

    def minus(self, other: Resampled) -> Estimate:
        """Return the difference from another row's value, on the same draws of rows."""
        difference = self.value - other.value
        if not (self.has_interval and other.has_interval):
            return Estimate(1, difference)
        return with_error(difference, float(np.std(self.draws - other.draws)))


def resampled(sites: Sites, metric: str) -> Resampled | None:
    """Return a metric's mean over clients for these rows, and for draws of them; None without one.

    A client whose rows do not define the metric is left out, as in evaluation. There are no draws
    if they would take long.
    """
    count = sum(len(site.rows) for site in sites.values())
    times = max(FEWEST_DRAWS, min(MOST_DRAWS, DRAWN_ROWS // max(1, count)))
    times = 0 if takes_long(sites) else times
    values, draws = [], []
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore")  # numpy warns of clients whose rows have one class
        for client, site in sites.items():
            value = float(_measured(site, np.ones((1, len(site.rows))), metric)[0])
            if not np.isnan(value):
                values.append(value)
                draws.append(_drawn(client, site, metric, times))
        if not values:
            return None
        enough = times > 0 and all(site.rarest >= RARE_ROWS for site in sites.values())
        return Resampled(float(np.mean(values)), np.nanmean(draws, 0), enough)


def _drawn(client: int, site: SiteRows, metric: str, times: int) -> Numbers:
    """Return the metric for each draw of the client's rows, the same for all methods: (times,)."""
    rng, count = np.random.default_rng(client), len(site.rows)
    at_once = max(1, AT_ONCE // count)
    pieces = []
    for start in range(0, times, at_once):
        size = min(at_once, times - start)
        weights = rng.multinomial(count, np.full(count, 1 / count), size).astype(np.float64)
        pieces.append(_measured(site, weights, metric))
    return np.concatenate(pieces) if pieces else np.zeros(0)


def _measured(site: SiteRows, weights: Numbers, metric: str) -> Numbers:
    """Return the mean of a metric over the runs that tested the client, (draws,)."""
    measure = RESAMPLED[metric]
    each = [measure(weights[:, places], said) for places, said in site.tests if len(places)]
    return np.asarray(np.nanmean(each, 0))


@dataclass(frozen=True)
class RowDifference:
    """Difference of the shares of right rows, on the same rows: over clients, and over rows.

    ``gained`` and ``lost`` are the rows about which more, or fewer, of the models are right.
    """

    over_clients: Estimate
    over_rows: Estimate
    gained: int
    lost: int


def difference(sites: Sites, others: Sites) -> RowDifference:
    """Return how much more often the models of one row are right than those of another."""
    apart = [site.right - others[client].right for client, site in sites.items()]
    few, whole = any(len(own) < FEW_ROWS for own in apart), np.concatenate(apart)
    over_clients = mean_of_differences([own.tolist() for own in apart])
    if few:
        over_clients = Estimate(len(apart), over_clients.mean)
    over_rows = mean_of_differences([whole.tolist()])
    return RowDifference(over_clients, over_rows, int((whole > 0).sum()), int((whole < 0).sum()))


def takes_long(sites: Sites) -> bool:
    """Return whether resampling these rows takes more than a few seconds."""
    work = (
        len(site.rows) * len(site.tests) * max(1, site.tests[0][1].log_odds.shape[1])
        for site in sites.values()
    )
    return bool(sum(work) > MOST_WORK)


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the resampled metrics that all runs of these rows measure."""
    runs = [run for row in rows for run in row.runs]
    return [name for name in RESAMPLED if all(name in run.metrics for run in runs)]


def counts_right(rows: Sequence[Row]) -> bool:
    """Return whether all runs of these rows measure the share of right rows."""
    return all(COUNTED in run.metrics for row in rows for run in row.runs)
