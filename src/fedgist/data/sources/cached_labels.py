"""Labels that were read once from all rows, kept in the user's cache by the identity of the files.

Rows without files that are known are not cached, because a change would not be noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_cache_path


def stored(identity: Sequence[str]) -> list[object] | None:
    """Return the labels that were stored for files of this identity, or None."""
    try:
        labels = json.loads(_path(identity).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return labels if isinstance(labels, list) else None


def cached(identity: Sequence[str], labels: Sequence[object]) -> None:
    """Store labels for files of this identity, if the cache can be written."""
    with contextlib.suppress(OSError, TypeError):
        path = _path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(list(labels)), encoding="utf-8")
        part.replace(path)


def _path(identity: Sequence[str]) -> Path:
    name = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    return user_cache_path("fedgist") / "labels" / f"{name[:32]}.json"
