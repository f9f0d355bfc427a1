"""The application that the commands register with, and the options they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="fedgist",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated learning that shares the gist, not the weights.",
)

# the panels of --help
RUN, LOOK, SEARCH = "Run", "Look at runs", "Many runs"

RecipeOrDemo = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of one that comes with fedgist. Default: demo.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change a key of the recipe; may be given several times.",
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        help="Folder of the data sets. Default: $FEDGIST_DATA if set, else the user's cache.",
    ),
]
ClientId = Annotated[
    str,
    typer.Option("--client", help="The client whose model is used: its name, or number from 0."),
]
Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders that hold them.")
]
