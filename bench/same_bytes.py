"""Whether two commits compute the same: twelve small runs, compared byte for byte.

    python bench/same_bytes.py OLD_COMMIT [--only NAME ...]

Every run is done by the old commit, then by the working tree from the recipe that the old run
recorded, so both have the same plans. One more run is stopped by the old commit and resumed by the
working tree. ``rounds.jsonl`` and ``clients.jsonl`` must be equal but for ``time/*``, and so must
the arrays of the last checkpoint, by name, type, shape and bytes. The exit code is 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
MAIN = "from fedgist.cli.main import main; main()"
SMALL = (
    "train.num_rounds=3",
    "train.local_epochs=2",
    "clients.num_clients=8",
    "data.train_rows=240",
)
PRIVATE = ("privacy.epsilon=4.0", "privacy.delta=0.01", "privacy.clip=3.0")
DP_SGD = ("privacy.bodies=dp_sgd", "privacy.gradient_clip=1.0", "privacy.sampling_rate=0.2")
PUBLIC = ("method.of=features", "data.public={client=0}", "method.distillation.epochs=2")

RUNS: dict[str, tuple[str, ...]] = {
    "fedlog, two models": ("demo",),
    "fedavg, two workers": ("demo", "method.name=fedavg", "engine.workers=2"),
    "fedrep, dropout": (
        "demo",
        "method.name=fedrep",
        "model.dropout=0.3",
        "clients.architectures={}",
    ),
    "fedlog_c, loop-back": ("demo", "method.name=fedlog_c", "engine.name=loopback"),
    "repshare, late replies": ("demo", "method.name=repshare", "clients.delay=0.3"),
    "feddbe, absent clients": ("demo", "method.name=feddbe", "clients.availability=0.6"),
    "cs_fl, two phases": ("demo", "method.name=cs_fl", "method.first_phase=0.5"),
    "fedlog, private records": ("demo", "privacy.unit=record", *PRIVATE),
    "fedlog, private steps": ("demo", "privacy.unit=record", *PRIVATE, *DP_SGD),
    "fedavg, private clients": (
        "demo",
        "method.name=fedavg",
        "privacy.unit=client",
        "train.sampling=poisson",
        "train.fraction_train=0.5",
        *PRIVATE,
    ),
    "merged_codist, pools": (
        "codistillation/digits",
        "method.distillation.steps=20",
        "data.public.rows=80",
    ),
    "flesd, public rows": ("demo", "method.name=flesd", *PUBLIC, "clients.architectures={}"),
}
NEW = ("events", "name", "model", "unscored", "clients/complete", "clients/expected")
RESUMED = "fedlog, stopped by the old commit"


def main() -> None:
    """Compare the working tree with a commit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the old commit")
    parser.add_argument("--only", nargs="+", default=[*RUNS, RESUMED], metavar="NAME")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tree = checked_out(asked.commit, place / "commit")
        differing = [name for name in asked.only if not compared(name, tree, place)]
    print(f"{len(asked.only) - len(differing)} of {len(asked.only)} runs are the same")
    sys.exit(bool(differing))


def checked_out(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder."""
    folder.mkdir()
    packed = subprocess.run(
        ["git", "archive", commit, "src", "recipes"], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def compared(name: str, tree: Path, place: Path) -> bool:
    """Do a run by both, and print whether they are the same."""
    if name == RESUMED:
        old, new = stopped_and_resumed(tree, place)
    else:
        old, new = (place / side / name.replace(", ", "-") for side in ("old", "new"))
        recipe, *settings = RUNS[name]
        fedgist(tree, "run", recipe, *words(settings, SMALL), "--out", str(old))
        fedgist(ROOT, "run", str(old / "recipe.toml"), "--out", str(new))
    differences = [*lines_that_differ(old, new), *arrays_that_differ(old, new)]
    print(f"{name}: {'differs' if differences else 'the same'}", flush=True)
    for text in differences[:5]:
        print(f"  {text}")
    return not differences


def stopped_and_resumed(tree: Path, place: Path) -> tuple[Path, Path]:
    """Return the run that the old commit does whole, and the one that the working tree ends."""
    whole, cut = place / "whole", place / "cut"
    fedgist(tree, "run", "demo", *words((), ("train.num_rounds=40",)), "--out", str(whole))
    command = ["run", str(whole / "recipe.toml"), "--out", str(cut), "-q"]
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *command], env=environment(tree), stderr=subprocess.DEVNULL
    ) as running:
        while len(lines_of(cut / "rounds.jsonl")) < 2 and running.poll() is None:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
    rounds = len(lines_of(cut / "rounds.jsonl"))
    assert 0 < rounds < 40, f"the run was to be stopped in its rounds, not after {rounds}"
    fedgist(ROOT, "run", "--resume", str(cut))
    return whole, cut


def words(*groups: tuple[str, ...] | list[str]) -> list[str]:
    """Return settings as a command's words."""
    return [word for group in groups for setting in group for word in ("--set", setting)]


def fedgist(tree: Path, *command: str) -> None:
    """Run a command with the code of a tree."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *command, "-q"],
        env=environment(tree),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{tree.name}: fedgist {' '.join(command)}\n{done.stdout}{done.stderr}")


def environment(tree: Path) -> dict[str, str]:
    """Return the environment in which a tree's code is imported."""
    return {**os.environ, "PYTHONPATH": str(tree / "src")}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines, without times; none if it is not there."""
    if not path.exists():
        return []
    whole = [line for line in path.read_text("utf-8").splitlines(keepends=True) if line[-1] == "\n"]
    lines: list[dict[str, Any]] = [json.loads(line) for line in whole]
    for line in lines:
        for key in [key for key in line if key.startswith("time/")]:
            del line[key]
        # new: that a run went on, who a client is, over how many clients a mean is
        for key in [key for key in line if key in NEW or (key.startswith("eval/") and counts(key))]:
            del line[key]
    return lines


def counts(column: str) -> bool:
    """Return whether a column of an evaluation counts clients."""
    return column.endswith(("/count", "/missing", "_count"))


def lines_that_differ(old: Path, new: Path) -> list[str]:
    """Return what differs in the record."""
    found = []
    for file in ("rounds.jsonl", "clients.jsonl"):
        before, after = lines_of(old / file), lines_of(new / file)
        if len(before) != len(after):
            found.append(f"{file}: {len(before)} and {len(after)} lines")
        for number, pair in enumerate(zip(before, after, strict=False), 1):
            if json.dumps(pair[0]) != json.dumps(pair[1]):  # the order of keys counts
                keys = [k for k in {**pair[0], **pair[1]} if pair[0].get(k) != pair[1].get(k)]
                found.append(f"{file}, line {number}: {', '.join(keys) or 'order of keys'}")
    return found


def arrays_that_differ(old: Path, new: Path) -> list[str]:
    """Return what differs in the arrays of the last checkpoint."""
    file = Path("checkpoint") / "state.safetensors"
    before, after = load_file(old / file), load_file(new / file)
    found = [f"{name}: in one of them" for name in sorted(before.keys() ^ after.keys())]
    shared = sorted(before.keys() & after.keys())
    differing = [name for name in shared if not same(before[name], after[name])]
    return found + [f"{name}: other numbers, type or shape" for name in differing]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two arrays have the same bytes; NaN is equal to itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


if __name__ == "__main__":
    main()
