"""A site's audit log: what left the site and what was refused, in words, one line each."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from fedgist.core.tree import named
from fedgist.engines.engine import Score, TrainingLoss
from fedgist.errors import MessageError, printable
from fedgist.runs.files import atomic_files as files
from fedgist.wire.envelope import Header, unseal
from fedgist.world.facts.sums import COMPARE

AUDIT = "audit.log"
CHARGE = "ledger"  # the first word of a line about a charge, and of no other line
CHARGED = re.compile(rf"\S+ {CHARGE} ([0-9a-f]+): ")
LARGEST = 1 << 62  # an envelope of the site's own has any size


def write(folder: Path, text: str) -> None:
    """Add a line to the log, which is on the disk when this returns."""
    files.private_folder(folder)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    end = "" if _is_whole(folder / AUDIT) else "\n"  # of a line that a kill cut off
    files.append(folder / AUDIT, f"{end}{now} {printable(text)}\n".encode(), private=True)
    files.sync(folder / AUDIT)


def write_charge(folder: Path, digest: str, event: str) -> None:
    """Add the line of a charge, which names the digest of the ledger that holds from now on."""
    write(folder, f"{CHARGE} {digest}: {event}")


def last_ledger(folder: Path) -> str | None:
    """Return the digest of the ledger that the last charge names; None without any charge."""
    try:
        lines = (folder / AUDIT).read_text("utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return None
    charges = (match for line in reversed(lines) if (match := CHARGED.match(line)))
    return next((match[1] for match in charges), None)


def _is_whole(path: Path) -> bool:
    """Return whether a log ends with a whole line, or does not exist."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def sentence(request: Header, envelope: bytes) -> str:
    """Return in words what a reply tells the server."""
    stage = f"round {request.round}, {request.stage}"
    try:
        header, messages = unseal(envelope, LARGEST)
    except MessageError as error:  # the site's own reply: this does not happen
        return f"{stage}: sent {len(envelope)} bytes that cannot be read ({error})"
    if header.purpose == "refusal":
        return f"{stage}: refused: {header.reason}"
    if request.purpose == "finish":
        what = "the facts of all sites" if request.stage == COMPARE else "the last download"
        return f"{stage}: received {what}"
    contents = [_content(name, message) for name, message in messages.items()]
    contents += [f"numbers of steps {list(header.steps)}"] if header.steps else []
    again = f", attempt {request.attempt}" if request.attempt > 1 else ""
    return f"{stage}{again}: sent {'; '.join(contents) or 'nothing'} ({len(envelope)} bytes)"


def _content(name: str, message: object) -> str:
    """Return a message's name, type, and arrays with their shapes."""
    if isinstance(message, Score):
        split = f"{name.removeprefix('score-')} " if name != "score-" else ""
        confusion = "" if message.confusion is None else ", confusion matrix"
        return f"{split}scores ({', '.join(sorted(message.values))}{confusion})"
    if isinstance(message, TrainingLoss):
        return "training loss"
    shapes = [f"{path} {list(array.shape)}" for path, array in sorted(named(message).items())]
    return f"{name} {type(message).__name__} ({', '.join(shapes)})"
