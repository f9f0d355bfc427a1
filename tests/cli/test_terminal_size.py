"""Sizes of the terminal: one that is no size changes nothing, and texts fill the lines."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commands import fedgist
from fedgist.cli.main import app
from fedgist.cli.shared_options import COMMAND_ORDER


@pytest.mark.slow
@pytest.mark.parametrize("words", [("list", "methods"), ("run", "--help")])
def test_sizes_that_are_none_are_as_if_they_were_not_given(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    # seen: COLUMNS=0, as some schedulers set it, printed nothing, with exit code 0
    expected = fedgist(*words, cwd=tmp_path, COLUMNS="80").stdout
    for size in ("0", "00", "-5", "abc", "\u00b2", "99999999999"):
        done = fedgist(*words, cwd=tmp_path, COLUMNS=size, LINES=size)
        assert done.stdout == expected, size
    narrow = fedgist(*words, cwd=tmp_path, COLUMNS="40").stdout
    assert max(map(len, narrow.splitlines())) <= 40, "a size is used"


@pytest.mark.parametrize("name", COMMAND_ORDER)
def test_the_help_of_a_command_fills_the_lines(name: str) -> None:
    """Seen: sentences that broke in the middle of a line, where the source does."""
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, "--help"]).output
    prose = shown.partition("Examples")[0].partition("╭")[0].splitlines()
    for line, below in itertools.pairwise(prose):
        if line.startswith("     "):  # lines of a file stay as they are
            continue
        first, *_ = [*below.split(), ""]
        assert not line.strip() or not first or len(line.rstrip()) + len(first) >= 78, line
