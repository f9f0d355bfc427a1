"""Commands that start and change runs: run, forget, partition."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgist.cli.recipe_files import NONE_GIVEN, find_recipe
from fedgist.cli.shared_options import (
    FEDERATE,
    START,
    DataRoot,
    RecipeOrDemo,
    SeedOption,
    SettingsOption,
    TrackOption,
    app,
    figure_option,
    refuse_unread,
)
from fedgist.cli.value_origins import naming_origins
from fedgist.errors import InputError, RecipeError, listed, printable
from fedgist.recipe.reading import Recipe, read
from fedgist.report.formatting import Sheet, bytes_text
from fedgist.report.tables.run_tables import overview
from fedgist.report.terminal.console import SheetView, console, say, words
from fedgist.report.tracking.tracker import Tracker
from fedgist.report.tracking.tracker_names import trackers
from fedgist.runs.files.record import RECIPE, to_json
from fedgist.runs.files.run_directory import as_folder
from fedgist.runs.finished import run_reader

if TYPE_CHECKING:
    from fedgist.runs.round import Observer
    from fedgist.world.world import World

FEW_CLASSES = 5  # whose rows are shown as numbers
OF_RESUMED = frozenset(  # parameters of ``fedgist run`` that a resumed run reads
    {
        *("resume", "rounds", "settings", "seed", "seeds"),
        *("track", "data_root", "quiet", "as_json"),
    }
)

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a run that is already in the folder.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON per round, and one for the result.")
]


@app.command(rich_help_panel=START)
@naming_origins
def run(
    context: typer.Context,
    recipe: RecipeOrDemo = None,
    settings: SettingsOption = None,
    seed: SeedOption = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of seeds, counted from the recipe's seed. Each seed gets its own folder.",
        ),
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. Default: runs/RECIPE-METHOD.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in DIR.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="With --resume: the new, larger number of rounds."),
    ] = None,
    overwrite: Overwrite = False,
    full_digest: Annotated[
        bool,
        typer.Option(
            "--full-digest",
            help="When the run is resumed later, check every byte of large data files, not only "
            "their size and time.",
        ),
    ] = False,
    track: TrackOption = None,
    data_root: DataRoot = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe. Without one, run the demo: FedLog on scikit-learn's digits, twenty clients.

    Examples
    --------
    fedgist run recipes/fedlog/mnist.toml --seeds 3
    fedgist run --set method.name=fedavg --set train.num_rounds=50
    fedgist run --resume runs/mnist-fedlog
    """
    _check_mode(context, rounds, resume)
    path, settings = find_recipe(recipe), _with_seed(settings, seed)
    parsed = read(path, settings) if resume is None else None
    chosen = trackers(track)
    from fedgist.cli import seeded_runs

    place = resume or out or _default_folder(path, parsed)
    with _observing(chosen, place, quiet=quiet, as_json=as_json) as observer:
        if parsed is None:
            results = seeded_runs.resume(place, settings, seeds, data_root, observer, rounds)
        else:
            if recipe is None:
                observer.note(NONE_GIVEN)
            flags = {"overwrite": overwrite, "full_digest": full_digest}
            results = seeded_runs.start(parsed, seeds, place, data_root, observer, **flags)
        folders, of_actors = [resume] if resume else [], 0
        for result in results:
            assert result.folder is not None  # every run of the command line has a folder
            folders += [] if resume else [result.folder]
            of_actors = max(of_actors, getattr(result.server_run.engine, "peak_bytes", 0))
            if as_json:
                sys.stdout.write(
                    to_json({"folder": str(result.folder), "result": result.summary}) + "\n"
                )
    if not quiet and not as_json:
        _print_overview(folders, of_actors)


@contextlib.contextmanager
def _observing(
    trackers: Mapping[str, Tracker], place: Path, *, quiet: bool, as_json: bool
) -> Iterator[Observer]:
    """Yield an observer that shows the runs and sends their rounds to trackers.

    A warning about a tracker is shown in any case, and ``quiet`` hides all other notes.
    """
    from fedgist.report.terminal.progress import observing
    from fedgist.report.tracking.live_tracking import tracking

    warn = functools.partial(say, error=True) if quiet else None
    with (
        observing(console(), quiet=quiet, as_json=as_json) as shown,
        tracking(shown, trackers, place, warn) as observer,
    ):
        yield observer


def _print_overview(folders: Sequence[Path], of_actors: int) -> None:
    screen = console()
    runs, problems = run_reader.readable(run_reader.find(folders))
    for problem in problems:
        screen.print(words(f"! {problem}", "yellow"))
    screen.print(SheetView(overview(runs)))
    screen.print(words(peak_memory(of_actors), "dim"))
    shown = {str(path.parent if path.name.startswith("seed-") else path) for path in folders}
    screen.print(words("Next: " + shlex.join(["fedgist", "show", *sorted(shown)]), "dim"))


def _default_folder(path: Path, recipe: Recipe | None) -> Path:
    method = recipe.method.name if recipe else ""
    return Path("runs") / as_folder(f"{path.stem}-{method}")


def _with_seed(settings: list[str] | None, seed: int | None) -> list[str]:
    return [*(settings or []), *([] if seed is None else [f"seed={seed}"])]


def _check_mode(context: typer.Context, rounds: int | None, resume: Path | None) -> None:
    """Refuse options of ``fedgist run`` that a new run, or a resumed one, does not read."""
    if rounds is not None and resume is None:
        raise InputError(
            "--rounds needs --resume DIR: it raises the rounds of an earlier run; use "
            f"--set train.num_rounds={rounds} for a new run"
        )
    if resume is None:
        return
    keeps = "a resumed run keeps its recipe, its folder and how it checks data files"
    refuse_unread(context, f"with --resume: {keeps}", OF_RESUMED)
    if (resume / RECIPE).is_file():
        refuse_unread(context, f"with --resume {resume}, a run of one seed", OF_RESUMED - {"seeds"})


@app.command(rich_help_panel=FEDERATE)
def forget(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    client: Annotated[
        str | None, typer.Option(metavar="CLIENT", help="A client, by number or name.")
    ] = None,
    reply: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A leaving site's reply (fedgist site --to-file)."),
    ] = None,
    kit: Annotated[
        Path | None, typer.Option(metavar="KIT", help="With --reply: the server's kit.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Delete what a stopped run's server stores about one client, before the run is resumed.

    The servers of relaying methods (repshare, fd) store each client's latest message. Models that
    other clients trained with that message do not change. With analytic, a simulated client sends
    its sums again, and they are taken out of the totals. A site of a federation that leaves makes
    its reply again as a file, and the server takes that out.

    Examples
    --------
    fedgist forget runs/mine --client 3 && fedgist run --resume runs/mine
    fedgist forget runs/federation --reply ulm.fedgist --kit kits/server
    """
    if (reply is None) == (client is None) or (reply is None) != (kit is None):
        raise InputError("give --client CLIENT, or --reply FILE with --kit KIT")
    if reply is not None and kit is not None:
        refuse_unread(context, "with --reply", {"folder", "reply", "kit"})
        name = _forget_site(folder, reply, kit)
        again = "the same fedgist server command sends the others their model without it"
        console().print(words(f"the sums of {name} are out of the totals of {folder}; {again}"))
        return
    assert client is not None
    from fedgist.recipe.overrides import Overrides
    from fedgist.runs import forgetting

    number = forgetting.forget(folder, client, Overrides(root=data_root))
    console().print(words(f"the server of {folder} keeps nothing of client {number}"))


def _forget_site(folder: Path, reply: Path, kit: Path) -> str:
    from fedgist.cli.network_commands import need_network

    need_network("forget --reply")
    from fedgist.federation.keys.kits import read_kit
    from fedgist.federation.server.forgetting import forget_site
    from fedgist.runs.round import Observer

    return forget_site(read_kit(kit), folder, reply, Observer())


@app.command(rich_help_panel=START)
def init(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A .csv, .tsv or .parquet file.")],
    label: Annotated[
        str | None, typer.Option(help="Column to predict. Default: found by its name.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="Column of clients. Default: found by its name.")
    ] = None,
    sep: Annotated[str | None, typer.Option(help="Character between cells, such as ';'.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Recipe to write. Default: TABLE.toml.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="A recipe with differential privacy of rows.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the recipe.")] = False,
) -> None:
    """Look at a table of your own and write a recipe for it, with a reason beside each decision.

    Use it first, with a table that has a row for each example.

    Examples
    --------
    fedgist init patients.csv --label diagnosis --client hospital
    """
    from fedgist.data.sources.table_look import look_at
    from fedgist.recipe.first_recipe import default_place, first_recipe
    from fedgist.recipe.overrides import Overrides
    from fedgist.recipe.reading import make
    from fedgist.recipe.resolve import resolve
    from fedgist.runs.files import atomic_files
    from fedgist.world.world import make_world

    place = out or default_place(table)
    if place.exists() and not overwrite:
        raise RecipeError(f"{place} exists; --overwrite replaces it, --out names another")
    look = look_at(table, label, client, sep)
    written = first_recipe(look, private=private)
    for text in look.guessed:
        say(f"found by its name: {text}")
    for column in look.ignored:
        say(f"ignored: {column.name or '(a column without a name)'}: {column.reason}")
    for sign, name in look.signs.items():
        say(f"taken as a missing number: {sign!r}, in {name}")
    recipe = make(tomllib.loads(written), (), place.parent)
    world = make_world(resolve(recipe, Overrides()))
    atomic_files.write(place, written)
    for note in world.data.notes:
        say(note)
    say(f"{place}: {world.data.facts.summary}; {len(world.partition.test)} clients")
    quoted = shlex.quote(str(place))
    say(f"next: read {place}, then fedgist partition {quoted} and fedgist run {quoted}")


@app.command(rich_help_panel=START)
@naming_origins
def partition(
    recipe: RecipeOrDemo = None,
    settings: SettingsOption = None,
    seed: SeedOption = None,
    figure: Annotated[
        Path | None,
        figure_option("Also draw the partition in this file"),
    ] = None,
    facts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also answer the question of FILE as the clients would: see fedgist facts.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="With --facts: write the recipe with the facts in it, and a page beside it.",
        ),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Show the number of rows of each class at each client, before any training.

    Use it to check how heterogeneous the clients' data are. With --facts, sums
    of the clients' training rows answer a question, as in fedgist facts.

    Examples
    --------
    fedgist partition demo --set partition.classes_per_client=2 --figure partition.pdf
    fedgist partition recipe.toml --facts question.toml --out with-facts.toml
    """
    if out is not None and facts is None:
        raise InputError(f"--out {out} belongs to --facts")
    parsed = read(find_recipe(recipe), _with_seed(settings, seed))
    from fedgist.recipe.overrides import Overrides
    from fedgist.recipe.resolve import resolve
    from fedgist.report.pictures.study_pictures import partition_figure
    from fedgist.world.data import class_counts
    from fedgist.world.world import make_world

    world = make_world(resolve(parsed, Overrides(root=data_root)))
    split = class_counts(world.data, world.partition)
    counts = split["train"]
    screen = console()
    if recipe is None:
        screen.print(words(NONE_GIVEN, "dim"))
    screen.print(words(f"data: {world.data.facts.summary}", "dim"))
    for note in (*world.data.how_read, *world.data.notes):
        screen.print(words(note, "dim"))
    screen.print(SheetView(_partition_sheet(world, counts)))
    if figure:
        partition_figure(split, figure)
        screen.print(words(f"drawn in {figure}"))
    if facts:
        changed = bool(settings) or seed is not None
        _facts(world, facts, parsed.to_toml() if changed else None, find_recipe(recipe), out)


def _facts(
    world: World, question: Path, changed: str | None, recipe: Path, out: Path | None
) -> None:
    """Print the facts that clients give together; write the recipe with them.

    ``changed`` is the recipe as settings have changed it.
    """
    from fedgist.cli.facts_commands import check_writing, raw_recipe, write_facts
    from fedgist.world.facts.question import read_question
    from fedgist.world.facts.simulated import simulated_facts

    base = raw_recipe(recipe) if changed is None else tomllib.loads(changed)
    check_writing(asked := read_question(question), base, out)
    plan, found = simulated_facts(world, asked)
    about = [f"Rows of {len(world.partition.train)} simulated clients."]
    write_facts(plan, found, about, out, base)


def _partition_sheet(world: World, counts: list[list[int]], most: int = 40) -> Sheet:
    peak = max((n for line in counts for n in line), default=1) or 1
    rows, classless = world.partition, world.data.target != "class"
    numbered = world.data.num_classes <= FEW_CLASSES
    models = {client.id: client.architectures[0] for client in world.population.clients}
    lines = []
    for i, line in enumerate(counts[:most]):
        shades = "".join("·░▒▓█"[0 if n == 0 else 1 + min(3, 4 * n // (peak + 1))] for n in line)
        shades = " + ".join(map(str, line)) if numbered else shades
        sizes = [str(len(part[i])) for part in (rows.train, rows.validation, rows.test)]
        called = rows.names[i] if rows.names else str(i)
        lines.append((called, *sizes, models.get(i, models[0]), "" if classless else shades))
    if len(counts) > most:
        lines.append((f"and {len(counts) - most} more", "", "", "", "", ""))
    sizes_in_order = sorted(sum(line) for line in counts)
    of_classes = listed(map(printable, world.data.names), FEW_CLASSES)
    shown = f"classes: 0 to {world.data.num_classes - 1} from the left, darker is more. "
    shown = f"training rows of each class: {of_classes}. " if numbered else shown
    return Sheet(
        f"{world.data.name}, {world.server.setup.recipe.partition.name}",
        ("client", "train", "valid", "test", "model", "" if classless else "classes"),
        tuple(lines),
        f"rows of each client; {'' if classless else shown}{len(counts)} clients; training rows: "
        f"{sizes_in_order[0]} at least, {sizes_in_order[len(counts) // 2]} median, "
        f"{sizes_in_order[-1]} at most",
    )


def peak_memory(of_actors: int = 0) -> str:
    """Return the peak memory of this process, and of the largest worker that has ended.

    ``of_actors`` is that of the largest process on a cluster, if there were any.
    """
    from fedgist.engines.process_control import peak_bytes

    text = f"peak memory of this process: {bytes_text(peak_bytes())}"
    largest = {"worker": peak_bytes(of_ended=True), "actor": of_actors}
    named = [f"the largest {kind}: {bytes_text(size)}" for kind, size in largest.items() if size]
    return "; ".join([text, *named])
