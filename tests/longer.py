"""Writes which tests the quick gate leaves out: python tests/longer.py TIMES.xml (make longer)."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

MOST_S = 0.2
LONGER = Path(__file__).with_name("longer.txt")
ALWAYS = "tests/cli/test_start.py"  # what commands load before there is work


def longer(report: Path) -> list[str]:
    """Return the functions of which a case took over ``MOST_S``, by pytest's report of times."""
    names = set()
    for case in ET.parse(report).iter("testcase"):  # it is pytest's
        file = case.get("classname", "").replace(".", "/") + ".py"
        if float(case.get("time", 0)) > MOST_S and file != ALWAYS:
            names.add(f"{file}::{case.get('name', '').partition('[')[0]}")
    return sorted(names)


if __name__ == "__main__":
    LONGER.write_text("\n".join(longer(Path(sys.argv[1]))) + "\n", "utf-8")
