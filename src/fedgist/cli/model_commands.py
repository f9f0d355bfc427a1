"""Commands that use trained models: predict, evaluate, probe, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.shared_options import USE, DataRoot, ModelId, app
from fedgist.report.terminal.console import console, say, words

ALL = "all"  # of --client: every client's model

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]
ExamplesPath = Annotated[
    Path,
    typer.Argument(
        help="Examples: .npz or .npy, a table (.csv, .tsv, .parquet), an image or a folder."
    ),
]


@app.command(rich_help_panel=USE)
def predict(
    folder: RunFolder,
    data: ExamplesPath,
    client: ModelId,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="CSV file. Default: standard output.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Predict labels and probabilities with a client's own final model, as CSV.

    Use it to apply a trained model to new examples. The label is the class with the largest
    probability. If the examples have labels, the accuracy is printed on standard error. Of a table,
    the last column names the unusual values of each row.

    Examples
    --------
    fedgist predict runs/mine new.csv --client 3 -o predictions.csv
    """
    from fedgist.cli import model_answers

    model_answers.predict(folder, data, client, out, data_root)


@app.command(rich_help_panel=USE)
def evaluate(
    folder: RunFolder,
    data: ExamplesPath,
    client: Annotated[
        str, typer.Option("--client", help="A client's name or number, server/NAME, or all.")
    ] = ALL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Score final models on your own labelled examples, with the run's metrics.

    Labels are the array y of a .npz file, the label column of a table, or the names of image
    folders.

    Examples
    --------
    fedgist evaluate runs/mine more.csv
    fedgist evaluate runs/mine more.csv --client 3 --json
    """
    from fedgist.cli import model_answers

    chosen = None if client == ALL else client
    model_answers.evaluate(folder, data, chosen, data_root, as_json=as_json)


@app.command(rich_help_panel=USE)
def probe(
    folder: RunFolder,
    client: Annotated[
        str, typer.Option("--client", help="A client's name or number, server/NAME, or all.")
    ] = ALL,
    by: Annotated[
        str, typer.Option(help="sgd, logistic, knn, or several separated by commas.")
    ] = "sgd",
    starts: Annotated[
        bool, typer.Option("--starts", help="Also probe the bodies before any training.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Train a linear layer on the features of frozen bodies, and score it on all test rows.

    Use it to compare the features that methods learn. The layer is trained on all training rows:
    sgd is a linear layer trained by SGD, logistic is scikit-learn's logistic regression, knn is
    k-nearest neighbours. The server's models are probed too.

    Examples
    --------
    fedgist probe runs/mine
    fedgist probe runs/mine --client 3 --by sgd,knn --starts
    """
    from fedgist.cli import model_answers

    chosen = None if client == ALL else client
    kinds = by.split(",")
    model_answers.probe(folder, chosen, kinds, data_root, starts=starts, as_json=as_json)


@app.command("export", rich_help_panel=USE)
def export_(
    folder: RunFolder,
    client: ModelId,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .pt2, .onnx or .safetensors.")
    ],
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write the adapters alone; -o is a folder.")
    ] = False,
    data_root: DataRoot = None,
) -> None:
    """Write a final model of a client or of the server to a file that needs no fedgist.

    Use it to deploy a model. The file's suffix selects the format. Adapters are merged into the
    weights. With --adapters they are written by themselves, in the format of peft.

    Examples
    --------
    fedgist export runs/mine --client 3 -o site.onnx
    fedgist export runs/mine --client server/large -o large.pt2
    fedgist export runs/mine --client 3 --adapters -o site-adapters
    """
    from fedgist.recipe.overrides import Overrides
    from fedgist.runs import runner
    from fedgist.runs.finished.adapter_files import export_adapters
    from fedgist.runs.finished.model_files import check_format, export, what_lacks
    from fedgist.runs.finished.trained_models import SERVER, trained_model

    if not adapters:
        check_format(out)
    federation, world = runner.load_run(folder, Overrides(root=data_root))
    write = export_adapters if adapters else export
    model = trained_model(federation, world, client)
    write(model, out)
    who = client if client.startswith(SERVER) else f"client {client}"
    console().print(words(f"{who} of {folder} written to {out}"))
    if not adapters and (lacking := what_lacks(model, out)):
        say(lacking)
