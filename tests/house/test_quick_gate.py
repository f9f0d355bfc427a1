"""What the quick gate leaves out: tests that exist, by the times that pytest reports."""

from __future__ import annotations

import re
from pathlib import Path

from longer import LONGER, longer

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_x" name="test_long[1]" time="0.3"/>
<testcase classname="tests.a.test_x" name="test_long[2]" time="0.1"/>
<testcase classname="tests.a.test_x" name="test_short" time="0.2"/>
<testcase classname="tests.cli.test_start" name="test_start" time="9.0"/>
</testsuite></testsuites>"""


def test_a_function_is_longer_if_one_of_its_cases_is(tmp_path: Path) -> None:
    (tmp_path / "times.xml").write_text(REPORT)
    assert longer(tmp_path / "times.xml") == ["tests/a/test_x.py::test_long"]


def test_what_is_left_out_exists() -> None:
    names = LONGER.read_text("utf-8").split()
    assert names == sorted(set(names))
    for name in names:
        file, _, function = name.partition("::")
        path = ROOT / file
        assert path.is_file(), f"{name}: run make longer"
        if file.startswith("tests/"):  # others are doctests
            assert re.search(rf"def {function}\(", path.read_text("utf-8")), (
                f"{name}: run make longer"
            )
