"""A site's audit log: what left the site and what was refused, in words, one line each."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fedgist.core.tree import named
from fedgist.engines.envelope import Header, unseal
from fedgist.errors import MessageError, printable
from fedgist.runs import atomic_files as files

AUDIT = "audit.log"
LARGEST = 1 << 62  # an envelope of the site's own has any size


def write(folder: Path, text: str) -> None:
    """Add a line to the log, which is on the disk when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    files.append(folder / AUDIT, f"{now} {printable(text)}\n".encode())
    files.sync(folder / AUDIT)


def sentence(request: Header, envelope: bytes) -> str:
    """Return in words what a reply tells the server."""
    stage = f"round {request.round}, {request.stage}"
    try:
        header, messages = unseal(envelope, LARGEST)
    except MessageError as error:  # the site's own reply: this does not happen
        return f"{stage}: sent {len(envelope)} bytes that cannot be read ({error})"
    if header.purpose == "refusal":
        return f"{stage}: refused: {header.reason}"
    contents = [_content(name, message) for name, message in messages.items()]
    return f"{stage}: sent {'; '.join(contents) or 'nothing'} ({len(envelope)} bytes)"


def _content(name: str, message: object) -> str:
    """Return a message's name, type, and arrays with their shapes."""
    arrays = named(message).items()
    shapes = [f"{path or 'value'} {list(array.shape)}" for path, array in arrays]
    return f"{name} ({type(message).__name__}: {', '.join(shapes)})"
