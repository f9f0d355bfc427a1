"""Folders of made-up runs, and the time that tables and pages of them take."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedgist.recipe.reading import make

METHODS = ("fedlog", "fedavg", "local")


def write_runs(root: Path, count: int, rounds: int, seeds: int, clients: int) -> None:
    """Write ``count`` run directories: ``seeds`` for each method and learning rate.

    Each run has this many rounds, in each of which all clients are evaluated.
    """
    draw = random.Random(0)  # noqa: S311  # made-up accuracies
    for cell, seed in ((i // seeds, i % seeds) for i in range(count)):
        sections = {"num_rounds": rounds, "lr": 1e-3 * (1 + cell // len(METHODS))}
        recipe = make(
            {"seed": seed, "method": {"name": METHODS[cell % len(METHODS)]}, "train": sections}
        )
        folder = root / f"cell-{cell}" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(recipe.to_toml())
        (folder / "result.json").write_text(
            json.dumps({"status": "finished", "time/total_s": 12.0})
        )
        (folder / "partition.json").write_text(
            json.dumps({"classes": list("0123456789"), "train": [[5] * 10] * clients})
        )
        lines, details = [], []
        for number in range(1, rounds + 1):
            accuracy = 0.9 - 0.5 / number + draw.gauss(0, 0.01)
            lines.append(
                {
                    "round": number,
                    "clients/asked": 10,
                    "clients/replied": 10,
                    "train/loss": 1 / number,
                    "comm/up_bytes": 20400,
                    "comm/down_bytes": 20400,
                    "time/train_s": 0.1,
                    "time/round_s": 0.12,
                    "eval/client/accuracy_mean": accuracy,
                    "eval/client/accuracy_std": 0.05,
                }
            )
            details += [
                {
                    "round": number,
                    "client": k,
                    "split": "client",
                    "rows": 20,
                    "accuracy": draw.random(),
                }
                for k in range(clients)
            ]
        for name, entries in (("rounds.jsonl", lines), ("clients.jsonl", details)):
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in entries))


def timed(*words: str) -> float:
    """Run a command of fedgist; return its seconds, the start of Python included."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fedgist.cli", *words], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin


def reports(repeats: int) -> dict[str, float]:
    """Time a comparison of 1,000 runs, and a page of 50 runs with 50 clients; 100 rounds each."""
    with tempfile.TemporaryDirectory() as folder:
        thousand, fifty = Path(folder, "many"), Path(folder, "some")
        write_runs(thousand, 1000, 100, 5, 10)
        write_runs(fifty, 50, 100, 5, 50)
        page = Path(folder, "report.html")
        tables = [
            timed("compare", str(thousand), "--target-accuracy", "88") for _ in range(repeats)
        ]
        pages = [
            timed("report", str(fifty), "--target-accuracy", "88", "-o", str(page))
            for _ in range(repeats)
        ]
        return {
            "compare: 1000 runs x 100 rounds, median s": sorted(tables)[repeats // 2],
            "report: 50 runs, median s": sorted(pages)[repeats // 2],
            "report: 50 runs, MB": page.stat().st_size / 1e6,
        }
