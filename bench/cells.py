"""How many runs of FedLog's table 1 a machine does in an hour: a column's methods at their sizes.

    python bench/cells.py [--columns mnist cifar10 cifar100] [--methods fedlog ...] [--device cuda]

A run is one method and one seed at the paper's size, tests included; the paper's cells are means
of ten. The first rounds of each are timed, on random images in the shape of the column's, and the
time of a run is that of its start and of as many rounds as the recipe has. Tests of copies after
local training, which the recipes have every 20 rounds, are left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

from paper_sizes import FEDLOG_MNIST, PaperSize

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.recipe.reading import read

COLUMNS = {
    "mnist": FEDLOG_MNIST,
    "cifar10": PaperSize("fedlog/cifar10", (3, 32, 32), 10, 50_000, 10_000),
    "cifar100": PaperSize("fedlog/cifar100", (3, 32, 32), 100, 50_000, 10_000),
}
METHODS = (
    *("local", "fedavg", "lg_fedavg@1", "lg_fedavg@2", "fedper", "fedrep", "cs_fl", "fedbabu"),
    *("fedproto", "feddbe", "fedlog", "fedlog_c"),
)
TIMED = 3  # rounds, after the first
HOUR = 3600.0


def main() -> None:
    """Time the methods of each column, and print runs an hour."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for column in args.columns:
        size, seconds = COLUMNS[column], {}
        for method in args.methods:
            first, each, rounds = _timed(size, method, args.device)
            seconds[method] = first + (rounds - 1) * each
            print(
                f"{column} {method}: {first:.1f} s to the end of the first round, {each:.2f} s for "
                f"each of {rounds - 1} others: {HOUR / seconds[method]:.1f} runs an hour",
                flush=True,
            )
        print(
            f"{column}: {HOUR * len(seconds) / sum(seconds.values()):.1f} runs an hour on average; "
            f"one seed of {len(seconds)} methods in {sum(seconds.values()) / HOUR:.2f} h",
            flush=True,
        )


def _timed(size: PaperSize, method: str, device: str) -> tuple[float, float, int]:
    """Return seconds to the end of the first round, those of a later one, and the rounds."""
    rounds = read(find_recipe(size.recipe)).train.num_rounds
    marks = []
    changes = (f"train.num_rounds={TIMED + 2}", "evaluate.trained_every=0")
    recipe = size.read(method, *changes, f"engine.device={device}")

    def ended(_: dict[str, Any]) -> None:
        marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        fedgist.run(recipe, data=size.data(), out=f"{folder}/run", callback=ended, progress=False)
    # the last round does not count: it has tests of its own
    each = statistics.mean(b - a for a, b in itertools.pairwise(marks[:-1]))
    return marks[0] - begin, each, rounds


if __name__ == "__main__":
    main()
