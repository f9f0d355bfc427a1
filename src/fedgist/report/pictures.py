"""Which pictures a study has, each with the numbers it shows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.federation.columns import spread_of
from fedgist.federation.record import CLIENTS, PARTITION, Line
from fedgist.federation.saved_features import FEATURES
from fedgist.report.drawing import (
    INK,
    STYLE,
    Picture,
    Table,
    boxes,
    bubbles,
    color,
    dashes,
    embedding,
    matplotlib,
    new_figure,
    stacked_bars,
)
from fedgist.report.run_files import RunFiles
from fedgist.report.study_rows import Row, Study

MOST_EMBEDDED = 6  # rows whose features are drawn
BAND = "Line: mean over seeds; band: its standard error, or with one seed the spread over clients."


def pictures(study: Study) -> list[Picture]:
    """Return every picture that the runs have data for; what is damaged is left out."""
    with matplotlib().rc_context(STYLE):
        candidates = [
            _by_round(study),
            _by_bytes(study),
            _over_clients(study),
            *_partitions(study),
            _traffic(study),
            _privacy(study),
            _times(study),
            *_embeddings(study),
        ]
    return [picture for picture in candidates if picture is not None]


@dataclass(frozen=True)
class _Curve:
    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    sent: list[float]


def _curve(row: Row, metric: str) -> _Curve | None:
    """Return the mean over seeds at the rounds that all of them have, and its band."""
    columns = [dict(zip(*run.column(metric), strict=True)) for run in row.runs]
    columns = [column for column in columns if column]
    if not columns:
        return None
    rounds = sorted(set.intersection(*(set(column) for column in columns)))
    means = [statistics.fmean([column[r] for column in columns]) for r in rounds]
    if len(columns) > 1:
        root = len(columns) ** 0.5
        band = [statistics.stdev([column[r] for column in columns]) / root for r in rounds]
    else:
        over_clients = spread_of(metric)
        column = row.runs[0].column(over_clients) if over_clients else ([], [])
        spread = dict(zip(*column, strict=True))
        band = [spread.get(r, 0.0) for r in rounds]
    low = [mean - half for mean, half in zip(means, band, strict=True)]
    high = [mean + half for mean, half in zip(means, band, strict=True)]
    totals = [run.sent() for run in row.runs if run.rounds]
    sent = [statistics.fmean([sum(total[r]) for total in totals if r in total]) for r in rounds]
    return _Curve(rounds, means, low, high, sent)


def _curves(study: Study, axes: Any, *, by_bytes: bool) -> Table:
    in_percent = study.measure.unit == "fraction"
    scale = 100.0 if in_percent else 1.0
    table: Table = [["row", "round", "bytes", "mean", "low", "high"]]
    for i, row in enumerate(study.rows):
        curve = _curve(row, study.metric)
        if curve is None or (by_bytes and not any(curve.sent)):
            continue
        x = curve.sent if by_bytes else curve.rounds
        mean, low, high = (
            [scale * v for v in column] for column in (curve.mean, curve.low, curve.high)
        )
        axes.plot(x, mean, color=color(i), linestyle=dashes(i), gid=f"row-{i}", label=row.label)
        axes.fill_between(x, low, high, color=color(i), alpha=0.15, linewidth=0, gid=f"row-{i}")
        columns = (curve.rounds, curve.sent, curve.mean, curve.low, curve.high)
        table += [[row.label, *line] for line in zip(*columns, strict=True)]
    if study.target_accuracy is not None:
        axes.axhline(scale * study.target_accuracy, color=INK, linewidth=0.8, linestyle=":")
    title = study.measure.title.lower()
    axes.set_ylabel(f"{title} (%)" if in_percent else title)
    return table


def _by_round(study: Study) -> Picture:
    figure, axes = new_figure()
    table = _curves(study, axes, by_bytes=False)
    axes.set_xlabel("round")
    return Picture("by-round", "By round", BAND, figure, table)


def _by_bytes(study: Study) -> Picture | None:
    figure, axes = new_figure()
    table = _curves(study, axes, by_bytes=True)
    if len(table) == 1:
        return None
    axes.set_xscale("log")
    axes.set_xlabel("payload bytes sent, up and down (log scale)")
    caption = f"{BAND} Methods that send nothing are left out."
    return Picture("by-bytes", "By communication", caption, figure, table)


def _over_clients(study: Study) -> Picture | None:
    table: Table = [["row", "seed", "client", "accuracy"]]
    rows = []
    for i, row in enumerate(study.rows):
        lines = [(run.seed, line) for run in row.runs for line in _last_of_clients(run)]
        table += [[row.label, seed, line.get("client"), line["accuracy"]] for seed, line in lines]
        if lines:
            rows.append((i, row.label, [100 * line["accuracy"] for _, line in lines]))
    if not rows:
        return None
    figure, axes = new_figure(height=max(2.0, 0.45 * len(rows) + 1.0))
    boxes(axes, rows)
    axes.set_xlabel("accuracy of a client in the last round (%)")
    caption = (
        "Every client of every seed. Box: quartiles and median; whiskers: up to 1.5 times the "
        "box's length."
    )
    return Picture("over-clients", "Over clients", caption, figure, table)


def _last_of_clients(run: RunFiles) -> list[Line]:
    """Return the lines of the last round in which clients were tested on their own rows."""
    lines = [line for line in run.clients if line.get("split", "client") == "client"]
    last = max((line["round"] for line in lines), default=0)
    return [line for line in lines if line["round"] == last and line.get("accuracy") is not None]


def _partitions(study: Study) -> list[Picture]:
    """Return a picture for each way in which the rows' first seeds split the data."""
    owners_by_split: dict[str, list[str]] = {}
    for row in study.rows:
        run = row.runs[0]
        if run.split:
            owners = owners_by_split.setdefault(json.dumps(run.split), [])
            owners.append(f"{row.label}, seed {run.seed}")
    only = len(owners_by_split) == 1
    return [
        _partition(number, "Who has what" if only else f"Who has what ({number})", split, owners)
        for number, (split, owners) in enumerate(owners_by_split.items(), 1)
    ]


def _partition(number: int, title: str, text: str, owners: Sequence[str]) -> Picture:
    split = json.loads(text)
    counts, classes = split["train"], split["classes"]
    width = max(5.0, min(12.0, 0.22 * len(counts) + 2))
    figure, axes = new_figure(width, max(2.6, 0.26 * len(classes) + 1.2))
    most = bubbles(axes, counts, classes)
    others = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
    caption = f"Training rows of {owners[0]}{others}; the largest bubble is {most}."
    table: Table = [["client", *classes], *([i, *line] for i, line in enumerate(counts))]
    return Picture(f"partition-{number}", title, caption, figure, table)


def _traffic(study: Study) -> Picture | None:
    figure, axes = new_figure()
    table: Table = [["row", "round", "up_bytes", "down_bytes"]]
    for i, row in enumerate(study.rows):
        lines = row.runs[0].rounds
        rounds = [line["round"] for line in lines]
        up = [line.get("comm/up_bytes") or 0 for line in lines]
        down = [line.get("comm/down_bytes") or 0 for line in lines]
        if not any([*up, *down]):
            continue
        axes.plot(rounds, up, color=color(i), label=row.label, gid=f"row-{i}")
        axes.plot(rounds, down, color=color(i), linestyle=":", gid=f"row-{i}")
        table += [[row.label, *line] for line in zip(rounds, up, down, strict=True)]
    if len(table) == 1:
        return None
    axes.set_yscale("log")
    axes.set(xlabel="round", ylabel="payload bytes (log scale)")
    caption = "Each row's first seed. Solid: up, to the server; dotted: down, to the clients."
    return Picture("bytes-by-round", "Bytes by round and direction", caption, figure, table)


def _privacy(study: Study) -> Picture | None:
    figure, axes = new_figure()
    table: Table = [["row", "round", "epsilon"]]
    for i, row in enumerate(study.rows):
        rounds, spent = row.runs[0].column("privacy/epsilon")
        if rounds:
            axes.plot(rounds, spent, color=color(i), linestyle=dashes(i), gid=f"row-{i}")
            table += [[row.label, r, e] for r, e in zip(rounds, spent, strict=True)]
    if len(table) == 1:
        return None
    axes.set(xlabel="round", ylabel="ε spent so far")
    return Picture("privacy", "Privacy spent", "Each row's first seed.", figure, table)


def _times(study: Study) -> Picture | None:
    parts = ("start", "training", "evaluation")
    rows: Table = []
    for row in study.rows:
        seconds = [_seconds(run) for run in row.runs if run.rounds]
        if seconds:
            means = (statistics.fmean(column) for column in zip(*seconds, strict=True))
            rows.append([row.label, *means])
    if not rows:
        return None
    figure, axes = new_figure(height=max(2.0, 0.4 * len(rows) + 1.4))
    stacked_bars(axes, parts, rows)
    axes.set_xlabel("seconds, mean over seeds")
    caption = (
        "Start: reading the data and timing how to stack clients; not known of an unfinished run."
    )
    return Picture("times", "Where time went", caption, figure, [["row", *parts], *rows])


def _seconds(run: RunFiles) -> tuple[float, float, float]:
    """Return the seconds before the first round, in training, and in the rest of the rounds."""
    rounds = sum(float(line.get("time/round_s") or 0) for line in run.rounds)
    training = sum(float(line.get("time/train_s") or 0) for line in run.rounds)
    total = float(run.result.get("time/total_s", rounds))
    return max(0.0, total - rounds), training, max(0.0, rounds - training)


def _embeddings(study: Study) -> list[Picture | None]:
    """Return t-SNE of the features of each row's first seed, where they were saved."""
    rows = [row for row in study.rows if (row.runs[0].folder / FEATURES).exists()]
    return [_embedding(number, row) for number, row in enumerate(rows[:MOST_EMBEDDED], 1)]


def _embedding(number: int, row: Row) -> Picture | None:
    run = row.runs[0]
    arranged = embedding(run.folder)
    if arranged is None:
        return None
    points, clients, labels = arranged
    figure, axes = new_figure(5.0, 4.6)
    most = max(labels, default=0) or 1
    x, y = [x for x, _ in points], [y for _, y in points]
    colors = [color(client) for client in clients]
    opacities = [0.25 + 0.75 * label / most for label in labels]
    axes.scatter(x, y, s=16, color=colors, alpha=opacities, linewidths=0)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    caption = f"t-SNE of test rows of {row.label}, seed {run.seed}. Colour: client; opacity: class."
    table: Table = [["x", "y", "client", "class"]]
    table += [list(line) for line in zip(x, y, clients, labels, strict=True)]
    return Picture(f"features-{number}", f"Features of {row.label}", caption, figure, table)


def unreadable(study: Study) -> list[str]:
    """Return a sentence for each file whose picture is missing because it cannot be read."""
    runs = [row.runs[0] for row in study.rows]

    def damaged(name: str, readable: Callable[[RunFiles], object]) -> list[Path]:
        paths = {run.folder / name: run for run in runs if (run.folder / name).exists()}
        return [path for path, run in paths.items() if not readable(run)]

    partitions = damaged(PARTITION, lambda run: run.split)
    features = damaged(FEATURES, lambda run: embedding(run.folder))
    clients = [run.folder / CLIENTS for run in runs if run.done and not run.clients]
    return [
        *(f"{path} cannot be read" for path in partitions),
        *(f"{path} is missing, or has no line that can be read" for path in clients),
        *(f"{path} cannot be read" for path in features),
    ]


def legend(rows: Sequence[Row]) -> list[tuple[int, str, str]]:
    """Return number, colour and label of each row, for the page's own legend."""
    return [(i, color(i), row.label) for i, row in enumerate(rows)]
