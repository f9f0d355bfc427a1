"""Fills the tables of names on the page of the API: python docs/scripts/api_page.py.

A row begins with the name of something that can be imported. The rest, a link to its code and the
first sentence of its docstring, is written by this program.
"""

from __future__ import annotations

import inspect
import os
import pydoc
import re
from pathlib import Path

from schema_text import markdown, one_line

PAGE = Path(__file__).parents[1] / "api.md"
HEAD = "| name | |\n|---|---|\n"
ROW = re.compile(r"^\| \[?`(fedgist[\w.]+)`.*\|$", re.MULTILINE)


def with_rows(page: str) -> str:
    """Return the page with the rows of its tables of names as the code has them."""
    tables = re.compile(re.escape(HEAD) + r"(?:\| .*\n)+")
    return tables.sub(lambda table: ROW.sub(lambda row: row_of(row[1]), table[0]), page)


def row_of(name: str) -> str:
    """Return the row of a name."""
    described = pydoc.locate(name)
    assert described is not None, name
    file = inspect.getsourcefile(inspect.getmodule(described) or described)  # type: ignore[arg-type]
    link = os.path.relpath(file or "", PAGE.parent)
    sentence = (inspect.getdoc(described) or "").partition("\n\n")[0]
    text = one_line(markdown(sentence)).replace("|", "\\|")
    return f"| [`{name}`]({link}) | {text} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_rows(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
