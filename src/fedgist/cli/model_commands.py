"""The commands that use trained models: predict, evaluate, probe, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.shared_options import USE, ClientId, DataRoot, app
from fedgist.report.terminal import console, words

ALL = "all"  # of --client: every client's model

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]
Examples = Annotated[
    Path,
    typer.Argument(
        help="Examples: .npz or .npy, a table (.csv, .tsv, .parquet), an image or a folder."
    ),
]


@app.command(rich_help_panel=USE)
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
    from fedgist.cli import model_answers

    model_answers.predict(folder, data, client, out, data_root)


@app.command(rich_help_panel=USE)
def evaluate(
    folder: RunFolder,
    data: Examples,
    client: Annotated[
        str, typer.Option("--client", help="A client's name or number, or all of them.")
    ] = ALL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Score final models on labelled examples of your own, by the run's own metrics.

    Labels are the array y of a .npz file, the label column of a table, or the folders of images.

    Examples
    --------
    fedgist evaluate runs/mine more.csv
    fedgist evaluate runs/mine more.csv --client 3 --json
    """
    from fedgist.cli import model_answers

    one = None if client == ALL else client
    model_answers.evaluate(folder, data, one, data_root, as_json=as_json)


@app.command(rich_help_panel=USE)
def probe(
    folder: RunFolder,
    client: Annotated[
        str, typer.Option("--client", help="A client's name or number, or all of them.")
    ] = ALL,
    by: Annotated[
        str, typer.Option(help="sgd, logistic, knn, or several with commas between.")
    ] = "sgd",
    starts: Annotated[
        bool, typer.Option("--starts", help="Also bodies as they were before any training.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Train a linear layer on the features of frozen bodies, and score it on all test rows.

    It learns on all training rows: sgd is a linear layer by SGD, logistic scikit-learn's logistic
    regression, knn the nearest neighbours. The server's own models are probed beside the clients'.

    Examples
    --------
    fedgist probe runs/mine
    fedgist probe runs/mine --client 3 --by sgd,knn --starts
    """
    from fedgist.cli import model_answers

    one = None if client == ALL else client
    kinds = by.split(",")
    model_answers.probe(folder, one, kinds, data_root, starts=starts, as_json=as_json)


@app.command("export", rich_help_panel=USE)
def export_(
    folder: RunFolder,
    client: ClientId,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .pt2, .onnx or .safetensors.")
    ],
    data_root: DataRoot = None,
) -> None:
    """Write a client's own final model to a file that loads without fedgist."""
    from fedgist.federation import runner
    from fedgist.federation.model_files import check_format, export
    from fedgist.federation.trained_models import client_model
    from fedgist.federation.world import Given

    check_format(out)
    federation, world = runner.load_run(folder, Given(root=data_root))
    export(client_model(federation, world, client), out)
    console().print(words(f"client {client} of {folder} written to {out}"))
