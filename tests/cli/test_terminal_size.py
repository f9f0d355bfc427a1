"""A size of the terminal that is no size changes nothing: every table is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import fedgist


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
