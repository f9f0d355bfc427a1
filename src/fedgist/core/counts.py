"""Counts in messages: which numbers of a message count rows, and which counts are possible.

A server divides by counts, so a negative count would turn a client's part of an average around. A
field is declared to hold counts, and every upload that comes from a client is checked::

    rows: Tensor = field(metadata=COUNTS)
    weight: Tensor = field(metadata=NONZERO | COUNTS)  # beside a form on the wire
    total: Tensor = field(metadata=COUNTS_FIRST)  # (classes, m + 1): in the first column alone
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

MOST_ROWS = 2**31  # that a client may say it has, unless clients.max_rows bounds them
_META = "counts"

COUNTS = {_META: "all"}
COUNTS_FIRST = {_META: "first column"}


@dataclass(frozen=True)
class CountRange:
    """The least and the greatest number that is taken for a count."""

    least: float = 0.0
    most: float = MOST_ROWS


@functools.cache
def count_fields(kind: type) -> Mapping[str, str]:
    """Return the fields of a message type that hold counts, and where in them counts are."""
    if not dataclasses.is_dataclass(kind):
        return {}
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[_META] for field in fields if _META in field.metadata}


def impossible(kind: type, arrays: Mapping[str, Tensor], allowed: CountRange) -> str | None:
    """Return why a count of a message, or of a stack of messages, is impossible, or None."""
    for name, where in count_fields(kind).items():
        counts = arrays[name][..., 0] if where == COUNTS_FIRST[_META] else arrays[name]
        wrong = counts[(counts < allowed.least) | (counts > allowed.most)]
        if wrong.numel():
            return (
                f"{name} holds the count {float(wrong[0]):g}; a count is at least "
                f"{allowed.least:g} and at most {allowed.most:.10g}"
            )
    return None
