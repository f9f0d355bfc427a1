"""Kernels that come with a wheel for one kind of machine: a library for each level of processors.

``make wheels`` puts them beside the source. A library's name holds a digest of the source, so that
none of another version is loaded. It has no threads of its own: workers have one each.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
FOLDER = Path(__file__).with_name("libraries")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """Processors that can run a library: of a machine, with these flags of ``/proc/cpuinfo``.

    ``cpu`` is a compiler's name of the first such processor.
    """

    machine: str
    cpu: str
    flags: frozenset[str]


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS: Mapping[str, Level] = {  # the fastest first
    "x86-64-v4": Level("x86_64", "x86_64_v4", _V4),
    "x86-64-v3": Level("x86_64", "x86_64_v3", _V3),
    "aarch64": Level("aarch64", "generic", frozenset({"asimd"})),
}


def file_name(level: str) -> str:
    """Return the name of a level's library."""
    return f"{level}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"


def levels() -> list[str]:
    """Return the levels whose libraries are here; none in a wheel for all machines."""
    return [level for level in LEVELS if (FOLDER / file_name(level)).exists()]


def runnable() -> list[Path]:
    """Return the libraries here that this processor can run, the fastest first."""
    return [FOLDER / file_name(level) for level in levels() if not _lacking(level)]


def why_none() -> str:
    """Return why this processor can run no library that is here; empty if it can, or none is."""
    here = levels()
    if not here or runnable():
        return ""
    lacks = ", ".join(sorted(_lacking(here[-1])))
    return f"this wheel has kernels for {' and '.join(here)}, and this processor lacks {lacks}"


def _lacking(level: str) -> frozenset[str]:
    """Return what this processor would need for a level: flags, or to be of another machine."""
    needed = LEVELS[level]
    if platform.machine() != needed.machine:
        return frozenset({needed.machine})
    return needed.flags - _flags()


def _flags() -> frozenset[str]:
    """Return the flags of this processor, as far as the system says them."""
    try:
        lines = CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return frozenset().union(
        *(v.split() for name, _, v in named if name.strip() in {"flags", "Features"})
    )
