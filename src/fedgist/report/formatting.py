"""Format numbers with units for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable

MINUTE = 60  # seconds in a minute, and minutes in an hour
UNITS = ("B", "kB", "MB", "GB", "TB")


def percent(value: float | None, digits: int = 2) -> str:
    """Return a fraction as percent; an unknown one as a dash."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def printed(numbers: Iterable[float]) -> str:
    """Return a mean and, if given, its standard error, with two digits as in papers."""
    return " ± ".join(f"{number:.2f}" for number in numbers)


def bytes_text(count: float) -> str:
    """Return a number of bytes with a decimal unit (powers of 1000)."""
    power = min(int(math.log10(count) // 3), len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {UNITS[power]}"


def bits_text(count: float) -> str:
    """Return a number of bits with a decimal unit, as in papers."""
    return bytes_text(count).removesuffix("B") + "b"


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    hours = minutes // MINUTE
    return f"{hours} h {minutes % MINUTE:02d} min" if hours else f"{minutes} min {rest:02d} s"
