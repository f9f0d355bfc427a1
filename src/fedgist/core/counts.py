"""Counts in messages: the fields that count rows, and the range of valid counts.

A server divides by counts, so a negative count would reverse the sign of a client's part of an
average. A field is declared to hold counts, and every upload of a client is checked::

    rows: Tensor = field(metadata=COUNTS)
    weight: Tensor = field(metadata=NONZERO | COUNTS)  # together with a wire form
    total: Tensor = field(metadata=COUNTS_FIRST)  # (classes, m + 1): first column only
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

MOST_ROWS = 2**31  # the default bound of a client's rows; clients.max_rows replaces it
_META = "counts"

COUNTS = {_META: "all"}
COUNTS_FIRST = {_META: "first column"}


@dataclass(frozen=True)
class CountRange:
    """The smallest and the largest valid count."""

    least: float = 0.0
    most: float = MOST_ROWS


@functools.cache
def count_fields(kind: type) -> Mapping[str, str]:
    """Return the fields of a message type that hold counts, and the position of their counts."""
    if not dataclasses.is_dataclass(kind):
        return {}
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[_META] for field in fields if _META in field.metadata}


def impossible(kind: type, arrays: Mapping[str, Tensor], allowed: CountRange) -> str | None:
    """Return why a count of a message, or of a stack of messages, is invalid, or None.

    ``arrays`` are those of the message by field, of any shape; of a stack, (clients, ...).
    """
    for name, position in count_fields(kind).items():
        counts = arrays[name][..., 0] if position == COUNTS_FIRST[_META] else arrays[name]
        wrong = counts[(counts < allowed.least) | (counts > allowed.most)]
        if wrong.numel():
            return (
                f"{name} holds the count {float(wrong[0]):g}; a count is at least "
                f"{allowed.least:g} and at most {allowed.most:.10g}"
            )
    return None
