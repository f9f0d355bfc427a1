"""Does the first rounds of archived runs again, and compares them with the archive.

    python docs/scripts/replay.py [--every-run | --sample] [--jobs N] [--code FOLDER] [FOLDER ...]

The default is one seed of each row below ``docs/results/data``; ``--sample`` is one quick row of
each experiment. Two rounds are done, and one where a round takes over a minute. Each run uses its
recorded recipe and plan on one core of a CPU. Compared are the losses of training and the bytes of
each round; of a method that records no losses, what its tests found. The exit code is 1 if a loss
is off by over 1e-4, or bytes are others.

Runs that begin with weights from a file need that file in the folder where this is started, and
runs of models that are code beside a recipe need ``--code`` (with ``recipes/encoders`` for those
in the archive, and the libraries that this code imports).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # runs are side by side, one core each

import torch

from fedgist.errors import FedgistError, RecipeError, first_line
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe, make
from fedgist.runs import runner
from fedgist.runs.files.columns import DOWN_BYTES, TRAIN_LOSS, UP_BYTES
from fedgist.runs.files.record import Line
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import read_run
from fedgist.runs.round import Observer
from fedgist.runs.versions import is_current
from fedgist.world.server_context import ServerContext

DATA = Path(__file__).parents[1] / "results" / "data"
NEAR = 1e-4  # of a loss, or of 1 if the loss is below 1
NEAR_ON_A_GPU = 1e-2  # of a run on a GPU: its sums are in another order, and Adam amplifies
LONG_S = 60.0  # a round that takes longer is the only one
ROUNDS = 2
QUICK_S = 15.0  # a sample has no run whose rounds took longer on average
_BYTES = UP_BYTES, DOWN_BYTES
_TESTS = "eval/"  # begins the names of what tests found
State = Literal["same", "differs", "left out", "failed"]


@dataclass(frozen=True)
class Replay:
    """A run that was begun again: both losses of each round that was done, or both test results."""

    path: Path
    state: State
    losses: tuple[tuple[float, float], ...] = ()  # the archive's, and today's
    bytes_same: bool = True
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line."""
        pairs = ", ".join(f"{old:.6g} -> {new:.6g}" for old, new in self.losses)
        place = self.path.relative_to(DATA) if self.path.is_relative_to(DATA) else self.path
        others = "" if self.bytes_same else ", other bytes"
        return f"{self.state:8} {place} {self.seconds:.0f} s  {pairs}{others}{self.reason}"


class _EnoughError(Exception):
    """Enough rounds are done."""


class _FirstRounds(Observer):
    """Ends a run after its first rounds, and keeps their lines."""

    def __init__(self, last: int) -> None:
        self.last, self.lines, self.began_at = last, list[Line](), 0.0

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Start the clock of round 1."""
        del server, folder, done
        self.began_at = time.perf_counter()

    def finished_round(self, line: Line) -> None:
        """Keep the line of a round; end the run if it was the last one, or took long."""
        if line["round"] == 0:
            self.began_at = time.perf_counter()
            return
        self.lines.append(line)
        if line["round"] >= self.last or time.perf_counter() - self.began_at > LONG_S:
            raise _EnoughError


def replay(path: Path, code: Path | None = None) -> Replay:
    """Do the first rounds of an archived run again; ``code`` is the folder of its model's code."""
    run, began = read_run(path), time.perf_counter()
    if reason := _left_out(run, code):
        return Replay(path, "left out", reason=reason)
    seen = _FirstRounds(min(ROUNDS, run.planned))
    torch.set_num_threads(1)
    try:
        _begin(_on_one_core(run, code), seen)
    except FedgistError as error:
        return Replay(path, "failed", reason=first_line(error))
    archived = {line["round"]: line for line in run.rounds}
    both = [(archived[line["round"]], line) for line in seen.lines if line["round"] in archived]
    if not any(_figures(*pair) for pair in both):
        return Replay(path, "left out", reason=f"no loss or test in rounds 1 to {seen.last}")
    losses = tuple(figures for pair in both for figures in _figures(*pair))
    bytes_same = all(old.get(key) == new.get(key) for old, new in both for key in _BYTES)
    near = NEAR if run.recipe.get("engine", {}).get("device") == "cpu" else NEAR_ON_A_GPU
    same = bytes_same and all(abs(new - old) <= near * max(1.0, abs(old)) for old, new in losses)
    seconds = time.perf_counter() - began
    return Replay(path, "same" if same else "differs", losses, bytes_same, seconds=seconds)


def _figures(old: Line, new: Line) -> list[tuple[float, float]]:
    """Return a round's loss of training, the archive's and today's; without one, of its tests.

    Today's is NaN, which is near nothing, where nothing is found any longer.
    """
    if old.get(TRAIN_LOSS):
        names = [TRAIN_LOSS]
    elif any(key.startswith(_TESTS) for key in new):
        names = [key for key in old if key.startswith(_TESTS) and _is_number(old[key])]
    else:
        return []
    return [(old[name], new[name] if _is_number(new.get(name)) else math.nan) for name in names]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _begin(recipe: Recipe, seen: _FirstRounds) -> None:
    """Do a run's first rounds; a plan whose compiled kernels this machine lacks is chosen anew."""
    try:
        runner.run(recipe, Overrides(), seen)
    except _EnoughError:
        pass
    except RecipeError:
        if not any(plan.kernels for plan in recipe.engine.plans.values()):
            raise
        _begin(recipe.changed({"engine.plans": {}}), seen)


def _left_out(run: FinishedRun, code: Path | None = None) -> str:
    """Return why a run cannot be compared; an empty text if it can."""
    if not is_current(run.name, run.result):
        return "of an earlier version: to be done again"
    if run.public_noise is None and run.recipe.get("privacy", {}).get("unit", "none") != "none":
        return "its noise was drawn from the system"
    if ":" in str(run.recipe.get("model", {}).get("name", "")) and not code:
        return "its model is code beside its recipe (--code)"
    weights = str(run.recipe.get("model", {}).get("weights", ""))
    if weights and not Path(weights).exists():
        return f"the weights that it began with, {weights}, are not in this folder"
    return ""


def _on_one_core(run: FinishedRun, code: Path | None) -> Recipe:
    """Return a run's recipe without evaluations, for one core of a CPU."""
    engine = dict(run.recipe.get("engine", {})) | ({"code_folder": str(code)} if code else {})
    recipe = make(dict(run.recipe) | {"engine": engine})
    here: dict[str, object] = {"engine.workers": 1, "evaluate.every": run.planned}
    here |= {"engine.server_threads": 1}
    if recipe.engine.device != "cpu":
        here |= {"engine.device": "cpu", "engine.plans": {}}
    return recipe.changed(here)


def rows(places: Sequence[Path]) -> list[Path]:
    """Return the first seed of each row below some folders."""
    paths = sorted(path for place in places for path in place.rglob("seed-*.csv"))
    return list({path.parent: path for path in reversed(paths)}.values())[::-1]


def sample(data: Path = DATA) -> list[Path]:
    """Return the quickest row of each experiment, which is the folder above rows.

    A row in which clients share something comes first, and FedDBE last, because its regularization
    makes 1.5e-4 in two rounds of last bits, in which compiled kernels differ. Slow rows, those of a
    GPU, and those that cannot be compared are left out.
    """
    quickest: dict[Path, tuple[bool, float, Path]] = {}
    for path in rows([data]):
        run = read_run(path)
        cost = float(run.result.get("time/total_s", 0)) / max(1, run.done)
        on_cpu = run.recipe.get("engine", {}).get("device") == "cpu"
        if cost <= QUICK_S and on_cpu and not _left_out(run):
            mine = run.name in {"local", "centralized", "feddbe"}, cost, path
            here = path.parent.parent
            quickest[here] = min(quickest.get(here, mine), mine)
    return [path for *_, path in quickest.values()]


def replays(paths: Sequence[Path], jobs: int, code: Path | None = None) -> Iterator[Replay]:
    """Yield the replays of runs, several at a time."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        begun = [pool.submit(replay, path, code) for path in paths]
        yield from (done.result() for done in as_completed(begun))


def main(words: Sequence[str] | None = None) -> int:
    """Replay runs as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", type=Path, default=[DATA], metavar="FOLDER")
    parser.add_argument("--every-run", action="store_true", help="all seeds, not one of each row")
    parser.add_argument("--sample", action="store_true", help="a quick row of each experiment")
    parser.add_argument("--code", type=Path, metavar="FOLDER", help="of models that are code")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(words)
    paths = rows(given.places)
    if given.every_run:
        paths = sorted(path for place in given.places for path in place.rglob("seed-*.csv"))
    elif given.sample:
        paths = sample()
    states: list[State] = []
    for done in replays(paths, given.jobs, given.code):
        states.append(done.state)
        print(f"[{len(states)}/{len(paths)}] {done}", flush=True)
    print(", ".join(f"{state}: {states.count(state)}" for state in dict.fromkeys(states)))
    return 1 if {"differs", "failed"} & set(states) else 0


if __name__ == "__main__":
    sys.exit(main())
