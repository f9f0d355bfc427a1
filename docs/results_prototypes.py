"""Prints how FedProto's features shrink: python docs/results_prototypes.py, from the root.

docs/methods/fedproto.md says what it shows.
For runs of 5, 20 and 100 rounds on MNIST, which are done in ``runs/prototypes`` if they are not
there: how far global prototypes are from each other, how far test rows are from their own class's,
and how many wrong answers are classes that the client does not have.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from fedgist.core.tree import map_leaves, take
from fedgist.federation.runner import load_run
from fedgist.federation.trained_models import simulation

RUNS, ROUNDS = Path("runs/prototypes"), (5, 20, 100)


def main() -> None:
    """Do the runs and print a line for each."""
    sys.stdout.write("rounds  between prototypes  row to its own  errors  of classes not there\n")
    for rounds in ROUNDS:
        folder = RUNS / str(rounds)
        if not (folder / "result.json").is_file():
            _run(rounds, folder)
        between, own, errors, foreign = measured(folder)
        line = f"{rounds:6}{between:20.2f}{own:16.2f}{errors:8}{foreign:22}\n"
        sys.stdout.write(line)


def measured(folder: Path) -> tuple[float, float, int, int]:
    """Return both mean distances, and the counts of all wrong answers and of such classes."""
    federation, world = load_run(folder)
    engine, people = simulation(federation), world.population
    orders, downs, ctx = federation.downloads(federation.round)
    distances, errors, foreign = [], 0, 0
    for client, down in enumerate(downs):
        rows = people.test[client]
        net = engine.client(ctx, orders[client], down).net
        batch = take(people.test_examples.batch(rows.unsqueeze(0)), 0)
        with torch.no_grad():
            features = map_leaves(torch.Tensor.cpu, net).features(batch.x)
        apart = torch.cdist(features, down.mean)
        answer = apart.argmin(1)
        wrong = answer != batch.y
        distances.append(float(apart[torch.arange(len(rows)), batch.y].mean()))
        errors += int(wrong.sum())
        foreign += int((wrong & ~torch.isin(answer, batch.y)).sum())
    between = torch.pdist(downs[0].mean).mean()
    return float(between), sum(distances) / len(distances), errors, foreign


def _run(rounds: int, folder: Path) -> None:
    settings = ("method.name=fedproto", f"train.num_rounds={rounds}", "evaluate.trained_every=0")
    words = [word for setting in settings for word in ("--set", setting)]
    command = (sys.executable, "-m", "fedgist.cli", "run", "fedlog/mnist", *words)
    subprocess.run([*command, "--out", str(folder), "--quiet"], check=True)


if __name__ == "__main__":
    main()
