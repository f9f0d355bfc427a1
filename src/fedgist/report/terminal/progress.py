"""Progress display of a run: a bar in a terminal, lines in a pipe, JSON, or nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from fedgist.core.objectives.metrics import METRICS, Metric
from fedgist.errors import printable
from fedgist.report.formatting import bytes_text, duration, replies, score_text, seconds_left
from fedgist.report.tables.mean_counts import marked, part_of
from fedgist.report.terminal.console import column, say, words
from fedgist.report.troubles import Trouble, troubles
from fedgist.runs.files.columns import (
    ACCURACY,
    DOWN_BYTES,
    EPSILON,
    UP_BYTES,
    of_all,
    over_clients,
    over_models,
)
from fedgist.runs.files.record import ROUNDS, Line, read_lines, to_json
from fedgist.runs.round import Observer
from fedgist.wire.delayed_engine import LATE
from fedgist.world.server_context import ServerContext


class Json(Observer):
    """Prints each round's line of the record as JSON."""

    def finished_round(self, line: Line) -> None:
        """Print the line."""
        sys.stdout.write(to_json(line) + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a note on standard error, so that standard output holds only JSON."""
        say(text, error=True)


class Plain(Observer):
    """Prints a line for each round, for pipes and logs."""

    def __init__(self) -> None:
        self.last, self.column, self.measure = 0, ACCURACY, METRICS["accuracy"]
        self.seconds: list[float] = []

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Print the method, the data, the clients and the folder."""
        self.last, self.seconds = server.task.training.num_rounds, []
        self.column, self.measure = main_column(server)
        say(title(server, folder) + (f", going on after round {done}" if done else ""))
        say(f"data: {server.data_summary}")

    def finished_round(self, line: Line) -> None:
        """Print the round."""
        score = ""
        if self.column in line:
            text = score_text(line[self.column], self.measure)
            text = marked(text, part_of(line, self.column))
            score = f"  {self.measure.title.lower()} {text}"
        # exactly 0 is the mean over no row: no phase learned anything
        loss = f"  loss {line['train/loss']:.4f}" if line.get("train/loss") else ""
        sent = (
            f"  up {bytes_text(line['comm/up_bytes'])}  down {bytes_text(line['comm/down_bytes'])}"
        )
        sent += f"  epsilon {line[EPSILON]:.3g}" if EPSILON in line else ""
        self.seconds.append(line["time/round_s"])
        left = seconds_left(self.seconds, self.last - line["round"])
        say(
            f"round {line['round']}/{self.last}{_beside(replies(line))}{score}{loss}{sent}  "
            f"{duration(line['time/round_s'])}{f', {duration(left)} left' if left else ''}"
        )
        for text in trouble_texts(line):
            say(f"  {text}")

    def note(self, text: str) -> None:
        """Print the note."""
        say(text)

    def chose(self, text: str) -> None:
        """Print a text on the round that was chosen."""
        say(text)


class Live(Observer):
    """Shows a bar with rounds, accuracy, bytes and the time left."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.bar = progress.add_task("", total=None, visible=False, score="-", sent="0 B")
        self.sent, self.score, self.name = 0, "-", ""
        self.column, self.measure = ACCURACY, METRICS["accuracy"]

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Start a bar."""
        self.progress.console.print(words(title(server, folder)))
        self.progress.console.print(words(f"data: {server.data_summary}", "dim"))
        self.sent, self.score = _sent_before(folder, done), "-"
        self.name = printable(server.setup.recipe.method.name)
        self.column, self.measure = main_column(server)
        self.progress.reset(
            self.bar,
            total=server.task.training.num_rounds,
            completed=done,
            visible=True,
            description=self.name,
            score="-",
            sent=bytes_text(self.sent),
        )

    def working(self, text: str) -> None:
        """Show the progress within a long round beside the bar."""
        self.progress.update(self.bar, description=f"{self.name}: {printable(text)}", refresh=True)

    def finished_round(self, line: Line) -> None:
        """Move the bar."""
        self.sent += line["comm/up_bytes"] + line["comm/down_bytes"]
        if self.column in line:
            text = score_text(line[self.column], self.measure)
            self.score = marked(text, part_of(line, self.column))
        self.progress.update(
            self.bar,
            completed=line["round"],
            sent=bytes_text(self.sent) + _beside(replies(line)),
            score=self.score,
            description=self.name,
            refresh=True,
        )
        for text in trouble_texts(line):
            self.note(text)

    def note(self, text: str) -> None:
        """Print above the bar."""
        self.progress.console.print(words(text, "yellow"))
        self.progress.refresh()

    def chose(self, text: str) -> None:
        """Print a text on the round that was chosen."""
        self.progress.console.print(words(text))


@contextlib.contextmanager
def observing(console: Console, *, quiet: bool, as_json: bool) -> Iterator[Observer]:
    """Yield the requested observer: a bar in a terminal and plain lines elsewhere by default."""
    simple: Callable[[], Observer] | None = (
        Observer if quiet else Json if as_json else None if console.is_terminal else Plain
    )
    if simple is not None:
        yield simple()
        return
    columns = (
        column("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        column("rounds"),
        column("{task.fields[score]}", "bold"),
        column("{task.fields[sent]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # no refresh thread: workers are forked while the bar is shown
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        yield Live(progress)


def main_column(server: ServerContext) -> tuple[str, Metric]:
    """Return the column of the objective's first metric, and this metric."""
    metric = server.task.objective.metrics[0]
    if server.setup.recipe.evaluate.on != "global":
        return over_clients("client", metric.name), metric
    alone = len(server.task.architectures) == 1
    return of_all(metric.name) if alone else over_models(metric.name), metric


def title(server: ServerContext, folder: str) -> str:
    """Return a one-line title: method, data, number of clients, models, seed and folder.

    Of a model it has the number of parameters, unless it is private to a site.
    """
    suffix = f" -> {folder}" if folder else ""
    clients = f"{server.num_clients} clients"
    models = ", ".join(_model(server, name) for name in server.task.architectures)
    method, seed = server.setup.recipe.method.name, server.setup.recipe.seed
    return f"{method} on {server.data_name}: {clients}, {models}, seed {seed}{suffix}"


def _model(server: ServerContext, name: str) -> str:
    """Return the name of a model with its number of parameters."""
    arch, notes = server.task.architectures[name], []
    if server.setup.private_width is None:
        count = sum(array.numel() for array in server.task.starts[name].params.values())
        notes.append(f"{count:,} parameters")
    if arch.projected:
        notes.append(f"projected to {arch.feature_width} features")
    return f"{name} ({', '.join(notes)})" if notes else name


def _sent_before(folder: str, done: int) -> int:
    """Return the bytes that the recorded rounds of a resumed run sent."""
    lines = read_lines(Path(folder) / ROUNDS) if folder and done else []
    return sum((line.get(UP_BYTES) or 0) + (line.get(DOWN_BYTES) or 0) for line in lines)


def _beside(text: str) -> str:
    return f"  {text}" if text else ""


def trouble_texts(line: Line) -> list[str]:
    """Return a sentence for each trouble of a round, but for lateness that the recipe sets."""
    return [_sentence(t) for t in troubles(line) if t.kind != "late" and t.reason != LATE]


def _sentence(trouble: Trouble) -> str:
    clients = f"client{'s' if len(trouble.clients) > 1 else ''} {trouble.who}"
    match trouble.kind:
        case "refused":
            return f"{clients}: upload refused, {trouble.reason}"
        case "absent":
            return f"absent: {clients}, {trouble.reason}"
        case _:
            return trouble.reason
