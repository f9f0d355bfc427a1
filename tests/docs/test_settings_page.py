"""The page of all settings is made from the schema, and every setting has a description."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedgist.methods import METHODS
from schema_text import in_words, meanings
from settings_page import MORE, NAMES, PAGE, fields, page

ROOT = PAGE.parents[1]
EXAMPLES = [
    path.read_text("utf-8")
    for folder in ("docs", "recipes")
    for path in [*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.toml")]
    if path != PAGE and "generated" not in path.parts
]
ROWS = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| `")]


def test_the_page_of_settings_is_current() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python docs/scripts/settings_page.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_setting_has_a_description(row: list[str]) -> None:
    text = re.sub(r" ?\[More\]\(\S+\)\.$", "", row[-1])
    assert re.fullmatch(r"[A-Z`].*\.", text), "write it in the string below the field"
    assert len(text) > 20


@pytest.mark.parametrize(
    "key",
    [k for row in ROWS if (k := row[0].strip("`")).startswith(("model.", "method.", "objective."))],
)
def test_every_option_of_a_model_method_or_objective_is_set_in_an_example(key: str) -> None:
    """An option that nobody can be shown a use of goes."""
    name = re.escape(key.rpartition(".")[2])
    assert any(re.search(rf'\b{name}["`]* ?[=:]', text) for text in EXAMPLES)


def test_keys_with_links_and_names_are_settings() -> None:
    keys = {row[0].strip("`") for row in ROWS}
    assert {*MORE, *NAMES} <= keys


@pytest.mark.parametrize("key", MORE)
def test_links_of_settings_lead_to_a_heading(key: str) -> None:
    name, _, anchor = MORE[key].partition("#")
    text = (PAGE.parent / name).read_text("utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    assert not anchor or anchor in slugs


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_a_method_is_explained(name: str) -> None:
    assert set(meanings(METHODS[name])) >= set(fields(METHODS[name]))


def test_types_are_said_in_words() -> None:
    assert in_words(int | None) == "whole number"
    assert in_words(str | Path) == "path"
    assert in_words(tuple[int, ...]) == "list of whole numbers"
    assert in_words(dict[str, str | list[str]]) == "table of text or list of texts"
