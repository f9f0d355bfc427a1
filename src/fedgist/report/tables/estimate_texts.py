"""Estimates as text: means with their errors, and the bounds of intervals."""

from __future__ import annotations

from collections.abc import Callable

from fedgist.core.objectives.metrics import Metric
from fedgist.report.tables.stats import Estimate


def shower(measure: Metric) -> Callable[..., str]:
    """Return the function that shows estimates of a metric: a mean and its standard error."""
    scale, digits = (100, 2) if measure.unit == "fraction" else (1, 4)

    def show(value: Estimate | None, *, signed: bool = False) -> str:
        if value is None:
            return "-"
        mean = f"{scale * value.mean:{'+' if signed else ''}.{digits}f}"
        return mean if value.error is None else f"{mean} ± {scale * value.error:.{digits}f}"

    return show


def interval(value: Estimate | None, show: Callable[..., str], *, signed: bool = False) -> str:
    """Return the bounds of an interval as text."""
    if value is None or value.low is None or value.high is None:
        return "-"
    low, high = (show(Estimate(1, end), signed=signed) for end in (value.low, value.high))
    return f"[{low}, {high}]"
