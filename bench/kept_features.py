"""Rounds over a frozen body, with rows that are encoded once against rows that are read each time.

    python bench/kept_features.py [--rounds 4]

Four clients have 100 images each, and train a head over ResNet9 for five local epochs; each round
ends with a score on 400 test images. Both ways run in turns in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from workloads import rounds_of

from fedgist.data.dataset import Dataset
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.prepare import prepare_run

METHODS = ("fedavg", "fedprox", "fedlog", "fedper", "fedproto", "repshare", "fd", "cs_fl", "local")
CLIENTS, IMAGES, EPOCHS = 4, 100, 5


def recipe_of(method: str) -> dict[str, Any]:
    """Return the recipe of a method."""
    return {
        "partition": {"name": "iid"},
        "clients": {"num_clients": CLIENTS},
        "model": {"name": "resnet9", "frozen": True},
        "method": {"name": method},
        "train": {"num_rounds": 1000, "local_epochs": EPOCHS, "batch_size": 10},
        "engine": {"workers": 1},
    }


def images() -> Dataset:
    """Return made-up images of ten classes."""
    x, y = (
        torch.randint(0, 256, (CLIENTS * IMAGES, 3, 32, 32), dtype=torch.uint8),
        torch.arange(400),
    )
    return Dataset("images", x, y % 10, x, y % 10, 10, 255.0)


@contextlib.contextmanager
def rounds(method: str, *, kept: bool) -> Iterator[Callable[[], float]]:
    """Yield a function that does one round and returns its seconds."""
    setup = resolve(make(recipe_of(method)), Overrides(data=images()))
    reads = patch.object(type(setup.method), "alters_inputs", not kept)  # then rows stay rows
    with reads:
        prepared = prepare_run(setup)
    with rounds_of(*prepared) as do_round:
        yield do_round


def main() -> None:
    """Print, of each method, the seconds of a round both ways, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    given = parser.parse_args()
    torch.manual_seed(0)
    print("| method | read each time, s | encoded once, s | first round, s | ratio |")
    print("|---|---|---|---|---|")
    for method in given.methods:
        with rounds(method, kept=False) as each, rounds(method, kept=True) as once:
            pairs = [(each(), once()) for _ in range(given.rounds + 1)]
        slow, fast = (statistics.median(p[i] for p in pairs[1:]) for i in (0, 1))
        numbers = f"{slow:.2f} | {fast:.3f} | {pairs[0][1]:.2f} | {slow / fast:.0f}"
        print(f"| {method} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
