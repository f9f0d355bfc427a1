"""Output in ASCII: every sign that the program prints has another, and nothing ends there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedgist
from commands import call
from fedgist.report.terminal.console import PLAIN

SOURCES = Path(fedgist.__file__).parent


def test_every_sign_of_a_text_output_has_a_plain_one() -> None:
    printed = ["report", "cli"]
    signs = {
        sign
        for room in printed
        for path in (SOURCES / room).glob("*.py")
        for sign in path.read_text("utf-8")
        if not sign.isascii()
    }
    assert signs <= PLAIN.keys()
    assert all(plain.isascii() for plain in PLAIN.values())


@pytest.mark.slow
def test_tables_and_curves_are_shown_where_only_ascii_can_be(tmp_path: Path) -> None:
    # seen: `show` ended with exit code 2 at the curve
    recipe = {
        "method": {"name": "local"},
        "data": {"train_rows": 60},
        "train": {"num_rounds": 2},
        "engine": {"workers": 1, "cohort_size": 5},
    }
    for seed in (0, 1):
        fedgist.run(recipe | {"seed": seed}, out=tmp_path / "runs" / f"seed-{seed}")
    for command, sign in (("show", " o local"), ("compare", " +- ")):
        words = [sys.executable, "-m", "fedgist.cli", command, tmp_path / "runs"]
        done = call(
            *(words, tmp_path, 0),
            PYTHONUTF8="0",
            PYTHONCOERCECLOCALE="0",
            PYTHONIOENCODING="",
            LC_ALL="C",
        )
        assert done.stdout.isascii()
        assert sign in done.stdout
