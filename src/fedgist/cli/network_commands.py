"""Commands of a running federation: server, site, status and stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedgist.cli.recipe_files import find_recipe
from fedgist.cli.shared_options import (
    FEDERATE,
    SettingsOption,
    app,
    refuse_unread,
    same_command,
)
from fedgist.cli.value_origins import naming_origins
from fedgist.data.sources.optional_packages import need
from fedgist.errors import InputError, Interrupted, Stopped
from fedgist.federation.server.status import FederationStatus
from fedgist.report.formatting import duration
from fedgist.report.terminal.console import console, words

NEEDS = "fedgist {} needs grpcio and cryptography: pip install 'fedgist[federation]'"
CONFIG = "site.toml"
LARGEST, KEPT = 5 << 20, 5  # bytes of a log file, and older files that are kept
FORM = "%(asctime)s %(levelname)s %(message)s"

KitFolder = Annotated[
    Path, typer.Argument(metavar="KIT", help="The kit's folder, made by fedgist provision.")
]


@app.command(rich_help_panel=FEDERATE)
@naming_origins
def server(
    context: typer.Context,
    kit: KitFolder,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The federation's recipe.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The run directory.")
    ] = Path("runs/federation"),
    settings: SettingsOption = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address to listen on. Default: every address, at the kit's port.",
        ),
    ] = None,
    from_files: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Add up the replies in this folder, which sites wrote with --to-file; no network.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
) -> None:
    """Run a federation's server: wait for the sites, do the rounds, keep the record.

    The run directory is that of fedgist run, so show, compare and report work
    on it. A server that was stopped or killed goes on where it was when it is
    started again with the same command.

    With --from-files, sites need not be online: their replies to the only
    exchange of a run are files. When more have arrived, give the same command.

    Examples
    --------
    fedgist server kits/server federation-recipe.toml --out runs/sepsis
    fedgist watch runs/sepsis --serve
    fedgist server kits/server recipe.toml --from-files replies --out runs/sepsis
    """
    need_network("server")
    from fedgist.federation.keys.kits import read_kit, split_address
    from fedgist.federation.server.serving import serve
    from fedgist.recipe.reading import read
    from fedgist.report.terminal.progress import observing

    if from_files is not None:
        by_file = {"kit", "recipe", "out", "settings", "from_files", "quiet"}
        refuse_unread(context, "with --from-files, which has no network", by_file)
    opened = read_kit(kit)
    check_role(opened.role, "server", kit)
    if from_files is not None:
        from fedgist.federation.server.from_files import serve_files

        parsed = read(find_recipe(recipe), settings or [])
        with observing(console(), quiet=quiet, as_json=False) as observer:
            serve_files(opened, parsed, from_files, out, observer)
        return
    host = listen or f"0.0.0.0:{split_address(opened.address)[1]}"  # sites dial in
    parsed = read(find_recipe(recipe), settings or [])
    shown = observing(console(), quiet=quiet, as_json=False)
    with logging_to(out / "server.log"), naming_this_command(), shown as observer:
        serve(opened, parsed, out, observer, host)


@app.command(rich_help_panel=FEDERATE)
def site(
    context: typer.Context,
    kit: KitFolder,
    config: Annotated[
        Path,
        typer.Option(
            "--config", "-c", metavar=CONFIG, help="The site's data, model and release policy."
        ),
    ] = Path(CONFIG),
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check data, model and policy, and list what would leave; no network."
        ),
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="With --check, --to-file and --from-file: the federation's recipe.",
        ),
    ] = None,
    to_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the reply to the only exchange of --recipe into a file; no network.",
        ),
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take this site's model from the server's models.fedgist."
        ),
    ] = None,
    new_data: Annotated[
        bool,
        typer.Option("--new-data", help="Open a new privacy budget: the site's data are new."),
    ] = False,
) -> None:
    """Take part in a federation as a site, until the run has ended.

    The site connects to the server, prepares for the server's recipe, and
    answers requests as far as its policy allows. If the connection or the
    process is lost, start it again with the same command: it goes on.

    With --to-file, no network is needed: the site's reply to the only exchange
    of a recipe is a signed file, which is sent to the server by any means.

    Examples
    --------
    fedgist site kits/sites/berlin --config site.toml
    fedgist site kits/sites/berlin --config site.toml --check --recipe recipe.toml
    fedgist site kits/sites/berlin --recipe recipe.toml --to-file berlin.fedgist
    fedgist site kits/sites/berlin --recipe recipe.toml --from-file models.fedgist
    """
    need_network("site")
    from fedgist.federation.keys.kits import read_kit
    from fedgist.federation.site.file import read_site_file
    from fedgist.federation.site.process import check_site, open_new_budget, take_part

    if new_data:
        refuse_unread(context, "with --new-data", {"kit", "config", "new_data"})
    by_file = to_file or from_file
    if recipe is not None and not (check or by_file):
        raise InputError(
            "--recipe belongs to --check, --to-file and --from-file: the server sends its recipe "
            "by itself"
        )
    by_name = "--to-file" if to_file else "--from-file"
    if by_file and (check or (to_file and from_file)):
        raise InputError(f"{by_name} does not go with {'--check' if check else '--from-file'}")
    if by_file and recipe is None:
        raise InputError(f"{by_name} needs --recipe RECIPE: the recipe that the server uses")
    table = read_site_file(config)
    if check:
        _print(check_site(table, kit, find_recipe(recipe) if recipe else None))
        return
    opened = read_kit(kit)
    check_role(opened.role, "site", kit)
    if new_data:
        _print(open_new_budget(table))
        return

    def tell(text: str) -> None:
        console(soft_wrap=True).print(words(text))

    if by_file and recipe is not None:
        from fedgist.federation.site.by_file import read_model, write_reply
        from fedgist.recipe.reading import read

        work = write_reply if to_file else read_model
        work(opened, table, read(find_recipe(recipe)), by_file, tell)
        return
    with logging_to(table.state_folder / "site.log"), naming_this_command():
        take_part(opened, table, tell)


@app.command(rich_help_panel=FEDERATE)
def status(kit: KitFolder) -> None:
    """Show the state of a running federation, as its administrator.

    Examples
    --------
    fedgist status kits/administrators/anna
    """
    _administer("status", kit)


@app.command(rich_help_panel=FEDERATE)
def stop(kit: KitFolder) -> None:
    """Stop a running federation, as its administrator.

    The finished rounds are saved. The server goes on with the run when it is
    started again; sites wait for it.

    Examples
    --------
    fedgist stop kits/administrators/anna
    """
    _administer("stop", kit)


def _administer(name: str, kit: Path) -> None:
    need_network(name)
    from fedgist.federation.keys.kits import read_kit
    from fedgist.federation.network.grpc_site import command
    from fedgist.federation.server.status import status_of

    opened = read_kit(kit)
    check_role(opened.role, "administrator", kit)
    answer = command(opened, name.capitalize())
    _show(status_of(answer), stopping=bool(answer.get("stopping")))


def _show(state: FederationStatus, *, stopping: bool) -> None:
    """Print the state of a federation: its round, and a line for each site."""
    screen = console()
    head = f"{state.federation}, run {state.run}: round {state.round}"
    head += f", attempt {state.attempt}" if (state.attempt or 1) > 1 else ""
    screen.print(words(f"{head}; stopping" if stopping else head))
    if state.waiting_for:
        screen.print(words(state.waiting_for, "yellow"))
    if state.scored:
        screen.print(words(f"the last scores are of {state.scored}"))
    table = Table(box=None, pad_edge=False)
    for column in ("site", "state", "for", "last round", "refusals", "note"):
        table.add_column(column)
    for site in state.sites:
        since = "" if site.since is None else duration(max(0.0, time.time() - site.since))
        last = "" if site.last_round is None else str(site.last_round)
        cells = [site.name, site.state, since, last, str(site.refusals or ""), site.note]
        table.add_row(*(words(cell) for cell in cells))
    screen.print(table)


def need_network(name: str) -> None:
    """Raise an error with what to install, if a command needs a package that is missing."""
    for package in ("grpc", "cryptography.x509"):
        need(package, NEEDS.format(name))


def check_role(role: str, expected: str, kit: Path) -> None:
    """Raise an error if a kit is not one of the expected role."""
    if role != expected:
        raise InputError(f"{kit} is a kit for the role {role}, and one for {expected} is needed")


@contextlib.contextmanager
def naming_this_command() -> Iterator[None]:
    """If the user stops the process, name the command that goes on: the same one."""
    try:
        yield
    except (Stopped, KeyboardInterrupt) as stopped:
        raise Interrupted(f"stopped; go on with: {same_command()}") from stopped


def _print(sentences: list[str]) -> None:
    for sentence in sentences:
        console(soft_wrap=True).print(words(sentence))


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write what fedgist logs to a file, inside this context."""
    import logging.handlers

    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=LARGEST, backupCount=KEPT, delay=True
    )
    handler.setFormatter(logging.Formatter(FORM))
    logger = logging.getLogger("fedgist")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.level, logger.propagate = before
