"""The pictures of the pages of results, each with the digest of the numbers that it shows."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedgist.report.pictures.curves import RunLines, by_bytes, by_round
from fedgist.report.pictures.drawing import STYLE, Picture, matplotlib, new_figure
from fedgist.report.pictures.varied import draw_varied
from fedgist.report.tables.stats import estimate
from fedgist.runs.files.columns import measured
from fedgist.runs.files.digests import of_text
from fedgist.runs.finished.finished_run import FinishedRun
from results_cells import Experiment

SHADES = 64  # colours of a picture: enough for flat ones, and a third of the bytes
HIGH = 3.0  # inches
DOTS = 190  # per inch: 800 across


def pictures(found: Experiment) -> list[Picture]:
    """Return the pictures of an experiment."""
    rows = tuple((cell.label, cell.row.runs) for cell in found.cells if cell.row)
    if not rows or found.options.get("gains"):  # such a table is read, not drawn
        return []
    with matplotlib().rc_context(STYLE):
        if "over" in found.options:
            return [_over(found)]
        return list(_curves(found, rows))


def _curves(
    found: Experiment, rows: Sequence[tuple[str, Sequence[FinishedRun]]]
) -> Iterator[Picture]:
    """Yield accuracy by round and by bytes; then above ``near`` percent alone, if it is given."""
    goal, near = found.paper.target_accuracy, found.options.get("near")
    run = rows[0][1][0]
    column = found.metric or run.main
    methods = tuple(runs[0].name for _, runs in rows)
    whole = RunLines(
        tuple(rows), methods, column, measured(column, run.metrics), goal and goal / 100
    )
    yield from _pair(whole, found.name, "")
    if near is not None:
        last = {
            label: estimate([run.last(run.main) or 0.0 for run in runs]) for label, runs in rows
        }
        close = {name for name, mean in last.items() if mean and 100 * mean.mean > near}
        if close:  # the others are there without runs: each line keeps its colour
            shown = tuple((name, runs if name in close else ()) for name, runs in rows)
            lines = replace(whole, rows=shown, low=near / 100)
            yield from _pair(lines, f"{found.name}-near", f", from {near:g} %")


def _pair(lines: RunLines, name: str, words: str) -> Iterator[Picture]:
    drawn = by_round(lines), by_bytes(lines)
    for picture in filter(None, drawn):
        title = f"{picture.title}{words}"
        yield replace(picture, name=f"{name}-{picture.name}", title=title)


def _over(found: Experiment) -> Picture:
    """Return the picture of the metric over the setting that is varied."""
    key = found.options["over"]
    figure, axes = new_figure(height=HIGH)
    table = draw_varied(axes, found.lines, found.rows[0].measure)
    if found.options.get("log"):
        axes.set_xscale("log")
    values = sorted({value for line in found.lines for value, _ in line.points})
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(key)
    return Picture(f"{found.name}-over", f"Accuracy over {key}", "", figure, table)


def digest(picture: Picture) -> str:
    """Return the digest of a picture's numbers, in six digits."""
    cells = [
        [f"{v:.6g}" if isinstance(v, float) else str(v) for v in line] for line in picture.table
    ]
    return of_text(f"{picture.name} {cells}")


def write(picture: Picture, folder: Path) -> None:
    """Write a picture as a small PNG that carries its digest."""
    image = Image.open(io.BytesIO(picture.png(DOTS))).convert("RGB")
    notes = PngInfo()
    notes.add_text("fedgist", digest(picture))
    image.quantize(SHADES).save(folder / f"{picture.name}.png", optimize=True, pnginfo=notes)
