"""The pictures of a study, by matplotlib; each with the numbers it shows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.federation.record import CLIENTS, PARTITION
from fedgist.federation.saved_features import FEATURES
from fedgist.report.comparison import Row, Study
from fedgist.report.drawing import (
    COLORS,
    INK,
    STYLE,
    Picture,
    Table,
    bubbles,
    color,
    dashes,
    matplotlib,
    new_figure,
)
from fedgist.report.run_files import RunFiles
from fedgist.report.tsne import embedding

MOST_EMBEDDED = 6  # rows whose features are drawn


def pictures(study: Study) -> list[Picture]:
    """Return every picture that the runs have something for; what is damaged is left out."""
    with matplotlib().rc_context(STYLE):
        made = [
            _by_round(study),
            _by_bytes(study),
            _over_clients(study),
            *_partitions(study),
            _traffic(study),
            _privacy(study),
            _times(study),
            *_embeddings(study),
        ]
    return [picture for picture in made if picture is not None]


@dataclass(frozen=True)
class _Curve:
    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    sent: list[float]


def _curve(row: Row, metric: str) -> _Curve | None:
    """Mean over seeds at the rounds that all of them have.

    The band is the standard error (of one seed: clients).
    """
    columns = [dict(zip(*run.column(metric), strict=True)) for run in row.runs]
    columns = [column for column in columns if column]
    if not columns:
        return None
    rounds = sorted(set.intersection(*(set(column) for column in columns)))
    means = [statistics.fmean([column[r] for column in columns]) for r in rounds]
    if len(columns) > 1:
        band = [
            statistics.stdev([column[r] for column in columns]) / len(columns) ** 0.5
            for r in rounds
        ]
    else:
        spread = dict(zip(*row.runs[0].column(metric.replace("_mean", "_std")), strict=True))
        band = [spread.get(r, 0.0) if metric.endswith("_mean") else 0.0 for r in rounds]
    sent = [run.sent() for run in row.runs if run.rounds]
    together = [statistics.fmean([sum(s[r]) for s in sent if r in s]) for r in rounds]
    low, high = (
        zip(*((m - b, m + b) for m, b in zip(means, band, strict=True)), strict=True)
        if rounds
        else ((), ())
    )
    return _Curve(rounds, means, list(low), list(high), together)


def _scale(study: Study) -> tuple[float, str]:
    return (100.0, "accuracy (%)") if "accuracy" in study.metric else (1.0, study.metric)


def _curves(study: Study, axes: Any, *, by_bytes: bool) -> Table:
    scale, label = _scale(study)
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
    axes.set_ylabel(label)
    return table


BAND = "Line: mean over seeds; band: its standard error, or with one seed the spread over clients."


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
    return Picture(
        "by-bytes",
        "By communication",
        f"{BAND} Methods that send nothing are left out.",
        figure,
        table,
    )


def _over_clients(study: Study) -> Picture | None:
    table: Table = [["row", "seed", "client", "accuracy"]]
    boxes = []
    for i, row in enumerate(study.rows):
        values = []
        for run in row.runs:
            lines = [line for line in run.clients if line.get("split", "client") == "client"]
            last = max((line["round"] for line in lines), default=0)
            final = [li for li in lines if li["round"] == last and li.get("accuracy") is not None]
            values += [100 * line["accuracy"] for line in final]
            table += [[row.label, run.seed, line.get("client"), line["accuracy"]] for line in final]
        if values:
            boxes.append((i, row.label, values))
    if not boxes:
        return None
    figure, axes = new_figure(height=max(2.0, 0.45 * len(boxes) + 1.0))
    parts = axes.boxplot(
        [values for _, _, values in boxes],
        orientation="horizontal",
        widths=0.6,
        patch_artist=True,
        flierprops={"markersize": 3, "markeredgecolor": INK},
        medianprops={"color": INK},
        whiskerprops={"color": INK},
        capprops={"color": INK},
    )
    for (i, _, _), box in zip(boxes, parts["boxes"], strict=True):
        box.set(facecolor=color(i), alpha=0.6, edgecolor=color(i), gid=f"row-{i}")
    axes.set_yticks(range(1, len(boxes) + 1), [label for _, label, _ in boxes])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy of a client in the last round (%)")
    caption = (
        "Every client of every seed. Box: quartiles and median; whiskers: 1.5 times its length."
    )
    return Picture("over-clients", "Over clients", caption, figure, table)


def _partitions(study: Study) -> list[Picture]:
    """Return a picture for each way in which the rows' first seeds split the data."""
    seen: dict[str, list[str]] = {}
    for row in study.rows:
        if row.runs[0].split:
            seen.setdefault(json.dumps(row.runs[0].split), []).append(
                f"{row.label}, seed {row.runs[0].seed}"
            )
    out = []
    for number, (text, owners) in enumerate(seen.items(), 1):
        split = json.loads(text)
        counts, classes = split["train"], split["classes"]
        figure, axes = new_figure(
            max(5.0, min(12.0, 0.22 * len(counts) + 2)), max(2.6, 0.26 * len(classes) + 1.2)
        )
        most = bubbles(axes, counts, classes)
        title = "Who has what" if len(seen) == 1 else f"Who has what ({number})"
        others = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        caption = f"Training rows of {owners[0]}{others}; the largest bubble is {most}."
        table: Table = [["client", *classes], *([i, *line] for i, line in enumerate(counts))]
        out.append(Picture(f"partition-{number}", title, caption, figure, table))
    return out


def _traffic(study: Study) -> Picture | None:
    figure, axes = new_figure()
    table: Table = [["row", "round", "up_bytes", "down_bytes"]]
    for i, row in enumerate(study.rows):
        run = row.runs[0]
        lines = [
            (li["round"], li.get("comm/up_bytes") or 0, li.get("comm/down_bytes") or 0)
            for li in run.rounds
        ]
        if not any(up or down for _, up, down in lines):
            continue
        rounds = [line[0] for line in lines]
        axes.plot(
            rounds, [line[1] for line in lines], color=color(i), label=row.label, gid=f"row-{i}"
        )
        axes.plot(
            rounds, [line[2] for line in lines], color=color(i), linestyle=":", gid=f"row-{i}"
        )
        table += [[row.label, *line] for line in lines]
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
    table: Table = [["row", "start", "training", "evaluation"]]
    for row in study.rows:
        parts = [_seconds(run) for run in row.runs if run.rounds]
        if parts:
            table.append(
                [row.label, *(statistics.fmean(column) for column in zip(*parts, strict=True))]
            )
    if len(table) == 1:
        return None
    figure, axes = new_figure(height=max(2.0, 0.4 * len(table) + 1.0))
    labels = [line[0] for line in table[1:]]
    left = [0.0] * len(labels)
    for place, name in enumerate(table[0][1:], 1):
        widths = [line[place] for line in table[1:]]
        axes.barh(
            labels, widths, left=left, color=COLORS[(0, 2, 4)[place - 1]], label=name, height=0.6
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds, mean over seeds")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    caption = (
        "Start: reading the data and timing how to stack clients; of an unfinished run it is not "
        "known."
    )
    return Picture("times", "Where time went", caption, figure, table)


def _seconds(run: RunFiles) -> tuple[float, float, float]:
    whole, training = (
        sum(float(li.get(k) or 0) for li in run.rounds) for k in ("time/round_s", "time/train_s")
    )
    total = float(run.result.get("time/total_s", whole))
    return max(0.0, total - whole), training, max(0.0, whole - training)


def _embeddings(study: Study) -> list[Picture]:
    """Return t-SNE of the features of each row's first seed, where they were saved."""
    rows = [row for row in study.rows if (row.runs[0].folder / FEATURES).exists()]
    made = (_embedding(i, row) for i, row in enumerate(rows[:MOST_EMBEDDED]))
    return [picture for picture in made if picture is not None]


def remarks(study: Study) -> list[str]:
    """Name the files that a picture could not be made of."""
    firsts = [row.runs[0] for row in study.rows]
    found = [
        f"{run.folder / PARTITION} cannot be read"
        for run in firsts
        if _there(run, PARTITION) and not run.split
    ]
    found += [
        f"{run.folder / CLIENTS} holds nothing to read"
        for run in firsts
        if run.done and not run.clients
    ]
    return found + [
        f"{run.folder / FEATURES} cannot be read"
        for run in firsts
        if _there(run, FEATURES) and not embedding(run.folder)
    ]


def _there(run: RunFiles, name: str) -> bool:
    return (run.folder / name).exists()


def _embedding(number: int, row: Row) -> Picture | None:
    found = embedding(row.runs[0].folder)
    if found is None:
        return None
    points, clients, labels = found
    figure, axes = new_figure(5.0, 4.6)
    most = max(labels, default=0) or 1
    shades = [0.25 + 0.75 * label / most for label in labels]
    axes.scatter(
        [x for x, _ in points],
        [y for _, y in points],
        s=16,
        color=[color(c) for c in clients],
        alpha=shades,
        linewidths=0,
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    caption = (
        f"t-SNE of test rows of {row.label}, seed {row.runs[0].seed}. Colour: client; opacity: "
        "class."
    )
    table: Table = [["x", "y", "client", "class"]]
    table += [[*point, c, label] for point, c, label in zip(points, clients, labels, strict=True)]
    return Picture(f"features-{number + 1}", f"Features of {row.label}", caption, figure, table)


def legend(rows: Sequence[Row]) -> list[tuple[int, str, str]]:
    """Return number, colour and label of each row, for the page's own legend."""
    return [(i, color(i), row.label) for i, row in enumerate(rows)]
