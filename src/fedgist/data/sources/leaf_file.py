"""Read LEAF's .json files: users, and the samples of each user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.errors import DataError, first_line

T = TypeVar("T")
_TIMES = 10  # bytes of memory per byte of the file while it is read


@dataclass(frozen=True)
class Sample:
    """One sample: its user, its input and label as in the file, and its location.

    Inputs and labels are arbitrary JSON values; the caller checks them.
    """

    user: str
    x: object
    y: object
    location: str


def read_leaf(path: Path) -> list[Sample]:
    """Return the samples in a file, user by user in the order of its ``users``."""
    check_memory(_TIMES * regular(path).stat().st_size, str(path))
    try:
        document: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {first_line(error)}") from error
    users = _field(document, "users", list, f"{path}")
    counts = _field(document, "num_samples", list, f"{path}")
    data = _field(document, "user_data", dict, f"{path}")
    if len(users) != len(counts):
        raise DataError(f"{path} has {len(users)} users, and num_samples of {len(counts)}")
    return [
        sample
        for user, count in zip(users, counts, strict=True)
        for sample in _samples(path, str(user), count, data.get(str(user)))
    ]


def leaf_files(base: Path, name: str) -> tuple[list[Path], list[Path]] | None:
    """Return LEAF's files of training and of test samples in the folder ``name``.

    The second list is empty if LEAF has not split the samples. None: there are no files.
    """
    train, test, whole = (
        sorted((base / name / folder).glob("*.json")) for folder in ("train", "test", "all_data")
    )
    if train and test:
        return train, test
    return (whole, []) if whole else None


def _samples(path: Path, user: str, count: object, entry: object) -> Iterator[Sample]:
    location = f"{path}, user {user!r:.80}"
    xs, ys = (_field(entry, key, list, location) for key in ("x", "y"))
    if not len(xs) == len(ys) == count:
        raise DataError(
            f"{location} has {len(xs)} inputs and {len(ys)} labels; num_samples says {count!r:.80}"
        )
    for x, y in zip(xs, ys, strict=True):
        yield Sample(user, x, y, location)


def _field(table: object, key: str, kind: type[T], location: str) -> T:
    value: object = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, kind):
        words = "a table" if kind is dict else "a list"
        raise DataError(f"{location} is not in LEAF's format: it needs {key}, {words}")
    return value
