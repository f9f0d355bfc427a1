"""The Typer application of all commands, and the options that several commands share."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from fedgist.errors import InputError
from fedgist.report.tracking.tracker_names import FORMS

# the commands in the order of first use, in the panels of --help
START, LOOK, USE, SEARCH = "Start", "Look at runs", "Use what was trained", "Many runs"
FEDERATE = "A federation over a network"
COMMAND_ORDER = (
    *("init", "run", "list", "partition", "compile"),
    *("show", "compare", "report", "card", "watch"),
    *("predict", "evaluate", "probe", "export"),
    *("sweep", "tune", "privacy", "reproduce"),
    *("provision", "facts", "server", "site", "status", "stop", "forget"),
)


def flowing(text: str) -> str:
    r"""Return a text with each paragraph on one line, for a terminal to break.

    Examples stay, and so do paragraphs that are indented, such as lines of a file.

    >>> flowing("Run it.\n\nA long\nsentence.\n\nExamples\n--------\na\nb")
    'Run it.\n\nA long sentence.\n\nExamples\n--------\na\nb'
    >>> flowing("A file:\n\n    [a]\n    b = 1\n\nEnd.")
    'A file:\n\n    \\[a]\n    b = 1\n\nEnd.'
    """
    prose, heading, examples = inspect.cleandoc(text).partition("\n\nExamples\n")
    parts = [
        escape(p) if p.startswith("    ") else p.replace("\n", " ") for p in prose.split("\n\n")
    ]
    return "\n\n".join(parts) + heading + examples


class OrderedGroup(TyperGroup):
    """Lists the commands in the order of first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return sorted(super().list_commands(ctx), key=COMMAND_ORDER.index)


app = typer.Typer(
    name="fedgist",
    cls=OrderedGroup,
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
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change a key of the recipe; may be given several times.",
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Seed of the run: short for --set seed=N.")
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        help="Folder of the data sets. Default: $FEDGIST_DATA if set, else the user's cache.",
    ),
]
ModelId = Annotated[
    str,
    typer.Option("--client", help="The model: a client's name or number from 0, or server/NAME."),
]
Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders that hold them.")
]


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Also show runs whose files do not match their seal, with a mark. Default: such runs "
        "are left out and named, and the exit code is 1.",
    ),
]

TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Also send the rounds to {FORMS}, each when it ends; may be given several times."
    ),
]


def figure_option(use: str) -> object:
    """Return the option ``--figure FILE``; ``use`` is the first half of its help."""
    return typer.Option("--figure", "--png", metavar="FILE", help=f"{use}: .pdf, .svg or .png.")


def refuse_unread(context: typer.Context, how: str, reads: Collection[str]) -> None:
    """Raise InputError if a command was given an option that it does not read when called so.

    ``how`` ends the sentence, such as "with --resume"; ``reads`` are the names of the parameters
    that are read.
    """
    unread = [
        (parameter.opts[0] if parameter.opts[0].startswith("-") else str(parameter.metavar))
        for parameter in context.command.params
        if parameter.name not in reads and _is_typed(context, str(parameter.name))
    ]
    if unread:
        have = "has" if len(unread) == 1 else "have"
        raise InputError(f"{', '.join(unread)} {have} no effect {how}")


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# options about where and how runs are executed; True if a value follows
OF_THIS_MACHINE = {
    **dict.fromkeys(("--out", "--jobs", "-j", "--data-root", "--archive"), True),
    **dict.fromkeys(("--format", "--track"), True),
    **dict.fromkeys(("--quiet", "-q"), False),
}


def same_runs() -> str:
    """Return the given command without the options of this machine, quoted for a shell."""
    words, skip = ["fedgist"], False
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        if not skip and name not in OF_THIS_MACHINE:
            words.append(word)
        skip = not skip and OF_THIS_MACHINE.get(name, False) and not equals
    return shlex.join(words)


def same_command() -> str:
    """Return the given command, quoted for a shell; finished runs are not repeated by it."""
    return shlex.join(["fedgist", *sys.argv[1:]])
