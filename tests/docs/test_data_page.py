"""The list of sources on the page on data is made from the code, and is complete."""

from __future__ import annotations

import re
import tomllib

import pytest

from data_page import HEAD, KNOWN, PAGE, example, page
from fedgist.data.sources import SOURCES
from fedgist.data.sources.loading import NO_OPTIONS
from fedgist.options import options_of
from fedgist.recipe.reading import make
from schema_text import meanings, sections


def test_the_page_on_data_is_current() -> None:
    _, mark, made = PAGE.read_text("utf-8").partition(HEAD)
    assert mark
    assert made == page(), "run: python docs/scripts/data_page.py"


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
