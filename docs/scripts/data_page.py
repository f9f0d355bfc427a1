"""Makes the list of sources on the page on data: python docs/scripts/data_page.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from fedgist.data.sources import SOURCES
from fedgist.data.sources.celeba import ADVICE as CELEBA
from fedgist.data.sources.cifar import CIFAR10, CIFAR100, CifarFiles
from fedgist.data.sources.loading import NO_OPTIONS
from fedgist.data.sources.mnist import FASHION_MNIST, MNIST, IdxFiles
from fedgist.data.sources.stackoverflow import ADVICE as STACKOVERFLOW
from fedgist.data.sources.wisdm import ADVICE as WISDM
from fedgist.options import options_of
from schema_text import default, in_words, markdown, meanings, sections

PAGE = Path(__file__).parents[1] / "data.md"
HEAD = "<!-- what follows is made by: python docs/scripts/data_page.py -->\n"
KNOWN: dict[str, IdxFiles | CifarFiles] = {
    "mnist": MNIST,
    "fashion_mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
}
WHERE = {**{name: files.advice for name, files in KNOWN.items()}, "celeba": CELEBA, "wisdm": WISDM}
WHERE |= {"stackoverflow": STACKOVERFLOW}


def page() -> str:
    """Return what the code says about sources, in Markdown."""
    names = [f"| [`{name}`](#{name}) | {text} |" for name, text in _summaries().items()]
    parts = [
        "## The sources",
        "\n".join(["| `data.name` | |", "|---|---|", *names]),
        *(_source(name, SOURCES[name]) for name in SOURCES),
    ]
    return "\n" + "\n\n".join(parts) + "\n"


def _summaries() -> dict[str, str]:
    return {name: markdown(inspect.getdoc(SOURCES[name]) or "").split("\n")[0] for name in SOURCES}


def _source(name: str, source: Callable[..., Any]) -> str:
    parts = [f"### {name}", *_section(source, "")]
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
    parts += [*_section(source, "Notes"), *_section(source, "References")]
    parts.append(f"```toml\n{example(source)}```")
    return "\n\n".join(parts)


def _section(source: Callable[..., Any], heading: str) -> list[str]:
    text = sections(source).get(heading, "").strip()
    return [markdown(text)] if text else []


def example(source: Callable[..., Any]) -> str:
    """Return the recipe in a source's docstring."""
    block = sections(source)["Examples"].partition("::\n")[2]
    return inspect.cleandoc(block) + "\n"


def main() -> None:
    """Write the list of sources into the page."""
    head, _, _ = PAGE.read_text("utf-8").partition(HEAD)
    PAGE.write_text(head + HEAD + page(), "utf-8")


if __name__ == "__main__":
    main()
