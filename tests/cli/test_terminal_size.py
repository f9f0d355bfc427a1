"""A size of the terminal that is no size changes nothing: every table is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import fedgist


@pytest.mark.slow
@pytest.mark.parametrize("key", ["COLUMNS", "LINES"])
def test_sizes_that_are_none_are_as_if_they_were_not_given(tmp_path: Path, key: str) -> None:
    # seen: COLUMNS=0, as some schedulers set it, printed nothing, with exit code 0
    for words in (("list", "methods"), ("partition", "demo"), ("show", "--help")):
        expected = fedgist(*words, cwd=tmp_path, **{"COLUMNS": "80", key: "80"}).stdout
        for size in ("0", "00", "-5", "abc", "", " ", "\u00b2", "1.5", "99999999999"):
            done = fedgist(*words, cwd=tmp_path, **{"COLUMNS": "80", key: size})
            assert done.stdout == expected, (words, size)
    if key == "COLUMNS":
        narrow = fedgist("list", "methods", cwd=tmp_path, COLUMNS="40").stdout
        assert max(map(len, narrow.splitlines())) <= 40, "a size is used"
