"""The command of an exchange of facts, and what it writes: ``fedgist facts``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from fedgist.cli.network_commands import KitFolder, check_role, naming_this_command, need_network
from fedgist.cli.recipe_files import find_recipe
from fedgist.cli.shared_options import FEDERATE, app
from fedgist.errors import InputError, RecipeError
from fedgist.report.terminal.console import SheetView, console, words

if TYPE_CHECKING:
    from fedgist.world.facts.pooled import PooledFacts
    from fedgist.world.facts.question import Plan, Question

Table: TypeAlias = Mapping[str, object]
PAGES = (".html", ".htm")
COLUMNS = "columns"  # of [facts]
POOLED = "pooled"  # data.normalize of a recipe that has means

Ask = Annotated[
    Path, typer.Option("--ask", metavar="FILE", help="The question: columns, classes, figures.")
]


@app.command(rich_help_panel=FEDERATE)
def facts(
    kit: KitFolder,
    ask: Ask,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Write the recipe here.")
    ] = Path("facts.toml"),
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Write this recipe with the facts in it."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address to listen on. Default: every address, at the kit's port.",
        ),
    ] = None,
) -> None:
    """Ask all sites for facts about their rows, before any training.

    The server sends the question of FILE to the sites, which run fedgist site
    and wait for the run afterwards. Their sums give rows, missing values,
    means, deviations, histograms, classes, categories and correlations, as far
    as each site's policy.facts allows.

    It writes a recipe with the form of the rows, the classes, the means and the
    deviations, which fedgist server runs, and a page with all tables beside it.

    FILE is TOML. Settings stand above the columns; docs/federation.md has them
    all (sums, epsilon, correlations, quantiles, least_sites, target, ...):

        classes = ["ill", "well"]
        sums = "secure"
        [columns]
        age = { centre = 60, unit = 15, edges = [20, 40, 60, 80] }
        dose = "number"
        sex = ["f", "m"]

    Without centre and unit, as of dose, a first exchange finds them. With sums
    = "secure" the server sees totals alone; else it sees each site's sums. With
    epsilon each site adds noise.

    Examples
    --------
    fedgist facts kits/server --ask question.toml --out facts.toml
    fedgist facts kits/server --ask question.toml --recipe recipe.toml --out with-facts.toml
    fedgist server kits/server with-facts.toml
    """
    need_network("facts")
    from fedgist.federation.keys.kits import read_kit, split_address
    from fedgist.federation.server.facts import ask_sites
    from fedgist.world.facts.question import read_question

    opened = read_kit(kit)
    check_role(opened.role, "server", kit)
    question = read_question(ask)
    base = {} if recipe is None else raw_recipe(find_recipe(recipe))
    try:
        check_writing(question, base, out)
    except RecipeError as error:
        raise RecipeError(f"{recipe or ask}: {error}") from error
    screen = console(soft_wrap=True)
    host = listen or f"0.0.0.0:{split_address(opened.address)[1]}"  # sites dial in
    with naming_this_command():
        answer = ask_sites(opened, question, host, lambda text: screen.print(words(text)))
    count, every = len(answer.sites), len(answer.sites) + len(answer.absent)
    about = [f"Rows of {count} of {every} sites: {', '.join(answer.sites)}."]
    about += [f"{name} has no part: {why}." for name, why in answer.absent.items()]
    about += [f"{name}: {why}." for name, why in answer.differs.items()]
    about.append(f"{answer.received} bytes were received, and {answer.sent} sent.")
    write_facts(answer.plan, answer.facts, about, out, base)
    screen.print(words(f"the sites wait; train with: fedgist server {kit} {out}", "bold"))


def raw_recipe(path: Path) -> dict[str, object]:
    """Return a recipe's file as it is written."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: {error}") from error


def check_writing(question: Question, base: Table, out: Path | None) -> None:
    """Raise an error before sites are asked, if their answer could not be written."""
    from fedgist.recipe.reading import make
    from fedgist.world.facts.pooled import made_up

    if out is not None and (out.is_dir() or out.suffix.lower() in PAGES):
        raise InputError(f"--out {out}: name the recipe, a file such as facts.toml")
    make(with_facts(base, made_up(question)))


def with_facts(base: Table, found: Mapping[str, Table]) -> dict[str, object]:
    """Return a recipe with facts in it; means are left out if it normalizes otherwise."""
    data = base.get("data", {})
    if isinstance(data, Mapping) and data.get("normalize", POOLED) != POOLED:
        kept = {k: v for k, v in found["data"].items() if k not in {"mean", "std"}}
        found = {**found, "data": kept}
    return merged(base, found)


def write_facts(
    plan: Plan,
    found: PooledFacts,
    about: Sequence[str],
    out: Path | None,
    base: Table,
) -> None:
    """Print facts; write a page, and the recipe with them, if ``out`` names a file."""
    import tomli_w

    from fedgist.recipe.reading import make
    from fedgist.report.facts_page import page, sheets
    from fedgist.runs.files import atomic_files as files
    from fedgist.world.facts.pooled import as_recipe

    screen = console()
    for sheet in sheets(plan.question, found):
        screen.print(SheetView(sheet))
    for note in (*about, *found.notes):
        screen.print(words(note, "dim"))
    if out is None:
        return
    beside = out.with_suffix(PAGES[0])
    files.write(beside, page(plan.question, found, about))
    screen.print(words(f"wrote {beside}, with all tables"))
    table = with_facts(base, as_recipe(plan, found))
    make(table)  # a recipe that can be read
    head = "".join(f"# {line}\n" for line in about)
    files.write(out, f"{head}\n{tomli_w.dumps(table)}")
    screen.print(words(f"wrote {out}, a recipe with these facts"))


def merged(base: Table, further: Table) -> dict[str, object]:
    """Return two tables in one; what ``further`` says holds."""
    both = dict(base)
    for key, value in further.items():
        before = both.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and key != COLUMNS:
            both[key] = merged(before, value)
        else:  # columns have the order of the question, and there are no others
            both[key] = value
    return both
