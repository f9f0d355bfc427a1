"""What every part of the GPU benchmark uses: its device, its time, and clocks of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Figures = dict[str, Any]
Measured = Iterator[Figures]


class NotHereError(Exception):
    """A part that a machine cannot measure; the message says why."""


@dataclass(frozen=True)
class Setting:
    """The device, whether sizes are tiny, and the moment at which a part should end."""

    device: str
    quick: bool
    deadline: float

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.deadline - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def held(self) -> int:
        """Return the bytes of tensors on the GPU; the peak begins anew from here."""
        if not self.on_gpu:
            return 0
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak_mb(self, before: int) -> float | None:
        """Return the most memory since :meth:`held`, in MB beyond ``before``; None on a CPU."""
        if not self.on_gpu:
            return None
        self.wait()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def timed(self, work: Callable[[], object]) -> Callable[[], float]:
        """Return a function that does the work and returns its seconds on the device."""

        def seconds() -> float:
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            return time.perf_counter() - begin

        return seconds


def in_turns(
    contenders: Mapping[str, Callable[[], list[float]]], repeats: int, setting: Setting
) -> Iterator[dict[str, list[float]]]:
    """Yield the seconds of each contender so far, after each of its turns but the first.

    The first turns only warm up. It ends early, but not before one turn of each counts, if the next
    turns would take too long.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        begin = time.monotonic()
        for name, take_turn in contenders.items():
            took = take_turn()
            seconds[name].extend(took if repeat else [])
        if repeat:
            yield seconds
        if repeat and setting.left < time.monotonic() - begin:
            break


def summary(seconds: Mapping[str, Sequence[float]]) -> Figures:
    """Return the best, the median and the number of the measurements of each contender."""
    return {
        name: {"best": min(s), "median": statistics.median(s), "count": len(s)}
        for name, s in seconds.items()
    }


def ratios(seconds: Mapping[str, Sequence[float]], ours: str = "fedgist") -> Figures:
    """Return how many times as fast as the fastest other contender ours is."""
    others = [values for name, values in seconds.items() if name != ours]
    return {
        "ratio": min(map(min, others)) / min(seconds[ours]),
        "median_ratio": min(map(statistics.median, others)) / statistics.median(seconds[ours]),
    }
