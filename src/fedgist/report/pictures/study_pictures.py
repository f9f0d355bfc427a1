"""Figures of a study, each with the table of its numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgist.methods.common.method_looks import INK
from fedgist.report.pictures.confusion_pictures import of_confusions
from fedgist.report.pictures.curves import by_bytes, by_round, lines_of
from fedgist.report.pictures.drawing import (
    HEIGHT,
    STYLE,
    WIDTH,
    FigureTable,
    Picture,
    matplotlib,
    new_figure,
    short,
    wrapped,
    write_figure,
)
from fedgist.report.pictures.feature_pictures import of_features, saved
from fedgist.report.pictures.plot_elements import (
    NamedLine,
    boxes,
    bubbles,
    byte_ticks,
    draw_line,
    groups,
    name_lines,
    rows_height,
    stacked_bars,
    tick_names,
    whole_ticks,
)
from fedgist.report.pictures.probability_pictures import of_probabilities
from fedgist.report.pictures.row_styles import RowStyle, styles_of
from fedgist.report.tables.client_scores import scores_of
from fedgist.report.tables.client_tables import LOCAL, gains, measure_of, without_scores
from fedgist.report.tables.comparison import Row, Study, common_metric
from fedgist.report.tables.mean_counts import sentence
from fedgist.runs.files.columns import DOWN_BYTES, EPSILON, UP_BYTES, over_clients
from fedgist.runs.files.record import CLIENTS, FEATURES, PREDICTIONS
from fedgist.runs.finished.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = {UP_BYTES: "up, to the server", DOWN_BYTES: "down, to clients"}
FEW = 4  # fewer values are also drawn as points: gaps between them may leave no line
MOST_NAMED_CLIENTS = 12  # in the figure of gains, each in a lane of its own
LANES = 5  # of points without names


def pictures(study: Study) -> list[Picture]:
    """Return every figure that the runs have data for; damaged data are left out."""
    with matplotlib().rc_context(STYLE):
        candidates = [
            by_round(lines_of(study)),
            by_bytes(lines_of(study)),
            _over_clients(study),
            _gains(study),
            *of_confusions(study),
            *of_probabilities(study),
            *_partitions(study),
            _traffic(study),
            _privacy(study),
            _times(study),
            *of_features(study),
        ]
    return [picture for picture in candidates if picture is not None]


def _over_clients(study: Study) -> Picture | None:
    runs = [run for row in study.rows for run in row.runs]
    metric, measure, rows = common_metric(runs), measure_of(runs), []
    scale = 100.0 if measure.unit == "fraction" else 1.0
    table: FigureTable = [["row", "seed", "client", metric]]
    for style, row in zip(styles_of_rows(study.rows), study.rows, strict=True):
        scores = [(run.seed, scores_of(run, metric)) for run in row.runs]
        values = [(seed, c, of[c].score) for seed, of in scores for c in sorted(of)]
        table += [[row.label, *value] for value in values]
        if values:
            rows.append((style, row.label, [scale * score for _, _, score in values]))
    if not rows:
        return None
    height = rows_height([label for _, label, _ in rows], 0.36)
    figure, axes = new_figure(height=max(1.8, height + 0.8))
    boxes(axes, rows)
    unit = " (%)" if scale > 1 else ""
    axes.set_xlabel(f"{measure.title.lower()} of a client at the end{unit}")
    caption = (
        "Every client of every seed. Box: quartiles and median; whiskers: up to 1.5 times the "
        "box's length."
    )
    note = without_scores(runs)
    caption += f" {note[:1].upper()}{note[1:]}." if note else ""
    rows_of = {row.label: row.runs for row in study.rows}
    caption = f"{caption} {sentence(rows_of, over_clients('client', metric))}".rstrip()
    return Picture("over-clients", "Over clients", caption, figure, table)


def _gains(study: Study) -> Picture | None:
    """Return the figure of each client's gain over local training, coloured by its model."""
    runs = [run for row in study.rows for run in row.runs]
    of_clients = gains(runs)
    labels = list(dict.fromkeys(label for label, _, _ in of_clients))
    if not labels:
        return None
    measure = measure_of(runs)  # not of the study, whose metric may have no value for a client
    percent = 100.0 if measure.unit == "fraction" else 1.0
    places, count = [], Counter[str]()
    lanes = max(Counter(label for label, _, _ in of_clients).values())
    named = lanes <= MOST_NAMED_CLIENTS
    lanes = lanes if named else LANES
    for label, _, gain in of_clients:  # points of a row in lanes, in the order of clients
        lane = (count[label] % lanes + 0.5) / lanes - 0.5
        count[label] += 1
        places.append((percent * gain, labels.index(label) + 0.8 * lane))
    each = 0.17 * lanes if named else 0.5
    figure, axes = new_figure(height=max(1.8, rows_height(labels, max(0.5, each)) + 0.8))
    groups(axes, places, [client.model for _, client, _ in of_clients], "model")
    for (x, y), (_, client, _) in zip(places, of_clients, strict=True) if named else ():
        axes.annotate(
            short(client.name, 16),
            (x, y),
            (5 if x >= 0 else -5, 0),
            textcoords="offset points",
            ha="left" if x >= 0 else "right",
            va="center",
            fontsize="x-small",
        )
    axes.margins(x=0.25 if named else 0.05)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(labels)), tick_names(labels))
    axes.invert_yaxis()
    unit, title = " (points)" if measure.unit == "fraction" else "", measure.title.lower()
    axes.set_xlabel(f"{title} of a client minus local training{unit}")
    table: FigureTable = [["row", "client", "model", "gain"]]
    table += [[label, client.name, client.model, gain] for label, client, gain in of_clients]
    caption = (
        "A point per client, the mean over seeds and divisions, against the same client trained "
        "alone (with drawn partitions a point per client and seed). Left of the line: it loses. "
        "Colour and sign: its model."
    )
    alone = [row.label for row in study.rows if row.label not in labels and row.method != LOCAL]
    caption += (
        f" Not shown, without local training to compare: {', '.join(alone)}." if alone else ""
    )
    return Picture("gains", "Gain of each client", caption, figure, table)


def _partitions(study: Study) -> list[Picture]:
    """Return one figure for each distinct partition of the rows' first seeds."""
    owners_by_split: dict[str, list[str]] = {}
    for row in study.rows:
        run = row.runs[0]
        if run.split:
            rows_alone = {k: v for k, v in run.split.items() if k != "models"}
            owners = owners_by_split.setdefault(json.dumps(rows_alone), [])
            owners.append(f"{row.label}, seed {run.seed}")
    only = len(owners_by_split) == 1
    return [
        _partition(number, "Who has what" if only else f"Who has what ({number})", split, owners)
        for number, (split, owners) in enumerate(owners_by_split.items(), 1)
    ]


def _partition(number: int, title: str, text: str, owners: Sequence[str]) -> Picture:
    split = json.loads(text)
    counts, classes = split["train"], split["classes"]
    clients = split.get("clients") or range(len(counts))
    others = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
    caption = f"Training rows of {owners[0]}{others}."
    lines = [[client, *line] for client, line in zip(clients, counts, strict=True)]
    table: FigureTable = [["client", *classes], *lines]
    figure = _bubble_figure(split)
    return Picture(f"partition-{number}", title, caption, figure, table)


def partition_figure(split: Mapping[str, Any], path: Path) -> None:
    """Write a figure with a bubble per client and class; its area is the number of rows."""
    with matplotlib().rc_context(STYLE):
        write_figure(_bubble_figure(split), path)


def _bubble_figure(split: Mapping[str, Any]) -> Figure:
    counts, classes = split["train"], split["classes"]
    width = max(WIDTH, min(14.0, 0.18 * len(counts) + 1.2))
    figure, axes = new_figure(width, max(2.0, min(9.0, 0.2 * len(classes) + 0.9)))
    bubbles(axes, counts, classes, split.get("clients") or ())
    return figure


def _traffic(study: Study) -> Picture | None:
    figure, both = new_figure(height=1.7 * HEIGHT, rows=2)
    table: FigureTable = [["row", "round", "up_bytes", "down_bytes"]]
    for row in study.rows:
        columns = [_by_number(row.runs[0], key) for key in (UP_BYTES, DOWN_BYTES)]
        table += [[row.label, r, *(column[r] for column in columns)] for r in columns[0]]
    if not any(line[2] or line[3] for line in table[1:]):
        return None
    ends = [_one_way(study.rows, axes, key) for axes, key in zip(both, WAYS, strict=True)]
    for axes, way in zip(both, WAYS.values(), strict=True):
        axes.set_ylabel(f"{way} (log scale)")
        whole_ticks(axes.xaxis)
    both[-1].set_xlabel("round")
    name_lines(both[0], [end for some in ends for end in some])
    caption = "Payload bytes of each row's first seed, all clients together."
    return Picture("bytes-by-round", "Bytes by round, up and down", caption, figure, table)


def _by_number(run: FinishedRun, key: str) -> dict[int, float]:
    return {line["round"]: line.get(key) or 0 for line in run.rounds}


def _one_way(rows: Sequence[Row], axes: Axes, key: str) -> list[NamedLine]:
    """Draw the bytes that each row sends in one direction; rounds without any are gaps."""
    ends, silent, sent = [], [], []
    for style, row in zip(styles_of_rows(rows), rows, strict=True):
        column = _by_number(row.runs[0], key)
        values = [value or math.nan for value in column.values()]
        if not any(column.values()):
            silent.append(row.label)
            continue
        # gaps between few values may leave nothing of a line but its markers
        draw_line(axes, style, list(column), values, dense=sum(map(bool, column.values())) < FEW)
        ends.append(NamedLine(style, row.label))
        sent += [value for value in column.values() if value]
    if sent:
        byte_ticks(axes, "y", [min(sent) / 1.5, max(sent) * 1.5])
    if silent:
        title = wrapped(f"sends nothing: {', '.join(silent)}", 60, 12)
        axes.set_title(title, fontsize="small", loc="left")
    return ends


def styles_of_rows(rows: Sequence[Row]) -> tuple[RowStyle, ...]:
    """Return how each row of a study is drawn."""
    return styles_of([row.method for row in rows])


def _privacy(study: Study) -> Picture | None:
    figure, axes = new_figure()
    table: FigureTable = [["row", "round", "epsilon"]]
    ends = []
    for style, row in zip(styles_of_rows(study.rows), study.rows, strict=True):
        rounds, spent = row.runs[0].column(EPSILON)
        if rounds:
            draw_line(axes, style, rounds, spent)
            table += [[row.label, r, e] for r, e in zip(rounds, spent, strict=True)]
            ends.append(NamedLine(style, row.label))
    if len(table) == 1:
        return None
    axes.set(xlabel="round", ylabel="ε spent so far")
    axes.set_ylim(bottom=0)
    whole_ticks(axes.xaxis)
    name_lines(axes, ends)
    return Picture("privacy", "Privacy spent", "Each row's first seed.", figure, table)


def _times(study: Study) -> Picture | None:
    parts = ("start", "training", "evaluation")
    rows: FigureTable = []
    for row in study.rows:
        seconds = [
            _seconds(run) for run in row.runs if any("time/round_s" in line for line in run.rounds)
        ]
        if seconds:
            means = (statistics.fmean(column) for column in zip(*seconds, strict=True))
            rows.append([row.label, *means])
    if not rows:
        return None
    height = rows_height([str(row[0]) for row in rows], 0.34)
    figure, axes = new_figure(height=max(1.6, height + 0.8))
    stacked_bars(axes, parts, rows)
    axes.set_xlabel("seconds, mean over seeds")
    caption = (
        "Start: reading the data and timing how to stack clients; not known of an unfinished run."
    )
    return Picture("times", "Where time went", caption, figure, [["row", *parts], *rows])


def _seconds(run: FinishedRun) -> tuple[float, float, float]:
    """Return the seconds before the first round, in training, and in the rest of the rounds."""
    rounds = sum(float(line.get("time/round_s") or 0) for line in run.rounds)
    training = sum(float(line.get("time/train_s") or 0) for line in run.rounds)
    total = float(run.result.get("time/total_s", rounds))
    return max(0.0, total - rounds), training, max(0.0, rounds - training)


def unreadable(study: Study) -> list[str]:
    """Return a sentence for each missing or unusable file that a figure needs."""
    firsts = [row.runs[0] for row in study.rows]
    runs = [run for row in study.rows for run in row.runs]
    scored = [run for run in firsts if run.recipe.get("evaluate", {}).get("on") != "global"]
    empty = [run for run in scored if not (run.clients.lines or run.clients.problems)]
    clients = [run.folder / CLIENTS for run in empty if run.done and run.folder.is_dir()]
    there = [run.folder for run in firsts if (run.folder / FEATURES).exists()]
    features = [folder / FEATURES for folder in there if saved(folder) is None]
    predictions = [
        path
        for run in runs
        if run.predictions is None and (path := run.folder / PREDICTIONS).exists()
    ]
    return [
        *(problem for run in firsts for problem in run.split_problems),
        *(problem for run in runs for problem in run.clients.problems),
        *(f"{path} is missing, or has no line that can be used" for path in clients),
        *(f"{path} cannot be used" for path in features),
        *(f"{path} cannot be used" for path in predictions),
    ]
