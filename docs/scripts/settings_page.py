"""Makes the page of all settings from the schema: python docs/scripts/settings_page.py."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel

from fedgist.core.objectives.metrics import CHOSEN_METRICS, OBJECTIVES
from fedgist.data import PARTITIONS
from fedgist.methods import METHODS
from fedgist.models import MODELS
from fedgist.options import options_of
from fedgist.recipe.model_factories import sizes_of
from fedgist.recipe.schema import Recipe
from fedgist.recipe.section_options import OF_THE_TASK, PARTS
from fedgist.world.client_settings import OwnTraining
from schema_text import default, in_words, markdown, meanings

PAGE = Path(__file__).parents[1] / "settings.md"
LEAD = """# All settings

This page lists every key of a recipe: its default, its values, and what it does. It is for those
who write recipes; [Recipes](recipes.md) explains how the keys work together.

`fedgist run RECIPE --set section.key=value` changes a key for one run. An empty default means that
nothing is set. The page is made from the code by `python docs/scripts/settings_page.py`.
"""
#: Where a page says more about a key.
MORE = {
    "data.name": "data.md#the-sources",
    "data.normalize": "data.md#normalization",
    "data.augment": "methods/flesd.md",
    "data.public": "recipes.md#public-data",
    "data.words": "recipes.md#texts",
    "clients.graph": "recipes.md#peers",
    "clients.pools": "recipes.md#pools",
    "clients.settings": "recipes.md#settings-of-single-clients",
    "model.name": "python.md#model",
    "model.project": "recipes.md#models-of-different-widths",
    "model.weights": "recipes.md#pretrained-models",
    "model.frozen": "lora.md",
    "model.adapters": "lora.md",
    "method.name": "recipes.md#several-methods-in-one-recipe",
    "objective.name": "tasks/index.md",
    "objective.metrics": "recipes.md#metrics",
    "train.lr_schedule": "recipes.md#training",
    "train.class_weights": "recipes.md#training",
    "train.precision": "recipes.md#training",
    "privacy.unit": "privacy.md",
    "privacy.accounting": "privacy.md#accounting",
    "tune.epsilon": "privacy.md#several-runs-and-searches",
    "engine.code_folder": "recipes.md#your-own-code",
    "evaluate.keep": "recipes.md#which-round-counts",
    "evaluate.patience": "recipes.md#which-round-counts",
}
#: The values of keys that are names.
NAMES = {
    "data.name": "[sources](data.md#the-sources)",
    "data.public.name": "[sources](data.md#the-sources)",
    "partition.name": ", ".join(f"`{name}`" for name in PARTITIONS),
    "model.name": ", ".join(f"`{name}`" for name in MODELS),
    "method.name": "[methods](which-method.md#the-methods)",
    "objective.name": ", ".join(f"`{name}`" for name in OBJECTIVES),
    "objective.metrics": ", ".join(f"`{name}`" for name in CHOSEN_METRICS),
}
#: Tables whose names a user chooses, by the key of the table.
NAMED = {"evaluate.sets": "NAME", "engine.plans": "ARCHITECTURE"}


@dataclass(frozen=True)
class Setting:
    """One line of the page: a key, whose it is, its default and values, and what it does."""

    key: str
    default: str
    values: str
    text: str
    of: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the line of the table."""
        text = self.text + (f" [More]({MORE[self.key]})." if self.key in MORE else "")
        whose = [", ".join(f"`{name}`" for name in self.of)] if self.of else []
        cells = [f"`{self.key}`", *whose, self.default, NAMES.get(self.key, self.values), text]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """Return the page."""
    parts = [LEAD, table(of_section("", Recipe))]
    for name, kind in get_type_hints(Recipe).items():
        if name in Recipe.model_fields and (inner := table_in(kind)):
            parts += [*section(name, inner), *OPTIONS.get(name, list)()]
    return "\n".join(parts)


def section(name: str, kind: type) -> Iterator[str]:
    """Yield a section of recipes: its heading, its keys, and the tables in it."""
    lead = markdown(inspect.getdoc(kind) or "").replace("\n\n", " ").replace("\n", " ")
    yield f"{'###' if '.' in name else '##'} {name}\n\n{textwrap.fill(lead, 100)}\n"
    yield table(of_section(name, kind))
    for key, (hint, _) in fields(kind).items():
        if inner := table_in(hint):
            place = f"{name}.{key}"
            yield from section(".".join(filter(None, [place, NAMED.get(place, "")])), inner)


def of_section(name: str, kind: type) -> Iterator[Setting]:
    """Yield the keys of a section in the order of the schema; ``""`` is a recipe's top."""
    known = meanings(kind)
    for key, (hint, value) in fields(kind).items():
        if name or not table_in(hint):
            whole = f"{name}.{key}" if name else key
            yield Setting(whole, default(value), in_words(hint), known.get(key, ""))


def fields(kind: type) -> dict[str, tuple[Any, object]]:
    """Return the type and the default of each field of a section or a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    if issubclass(kind, BaseModel):
        return {name: (hints[name], field.default) for name, field in kind.model_fields.items()}
    options, _ = options_of(kind)
    return {name: (hints[name], value) for name, value in options.items()}


def table_in(kind: Any) -> type | None:
    """Return the table that a type is or holds: a section, or a dataclass."""
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)):
        return kind
    return next((found for part in get_args(kind) if (found := table_in(part))), None)


def table(settings: Iterable[Setting], of: str = "") -> str:
    """Return a table of settings; ``of`` is the heading of the column that says whose they are."""
    heads = ["key", *filter(None, [of]), "default", "values", "what it does"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*rows, *(setting.line() for setting in settings), ""])


def options(
    name: str, registry: Mapping[str, Callable[..., Any]], aside: Callable[[Any], Sequence[str]]
) -> list[Setting]:
    """Return the options of all that a registry holds; equal ones of several names are one line."""
    lines: dict[tuple[str, ...], Setting] = {}
    for one in registry:
        known, hints = meanings(registry[one]), get_type_hints(registry[one], include_extras=True)
        for key, value in options_of(registry[one], aside(registry[one]))[0].items():
            text, words = known.get(key, ""), in_words(hints[key])
            same = (key, text, words, default(value))
            line = lines.get(same, Setting(f"{name}.{key}", default(value), words, text))
            lines[same] = replace(line, of=(*line.of, one))
    return [*lines.values()]


def of_partitions() -> Iterator[str]:
    """Yield the options of partitions."""
    yield "### Options of partitions\n"
    yield table(options("partition", PARTITIONS, lambda _: PARTS), of="partition")


def of_models() -> Iterator[str]:
    """Yield the options of models."""
    yield "### Options of models\n"
    yield table(options("model", MODELS, sizes_of), of="model")


def of_objectives() -> Iterator[str]:
    """Yield the options of objectives."""
    yield "### Options of objectives\n"
    yield table(options("objective", OBJECTIVES, lambda _: OF_THE_TASK), of="objective")


def of_methods() -> Iterator[str]:
    """Yield the options of each method, and the tables that several methods share."""
    shared: dict[tuple[str, type], list[str]] = {}
    bare = [name for name, kind in METHODS.items() if not fields(kind)]
    yield f"Methods without options: {', '.join(f'`{name}`' for name in bare)}.\n"
    for name in (name for name in METHODS if name not in bare):
        yield f"### {name}\n\nOptions of the method [{name}](methods/{name}.md).\n"
        own = options("method", {name: METHODS[name]}, lambda _: ())
        yield table(replace(setting, of=()) for setting in own)
        for key, (hint, _) in fields(METHODS[name]).items():
            if inner := table_in(hint):
                shared.setdefault((key, inner), []).append(name)
        if single := getattr(METHODS[name], "own_settings", None):
            yield f"Settings of single clients with {name}:\n"
            yield table(of_section("clients.settings.NAME", single))
    for (key, kind), names in shared.items():
        yield f"### method.{key} of {', '.join(names)}\n"
        yield table(_with_defaults(of_section(f"method.{key}", kind), key, names))


def _with_defaults(lines: Iterable[Setting], key: str, methods: list[str]) -> Iterator[Setting]:
    """Yield the lines of a table with the defaults that these methods give it."""
    given = [fields(METHODS[name])[key][1] for name in methods]
    for line in lines:
        found = [default(getattr(one, line.key.rpartition(".")[2])) for one in given]
        yield replace(line, default=", ".join(dict.fromkeys(found)))


def of_single_clients() -> Iterator[str]:
    """Yield how long single clients train."""
    yield from section("clients.settings.NAME.train", OwnTraining)


OPTIONS: dict[str, Callable[[], Iterable[str]]] = {
    "clients": of_single_clients,
    "partition": of_partitions,
    "model": of_models,
    "method": of_methods,
    "objective": of_objectives,
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
