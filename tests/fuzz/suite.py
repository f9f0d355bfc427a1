"""The fuzz suite: ``python -m fuzz.suite --cases 10000`` (``make fuzz``), or one case again.

A case that fails is kept, with what fedgist was given, in a folder of its own; its name says how to
do it again: ``python -m fuzz.suite --door record --case 17``.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from fuzz.cases import Door, Outcome, little_room, outcome, peak
from fuzz.data_doors import data_file
from fuzz.python_door import wrong_arguments
from fuzz.recipe_doors import recipe_file, setting
from fuzz.run_doors import archive, checkpoint, record
from fuzz.study_door import study_file

DOORS = (
    Door("recipe", 200, recipe_file),
    Door("setting", 170, setting),
    Door("study", 50, study_file),
    Door("record", 110, record),
    Door("archive", 30, archive),
    Door("checkpoint", 100, checkpoint),
    Door("data", 240, data_file),
    Door("python", 100, wrong_arguments),
)


def do_case(door: Door, number: int, kept: Path) -> Outcome:
    """Do a case; if it fails, keep its folder as ``kept/DOOR-NUMBER``."""
    place = Path(tempfile.mkdtemp(prefix="fedgist-fuzz-"))
    here = Path.cwd()
    os.chdir(place)  # whatever a case writes by a relative path
    try:
        done = outcome(door, number, place)
    finally:
        os.chdir(here)
    if done.kind == "failed":
        (place / "failure.txt").write_text(done.text, "utf-8", "replace")
        folder = kept / f"{door.name}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(place, folder)
    shutil.rmtree(place, ignore_errors=True)
    return done


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="of all doors together")
    parser.add_argument("--door", choices=[door.name for door in DOORS], help="only this one")
    parser.add_argument("--case", type=int, help="only this one of the door")
    parser.add_argument("--first", type=int, default=0, help="number of each door's first case")
    parser.add_argument("--kept", type=Path, default=Path("fuzz-failures"))
    asked = parser.parse_args()
    asked.kept = asked.kept.resolve()
    return asked


def do_door(door: Door, cases: Iterable[int], kept: Path) -> Counter[str]:
    """Do some of a door's cases; say which failed, and how many were taken or refused."""
    kinds: Counter[str] = Counter()
    since = time.monotonic()
    for case in cases:
        done = do_case(door, case, kept)
        kinds[done.kind] += 1
        if done.kind == "failed":
            print(f"{door.name} {case}: {done.text.strip().splitlines()[-1][:200]}", flush=True)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("taken", "refused", "failed"))
    print(f"{door.name}: {counts}, {time.monotonic() - since:.0f} s", flush=True)
    return kinds


def main() -> int:
    """Do the cases, say what failed, and return the exit code."""
    asked = parsed()
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    begin, kinds = time.monotonic(), Counter[str]()
    with little_room():
        for door in DOORS:
            if asked.door not in {None, door.name}:
                continue
            number = asked.cases if asked.door else asked.cases * door.share // 1000
            cases = range(asked.first, asked.first + number)
            kinds += do_door(door, cases if asked.case is None else [asked.case], asked.kept)
    print(
        f"{kinds.total()} cases, {kinds['failed']} failed, {time.monotonic() - begin:.0f} s, "
        f"peak memory {peak() >> 20} MB"
    )
    return 1 if kinds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
