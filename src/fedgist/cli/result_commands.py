"""Looking at runs: tables, curves, pages."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedgist.cli.shared_options import LOOK, Folders, app
from fedgist.errors import one_of
from fedgist.federation import atomic_files as files
from fedgist.report import drawing, figures, page, pictures, tables, watch
from fedgist.report import formatting as text
from fedgist.report import run_files as runs
from fedgist.report import tracking as track_
from fedgist.report.comparison import study

Reference = Annotated[
    str | None,
    typer.Option(
        "--reference", metavar="ROW", help="Row to compare the others with: its label or method."
    ),
]
Metric = Annotated[
    str, typer.Option("--metric", help="Column of rounds.jsonl; of a loss lower is better.")
]
Target = Annotated[
    float | None,
    typer.Option(
        "--target-accuracy",
        min=0,
        max=100,
        metavar="PERCENT",
        help="Count rounds and bytes until this accuracy. Default: the paper's, if any.",
    ),
]


@app.command(rich_help_panel=LOOK)
def show(
    folders: Folders,
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
) -> None:
    """Show runs: a table, the rounds, and a curve in the terminal or a PNG."""
    found = runs.find(folders)
    console = Console()
    if len(found) == 1:
        console.print(text.by_round(found[0]))
    console.print(text.overview(found))
    if png:
        figures.curves_png(found, png)
        console.print(f"drawn in {png}")
    elif any(run.rounds for run in found):
        console.print(Text(figures.curves_text(found, min(console.width, 100))))


@app.command(rich_help_panel=LOOK)
def compare(
    folders: Folders,
    reference: Reference = None,
    target_accuracy: Target = None,
    metric: Metric = runs.ACCURACY,
    form: Annotated[
        str, typer.Option("--format", help=f"One of {', '.join(get_args(tables.Format))}.")
    ] = "terminal",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. Default: standard output.")
    ] = None,
) -> None:
    """Compare runs: mean and error over seeds, paired tests, bytes to a target accuracy.

    Runs that differ in nothing but the seed are one row. Differences are paired by seed.

    Examples
    --------
    fedgist compare runs/demo/fedlog runs/demo/fedavg --reference fedlog
    fedgist compare runs --target-accuracy 97 --format latex -o table.tex
    """
    chosen: tables.Format = one_of(form, get_args(tables.Format), "format")  # type: ignore[assignment]  # one of them
    found = study(
        runs.find(folders),
        reference=reference,
        metric=metric,
        target_accuracy=None if target_accuracy is None else target_accuracy / 100,
    )
    whole = tables.render(found, chosen)
    if out is not None:
        if not isinstance(whole, str):
            console = Console(width=160, file=io.StringIO(), record=True)
            console.print(whole)
            whole = console.export_text()
        files.write(out, whole)
    elif isinstance(whole, str):
        sys.stdout.write(whole)
    else:
        Console().print(whole)


@app.command(rich_help_panel=LOOK)
def report(
    folders: Folders,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    reference: Reference = None,
    target_accuracy: Target = None,
    metric: Metric = runs.ACCURACY,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Federated runs",
    figure_folder: Annotated[
        Path | None,
        typer.Option(
            "--figures", metavar="DIR", help="Also write each figure here as PNG, SVG and CSV."
        ),
    ] = None,
) -> None:
    """Write a page about runs: tables, curves, partitions, bytes, time, settings; one file.

    Examples
    --------
    fedgist report runs/demo --reference fedlog -o demo.html
    """
    found = study(
        runs.find(folders),
        reference=reference,
        metric=metric,
        target_accuracy=None if target_accuracy is None else target_accuracy / 100,
    )
    drawn = pictures.pictures(found)
    found = replace(found, notes=(*found.notes, *pictures.remarks(found)))
    whole = page.render(found, drawn, title)
    files.write(out, whole)
    if figure_folder is not None:
        drawing.write(drawn, figure_folder)
    console = Console()
    for note in found.notes:
        console.print(Text(f"! {note}", style="yellow"))
    console.print(f"{out}: {text.size(len(whole.encode()))}, {len(drawn)} figures")


@app.command("watch", rich_help_panel=LOOK)
def watch_(
    folders: Folders,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,  # noqa: FBT002
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Also send the rounds to tensorboard[:FOLDER] or mlflow[:URI]; may be given twice."
        ),
    ] = None,
) -> None:
    """Watch runs as they go, and send them on to TensorBoard or MLflow; ends when all are finished.

    Works from the files alone: for runs of another terminal, another machine's shared disk, or
    finished ones.

    Examples
    --------
    fedgist watch runs --track tensorboard
    """
    trackers = [track_.tracker(text) for text in track or []]
    console = Console()
    view = Live(console=console, auto_refresh=False) if console.is_terminal else None
    said: set[str] = set()
    try:
        with view or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
            while True:
                found = runs.find(folders)
                for one in found:
                    for tracker in trackers:
                        tracker.send(one)
                if view:
                    view.update(watch.overview(found), refresh=True)
                else:
                    new = [line for line in watch.lines(found) if line not in said]
                    said.update(new)
                    sys.stdout.write("".join(f"{line}\n" for line in new))
                    sys.stdout.flush()
                if once or all(watch.state(one) == "finished" for one in found):
                    return
                time.sleep(every)
    finally:
        for tracker in trackers:
            tracker.close()
