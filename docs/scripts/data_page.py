"""Makes a page for each data source, and their list: python docs/scripts/data_page.py."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from fedgist.data.sources import SOURCES
from fedgist.data.sources.celeba import ADVICE as CELEBA
from fedgist.data.sources.cifar import CIFAR10, CIFAR100, CifarFiles
from fedgist.data.sources.femnist import ADVICE as FEMNIST
from fedgist.data.sources.loading import NO_OPTIONS
from fedgist.data.sources.mnist import FASHION_MNIST, MNIST, IdxFiles
from fedgist.data.sources.stackoverflow import ADVICE as STACKOVERFLOW
from fedgist.data.sources.wisdm import ADVICE as WISDM
from fedgist.options import options_of, shared_options
from schema_text import default, in_words, markdown, meanings, sections

PAGE = Path(__file__).parents[1] / "data.md"
FOLDER = PAGE.parent / "sources"
BEGIN, END = "<!-- made by docs/scripts/data_page.py -->\n", "<!-- end -->"  # of the list
KNOWN: dict[str, IdxFiles | CifarFiles] = {
    "mnist": MNIST,
    "fashion_mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
}
WHERE = {
    **{name: files.advice for name, files in KNOWN.items()},
    "celeba": CELEBA,
    "femnist": FEMNIST,
    "wisdm": WISDM,
}
WHERE |= {"stackoverflow": STACKOVERFLOW}


def pages() -> dict[str, str]:
    """Return the page of each source by its file's name."""
    return {f"{name}.md": _source(name, SOURCES[name]) + "\n" for name in SOURCES}


def with_list(page: str) -> str:
    """Return the page on data with the list of sources as the code has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| `data.name` | |", "|---|---|"]
    for name, source in SOURCES.items():
        summary = markdown(inspect.getdoc(source) or "").split("\n")[0]
        lines.append(f"| [`{name}`](sources/{name}.md) | {summary} |")
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def _source(name: str, source: Callable[..., Any]) -> str:
    parts = [f"# {name}", *_section(source, "")]
    if name in WHERE:
        where = WHERE[name].replace("ROOT", "$FEDGIST_DATA")
        parts.append(f"{where[:1].upper()}{where[1:]}.")
    options, _ = options_of(source, NO_OPTIONS)
    if options:
        shared = shared_options(source)
        meaning, hints = meanings(source), get_type_hints(source)
        hints |= get_type_hints(shared) if shared else {}
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
    return [re.sub(r"\]\(([\w-]+\.md)", r"](../\1", markdown(text))] if text else []


def example(source: Callable[..., Any]) -> str:
    """Return the recipe in a source's docstring."""
    block = sections(source)["Examples"].partition("::\n")[2]
    return inspect.cleandoc(block) + "\n"


def main() -> None:
    """Write the pages and the list."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")
    PAGE.write_text(with_list(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
