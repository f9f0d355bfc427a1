"""The commands that use trained models: predict, evaluate, export."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from fedgist.cli.shared_options import RUN, ClientId, DataRoot, app
from fedgist.core.objective import LOSS, Metric
from fedgist.data import read_examples
from fedgist.data.sources.further_labels import image_names, read_labels
from fedgist.errors import DataError
from fedgist.federation import atomic_files, runner
from fedgist.federation.evaluation import score_rows
from fedgist.federation.model_files import check_format
from fedgist.federation.model_files import export as export_model
from fedgist.federation.record import to_json
from fedgist.federation.trained_models import client_model
from fedgist.federation.world import Given, World
from fedgist.report.escapes import csv_text
from fedgist.report.formatting import percent
from fedgist.report.sheet import Sheet
from fedgist.report.terminal import SheetView, console, say, words

ALL = "all"  # of --client: every client's model

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]
Examples = Annotated[
    Path,
    typer.Argument(
        help="Examples: .npz or .npy, a table (.csv, .tsv, .parquet), an image or a folder."
    ),
]


@app.command(rich_help_panel=RUN)
def predict(
    folder: RunFolder,
    data: Examples,
    client: ClientId,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="CSV file. Default: standard output.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Predict labels and probabilities with a client's own final model, as CSV.

    Where the examples have labels, the accuracy is printed on standard error.
    """
    federation, world = runner.load_run(folder, Given(root=data_root))
    x = read_examples(data, world.data)
    model = client_model(federation, world, client)
    probabilities, names = model.probabilities(x), world.data.names
    images = image_names(data)
    lines = [["row" if images is None else "file", "label", *(f"p_{name}" for name in names)]]
    for i, row in enumerate(probabilities.tolist()):
        first = str(i) if images is None else images[i]
        lines.append([first, names[row.index(max(row))], *(f"{p:.6g}" for p in row)])
    text = csv_text(lines)
    if out is None:
        sys.stdout.write(text)
    else:
        atomic_files.write(out, text)
    _say_accuracy(data, world, probabilities.argmax(1))


def _say_accuracy(data: Path, world: World, predicted: Tensor) -> None:
    """Print which share of the examples is right, or why that cannot be said."""
    try:
        y = _labels(data, world)
    except DataError as error:
        text = f"accuracy not known: {error}"
    else:
        if y is None:
            return
        text = f"accuracy {percent(float((predicted == y).double().mean()))} of {len(y)} rows"
    say(text, error=True)


def _labels(data: Path, world: World) -> Tensor | None:
    column = world.server.recipe.data.options.get("label")
    return read_labels(data, world.data, column if isinstance(column, str) else None)


@app.command(rich_help_panel=RUN)
def evaluate(
    folder: RunFolder,
    data: Examples,
    client: Annotated[
        str, typer.Option("--client", help="A client's name or number, or all of them.")
    ] = ALL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,  # noqa: FBT002
    data_root: DataRoot = None,
) -> None:
    """Score final models on labelled examples of your own, by the run's own metrics.

    Labels are the array y of a .npz file, the label column of a table, or the folders of images.

    Examples
    --------
    fedgist evaluate runs/mine more.csv
    fedgist evaluate runs/mine more.csv --client 3 --json
    """
    federation, world = runner.load_run(folder, Given(root=data_root))
    x, y = read_examples(data, world.data), _labels(data, world)
    if y is None:
        msg = f"{data} has no labels: evaluate needs the array y of a .npz file, the label column "
        raise DataError(msg + "of a table, or images in folders that are called like the classes")
    if len(y) != len(x):
        msg = f"{data} has {len(x)} examples, but {len(y)} labels"
        raise DataError(msg)
    every = world.partition.names or tuple(str(i) for i in range(len(world.partition.test)))
    clients = every if client == ALL else [client]
    objective = federation.task.objective
    scores = {
        who: score_rows(client_model(federation, world, who), x, y, objective) for who in clients
    }
    if as_json:
        lines = [{"client": who, **values} for who, values in scores.items()]
        sys.stdout.write(to_json({"rows": len(y), "clients": lines, "mean": _means(scores)}) + "\n")
    else:
        console().print(SheetView(_sheet(scores, len(y), objective.metrics)))


def _means(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the clients for which it is defined."""
    names = next(iter(scores.values()))
    defined = {n: [v[n] for v in scores.values() if not math.isnan(v[n])] for n in names}
    return {n: statistics.fmean(values) if values else math.nan for n, values in defined.items()}


def _sheet(
    scores: Mapping[str, Mapping[str, float]], rows: int, metrics: Sequence[Metric]
) -> Sheet:
    known = {metric.name: metric for metric in (*metrics, LOSS)}
    columns = [known[name] for name in next(iter(scores.values()))]
    lines = dict(scores) | ({"mean": _means(scores)} if len(scores) > 1 else {})
    return Sheet(
        f"Final models on {rows} rows",
        ("client", *(metric.title.lower() for metric in columns)),
        tuple((who, *(_words(of[m.name], m) for m in columns)) for who, of in lines.items()),
    )


def _words(value: float, metric: Metric) -> str:
    if math.isnan(value):
        return "-"
    return percent(value) if metric.unit == "fraction" else f"{value:.4f}"


@app.command("export", rich_help_panel=RUN)
def export_(
    folder: RunFolder,
    client: ClientId,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .pt2, .onnx or .safetensors.")
    ],
    data_root: DataRoot = None,
) -> None:
    """Write a client's own final model to a file that loads without fedgist."""
    check_format(out)
    federation, world = runner.load_run(folder, Given(root=data_root))
    export_model(client_model(federation, world, client), out)
    console().print(words(f"client {client} of {folder} written to {out}"))
