"""The page of the API lists what a user may import: each name exists, and none is left out."""

from __future__ import annotations

import pydoc
import re
from pathlib import Path

import pytest

import fedgist
import fedgist.core
import fedgist.core.method
from api_page import with_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text("utf-8")
NAMES = re.findall(r"^\| \[`(fedgist[\w.]+)`\]", PAGE, re.MULTILINE)
STABLE = re.findall(r"^``([\w.]+)`` +(.*)$", fedgist.core.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize(
    "name", sorted({*NAMES, *re.findall(r"`(fedgist\.[a-z_]+\.[\w.]+)", PAGE)})
)
def test_each_name_exists_and_says_what_it_is(name: str) -> None:
    described = pydoc.locate(name)
    assert described is not None
    assert name not in NAMES or described.__doc__


def test_the_page_is_current() -> None:
    assert with_rows(PAGE) == PAGE, "run: python docs/scripts/api_page.py"
    assert len(NAMES) > 50


def test_everything_that_fedgist_exports_is_on_the_page() -> None:
    missing = [name for name in fedgist.__all__ if f"fedgist.{name}" not in NAMES]
    assert not missing


def test_the_names_that_authors_of_methods_may_import_are_on_the_page() -> None:
    assert len(STABLE) > 10
    for name in fedgist.core.method.__all__:
        assert re.search(rf"\b{name}\b", PAGE), name
    for module, contents in STABLE:
        for name in re.findall(r"``(\w+)``", contents):
            assert re.search(rf"\b{name}\b", PAGE), f"{module}: {name}"
