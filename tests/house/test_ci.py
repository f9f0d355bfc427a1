"""What CI runs: both parts of the tests, and what it says of the part that may be cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import call

ROOT = Path(__file__).parents[2]
PASSED = "[gw0] [ 50%] PASSED tests/test_a.py::test_one[a b] "
FAILED = "[gw1] [100%] FAILED tests/test_a.py::test_two "
OTHER = "tests/test_a.py::test_two"


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)


def run(place: Path, test: str, rest: str, code: int, limit: int = 900) -> list[str]:
    """Run CI's script where ``make`` is a stand-in that does this for its two targets."""
    (place / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", place / ".ci")
    script(place / "bin" / "chromium")
    cases = ('case "${@: -1}" in', f"test) {test};;", f"test-rest) {rest};;", "esac")
    script(place / "bin" / "make", *cases)
    names = f"echo 'tests/test_a.py::test_one[a b]'; echo {OTHER}"
    script(place / ".venv" / "bin" / "python", names)
    env = {"PATH": f"{place / 'bin'}:/usr/bin:/bin", "CI_LIMIT_S": str(limit)}
    return call([place / ".ci" / "run"], place, code, **env).stdout.splitlines()


def test_all_tests_may_fit(tmp_path: Path) -> None:
    said = run(tmp_path, "true", f"echo '{PASSED}'", 0)
    assert said[0].startswith("make test: passed in ")
    assert said[-1].startswith("make test-rest: all 1 tests ended and none failed")


@pytest.mark.parametrize(
    ("test", "rest"),
    [
        ("exit 1", "true"),
        ("true", f"echo '{FAILED}'; exit 1"),
        ("true", "exit 2"),  # nothing could be collected
        ("true", f"echo '{FAILED}'; exec sleep 900"),  # failed, then cut
    ],
)
def test_a_failure_of_either_part_fails_the_run(tmp_path: Path, test: str, rest: str) -> None:
    said = run(tmp_path, test, rest, 1, limit=2)
    assert said[-1:] == [] if test != "true" else said[-1].startswith("make test-rest: failed")


@pytest.mark.slow
def test_what_was_cut_is_named_and_fails_nothing(tmp_path: Path) -> None:
    said = run(tmp_path, "true", f"echo '{PASSED}'; exec sleep 900", 0, limit=2)
    assert said[-2] == f"cut: {OTHER}"
    assert said[-1].startswith("make test-rest: 1 of 2 tests ended in 2 s and none failed")


def test_without_time_left_the_second_part_is_said_to_be_left_out(tmp_path: Path) -> None:
    said = run(tmp_path, "true", "exit 1", 0, limit=0)
    assert said[-1].startswith("make test-rest: not run")
