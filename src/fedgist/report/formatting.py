"""Numbers in words."""

from __future__ import annotations

import math
from collections.abc import Iterable

MINUTE = 60  # seconds; and an hour has as many minutes
UNITS = ("B", "kB", "MB", "GB", "TB")


def percent(value: float | None, digits: int = 2) -> str:
    """Return a fraction as percent; one that is not known as a dash."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def printed(numbers: Iterable[float]) -> str:
    """Return a mean and, if it is given, its standard error, in the papers' way: two digits."""
    return " ± ".join(f"{number:.2f}" for number in numbers)


def size(count: float) -> str:
    """Return a number of bytes with its unit, in steps of a thousand."""
    power = min(int(math.log10(count) // 3), len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {UNITS[power]}"


def bits(count: float) -> str:
    """Return a number of bits with its unit, in steps of a thousand, as the papers print them."""
    return size(count).removesuffix("B") + "b"


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    hours = minutes // MINUTE
    return f"{hours} h {minutes % MINUTE:02d} min" if hours else f"{minutes} min {rest:02d} s"
