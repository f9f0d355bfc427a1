"""Checkpoints: everything a run needs to resume, in one file that is replaced as a whole.

If the clients are on several machines that share the run's folder, these write the clients' state
into further files, which the checkpoint names.

A checkpoint is bound to the inputs of its run. It holds the recipe, digests of the data and of the
record's lines up to the checkpoint's round, and a digest of itself. A run resumes only if none of
these changed; otherwise an error names the difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgist.core.tree import below, under
from fedgist.errors import CheckpointError, first_line, listed
from fedgist.runs.files.array_files import BROKEN, on_cpu, read_arrays, save_arrays
from fedgist.runs.files.digests import of_arrays, of_text
from fedgist.runs.files.record import FORMAT, FORMAT_KEY, STATE, Line, is_round
from fedgist.runs.files.run_directory import remove_parts
from fedgist.runs.files.seals import HEADER_KEY, SEAL, WHOLE, sealed
from fedgist.runs.files.state_parts import Parts

PARTS, BEST_PARTS = "parts", "best_parts"  # files of the clients' state, by name
_HINT = "put the file back from a copy, or start the run again with --overwrite"
_BROKEN = (
    *BROKEN,
    AttributeError,
    RecursionError,
    MemoryError,
    OverflowError,
)


@dataclass(frozen=True)
class Binding:
    """The recipe, inputs and files of a run that its checkpoint is bound to.

    ``recipe`` is flat, by dotted key. ``inputs`` holds digests of the run's other inputs by name,
    such as "the data". ``lines`` holds digests of the record's files up to the checkpoint's round,
    by file name, and ``files`` those of the run's other files. ``over`` says that no round is left
    to do. ``raised`` lists changes of the number of rounds as ``[round, from, to]``. ``again``
    counts the rounds that released more than once. ``forgotten`` lists the clients that the server
    was asked to forget as ``[round, client]``.
    """

    recipe: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    raised: tuple[tuple[int, int, int], ...] = ()
    again: int = 0
    forgotten: tuple[tuple[int, int], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    over: bool = False

    def with_events(self, line: Line) -> Line:
        """Return a round's line with the events that preceded the round."""
        notes = [
            (done, f"train.num_rounds was raised from {old} to {new}")
            for done, old, new in self.raised
        ]
        notes += [(done, f"the server forgot client {client}") for done, client in self.forgotten]
        if events := [note for done, note in notes if line["round"] == done + 1]:
            line["events"] = [*line.get("events", []), *events]
        return line


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``round``: the server's arrays and the clients', by name.

    ``parts`` are the files of the clients' state, if it is not in ``clients``. ``best`` is the
    state after the best round so far, if the run keeps that round's models. ``under_way`` is the
    finished part of the next round, if the run stopped between two stages.
    """

    round: int
    server: Mapping[str, Tensor]
    clients: Mapping[str, Tensor]
    best: Checkpoint | None = None
    binding: Binding = Binding()
    under_way: Line | None = None
    parts: Parts | None = None

    def arrays(self) -> dict[str, Tensor]:
        """Return all arrays, of any shape by name, those of the best round below ``best/``."""
        best = self.best.arrays() if self.best else {}
        return (
            under("server/", self.server) | under("clients/", self.clients) | under("best/", best)
        )

    def copied(self) -> Checkpoint:
        """Return a copy whose arrays the run does not change later, in order of name as in a file.

        So what depends on the order of a dictionary's keys shows without a file, too.
        """
        server, clients = (
            {k: v.clone() for k, v in sorted(arrays.items())}
            for arrays in (self.server, self.clients)
        )
        return replace(self, server=server, clients=clients, best=None, binding=Binding())


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint into a run directory."""
    arrays = on_cpu(checkpoint.arrays())
    rounds = {"round": checkpoint.round, "best": checkpoint.best and checkpoint.best.round}
    now = {"under_way": checkpoint.under_way, FORMAT_KEY: FORMAT}
    files_of = {PARTS: checkpoint.parts, BEST_PARTS: checkpoint.best and checkpoint.best.parts}
    now |= {key: dict(parts.files) for key, parts in files_of.items() if parts}
    # sealed by itself, too: whoever reads it alone need not read the arrays
    entry = sealed(rounds | now | asdict(checkpoint.binding))
    entry[WHOLE] = _digest(entry, arrays)
    save_arrays(folder / STATE, HEADER_KEY, json.dumps(entry), arrays)
    kept = [name for parts in files_of.values() if parts for name in parts.files]
    remove_parts(folder / STATE.parent, kept)


def load(folder: Path) -> Checkpoint | None:
    """Read a run directory's checkpoint; None if it has none."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        entry, arrays = _read(path)
        digest = entry.pop(WHOLE, None)
        whole = digest == _digest(entry, arrays)
        entry = {key: v for key, v in entry.items() if key not in {FORMAT_KEY, SEAL}}
        number, best, now = (entry.pop(k, None) for k in ("round", "best", "under_way"))
        parts, best_parts = (_parts(folder, entry.pop(k, {})) for k in (PARTS, BEST_PARTS))
        whole = whole and is_round(number) and (best is None or is_round(best))
        raised, forgotten = (tuple(map(tuple, entry.pop(k, ()))) for k in ("raised", "forgotten"))
        names = {f.name for f in fields(Binding)}
        stated = {key: value for key, value in entry.items() if key in names}
        binding = Binding(**stated, raised=raised, forgotten=forgotten)
        whole = whole and _is_sound(binding)
    except _BROKEN as error:
        raise CheckpointError(f"{path} is damaged ({first_line(error)}); {_HINT}") from error
    if not whole:
        raise CheckpointError(f"{path} is damaged: its content is not what was written; {_HINT}")
    if strange := sorted(entry.keys() - names):
        raise CheckpointError(
            f"{path} was written by another version of fedgist, which kept {listed(strange)}: end "
            "the run with that version, or start it again with --overwrite"
        )

    kept = None
    if best is not None:
        arrays_of = below("best/server/", arrays), below("best/clients/", arrays)
        kept = Checkpoint(best, *arrays_of, parts=best_parts)
    server, clients = below("server/", arrays), below("clients/", arrays)
    return Checkpoint(number, server, clients, kept, binding, now, parts)


def _parts(folder: Path, digests: Mapping[str, str]) -> Parts | None:
    if any(Path(name).name != name for name in digests):
        raise ValueError("a file of the clients' state is in another folder")
    return Parts(folder / STATE.parent, digests) if digests else None


def _is_sound(binding: Binding) -> bool:
    tables: tuple[object, ...] = (binding.recipe, binding.inputs, binding.lines, binding.files)
    sound = all(isinstance(t, dict) for t in tables) and is_round(binding.again)
    sound = sound and isinstance(binding.over, bool)
    wide = {"raised": len(("round", "from", "to")), "forgotten": len(("round", "client"))}
    return sound and all(
        all(map(is_round, change)) and len(change) == width
        for key, width in wide.items()
        for change in getattr(binding, key)
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    text, arrays = read_arrays(path, HEADER_KEY)
    return dict(json.loads(text)), arrays


def _digest(entry: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> str:
    return of_text(json.dumps(entry, sort_keys=True) + of_arrays(arrays))
