"""Mutation check: each fault of mutants.toml must be caught by the test that it names.

``PYTHONPATH=tests python -m mutants`` copies the sources, makes one fault at a time in the copy and
runs the named test there. The working tree is only read. ``--only`` picks a fault by its number, or
several by a text in their sentence, file or test.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from commands import call

ROOT = Path(__file__).parents[1]
TABLE = "mutants.toml"
COPIED = ("src", "tests", "recipes", "pyproject.toml")
PASSED, FAILED = 0, 1  # exit codes of pytest: all others mean that it could not run the test


@dataclass(frozen=True)
class Mutant:
    """A fault: the sentence that says what is wrong, the change, and the test that must fail."""

    what: str
    file: str
    old: str
    new: str
    test: str

    def applied(self, text: str) -> str | None:
        """Return the text with the fault; None unless the old text occurs exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def read() -> list[Mutant]:
    """Return the faults of mutants.toml."""
    tables = tomllib.loads((ROOT / TABLE).read_text("utf-8"))["mutants"]
    return [Mutant(**table) for table in tables]


def chosen(mutants: Sequence[Mutant], only: str) -> dict[int, Mutant]:
    """Return the faults that ``only`` picks, by number from 1; all if it is empty."""
    numbered = dict(enumerate(mutants, 1))
    if only.isdecimal():
        return {number: m for number, m in numbered.items() if number == int(only)}
    return {n: m for n, m in numbered.items() if any(only in text for text in astuple(m))}


def copied(folder: Path) -> Path:
    """Copy into ``folder`` what tests need; fail unless Python then imports the copy."""
    place = folder.resolve()
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, place / name, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, place / name)
    words = [sys.executable, "-c", "import fedgist; print(fedgist.__file__)"]
    found = call(words, place, 0, **environment(place)).stdout.strip()
    assert Path(found).is_relative_to(place), f"Python imports {found}, not the copy in {place}"
    return place


def environment(place: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(place / "src")}


def tested(
    place: Path, tests: Sequence[str], more: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run tests in the copy; those marked slow are left out."""
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow")
    words = [sys.executable, "-m", "pytest", *options, *tests]
    return call(words, place, None, **environment(place), **more)


def passes_unchanged(place: Path, mutants: Sequence[Mutant]) -> bool:
    """Return whether all named tests run and pass without a fault; print the output if not."""
    tests = list(dict.fromkeys(m.test for m in mutants))
    done = tested(place, tests, {})
    passed = re.search(rf"^{len(tests)} passed in", done.stdout, re.MULTILINE)
    if done.returncode == PASSED and passed:
        return True
    print(done.stdout, done.stderr, f"{len(tests)} tests must pass, none slow or skipped", sep="\n")
    return False


def verdict(place: Path, mutant: Mutant) -> str:
    """Return ``killed`` if the named test fails with the fault, or what happened instead."""
    path = place / mutant.file
    text = mutant.applied(path.read_text("utf-8"))
    if text is None:
        return "old text not found once"
    path.write_text(text, "utf-8")
    try:
        code = tested(place, [mutant.test], {"PYTHONDONTWRITEBYTECODE": "1"}).returncode
    except subprocess.TimeoutExpired:
        return "HANGS"
    finally:
        shutil.copy2(ROOT / mutant.file, path)  # with its time, so that compiled files stay valid
    return {PASSED: "SURVIVED", FAILED: "killed"}.get(code, f"pytest ends with {code}")


def main() -> int:
    """Check the faults asked for; return 0 if all were killed."""
    parser = argparse.ArgumentParser(prog="mutants", description="Check the faults of mutants.toml")
    parser.add_argument("--only", default="", help="a number, or a text in sentence, file or test")
    mutants = chosen(read(), parser.parse_args().only)
    began, killed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="fedgist-mutants-") as folder:
        place = copied(Path(folder))
        if not mutants or not passes_unchanged(place, list(mutants.values())):
            return 1
        print(f"unchanged, all named tests pass: {time.monotonic() - began:.0f} s", flush=True)
        for number, mutant in mutants.items():
            start = time.monotonic()
            found = verdict(place, mutant)
            killed += found == "killed"
            seconds = time.monotonic() - start
            print(f"{number:2} {found} {seconds:4.1f} s  {mutant.file}: {mutant.what}", flush=True)
    print(f"{killed} of {len(mutants)} killed in {time.monotonic() - began:.0f} s")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
