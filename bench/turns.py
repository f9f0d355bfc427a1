"""Contenders that take turns: rounds of fedgist and of bare loops, interleaved in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

TURN_S = 1 / 3


def turn(round_of: Callable[[], float]) -> list[float]:
    """Do rounds for a third of a second, but at least one; return the seconds of each.

    It is so long because idle threads of the contender before spin for a while.
    """
    took = [round_of()]
    while sum(took) < TURN_S:
        took.append(round_of())
    return took


def compared(
    key: str, contenders: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, float]:
    """Return seconds per round of every contender, taken in turns, and their ratios.

    The names of contenders begin with "fedgist" or "bare". A ratio is the seconds of the fastest
    bare loop over those of the fastest fedgist: of the best rounds, and of the median rounds.
    """
    threads = torch.get_num_threads()
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name, round_of in contenders.items():
            took = turn(round_of)
            if repeat:  # the first turn of each warms up
                seconds.setdefault(name, []).extend(took)
    torch.set_num_threads(threads)
    out: dict[str, float] = {}
    for name, values in seconds.items():
        out[f"{key}: {name}, best s"] = min(values)
        out[f"{key}: {name}, median s"] = statistics.median(values)
    out[f"{key}.ratio"] = _ratio(seconds, min)
    out[f"{key}.median_ratio"] = _ratio(seconds, statistics.median)
    return out


def _ratio(seconds: Mapping[str, list[float]], chosen: Callable[[list[float]], float]) -> float:
    of_bare, of_fedgist = (
        min(chosen(values) for name, values in seconds.items() if name.startswith(kind))
        for kind in ("bare", "fedgist")
    )
    return of_bare / of_fedgist
