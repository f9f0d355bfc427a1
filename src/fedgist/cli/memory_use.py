"""The most memory that this process and its workers have used."""

from __future__ import annotations

import resource
import sys

from fedgist.report.formatting import bytes_text

UNIT = 1 if sys.platform == "darwin" else 1024  # of the system's numbers, in bytes


def peak_memory() -> str:
    """Return the peak memory of this process, and of the largest worker that has ended."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    largest = f"; the largest worker: {bytes_text(UNIT * worker)}" if worker else ""
    return f"peak memory: {bytes_text(UNIT * own)}{largest}"
