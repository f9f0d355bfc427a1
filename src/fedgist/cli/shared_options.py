"""The application that the commands register with, and the options they share."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# the commands in the order of a journey, in the panels of --help
START, LOOK, USE, SEARCH = "Start", "Look at runs", "Use what was trained", "Many runs"
JOURNEY = (
    *("list", "partition", "run", "forget"),
    *("watch", "show", "compare", "report"),
    *("predict", "evaluate", "probe", "export"),
    *("sweep", "tune", "reproduce"),
)


class Journey(TyperGroup):
    """The commands, in the order in which one meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return sorted(super().list_commands(ctx), key=JOURNEY.index)


app = typer.Typer(
    name="fedgist",
    cls=Journey,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated learning that shares the gist, not the weights.",
)

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
    typer.Option("--client", help="The client: its name, or number from 0."),
]
ModelId = Annotated[
    str,
    typer.Option("--client", help="Whose model: a client's name or number from 0, or server/NAME."),
]
Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders that hold them.")
]


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Show runs whose files do not fit their seal, too, marked. Default: they are left "
        "out and named, and the exit code is 1.",
    ),
]


# options that say where and how runs are done, not which; and whether a value follows
OF_THIS_MACHINE = {
    **dict.fromkeys(("--out", "--jobs", "-j", "--data-root", "--archive", "--format"), True),
    **dict.fromkeys(("--quiet", "-q"), False),
}


def same_runs() -> str:
    """Return the command that was given, without what only says where and how runs are done."""
    words, skip = ["fedgist"], False
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        if not skip and name not in OF_THIS_MACHINE:
            words.append(word)
        skip = not skip and OF_THIS_MACHINE.get(name, False) and not equals
    return shlex.join(words)


def same_command() -> str:
    """Return the command that was given, quoted for a shell: what is done is not done again."""
    return shlex.join(["fedgist", *sys.argv[1:]])
