"""Data sets that are known by the SHA-256 of their rows, in any order and any packing."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.errors import DataError


def check_published(data: Dataset, sha256: str, folder: Path) -> Dataset:
    """Return ``data`` if its rows are the published ones, else raise DataError.

    The order of rows does not matter, because these data sets are passed on in several orders and
    packings; images, labels and the division into training and test rows do.
    """
    found = digest_of_rows(data)
    if found == sha256:
        return data
    raise DataError(
        f"the files in {folder} are not the published {data.name}: SHA-256 of the rows is "
        f"{found[:12]}..., not {sha256[:12]}...; download them again, or read other images by "
        "data.name = 'npz' or 'folder'"
    )


def digest_of_rows(data: Dataset) -> str:
    """Return the SHA-256 of the sorted SHA-256 of training rows, then of test rows."""
    whole = hashlib.sha256()
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        whole.update(repr(tuple(x.shape)).encode())
        whole.update(b"".join(sorted(_row_digests(x, y))))
    return whole.hexdigest()


def _row_digests(x: Tensor, y: Tensor) -> list[bytes]:
    """Return the SHA-256 of each row: its bytes, then its label as one byte."""
    rows = zip(x.flatten(1).numpy(), y.tolist(), strict=True)
    digests = []
    for row, label in rows:
        digest = hashlib.sha256(row)
        digest.update(bytes([label]))
        digests.append(digest.digest())
    return digests
