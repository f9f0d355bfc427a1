"""The choice whether rows are read into memory, or when they are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedgist.data.lazy_rows import CHECKED, LazyRows, sample_of
from fedgist.data.sources.file_sizes import fits, in_words
from fedgist.data.sources.read_modes import Read

Notes = tuple[str, ...]
_SHARES = {1: "half", 2: "a quarter"}  # of the memory, of which half is usable


def choice(rows: Sequence[LazyRows], read: Read, share: int) -> tuple[bool, Notes]:
    """Return whether rows are read lazily, and a note on it for the user.

    In memory they may fill 1 / ``share`` of the usable memory.

    Raises
    ------
    DataError
        If a row cannot be read.
    """
    frozen = all(map(_same_under_other_seeds, rows))
    size = sum(len(x) * x.source.row_bytes for x in rows)
    how = f"{sum(map(len, rows)):,} rows, {in_words(size)}"
    if read == "once":
        lost = "; random transforms are drawn only once: data.read = 'lazy' draws them anew"
        return False, (f"all rows are read into memory ({how}){'' if frozen else lost}",)
    large = not fits(size, share)
    if read == "lazy" or large or not frozen:
        reason = f"they would fill more than {_SHARES[share]} of the memory" if large else ""
        reason = reason or ("" if frozen else "random transforms are drawn anew at each read")
        return True, (f"rows are read when they are used ({how}){reason and ': '}{reason}",)
    return False, (f"all rows are read into memory ({how}); data.read = 'lazy' does not do so",)


def _same_under_other_seeds(x: LazyRows) -> bool:
    """Return whether a few rows are the same if they are read with other seeds."""
    if not x.source.reader.draws:
        return True
    rows = sample_of(len(x), CHECKED)
    return torch.equal(x.read(rows, torch.full_like(rows, 1)), x.read(rows, rows + 2))
