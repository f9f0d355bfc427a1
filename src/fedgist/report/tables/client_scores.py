"""The scores of single clients in a run's last evaluation, and over the runs of a row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedgist.recipe.section import KEPT
from fedgist.report.tables.stats import Estimate, mean_of_sites, wilson
from fedgist.runs.files.columns import ends_lost, over_clients
from fedgist.runs.files.record import Line
from fedgist.runs.finished.finished_run import FinishedRun

UNKNOWN = "-"  # the model of a client in a run recorded before models were
FEW_ROWS = 30  # of a client, below which the mean over clients has no interval over rows
COUNTED = "accuracy"  # the metric that is a share of right rows
OF_CLASSES = ("classes", "text_classes")  # the objectives whose accuracy is one of rows
A_POINT = 0.01


@dataclass(frozen=True)
class ClientScore:
    """A client's score: its name, its model, its test rows, and the score.

    ``spread`` is the standard deviation over several runs, if it is their mean.
    """

    name: str
    model: str
    rows: float
    score: float
    spread: float | None = None


Scores = Mapping[int, ClientScore]  # by client


def scores_of(run: FinishedRun, metric: str) -> dict[int, ClientScore]:
    """Return each client's score in the last evaluation up to the round that the run keeps.

    A run that diverged has no result, and so no scores.
    """
    if run.kept is None and ends_lost(run.rounds, over_clients("client", metric)):
        return {}
    lines: list[Line] = [
        line
        for line in run.clients.lines
        if line.get("split") == "client"
        and line.get(metric) is not None
        and (run.kept is None or line["round"] <= run.kept)
    ]
    last = max((line["round"] for line in lines), default=0)
    return {
        line["client"]: ClientScore(
            line.get("name", str(line["client"])),
            line.get("model", UNKNOWN),
            int(line.get("rows") or 0),
            line[metric],
        )
        for line in lines
        if line["round"] == last
    }


def keeps_clients(runs: Sequence[FinishedRun]) -> bool:
    """Return whether client 3 of one run is client 3 of all: clients with names, or one seed.

    A drawn partition depends on the seed.
    """
    if len({run.seed for run in runs}) <= 1:
        return True
    names = [(run.split or {}).get("clients") or () for run in runs]
    kept = all(run.recipe.get("partition", {}).get("name") in KEPT for run in runs)
    return kept or (bool(names[0]) and all(own == names[0] for own in names))


def over_runs(runs: Sequence[FinishedRun], metric: str) -> dict[int, ClientScore]:
    """Return each client's score over the seeds and divisions of one row of a study.

    Scores are means in which a row counts each time it is tested; ``rows`` counts rows that several
    runs test once.
    """
    of_client: dict[int, list[tuple[int, ClientScore]]] = {}
    for run in runs:
        for client, score in scores_of(run, metric).items():
            of_client.setdefault(client, []).append((run.fold, score))
    return {client: _mean(scores) for client, scores in sorted(of_client.items())}


def _mean(by_fold: Sequence[tuple[int, ClientScore]]) -> ClientScore:
    scores = [score for _, score in by_fold]
    values, rows = [score.score for score in scores], [score.rows for score in scores]
    mean = statistics.fmean(values, rows if any(rows) else None)
    spread = statistics.stdev(values) if len(values) > 1 else None
    once = rows_once([(fold, score.rows) for fold, score in by_fold])
    return ClientScore(scores[0].name, scores[0].model, once, mean, spread)


def rows_once(by_fold: Sequence[tuple[int, float]]) -> float:
    """Return the number of rows of which each run tested some, by its fold and its number of rows.

    Seeds test the same rows, and repeats about as many.

    >>> rows_once([(0, 10), (1, 11), (0, 10)])
    21.0
    """
    of_folds: dict[int, list[float]] = {}
    for fold, rows in by_fold:
        of_folds.setdefault(fold, []).append(rows)
    return sum(map(statistics.fmean, of_folds.values()), 0.0)


def counts_rows(runs: Sequence[FinishedRun], metric: str) -> bool:
    """Return whether a metric of clients is a share of right rows."""
    objectives = {run.recipe.get("objective", {}).get("name", OF_CLASSES[0]) for run in runs}
    return metric == COUNTED and objectives <= {*OF_CLASSES}


@dataclass(frozen=True)
class OverRows:
    """What models reach on other rows of the same clients, by the ``clients`` they were tested on.

    The models are fixed and rows are drawn. This says nothing about training again, which is the
    subject of :func:`.stats.estimate`. ``fixed`` says whether clients are the same in all runs.
    """

    clients: Sequence[ClientScore]
    fixed: bool

    @property
    def rows(self) -> float:
        """Number of test rows."""
        return sum(client.rows for client in self.clients)

    @property
    def each_row(self) -> Estimate:
        """Share of right rows among those of all clients, with Wilson's interval."""
        share = statistics.fmean([c.score for c in self.clients], [c.rows for c in self.clients])
        return Estimate(1, share, None, *wilson(share, self.rows))

    @property
    def mean(self) -> Estimate | None:
        """Mean over clients; with an interval if none has too few rows."""
        if not self.fixed:
            return None
        shares, rows = [c.score for c in self.clients], [c.rows for c in self.clients]
        mean = mean_of_sites(shares, rows)
        bounds = (None, None) if min(rows) < FEW_ROWS else (mean.low, mean.high)
        return Estimate(1, mean.mean, None, *bounds)


def over_rows(runs: Sequence[FinishedRun], metric: str) -> OverRows | None:
    """Return what the test rows of a row of a study say, or None if they are not recorded."""
    if not counts_rows(runs, metric):
        return None
    clients = [client for client in over_runs(runs, metric).values() if client.rows]
    return OverRows(clients, keeps_clients(runs)) if clients else None


def note_on_few_rows(row: OverRows) -> str:
    """Return a note if one test row moves the mean over clients by a point or more, or ''."""
    least = min(row.clients, key=lambda client: client.rows)
    share = 1 / (len(row.clients) * least.rows)
    if not row.fixed or share < A_POINT:
        return ""
    return (
        f"{row.rows:.0f} test rows: one row is up to {100 * share:.1f} points of the mean over "
        f"clients ({least.name} has {least.rows:.0f})"
    )
