"""The command of an exchange of facts, and what it writes: ``fedgist facts``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgist.cli.network_commands import KitFolder, check_role, naming_this_command, need_network
from fedgist.cli.recipe_files import find_recipe
from fedgist.cli.shared_options import FEDERATE, app
from fedgist.errors import InputError
from fedgist.report.terminal.console import SheetView, console, words

if TYPE_CHECKING:
    from fedgist.world.facts.pooled import PooledFacts
    from fedgist.world.facts.question import Plan

HEAD = "Facts about the rows of all sites, by fedgist facts."

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

    The server sends the question of FILE to the sites, which run fedgist site.
    One exchange of sums gives rows, missing values, means, deviations,
    histograms, class counts, counts of categories and correlations, as far as
    each site's policy.facts allows. With sums = "secure" the server sees totals
    alone, and with epsilon each site adds noise.

    It writes a recipe with the form of the rows, the classes, the means and the
    deviations: fedgist server runs it. A page with all tables is written beside
    it. Then the sites wait for the run.

    FILE names the columns, for example:

        classes = ["ill", "well"]
        [columns]
        age = { centre = 60, unit = 15, edges = [20, 40, 60, 80] }
        dose = "number"
        sex = ["f", "m"]

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
    base = None if recipe is None else raw_recipe(find_recipe(recipe))
    screen = console(soft_wrap=True)
    host = listen or f"0.0.0.0:{split_address(opened.address)[1]}"  # sites dial in
    with naming_this_command():
        answer = ask_sites(opened, question, host, lambda text: screen.print(words(text)))
    count, every = len(answer.sites), len(answer.sites) + len({*answer.refused, *answer.absent})
    about = [f"Rows of {count} of {every} sites: {', '.join(answer.sites)}."]
    about += [
        f"{name} has no part: {why}." for name, why in {**answer.absent, **answer.refused}.items()
    ]
    about += [f"{name} says that its rows differ: {why}." for name, why in answer.differs.items()]
    about.append(f"{answer.received} bytes were received, and {answer.sent} sent.")
    write_facts(answer.plan, answer.facts, about, out, base)
    screen.print(words(f"the sites wait; train with: fedgist server {kit} {out}", "bold"))


def raw_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's file as it is written."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: {error}") from error


def write_facts(
    plan: Plan,
    found: PooledFacts,
    about: Sequence[str],
    out: Path | None,
    base: Mapping[str, Any] | None = None,
) -> None:
    """Print facts; write the recipe, if ``out`` names a file, and the page beside it."""
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
    table = merged(base or {}, as_recipe(plan, found))
    make(table)  # a recipe that can be read
    head = "".join(
        f"# {line}\n" for line in ("Facts about the rows of all sites, by fedgist facts.", *about)
    )
    files.write(out, f"{head}\n{tomli_w.dumps(table)}")
    beside = out.with_suffix(".html")
    files.write(beside, page(plan.question, found, about))
    screen.print(words(f"wrote {out}, and {beside} with all tables"))


def merged(base: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tables in one; what ``further`` says holds."""
    both = dict(base)
    for key, value in further.items():
        before = both.get(key)
        nested = isinstance(value, Mapping) and isinstance(before, Mapping)
        whole = key == "columns"  # in the order of the question, and no others
        both[key] = merged(before or {}, value) if nested and not whole else value
    return both
