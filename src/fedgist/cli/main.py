"""The program ``fedgist``: its commands, error messages and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer
from rich.table import Table

from fedgist.cli import (
    facts_commands,
    federation_commands,
    kernel_commands,
    model_commands,
    network_commands,
    result_commands,
    run_commands,
    study_commands,
)
from fedgist.cli.recipe_files import shipped
from fedgist.cli.shared_options import START, app, flowing, same_command
from fedgist.core.objectives.metrics import OBJECTIVES
from fedgist.data import PARTITIONS
from fedgist.data.sources import SOURCES
from fedgist.engines import ENGINES
from fedgist.engines.stop_signals import ignore_stops, interrupt, stoppable
from fedgist.errors import (
    DiskFullError,
    FederationError,
    Interrupted,
    JobsError,
    RecipeError,
    SealError,
    Stopped,
    WorkerError,
    exhausted,
    one_of,
    shown,
)
from fedgist.methods import METHODS
from fedgist.models import MODELS
from fedgist.recipe.own_code import Before, before_each_import
from fedgist.report.terminal.console import (
    console,
    drop_odd_sizes,
    paragraph,
    use_plain_signs,
    words,
)

# each module of commands registers them with ``app`` when it is imported
__all__ = [
    "app",
    "facts_commands",
    "federation_commands",
    "kernel_commands",
    "main",
    "model_commands",
    "network_commands",
    "result_commands",
    "run_commands",
    "study_commands",
]

NO_CODE = "--no-code"
INTERRUPTED = 130  # exit code after Ctrl-C, SIGTERM and SIGHUP
AT_ONCE = "stopped at once; give the same command again, or resume a run that saved a checkpoint"
LESS_MEMORY = "; a run needs less with a lower engine.cohort_size, engine.workers or batch size"


def main() -> None:
    """Run the command line: bad input prints one line with exit code 2; a stop exits with 130.

    Ctrl-C, SIGTERM and SIGHUP stop a command, all in the same way.
    """
    with stoppable(interrupt):
        _main()


def _main() -> None:
    # users type "fedgist run RECIPE --no-code": the option may stand anywhere
    arguments = sorted(sys.argv[1:], key=lambda argument: argument != NO_CODE)
    use_plain_signs()
    drop_odd_sizes()
    try:
        with before_each_import(_refuse if NO_CODE in arguments else _tell()):
            app(arguments)
    except (Stopped, Interrupted) as stopped:
        _fail(str(stopped), INTERRUPTED)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        _fail(AT_ONCE, INTERRUPTED)  # Typer itself says nothing
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except DiskFullError as error:
        again = "" if error.command else f"; go on with: {same_command()}"
        _fail(f"error: {error}{again}", 1)
    except ValueError as error:
        _fail(f"error: {error}", 1 if isinstance(error, SealError) else 2)
    except (OSError, FederationError, WorkerError, JobsError) as error:
        _fail(f"error: {error}", 1)
    except (MemoryError, RuntimeError) as error:
        if (lacking := exhausted(error)) is None:
            raise
        _fail(f"error: {lacking}{'' if isinstance(error, RecursionError) else LESS_MEMORY}", 1)


def _tell() -> Before:
    """Return a function that announces each imported user module once."""
    announced: set[str] = set()

    def tell(key: str, place: str, file: str) -> None:
        if place not in announced:
            announced.add(place)
            module = file or "this module"
            _say(f"{key} = {place!r}: importing {module} runs its code ({NO_CODE} refuses it)")

    return tell


def _refuse(key: str, place: str, _file: str) -> None:
    raise RecipeError(f"{key} = {shown(place)} names code to be run, which {NO_CODE} refuses")


def _say(message: str) -> None:
    console(stderr=True, soft_wrap=True).print(paragraph(message))


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"fedgist {version('fedgist')}\n")
        raise typer.Exit


@app.callback()
def options(
    version_: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
    no_code: Annotated[
        bool,
        typer.Option(
            NO_CODE,
            help="Refuse recipes and runs that name user code (package.module:object).",
        ),
    ] = False,
) -> None:
    """Federated learning that shares the gist, not the weights.

    Start with fedgist run demo, then fedgist show runs/demo-fedlog. Every command has --help.
    """
    del version_, no_code  # main reads both before the commands start


def _fail(message: str, code: int) -> None:
    ignore_stops()  # the end is near
    _say(message)
    sys.exit(code)


@app.command("list", rich_help_panel=START)
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="what",
            help="methods, objectives, datasets, models, partitions, engines or recipes.",
        ),
    ],
) -> None:
    """List the available methods, objectives, datasets, models, partitions, engines or recipes.

    Use it to look up the names that recipes and --set accept.

    Examples
    --------
    fedgist list methods
    """
    tables: dict[str, Callable[[], dict[str, str]]] = {
        "methods": METHODS.summaries,
        "objectives": OBJECTIVES.summaries,
        "datasets": SOURCES.summaries,
        "models": MODELS.summaries,
        "partitions": PARTITIONS.summaries,
        "engines": ENGINES.summaries,
        "recipes": shipped,
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    for name, summary in tables[one_of(kind, tables, "argument")]().items():
        table.add_row(words(name), words(summary))
    console().print(table)


for command in app.registered_commands:
    command.help = flowing(command.callback.__doc__ or "") if command.callback else None
