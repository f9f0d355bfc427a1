"""Seals: digests that bind the files of a run together, in its result and in its checkpoint.

``result.json`` holds a digest of itself and the digests of the run's other files. The checkpoint of
an unfinished run holds the digests of the files so far. A plain digest detects damage and edits. It
does not detect an editor who also recomputes the digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedgist.runs.record import (
    FEATURES,
    FORMAT_KEY,
    METRICS_FILE,
    PARTITION,
    RECIPE,
    STATE,
    features_of,
)

SEAL, DIGESTS, WHOLE = "seal", "digests", "digest"
HEADER_KEY = "fedgist"  # in the metadata of a checkpoint's file


def of_table(table: Mapping[str, object]) -> str:
    """Return the digest of a table of JSON without its own digests, for any order of keys."""
    rest = {key: value for key, value in table.items() if key not in {SEAL, WHOLE}}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(table: Mapping[str, object]) -> dict[str, object]:
    """Return a table of JSON with its seal: the digest of all its other content."""
    return {**table, SEAL: of_table(table)}


def of_file(path: Path) -> str:
    """Return the digest of a file; an empty text if it is missing or no regular file."""
    if not path.is_file():  # reading a pipe would wait for ever
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of files in a folder by their names."""
    return {name: of_file(folder / name) for name in names}


def files_in(folder: Path) -> list[str]:
    """Return the names of a run's files that a seal covers whole: all except files of lines."""
    single = [name for name in (RECIPE, METRICS_FILE, PARTITION) if (folder / name).exists()]
    return [*single, *features_in(folder)]


def features_in(folder: Path) -> list[str]:
    """Return the names of the files of saved features in a folder."""
    return sorted(p.name for pattern in (FEATURES, features_of("*")) for p in folder.glob(pattern))


def header_of(folder: Path) -> dict[str, object]:
    """Return the header of a run's checkpoint without reading its arrays."""
    path = folder / STATE
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(length) if length < path.stat().st_size else b"")
    metadata = table.get("__metadata__") if isinstance(table, dict) else None
    entry = json.loads(metadata.get(HEADER_KEY, "")) if isinstance(metadata, dict) else None
    if isinstance(entry, dict):
        return entry
    raise ValueError("it has no header")


def is_sealed(table: Mapping[str, object]) -> bool:
    """Return whether a table has a seal that fits its content."""
    return FORMAT_KEY in table and table.get(SEAL) == of_table(table)
