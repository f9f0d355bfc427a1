"""Seals: digests that bind the files of a run together, and the check that all readers of runs use.

A finished run is sealed by its ``result.json``, which holds a digest of itself and those of the
run's other files, a stopped run by its checkpoint. A running run is not checked, because its files
change. A plain digest detects damage and edits. It does not detect an editor who recomputes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedgist.errors import DataError, first_line, shown
from fedgist.runs.files.record import (
    FORMAT,
    FORMAT_KEY,
    LINES,
    METRICS_FILE,
    PARTITION,
    RECIPE,
    RESULT,
    STATE,
    damage,
    features_of,
    is_round,
    lines_up_to,
    read_bytes_or_empty,
    read_result,
    saved_arrays_in,
)
from fedgist.runs.files.run_directory import is_held

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
    return [*single, *saved_arrays_in(folder)]


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


State = Literal["sealed", "running", "stopped", "broken"]
ResultTable = Mapping[str, object]
MENDING = "put the file back from a copy, or start the run again with --overwrite"


@dataclass(frozen=True)
class Seal:
    """The state of a run's files by its seal.

    ``problems`` holds a sentence for each file that does not fit the seal. ``behind`` describes the
    lines of a stopped run after its checkpoint, which are not sealed.
    """

    state: State
    problems: tuple[str, ...] = ()
    behind: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether a file changed after it was sealed, or the seal is missing."""
        return self.state == "broken"


SEALED = Seal("sealed")


def seal_of(folder: Path) -> Seal:
    """Return the state of the run in a folder by its seal."""
    if is_held(folder):
        return Seal("running")
    seal = _judged(folder)
    # it may have begun, or gone on, while its files were read
    return Seal("running") if seal.is_broken and is_held(folder) else seal


def _judged(folder: Path) -> Seal:
    try:
        if (folder / RESULT).exists():
            problems = tuple(_faults_of_finished(folder))
            return Seal("broken" if problems else "sealed", problems)
        return _stopped(folder)
    except (OSError, DataError) as error:
        return Seal("broken", (first_line(error),))


def _content(path: Path) -> bytes:
    return read_bytes_or_empty(path) if path.is_file() else b""


def _faults_of_finished(folder: Path) -> Iterator[str]:
    result = read_result(folder)
    digests, last = result.get(DIGESTS), result.get("rounds")
    if problem := _fault_of_seal(RESULT, result):
        yield problem
    if not isinstance(digests, dict) or not is_round(last):
        return
    assert isinstance(last, int)  # that is what is_round says
    for name in LINES:
        yield from _nonempty(_fault_of_lines(folder / name, digests.get(name), last, later=False))
    for name in _names(folder, digests):
        yield from _nonempty(_fault_of_file(folder / name, digests.get(name)))


def _stopped(folder: Path) -> Seal:
    """Check a run without a result by its checkpoint."""
    if not (folder / STATE).exists():
        lines = [name for name in LINES if _content(folder / name)]
        if not lines:
            return Seal("stopped")  # it has not begun: there is nothing to seal
        missing = f"{lines[0]} has lines, but there is neither {RESULT} nor a checkpoint"
        return Seal("broken", (f"{missing}: it was removed, or the run was killed before one",))
    try:
        header = header_of(folder)
    except (ValueError, RecursionError) as error:
        return Seal("broken", (f"{STATE} is damaged: {first_line(error)}",))
    problems = tuple(_faults_of_stopped(folder, header))
    if problems:
        return Seal("broken", problems)
    done = _done(header)
    later = [
        n
        for n in LINES
        if _content(folder / n) != lines_up_to(read_bytes_or_empty(folder / n), done)
    ]
    behind = f"it has lines after round {done}, which its checkpoint does not cover: not sealed"
    return Seal("stopped", behind=behind if later else "")


def _faults_of_stopped(folder: Path, header: ResultTable) -> Iterator[str]:
    if problem := _fault_of_seal(str(STATE), header):
        yield problem
        return
    if header.get("over") is True:
        yield f"{RESULT} is missing: it was removed, or the run was killed at its end"
    done, lines, files = _done(header), header.get("lines"), header.get("files")
    if not isinstance(lines, dict) or not isinstance(files, dict):
        yield f"{STATE} has no digests of the run's files"
        return
    for name in LINES:
        yield from _nonempty(_fault_of_lines(folder / name, lines.get(name), done))
    later = {features_of(p) for p in _numbers_after(folder, done)}
    for name in _names(folder, files):
        if name in files or name not in later:
            yield from _nonempty(_fault_of_file(folder / name, files.get(name)))


def _numbers_after(folder: Path, done: int) -> Iterator[int]:
    """Yield the rounds with saved features after round ``done``, the checkpoint's round."""
    for path in folder.glob(features_of("*")):
        number = path.stem.rpartition("-")[2]
        if number.isdecimal() and int(number) > done:
            yield int(number)


def _done(header: ResultTable) -> int:
    done = header.get("round")
    return done if isinstance(done, int) else -1


def _names(folder: Path, digests: ResultTable) -> list[str]:
    """Return the names of files in a folder or in a seal, except the files of lines."""
    return [name for name in dict.fromkeys([*digests, *files_in(folder)]) if name not in LINES]


def _nonempty(fault: str) -> list[str]:
    return [fault] if fault else []


def _fault_of_seal(name: str, table: ResultTable) -> str:
    if not table:
        return f"{name} is empty, or no table of JSON"
    if FORMAT_KEY not in table:
        return f"{name} has no seal: it was removed"
    if table[FORMAT_KEY] != FORMAT:
        return f"{name} has {FORMAT_KEY} = {shown(table[FORMAT_KEY])}, this fedgist knows {FORMAT}"
    return "" if is_sealed(table) else f"{name} was changed since the run wrote it"


def _fault_of_file(path: Path, digest: object) -> str:
    if digest is None:
        return f"{path.name} is not of this run"
    if not path.exists():
        return f"{path.name} is missing"
    return "" if of_file(path) == digest else f"{path.name} was changed since the run wrote it"


def _fault_of_lines(path: Path, digest: object, last: int, *, later: bool = True) -> str:
    """Return the fault of the lines up to a round, or an empty text.

    ``later`` says whether lines of later rounds may follow.
    """
    blob = _content(path)
    if _hash(blob) == digest:  # no line needs to be read
        return ""
    fits = _hash(lines_up_to(blob, last)) == digest
    if fits and later:
        return ""
    fault = f"it has lines after round {last}, its last one" if fits else damage(path, last)
    return f"{path.name} was changed since the run wrote it: {fault}"


def _hash(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()
