"""The page on data is made from the code: every source, its options, its arrays, an example."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from fedgist.data.sources import SOURCES
from fedgist.data.sources.celeba import WHERE as CELEBA
from fedgist.data.sources.cifar import CIFAR10, CIFAR100, CifarFiles
from fedgist.data.sources.loading import NO_OPTIONS
from fedgist.data.sources.mnist import FASHION_MNIST, MNIST, IdxFiles
from fedgist.data.sources.stackoverflow import WHERE as STACKOVERFLOW
from fedgist.data.sources.wisdm import WHERE as WISDM
from fedgist.options import options_of
from fedgist.recipe.data_section import Data
from fedgist.recipe.reading import make

ROOT = Path(__file__).parents[2]
PAGE, RECIPES = ROOT / "docs" / "data.md", ROOT / "docs" / "recipes.md"
HEAD = "<!-- what follows is made by: python tests/docs/test_data_page.py -->\n"
KNOWN: dict[str, IdxFiles | CifarFiles] = {
    "mnist": MNIST,
    "fashion_mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
}
WHERE = {**{name: files.where for name, files in KNOWN.items()}, "celeba": CELEBA, "wisdm": WISDM}
WHERE |= {"stackoverflow": STACKOVERFLOW}
WORDS = {str: "text", Path: "path", float: "number", int: "whole number", bool: "true or false"}


def page() -> str:
    """What the code says about data, in Markdown."""
    rows = [line for line in RECIPES.read_text("utf-8").splitlines() if line.startswith("| `data.")]
    common = [row for row in rows if re.match(r"\| `data\.(\w+)", row)]
    names = [f"| [`{name}`](#{name}) | {text} |" for name, text in summaries().items()]
    parts = [
        "## Keys of every source",
        "\n".join(["| key | default | |", "|---|---|---|", *common]),
        "## The sources",
        "\n".join(["| `data.name` | |", "|---|---|", *names]),
        *(source_page(name, SOURCES[name]) for name in SOURCES),
    ]
    return "\n" + "\n\n".join(parts) + "\n"


def summaries() -> dict[str, str]:
    return {name: markdown(inspect.getdoc(SOURCES[name]) or "").split("\n")[0] for name in SOURCES}


def source_page(name: str, source: Callable[..., Any]) -> str:
    parts = [f"### {name}", *section(source, "")]
    if name in WHERE:
        where = WHERE[name].replace("ROOT", "$FEDGIST_DATA")
        parts.append(f"{where[:1].upper()}{where[1:]}.")
    options, _ = options_of(source, NO_OPTIONS)
    if options:
        meaning, hints = meanings(source), get_type_hints(source)
        lines = [
            f"| `{key}` | {in_words(hints[key])} | {default(value)} | {meaning[key]} |"
            for key, value in options.items()
        ]
        parts.append("\n".join(["| option | type | default | |", "|---|---|---|---|", *lines]))
    parts += [*section(source, "Notes"), *section(source, "References")]
    parts.append(f"```toml\n{example(source)}```")
    return "\n\n".join(parts)


def sections(source: Callable[..., Any]) -> dict[str, str]:
    """The sections of a NumPy-style docstring by their heading; what comes first is called ''."""
    parts = re.split(r"(?:^|\n)(\w+)\n-+\n", inspect.getdoc(source) or "")
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def section(source: Callable[..., Any], heading: str) -> list[str]:
    text = sections(source).get(heading, "").strip()
    return [markdown(text)] if text else []


def markdown(text: str) -> str:
    """Plain reStructuredText as Markdown: names in code, defined terms as a list."""
    listed = re.sub(r"^(``.*``)\n    (.*(?:\n    .*)*)", as_item, text, flags=re.MULTILINE)
    return listed.replace("``", "`")


def as_item(found: re.Match[str]) -> str:
    return f"- {found[1]}: " + re.sub(r"\n    ", "\n  ", found[2])


def meanings(source: Callable[..., Any]) -> dict[str, str]:
    """What the docstring says of each parameter, in one line."""
    found = re.findall(
        r"^(\w+)\n((?:    .*\n?|\n)+)", sections(source).get("Parameters", ""), re.MULTILINE
    )
    return {name: markdown(" ".join(text.split())) for name, text in found}


def example(source: Callable[..., Any]) -> str:
    block = sections(source)["Examples"].partition("::\n")[2]
    return inspect.cleandoc(block) + "\n"


def in_words(kind: Any) -> str:
    """A type hint as a reader of recipes says it."""
    parts = [part for part in get_args(kind) if part is not NoneType]
    origin = get_origin(kind)
    if kind == str | Path:
        return "path"
    if origin in {Union, UnionType}:
        return " or ".join(in_words(part) for part in parts if not (part is Path and str in parts))
    if origin is Literal:
        return " or ".join(f'`"{part}"`' for part in parts)
    if origin is list:
        return f"list of {in_words(parts[0])}s"
    if origin is dict:
        return f"table of {in_words(parts[1])}"
    return WORDS[kind]


def default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "needed"
    return "" if value is None else f"`{json.dumps(value)}`"


def test_the_page_on_data_is_current() -> None:
    _, mark, made = PAGE.read_text("utf-8").partition(HEAD)
    assert mark
    assert made == page(), "run: python tests/docs/test_data_page.py"


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


def test_every_key_of_the_section_is_there() -> None:
    for key in Data.model_fields:
        assert f"`data.{key}`" in page()


if __name__ == "__main__":
    head, _, _ = PAGE.read_text("utf-8").partition(HEAD)
    PAGE.write_text(head + HEAD + page(), "utf-8")
