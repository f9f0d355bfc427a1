"""Draws among rows that depend on what each row holds, and on no other row.

Differential privacy of records compares data sets that differ by one row. If rows are drawn by
their places, one row more moves the draws of all rows behind it. Here a row's draw is a keyed
digest of its content and of its copy number among equal rows. So one row more adds one draw, and
all other draws stay. If the new row equals others, it takes the next copy number: which of the
equal rows has which number changes nothing (docs/privacy.md, "Draws among rows").
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.division import Division
from fedgist.data.lazy_rows import pieces_of

_BITS = 64


def fates(data: Dataset, secret: int, purpose: str, owner: Tensor | None = None) -> Tensor:
    """Return a random whole number for each training row, int64 (rows,).

    A row's content is all that is used of it: its inputs, label, client and annotations. Equal rows
    are counted for each ``owner`` (rows,), the client that holds a row. Lazy rows are read once.
    Who does not know ``secret`` cannot predict the numbers.
    """
    key = hashlib.blake2b(f"{secret}/{purpose}".encode()).digest()
    owners = [0] * len(data.y) if owner is None else owner.tolist()
    copies: Counter[tuple[bytes, int]] = Counter()
    numbers = []
    for content, holder in zip(_contents(data), owners, strict=True):
        copies[content, holder] += 1
        text = content + copies[content, holder].to_bytes(8, "little")
        digest = hashlib.blake2b(text, key=key, digest_size=8).digest()
        numbers.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(numbers, dtype=torch.int64)


def shares(numbers: Tensor) -> Tensor:
    """Return fates as numbers from 0 to just below 1, float64 (rows,)."""
    return numbers.double() / 2.0**_BITS + 0.5


def split_by_content(
    data: Dataset, division: Division, secret: int, owner: Tensor | None = None
) -> tuple[Dataset, Tensor]:
    """Hold out training rows as test rows, each with the probability of the division's share.

    Return the data, and Booleans (rows,) that are true for test rows. ``data`` has no test rows.
    """
    purpose = f"test rows {division.repeat}" if division.repeat else "test rows"
    numbers = fates(data, secret, purpose, owner)
    if division.folds is None:
        held = shares(numbers) < division.share
    else:
        held = numbers % division.folds == division.fold
    tested = data.only(held.nonzero().squeeze(1))
    trained = data.only((~held).nonzero().squeeze(1))
    whole = replace(trained, y_test=tested.y, clients_test=tested.clients)
    return whole.with_inputs(trained.inputs, tested.inputs), held


def _contents(data: Dataset) -> Iterator[bytes]:
    """Yield a digest of each training row's content."""
    beside = [values for _, values in sorted(data.annotations.items())]
    labels, row = _labels(data), 0
    for piece in pieces_of(data.inputs):
        for x in piece.cpu().contiguous().numpy():
            parts = [
                x.tobytes(),
                labels[row],
                *(values[row].numpy().tobytes() for values in beside),
            ]
            yield hashlib.blake2b(b"".join(parts), digest_size=16).digest()
            row += 1


def _labels(data: Dataset) -> list[bytes]:
    """Return each row's label and client by name, as bytes: numbers of names depend on all rows."""
    names = data.names
    if data.target == "class":
        labels = [names[label].encode() for label in data.y.tolist()]
    else:
        labels = [label.tobytes() for label in data.y.numpy()]
    if data.clients is None:
        return labels
    clients = data.client_names or tuple(map(str, range(int(data.clients.max()) + 1)))
    return [
        label + b"\0" + clients[client].encode()
        for label, client in zip(labels, data.clients.tolist(), strict=True)
    ]
