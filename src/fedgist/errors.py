"""All of fedgist's exceptions, and the messages about unknown names.

::

    FedgistError
    +-- InputError (a ValueError)    an argument or a file cannot be used
    |   +-- RecipeError              a recipe, or an object given in place of a part of it
    |   +-- DataError                a data set, or a file of examples
    |   +-- MethodError              a method that breaks the vocabulary, or does not fit the task
    |   +-- MessageError             bytes that are not a message, or not the one expected
    |   +-- CheckpointError          a checkpoint that cannot be read
    |   +-- ReportError              a folder that holds no run that can be shown
    |   |   +-- SealError            runs of which none fits its seal
    |   +-- OutputError              a path that cannot be written to
    |       +-- DiskFullError        there is no room to write it
    +-- TooFewRepliesError           a method asked for a total over fewer clients than allowed
    +-- WorkerError (a RuntimeError) a worker process failed or died
    +-- JobsError                    some of many runs failed; the others are done

Every message is one line that names the key, the value and the choices.
"""

from __future__ import annotations

import difflib
import reprlib
import shlex
from collections.abc import Iterable
from pathlib import Path

WIDEST = 80  # characters of a value in a message


class FedgistError(Exception):
    """Any error that fedgist itself raises."""


class InputError(FedgistError, ValueError):
    """An argument, a recipe or a file cannot be used; the message is one line of printable text."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class RecipeError(InputError):
    """A recipe cannot be used, or an object given in place of a part of it."""


class DataError(InputError):
    """A data set or a file of examples cannot be read or used."""


class MethodError(InputError):
    """A method breaks the vocabulary, or does not fit the task."""


class MessageError(InputError):
    """Bytes are not a message, or not the one expected."""


class CheckpointError(InputError):
    """A checkpoint cannot be read."""


class ReportError(InputError):
    """A folder holds no run that can be shown or compared."""


class SealError(ReportError):
    """None of the runs to be shown fits its seal."""


class OutputError(InputError):
    """A path cannot be written to."""


class DiskFullError(OutputError):
    """There is no room to write a file; with room, ``command`` goes on with what was being done."""

    def __init__(self, what: str, command: str = "") -> None:
        super().__init__(f"{what}; go on with: {command}" if command else what)
        self.what, self.command = what, command


class Stopped(Exception):  # noqa: N818  # not an error: the user asked for it
    """A run was stopped early, and its checkpoint written.

    ``folder`` is the run directory to resume, None if the run was kept in memory only.
    """

    def __init__(self, folder: Path | None, *options: str) -> None:
        how = f"; resume with: {resume_command(folder, *options)}" if folder else ""
        super().__init__(f"stopped{how}")
        self.folder = folder


class Interrupted(Exception):  # noqa: N818  # no error: somebody asked
    """Many runs were stopped; what was running is saved."""


class TooFewRepliesError(FedgistError):
    """A total was asked for over fewer clients than ``privacy.min_replies``."""


class WorkerError(FedgistError, RuntimeError):
    """A worker process failed or died; the message holds its traceback, if it left one."""


class JobsError(FedgistError):
    """Some runs failed; the others are done."""


def resume_command(folder: Path, *options: str) -> str:
    """Return the command that goes on with a run, quoted for a shell."""
    return shlex.join(["fedgist", "run", "--resume", str(folder), *options])


def one_of(name: str, choices: Iterable[str], kind: str) -> str:
    """Return ``name`` if it is among the choices.

    Raises
    ------
    InputError
        If it is not; the message names the nearest choice, and all of them.
    """
    known = list(choices)
    if name in known:
        return name
    raise InputError(f"unknown {kind} {shown(name)}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, and all of them."""
    choices = list(known)
    near = nearest(name, choices)
    hint = f"did you mean {near!r}? " if near else ""
    return f"; {hint}known: {', '.join(choices) or 'none'}"


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name most similar to ``name``, if its similarity is at least ``alike``."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, alike)), None)


def listed(names: Iterable[object], most: int = 20) -> str:
    """Return names with commas between them: the first ``most``, and how many more there are."""
    shown = [str(name) for name in names]
    more = [f"... ({len(shown) - most} more)"] if len(shown) > most else []
    return ", ".join(shown[:most] + more) or "nothing"


def first_line(error: BaseException) -> str:
    """Return the first line of another package's message, or the error's type if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def exhausted(error: BaseException) -> str | None:
    """Return in words what ran out, if an error says so: memory, or Python's stack."""
    if isinstance(error, RecursionError):
        return "values or models are nested too deeply"
    # torch has no class of its own for what the CPU's allocator says
    torchs = ("allocate memory", "out of memory")
    says = isinstance(error, RuntimeError) and any(words in str(error) for words in torchs)
    return "this machine has not enough memory" if says or isinstance(error, MemoryError) else None


def printable(text: str) -> str:
    """Return a text as one line, with escapes for characters that cannot be printed."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a value as it is printed in a message: its repr, cut at 80 characters."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxlong = brief.maxother = WIDEST
    try:
        text = brief.repr(value)
    except ValueError:  # Python does not print a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
