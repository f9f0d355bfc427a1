"""Lists the archived runs that lack a correction: python docs/results_stale.py, from the root.

A line for each correction and folder, with how many of its seeds lack it; ``fedgist reproduce`` and
``fedgist sweep`` with ``--archive`` do such runs again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedgist.runs.finished.run_reader import read_run

DATA = Path(__file__).parent / "results" / "data"


def stale(data: Path = DATA) -> Counter[tuple[int, str]]:
    """Return how many runs of a folder lack a correction, by its number and the folder."""
    found: Counter[tuple[int, str]] = Counter()
    for path in sorted(data.rglob("seed-*.csv")):
        for correction in read_run(path).lacks:
            found[correction.number, str(path.parent.relative_to(data))] += 1
    return found


if __name__ == "__main__":
    for (number, folder), count in sorted(stale().items()):
        print(f"correction {number}: {folder}: {count} run{'s' if count > 1 else ''}")
