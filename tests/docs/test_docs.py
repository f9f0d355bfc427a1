"""What the documentation says is run, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from commands import fedgist
from fedgist.methods import METHODS
from fedgist.recipe.reading import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_tutorials_commands_run(tmp_path: Path) -> None:
    for block in blocks(ROOT / "docs/tutorial.md", "sh"):
        for line in block.strip().splitlines():
            fedgist(*shlex.split(line)[1:], cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_page_in_the_fixed_order(name: str) -> None:
    text = (ROOT / f"docs/methods/{name}.md").read_text()
    heads = [
        "**Idea.**",
        "**Messages a round.**",
        "**Differences from the paper",
        "**Reproduce.**",
        "**Known failures.**",
    ]
    places = [text.find(head) for head in heads]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("name", sorted({*METHODS} - {"centralized", "local"}))
def test_every_page_of_a_method_links_its_paper_or_says_where_it_appeared(name: str) -> None:
    head, _, _ = (ROOT / f"docs/methods/{name}.md").read_text().partition("**Messages")
    assert re.search(r"\[arXiv:(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/\1\)|Journal \d+", head)


def test_every_key_of_a_recipe_is_on_the_page_of_settings() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    for section, field in Recipe.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)  # a section may be optional
        keys = getattr(kinds[0], "model_fields", None)
        names = [f"{section}.{key}" for key in keys] if keys else [section]
        missing = [n for n in names if f"`{n}`" not in text]
        assert not missing
