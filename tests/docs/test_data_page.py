"""The pages of data sources and their list are made from the code, and are complete."""

from __future__ import annotations

import re
import tomllib

import pytest

from data_page import FOLDER, KNOWN, PAGE, example, pages, with_list
from fedgist.data.sources import SOURCES
from fedgist.data.sources.loading import NO_OPTIONS
from fedgist.options import options_of
from fedgist.recipe.reading import make
from schema_text import meanings, sections

AGAIN = "run: python docs/scripts/data_page.py"


def test_the_pages_of_sources_are_current() -> None:
    written = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir()}
    assert written == pages(), AGAIN
    assert len(written) == len(SOURCES) > 10


def test_the_list_of_sources_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert with_list(page) == page, AGAIN
    assert f"[`{next(iter(SOURCES))}`](sources/" in page


@pytest.mark.parametrize("name", SOURCES)
def test_every_option_of_a_source_is_explained(name: str) -> None:
    options, _ = options_of(SOURCES[name], NO_OPTIONS)
    assert set(options) <= set(meanings(SOURCES[name]))
    assert "ormalization" in sections(SOURCES[name])["Notes"]


@pytest.mark.parametrize("name", SOURCES)
def test_the_examples_of_sources_are_valid_recipes(name: str) -> None:
    recipe = make(tomllib.loads(example(SOURCES[name])))
    assert recipe.data.name == name


@pytest.mark.parametrize("name", KNOWN)
def test_known_moments_are_those_of_the_code(name: str) -> None:
    files, text = KNOWN[name], sections(SOURCES[name])["Notes"]
    known = (files.mean, files.std)
    numbers = [n for part in known for n in (part if isinstance(part, tuple) else (part,))]
    assert [float(number) for number in re.findall(r"0\.\d+", text)] == numbers
