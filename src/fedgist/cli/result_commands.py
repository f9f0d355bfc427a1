"""Commands that show and compare runs: show, compare, report, watch."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Group
from rich.live import Live

from fedgist.cli.shared_options import (
    LOOK,
    Folders,
    TrackOption,
    Trust,
    app,
    figure_option,
    refuse_unread,
)
from fedgist.errors import InputError, ReportError, one_of
from fedgist.report import formatting, model_card, page
from fedgist.report.formatting import Sheet
from fedgist.report.page import watch_page, watch_server
from fedgist.report.pictures import curves, drawing, varied
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.pictures.rank_picture import of_ranks
from fedgist.report.tables import client_tables, comparison, row_labels, run_tables
from fedgist.report.tables import ranks as rank_tables
from fedgist.report.tables.comparison import Study
from fedgist.report.terminal import watch
from fedgist.report.terminal.console import SheetView, console, paragraph, say, words
from fedgist.report.terminal.table_formats import Format, in_words, render
from fedgist.report.terminal.text_chart import chart_of
from fedgist.report.tracking.sending import Sender
from fedgist.report.tracking.tracker_names import trackers
from fedgist.runs.files import atomic_files
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.finished_run import FinishedRun

FORMATS: dict[str, Format] = {form: form for form in get_args(Format)}

Reference = Annotated[
    str | None,
    typer.Option(
        "--reference", metavar="ROW", help="Row to compare all others with: its label or method."
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option("--metric", help="Column of rounds.jsonl. Default: the objective's first metric."),
]
TargetOption = Annotated[
    float | None,
    typer.Option(
        "--target-accuracy",
        min=0,
        max=100,
        metavar="PERCENT",
        help="Report rounds and bytes until this accuracy. Default: the paper's target, if any.",
    ),
]
ByOption = Annotated[
    client_tables.By | None,
    typer.Option(help="Show the scores by the clients' models, or by client."),
]

OrderOption = Annotated[
    str | None,
    typer.Option(
        metavar="ROW,ROW,...",
        help="Rows that come first, by label or method, or 'final': the best first.",
    ),
]

LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME=ROW",
        help="Name a row in tables, figures and LaTeX. ROW is its folder, its label or its method; "
        "may be given several times.",
    ),
]


@app.command(rich_help_panel=LOOK)
def show(
    context: typer.Context,
    folders: Folders,
    figure: Annotated[
        Path | None,
        figure_option("Draw the curves in this file, not in the terminal"),
    ] = None,
    by: ByOption = None,
    label: LabelOption = None,
    trust: Trust = False,
) -> None:
    """Show runs: a table, the rounds of a single run, and the curves in the terminal or a file.

    Use it for a first look at one or a few runs.

    Examples
    --------
    fedgist show runs/demo --figure accuracy.pdf
    fedgist show runs/demo/fedlog runs/demo/local --by client
    """
    if by is not None:
        refuse_unread(context, f"with --by {by}", {"folders", "by", "label", "trust"})
    all_runs = row_labels.labelled(run_reader.find(folders, trust=trust), label or ())
    runs, problems = run_reader.readable(all_runs)
    screen = console()
    for problem in problems:
        screen.print(words(f"! {problem}", "yellow"))
    if by is not None:
        for sheet in client_tables.TABLES[by](runs):
            screen.print(SheetView(sheet))
        _end(all_runs)
        return
    if len(runs) == 1:
        screen.print(SheetView(run_tables.by_round(runs[0])))
    screen.print(SheetView(run_tables.overview(runs)))
    lines = curves.lines_of_runs(runs)
    if figure:
        curves.curves_figure(lines, figure)
        screen.print(words(f"drawn in {figure}"))
    elif text := chart_of(lines, min(screen.width, 100)):
        screen.print(paragraph(text))
    _end(all_runs)


def _end(runs: Sequence[FinishedRun]) -> None:
    """Exit with code 1 if a run was left out."""
    if not all(run.usable for run in runs):
        raise typer.Exit(1)


@app.command(rich_help_panel=LOOK)
def compare(
    context: typer.Context,
    folders: Folders,
    reference: Reference = None,
    target_accuracy: TargetOption = None,
    metric: MetricOption = None,
    form: Annotated[
        str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")
    ] = "terminal",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. Default: standard output.")
    ] = None,
    by: ByOption = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="One table with these columns, such as final,interval,difference,p,bytes.",
        ),
    ] = None,
    order: OrderOption = None,
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="Mean ranks of methods over data sets and divisions, with Friedman's test.",
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --ranks: draw them, as PDF, SVG or PNG."),
    ] = None,
    label: LabelOption = None,
    trust: Trust = False,
) -> None:
    """Compare runs: mean and error over seeds, paired tests, bytes to a target accuracy.

    Runs that differ only in their seed or in the division of their rows form one row. Differences
    are paired by both.

    Examples
    --------
    fedgist compare runs/demo/fedlog runs/demo/fedavg --reference fedlog
    fedgist compare runs --target-accuracy 97 --format latex -o table.tex
    fedgist compare runs --by model --format markdown
    fedgist compare runs --columns final,interval,seeds --order final --format latex
    fedgist compare runs/mnist runs/cifar10 --ranks --figure ranks.pdf
    fedgist compare runs/a runs/b --label "FedLog (ours)=runs/a"
    """
    chosen_form = FORMATS[one_of(form, FORMATS, "format")]
    of_all_tables = {"folders", "form", "out", "label", "trust"}
    if ranks:
        own = {*of_all_tables, "ranks", "metric", "figure"}
        refuse_unread(context, "with --ranks, which is a table of its own", own)
        if chosen_form in {"csv", "json"}:
            raise ReportError(f"--ranks has no --format {form}: it is a table of its own")
    elif by is not None:
        own = {*of_all_tables, "by"}
        refuse_unread(context, f"with --by {by}, which has columns of its own", own)
    elif figure is not None:
        raise ReportError("--figure draws ranks: use --ranks, or fedgist show --figure")
    if columns is not None and chosen_form in {"csv", "json"}:
        raise ReportError(f"--columns has no effect with --format {form}, which has all columns")
    runs = row_labels.labelled(run_reader.find(folders, trust=trust), label or ())
    if ranks:
        output = _ranks(runs, metric, chosen_form, figure)
    elif by is None:
        study = _study(runs, reference, metric, target_accuracy, order)
        names = () if columns is None else tuple(name.strip() for name in columns.split(","))
        output = render(study, chosen_form, names)
    else:
        output = in_words(_tables_by(by, runs, form), [], chosen_form)
    if by or ranks or out is not None or chosen_form == "csv":  # these have no place for notes
        for problem in run_reader.problems_of(runs):
            say(f"! {problem}", error=True)
    _write(output, out)
    _end(runs)


def _ranks(
    runs: Sequence[FinishedRun], metric: str | None, form: Format, figure: Path | None
) -> str | Group:
    """Return the ranks of the runs' methods as a table, and draw them if a file is named."""
    found = rank_tables.ranks_of(runs, metric)
    if figure is not None:
        drawing.write_figure(of_ranks(found).figure, figure)
        say(f"drawn in {figure}", error=True)
    return in_words([found.sheet()], found.notes, form)


def _tables_by(by: client_tables.By, runs: Sequence[FinishedRun], form: str) -> list[Sheet]:
    if form in {"csv", "json"}:
        raise ReportError(
            f"--by {by} has no --format {form}: each client's numbers are in clients.jsonl of its "
            "run directory"
        )
    return client_tables.TABLES[by]([run for run in runs if run.usable])


def _write(output: str | Group, out: Path | None) -> None:
    """Write a table into a file, or print it."""
    if out is not None:
        if not isinstance(output, str):
            buffer = io.StringIO()
            console(buffer, width=160).print(output)
            output = buffer.getvalue()
        atomic_files.write(out, output)
    elif isinstance(output, str):
        sys.stdout.write(output)
    else:
        console().print(output)


def _study(
    runs: Sequence[FinishedRun],
    reference: str | None,
    metric: str | None,
    target_percent: float | None,
    order: str | None,
) -> Study:
    return comparison.study(
        runs,
        reference=reference,
        metric=metric,
        target_accuracy=None if target_percent is None else target_percent / 100,
        order=() if order is None else [name.strip() for name in order.split(",")],
    )


@app.command(rich_help_panel=LOOK)
def report(
    folders: Folders,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    reference: Reference = None,
    target_accuracy: TargetOption = None,
    metric: MetricOption = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Also draw the metric against this setting; may be given several times.",
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Federated runs",
    figure_folder: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            metavar="DIR",
            help="Also write each figure to this folder, as PDF, SVG, PNG and CSV.",
        ),
    ] = None,
    order: OrderOption = None,
    label: LabelOption = None,
    trust: Trust = False,
) -> None:
    """Write one HTML page about runs: tables, curves, partitions, bytes, time and settings.

    Use it to share results. The page is a single file.

    Examples
    --------
    fedgist report runs/demo --reference fedlog -o demo.html
    fedgist report runs/alpha --over partition.alpha
    """
    runs = row_labels.labelled(run_reader.find(folders, trust=trust), label or ())
    study = _study(runs, reference, metric, target_accuracy, order)
    drawn = [*(varied.over(study, key) for key in over or ()), *pictures.pictures(study)]
    study = replace(study, notes=(*study.notes, *pictures.unreadable(study)))
    html = page.render(study, drawn, title)
    atomic_files.write(out, html)
    if figure_folder is not None:
        drawing.write(drawn, figure_folder)
    screen = console()
    for note in study.notes:
        screen.print(words(f"! {note}", "yellow"))
    screen.print(words(f"{out}: {formatting.bytes_text(len(html.encode()))}, {len(drawn)} figures"))
    _end(runs)


@app.command(rich_help_panel=LOOK)
def card(
    folders: Folders,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The card to write, *.md or *.html.")
    ] = Path("model-card.md"),
    reference: Reference = None,
    metric: MetricOption = None,
    title: Annotated[str, typer.Option(help="Heading of the card.")] = "Model card",
    label: LabelOption = None,
    trust: Trust = False,
) -> None:
    """Write a model card: task, data by site, method, privacy, results with intervals, limits.

    Use it to hand a result to those who decide. What only you know stands in
    brackets.

    Examples
    --------
    fedgist card runs/hospitals --reference local -o card.html
    """
    runs = row_labels.labelled(run_reader.find(folders, trust=trust), label or ())
    study = _study(runs, reference, metric, None, None)
    text = model_card.write(model_card.card(study, title), out)
    atomic_files.write(out, text)
    console().print(words(f"{out}: {formatting.bytes_text(len(text.encode()))}"))
    _end(runs)


@app.command("watch", rich_help_panel=LOOK)
def watch_(
    context: typer.Context,
    folders: Folders,
    every: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Seconds between two updates. Default: 1 in the terminal, 2 on the page."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    track: TrackOption = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Show the runs on a web page that refreshes itself, for this machine only.",
        ),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=1024, max=65535, help="Port of the page. Default: a free port."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Watch runs until all are finished or stopped, and send their rounds to trackers.

    Only files are read: the runs may be in another terminal, on another machine with a shared disk,
    or finished. With --serve, the folders may also be empty until a run begins.

    Examples
    --------
    fedgist watch runs --track tensorboard
    fedgist watch runs/demo-fedlog --serve
    """
    if serve:
        own = {"folders", "every", "serve", "port", "trust"}
        refuse_unread(context, "with --serve: a second fedgist watch does it", own)
        _serve(folders, every or 2.0, port or 0, trust=trust)
    elif port is not None:
        raise InputError("--port needs --serve")
    else:
        _watch(folders, every or 1.0, track, once=once, trust=trust)


def _watch(
    folders: Sequence[Path], every: float, track: list[str] | None, *, once: bool, trust: bool
) -> None:
    """Show the runs in the terminal until all are finished or stopped."""
    senders = [Sender(tracker) for tracker in trackers(track).values()]
    screen = console()
    view = Live(console=screen, auto_refresh=False) if screen.is_terminal else None
    printed: set[str] = set()
    all_runs: list[FinishedRun] = []
    try:
        with view or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
            while True:
                all_runs = run_reader.find(folders, trust=trust)
                runs = watch.in_order([run for run in all_runs if run.usable])
                problems = run_reader.problems_of(all_runs)
                for run in runs:
                    for sender in senders:
                        sender.send_files(run)
                if view:
                    notes = [words(f"! {problem}", "yellow") for problem in problems]
                    view.update(Group(SheetView(watch.overview(runs)), *notes), refresh=True)
                else:
                    lines = [*watch.lines(runs), *(f"! {problem}" for problem in problems)]
                    for line in lines:
                        if line not in printed:
                            say(line)
                    printed.update(lines)
                if once or all(map(watch.is_over, runs)):
                    break
                time.sleep(every)
    finally:
        for sender in senders:
            sender.close()
    _end(all_runs)


def _serve(folders: Sequence[Path], every: float, port: int, *, trust: bool) -> None:
    """Serve the page until Ctrl-C."""
    read = functools.partial(watch_page.read_state, folders, trust=trust)
    state = read()
    with (
        watch_server.opened(read, every, port) as (server, site),
        contextlib.suppress(KeyboardInterrupt),
    ):
        for view in state.runs:
            if view.kind == watch_page.WAITING:
                say(view.line)
        say(f"watch the runs at {site.address}")
        say("the page opens on this machine only; Ctrl-C ends the page, and no run")
        server.serve_forever()
    if read().left_out:
        raise typer.Exit(1)
