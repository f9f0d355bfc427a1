"""Features of frozen bodies, which are made once and read from then on.

A body that does not learn gives a row the same features in every round. So a host encodes each row
once, and clients train and predict with features for rows and with a body that changes nothing. If
some layers of a body learn, such as adapters, what is kept is the input of the first of them: the
body must then be a chain of modules (``nn.Sequential``) up to there.

Rows are encoded in fixed pieces: a client's rows in their order, or, if clients share rows, all
rows. A piece does not depend on the round, the cohort or the number of workers, so neither do the
bits. Without memory for the features (``engine.keep_features = false``) the same pieces are encoded
again whenever a client is asked.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from platformdirs import user_cache_path
from torch import Tensor, nn

from fedgist.core.method import Method, Net, Task
from fedgist.core.nets.net import Architecture
from fedgist.data.examples import Examples
from fedgist.data.sources.file_sizes import in_words, usable_memory
from fedgist.engines.engine import Split
from fedgist.engines.population import Features, HostSettings, Population
from fedgist.engines.process_control import as_workers_do
from fedgist.errors import DataError
from fedgist.training.client_store import shared
from fedgist.training.inference import rows_at_once

FOLDER = "features"  # in the user's cache
AT_ONCE = 1 << 20  # numbers that are digested together
TRIED = 8  # rows whose features say which encoder it is
MOST_ROWS = 64  # that are encoded together: an encoder may enlarge images a hundred times
SHARE = 4  # of the usable memory, one part is for features


def kept_features(
    method: Method,
    task: Task,
    nets: Mapping[str, Net],
    population: Population,
    settings: HostSettings,
) -> dict[str, KeptFeatures]:
    """Return the features of each architecture whose body is frozen; none if rows may change.

    ``nets`` are the initial nets, as rows are encoded. Rows change by augmentation, by readers that
    draw, and by methods that alter inputs. Public rows would need features as well.
    """
    inputs = [e.x for e in _all_examples(population)]
    draws = any(not isinstance(x, Tensor) and x.source.reader.draws for x in inputs)
    changes = draws or bool(population.examples.augment) or population.examples.views > 1
    reads = settings.features == "raw" or method.alters_inputs or task.public is not None
    if reads or changes or task.places:  # the places of a row are those of its inputs
        return {}
    divided = {name: parts for name, net in nets.items() if (parts := _divided(net)) is not None}
    at_once = min(MOST_ROWS, rows_at_once(task))
    splits = [_pieces(population, split, at_once) for split in ("train", "client")]
    widths = [math.prod(parts.shape) for parts in divided.values()]
    total = 4 * sum(widths) * sum(len(pieces.piece_of) for pieces in splits)
    in_file = settings.features == "kept" and total > _limit(settings)
    return {
        name: KeptFeatures(parts, task, population, settings.features, splits, in_file=in_file)
        for name, parts in divided.items()
    }


@dataclass(frozen=True)
class Divided:
    """A body in two parts: the ``encoder`` that does not learn, and the ``rest`` of the model.

    The encoder maps a row to ``shape``, which is the input of the rest.
    """

    encoder: Net
    rest: Architecture
    shape: tuple[int, ...]


def _divided(net: Net) -> Divided | None:
    """Return a body in two parts; None if it has no frozen beginning that is worth keeping."""
    arch = net.arch
    if arch.frozen is None or not arch.evaluates or net.buffers:
        return None
    first, rest = _cut(arch.module, [*net.body])
    if not _computes(first):
        return None
    encoder = replace(net, params={}, arch=replace(arch, module=first))
    kind, device = torch.int64 if arch.words else torch.float32, net.head[0].device
    with torch.no_grad():
        out = encoder.features(torch.zeros(1, *arch.input_shape, dtype=kind, device=device))
    if out.dtype != torch.float32:
        return None
    shape = tuple(out.shape[1:])
    return Divided(encoder, replace(arch, module=rest, input_shape=shape, words=0), shape)


def _computes(module: nn.Module) -> bool:
    """Return whether a module has parameters, or is a user's, whose numbers may lie elsewhere."""
    places = {type(layer).__module__ for layer in module.modules()}
    own = {place for place in places if not place.startswith(("torch.", "fedgist."))}
    return bool(own) or any(True for _ in module.parameters())


def _cut(module: nn.Module, learned: Sequence[str], path: str = "") -> tuple[nn.Module, nn.Module]:
    """Return a module's beginning without learned parameters, and what follows it.

    Both have the layers of the module under its names; the others are identities. ``learned`` are
    names of parameters in the whole body, in which the module is at ``path``.
    """
    if not any(name.startswith(path) for name in learned):
        return module, nn.Identity()
    if type(module).forward is not nn.Sequential.forward:
        return nn.Identity(), module
    first, rest = copy.deepcopy(module), copy.deepcopy(module)
    learns = False
    for name, child in module.named_children():
        before, after = (nn.Identity(), child) if learns else _cut(child, learned, f"{path}{name}.")
        setattr(first, name, before)
        setattr(rest, name, after)
        learns = learns or after is child or not isinstance(after, nn.Identity)
    return first, rest


def _limit(settings: HostSettings) -> int:
    if settings.feature_memory is not None:
        return settings.feature_memory
    if settings.device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(settings.device)[0]) // SHARE
    return usable_memory() // SHARE


def _all_examples(population: Population) -> list[Examples]:
    parts = population.examples, population.test_examples, population.whole_test
    return [part for part in parts if part is not None]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Row numbers that are encoded together, each (rows,), and the piece of each row, (rows,).

    A row without a piece has -1.
    """

    examples: Examples
    rows: Sequence[Tensor]
    piece_of: Tensor = field(repr=False)


def _pieces(population: Population, split: Split, at_once: int) -> Pieces:
    """Return the pieces of the training rows, or of the test rows."""
    examples = population.examples_of(split)
    of_clients = [population.rows(split)]
    of_clients += [population.validation] if split == "train" else []
    lists = [rows[client] for rows in of_clients for client in range(len(rows))]
    joined = torch.cat([*lists, torch.zeros(0, dtype=torch.int64)])
    lines = torch.zeros(len(examples), dtype=torch.int64)
    times = lines.index_add(0, joined, torch.ones_like(joined))
    if split == "client":  # a model that all share predicts rows of nobody, too
        nobody = (times == 0).nonzero()[:, 0]
        if examples.complete:
            lists.append(nobody)
    if bool((times > 1).any()):
        lists = [torch.unique(torch.cat(lists))]
    pieces = [piece for rows in lists for piece in torch.split(rows, at_once) if len(piece)]
    piece_of = torch.full((len(examples),), -1)
    for number, rows in enumerate(pieces):
        piece_of[rows] = number
    return Pieces(examples, pieces, piece_of)


class KeptFeatures:
    """The features of one architecture's rows, and the model and the task that take them."""

    def __init__(
        self,
        parts: Divided,
        task: Task,
        population: Population,
        features: Features,
        splits: Sequence[Pieces],
        *,
        in_file: bool,
    ) -> None:
        """Set up the memory; nothing is encoded yet."""
        self.arch, self.population = parts.rest, population
        name = self.arch.name
        self.task = replace(
            task,
            input_shape=parts.shape,
            words=0,
            architectures={**task.architectures, name: self.arch},
            starts={**task.starts, name: replace(task.starts[name], arch=self.arch)},
        )
        whole, every = population.whole_test, list(splits)
        if whole is not None:  # the server's view of the test rows is another one
            rows, at_once = torch.arange(len(whole)), min(MOST_ROWS, rows_at_once(task))
            every.append(Pieces(whole, torch.split(rows, at_once), rows // at_once))
        self.banks = {
            id(pieces.examples): _Bank(parts, pieces, features, in_file=in_file) for pieces in every
        }
        self.in_file = in_file

    @property
    def note(self) -> str:
        """Where features are that do not fit in memory; empty if they do."""
        if not self.in_file:
            return ""
        banks = self.banks.values()
        size = sum(4 * math.prod(bank.shape) for bank in banks)
        rows, where = sum(bank.shape[0] for bank in banks), user_cache_path("fedgist") / FOLDER
        kept = all(bank.kept for bank in banks)
        done = f"are kept in {where}" if kept else "do not fit in the GPU's share of memory"
        return (
            f"features of {rows:,} rows by {self.arch.name} ({in_words(size)}) {done} "
            "(engine.feature_memory)"
        )

    def examples(self, split: Split, table: Tensor) -> Examples:
        """Return examples with the features of at least the rows in ``table`` (..., rows)."""
        plain = self.population.examples_of(split)
        x = self.banks[id(plain)].values(table)
        one, zero = (torch.tensor(v, device=x.device) for v in (1.0, 0.0))
        beside = plain.annotations, plain.fates
        return Examples(x, plain.y, one, zero, annotations=beside[0], fates=beside[1])


class _Bank:
    """The features of the rows of one set of examples: (rows, ...)."""

    def __init__(
        self, parts: Divided, pieces: Pieces, features: Features, *, in_file: bool
    ) -> None:
        self.encoder, self.pieces, self.features = parts.encoder, pieces, features
        self.shape = (len(pieces.piece_of), *parts.shape)
        device = str(pieces.examples.y.device)
        self.kept = features == "kept" and not (in_file and device != "cpu")
        self.complete = False
        if not self.kept:
            return
        if in_file:
            self.stored, self.present = _in_file(
                _digest(parts.encoder, pieces), self.shape, len(pieces.rows)
            )
        else:
            self.stored = shared(self.shape, torch.float32, device)
            self.present = shared((len(pieces.rows),), torch.bool, "cpu")

    def values(self, table: Tensor) -> Tensor:
        """Return features (all rows, ...) in which those of the table's rows are right."""
        device = self.pieces.examples.y.device
        if self.features == "blank":
            return torch.zeros(self.shape, device=device)
        values = self.stored if self.kept else torch.zeros(self.shape, device=device)
        if self.kept and (self.complete or bool(self.present.all())):
            self.complete = True
            return values
        rows = table[table >= 0].cpu()
        wanted = torch.unique(self.pieces.piece_of[rows])
        if self.kept:
            wanted = wanted[~self.present[wanted]]
        for number in wanted.tolist():
            rows = self.pieces.rows[number]
            at = rows.to(device)
            values[at] = _encode(self.encoder, self.pieces.examples, at)
            if self.kept:
                self.present[number] = True
        return values


def _encode(encoder: Net, examples: Examples, rows: Tensor) -> Tensor:
    """Return the features of rows (rows,)."""
    with torch.no_grad():
        return encoder.features(examples.batch(rows.unsqueeze(0)).x[0])


def _in_file(digest: str | None, shape: Sequence[int], pieces: int) -> tuple[Tensor, Tensor]:
    """Return zeros of ``shape`` in a file, and which pieces (pieces,) an earlier run has written.

    Without a digest the files have no name, and go with the run.

    Raises
    ------
    DataError
        If the cache cannot be written, or is full.
    """
    folder = user_cache_path("fedgist") / FOLDER
    sizes = {"values": 4 * math.prod(shape), "present": max(1, pieces)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # features tell about rows
        with _named(folder, digest) as named_files:
            paths = {name: named_files / name for name in sizes}
            for name, size in sizes.items():
                with paths[name].open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk is found out now
            values = torch.from_file(
                str(paths["values"]), shared=True, size=math.prod(shape), dtype=torch.float32
            )
            present = torch.from_file(
                str(paths["present"]), shared=True, size=sizes["present"], dtype=torch.bool
            )
    except OSError as error:
        raise DataError(
            f"features of frozen bodies take {sizes['values']:,} bytes in {folder}: {error}; raise "
            "engine.feature_memory, or use engine.keep_features = false"
        ) from error
    return values.view(*shape), present[:pieces]


@contextlib.contextmanager
def _named(folder: Path, digest: str | None) -> Iterator[Path]:
    """Give a folder for files: of this digest, or one that is gone when the files are open."""
    if digest is None:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            yield Path(made)
        return
    (folder / digest).mkdir(exist_ok=True)
    yield folder / digest


def _digest(encoder: Net, pieces: Pieces) -> str | None:
    """Return what features depend on, as a name; None if rows cannot be known before reading.

    The code of an encoder and its options are known by what it does to the first rows.
    """
    examples, arch = pieces.examples, encoder.arch
    assert arch.frozen is not None
    arrays = {**arch.frozen.params, **arch.frozen.buffers}
    owner = examples.owner
    arrays |= {"factor": examples.factor, "offset": examples.offset}
    arrays |= {} if owner is None else {"owner": owner}
    arrays |= {f"piece {i}": rows for i, rows in enumerate(pieces.rows)}
    about = [repr(arch.module), str(arch.input_shape), torch.__version__]
    if isinstance(examples.x, Tensor):
        arrays["x"] = examples.x
    else:
        identity = examples.x.source.reader.identity()
        if identity is None:
            return None
        about += identity
        arrays["x"] = examples.x.numbers
    for rows in pieces.rows[:1]:
        with as_workers_do():
            arrays["features"] = _encode(encoder, examples, rows[:TRIED])
    digest = hashlib.sha256("\n".join(about).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        whole = array.detach().cpu().contiguous().flatten()
        for piece in torch.split(whole, AT_ONCE):
            digest.update(piece.numpy().tobytes())
    return digest.hexdigest()[:32]
