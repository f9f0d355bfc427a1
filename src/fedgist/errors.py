"""Exceptions of fedgist, and helpers for their messages.

::

    FedgistError
    +-- InputError (a ValueError)    an argument or a file cannot be used
    |   +-- RecipeError              a recipe, or an object that replaces a part of it
    |   +-- DataError                a data set, or a file of examples
    |   +-- MethodError              a method breaks its interface, or does not fit the task
    |   +-- MessageError             bytes are no message, or not the expected one
    |   +-- CheckpointError          a checkpoint cannot be read
    |   +-- SiteError                a site's file or stored state cannot be used
    |   +-- KitError                 a kit, certificate, key or roster of a federation
    |   +-- ReportError              a folder holds no run that can be shown
    |   |   +-- SealError            no run matches its seal
    |   +-- OutputError              a path cannot be written to
    |       +-- DiskFullError        the disk is full
    +-- TooFewRepliesError           a sum over fewer clients than allowed was requested
    +-- FederationError              the sites of a federation did not answer
    +-- WorkerError (a RuntimeError) a worker process failed or died
    +-- JobsError                    some of many runs failed; the others are complete

Every message is one line that names the key, the value and the choices.
"""

from __future__ import annotations

import difflib
import errno
import reprlib
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

#: Why a site refuses: its owner's policy, its privacy budget, the server's plan or recipe, its
#: rows, its stored state, the request itself, or a failure of its own work.
RefusalKind = Literal["policy", "budget", "plan", "rows", "state", "message", "work"]
#: The kinds that asking again cannot change.
FINAL: frozenset[RefusalKind] = frozenset({"policy", "budget", "plan", "rows", "state"})
WIDEST = 80  # maximal number of characters of a value in a message


class FedgistError(Exception):
    """Any error that fedgist itself raises.

    At a site, ``kind`` is the kind of the refusal that the error becomes. ``key`` names the setting
    behind it, such as ``most_rounds``. Both may leave the site; the text may show rows.
    """

    kind: RefusalKind = "work"
    key: str = ""


class InputError(FedgistError, ValueError):
    """An argument, a recipe or a file cannot be used.

    The message is one line of printable text, and a further line for each of ``items``.
    """

    def __init__(
        self,
        message: str,
        kind: RefusalKind | None = None,
        key: str = "",
        items: Iterable[str] = (),
    ) -> None:
        super().__init__("\n- ".join(map(printable, (message, *items))))
        self.kind, self.key = kind or self.kind, key


class RecipeError(InputError):
    """A recipe, or an object that replaces a part of it, cannot be used."""

    kind = "plan"


class DataError(InputError):
    """A data set or a file of examples cannot be read or used."""

    kind = "rows"


class MethodError(InputError):
    """A method breaks the ``Method`` interface, or does not fit the task."""

    kind = "plan"


class MessageError(InputError):
    """Bytes are no message, or not the expected message."""

    kind = "message"


class CheckpointError(InputError):
    """A checkpoint cannot be read."""

    kind = "state"


class SiteError(InputError):
    """A site's file or its stored state cannot be used."""

    kind = "state"


class OwnerError(SiteError):
    """A private site's rows do not fit: its owner must act, and no server may hear of it."""


class KitError(InputError):
    """A kit, certificate, key or roster of a federation cannot be used."""


class ReportError(InputError):
    """A folder holds no run that can be shown or compared."""


class SealError(ReportError):
    """No run of the given folders matches its seal."""


class OutputError(InputError):
    """A path cannot be written to."""


#: Numbers of a system's errors that say that there is no room.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OutputError):
    """The disk is full; once there is space, ``command`` resumes the interrupted work."""

    def __init__(self, reason: str, command: str = "") -> None:
        super().__init__(f"{reason}; go on with: {command}" if command else reason)
        self.reason, self.command = reason, command


class Stopped(Exception):  # noqa: N818  # not an error: the user asked for it
    """A run was stopped early at the user's request, and its checkpoint was written.

    ``folder`` is the run directory to resume, or None if the run was kept only in memory.
    """

    def __init__(self, folder: Path | None, *options: str) -> None:
        how = f"; resume with: {resume_command(folder, *options)}" if folder else ""
        super().__init__(f"stopped{how}")
        self.folder = folder


class Interrupted(Exception):  # noqa: N818  # not an error: the user asked for it
    """Several runs were stopped; the progress of each is saved."""


class TooFewRepliesError(FedgistError):
    """A sum over fewer clients than ``privacy.min_replies`` was requested."""


class FederationError(FedgistError):
    """Too few sites of a federation answered, or the server cannot be reached."""


class WorkerError(FedgistError, RuntimeError):
    """A worker process failed or died; the message holds its traceback if there is one."""


class JobsError(FedgistError):
    """Some of many runs failed; the others are complete."""


def kind_of(error: BaseException) -> RefusalKind:
    """Return the kind of the refusal that an error at a site becomes."""
    return error.kind if isinstance(error, FedgistError) else "work"


def key_of(error: BaseException) -> str:
    """Return the setting behind an error; an empty text if none is named."""
    return error.key if isinstance(error, FedgistError) else ""


def resume_command(folder: Path, *options: str) -> str:
    """Return the command that resumes a run, quoted for a shell."""
    return shlex.join(["fedgist", "run", "--resume", str(folder), *options])


def one_of(name: str, choices: Iterable[str], kind: str) -> str:
    """Return ``name`` if it is among the choices.

    Raises
    ------
    InputError
        If it is not; the message names the most similar choice, and all choices.
    """
    names = list(choices)
    if name in names:
        return name
    raise InputError(f"unknown {kind} {shown(name)}{did_you_mean(name, names)}")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar name, and all names."""
    names = list(choices)
    near = nearest(name, names)
    hint = f"did you mean {near!r}? " if near else ""
    return f"; {hint}known: {', '.join(names) or 'none'}"


def nearest(name: str, choices: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the choice most similar to ``name``, if its similarity is at least ``alike``."""
    return next(iter(difflib.get_close_matches(name, list(choices), 1, alike)), None)


def listed(names: Iterable[object], most: int = 20) -> str:
    """Return names joined by commas: the first ``most``, and the number of the others."""
    shown = [str(name) for name in names]
    more = [f"... ({len(shown) - most} more)"] if len(shown) > most else []
    return ", ".join(shown[:most] + more) or "nothing"


def first_line(error: BaseException) -> str:
    """Return the first line of another package's message, or the error's type if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def cut(text: str, width: int) -> str:
    """Return as many whole sentences of a text as fit into ``width`` characters.

    Of a longer first sentence it is the whole words that fit, and ``...``.

    >>> cut("It fails. We don't support that yet, please wait.", 30)
    'It fails.'
    >>> cut("We don't support that yet, please wait.", 30)
    "We don't support that yet, ..."
    """
    if len(text) <= width:
        return text
    end = text[: width + 1].rfind(". ")
    return text[: end + 1] if end > 0 else textwrap.shorten(text, width, placeholder=" ...")


def exhausted(error: BaseException) -> str | None:
    """Return what an error says is exhausted, memory or Python's stack; None for other errors."""
    if isinstance(error, RecursionError):
        return "values or models are nested too deeply"
    # torch has no exception class for a failure of its CPU allocator
    torchs = ("allocate memory", "out of memory")
    says = isinstance(error, RuntimeError) and any(words in str(error) for words in torchs)
    return "this machine has not enough memory" if says or isinstance(error, MemoryError) else None


def printable(text: str) -> str:
    """Return a text as one line, with escapes for unprintable characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a value for a message: its repr, cut at 80 characters."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxlong = brief.maxother = WIDEST
    try:
        text = brief.repr(value)
    except ValueError:  # Python refuses to print numbers with thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
