"""The program ``fedgist``: its commands, and what it says and returns when they fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.table import Table

from fedgist.cli import model_commands, result_commands, run_commands, study_commands
from fedgist.cli.recipe_files import shipped
from fedgist.cli.shared_options import LOOK, app
from fedgist.data import SOURCES
from fedgist.data.partition import PARTITIONS
from fedgist.errors import JobsError, WorkerError, one_of
from fedgist.federation.server_run import Stopped
from fedgist.methods import METHODS
from fedgist.models import MODELS
from fedgist.report.terminal import console, paragraph, words
from fedgist.studies.jobs import Interrupted

# each module of commands registers them with ``app`` when it is imported
__all__ = ["app", "main", "model_commands", "result_commands", "run_commands", "study_commands"]


def main() -> None:
    """Run the command line: bad input is one line and exit code 2, Ctrl-C is exit code 130."""
    try:
        app()
    except (Stopped, Interrupted) as stopped:
        _fail(str(stopped), 130)
    except KeyboardInterrupt:
        _fail("stopped at once; the run can be resumed from its last checkpoint", 130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except ValueError as error:
        _fail(f"error: {error}", 2)
    except (OSError, WorkerError, JobsError) as error:
        _fail(f"error: {error}", 1)


def _fail(message: str, code: int) -> None:
    console(stderr=True, soft_wrap=True).print(paragraph(message))
    sys.exit(code)


@app.command("list", rich_help_panel=LOOK)
def list_(
    what: Annotated[str, typer.Argument(help="methods, datasets, models, partitions or recipes")],
) -> None:
    """List the methods, datasets, models, partitions or recipes."""
    tables: dict[str, Callable[[], dict[str, str]]] = {
        "methods": lambda: {name: _summary(cls) for name, cls in METHODS.items()},
        "datasets": lambda: {name: source.summary for name, source in SOURCES.items()},
        "models": lambda: {name: _summary(builder) for name, builder in MODELS.items()},
        "partitions": lambda: {name: _summary(function) for name, function in PARTITIONS.items()},
        "recipes": shipped,
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    for name, summary in tables[one_of(what, tables, "argument")]().items():
        table.add_row(words(name), words(summary))
    console().print(table)


def _summary(documented: Any) -> str:
    """Return the first paragraph of a function's docstring, or of the module of a class."""
    source = sys.modules[documented.__module__] if isinstance(documented, type) else documented
    return " ".join((source.__doc__ or "").strip().split("\n\n")[0].split())
