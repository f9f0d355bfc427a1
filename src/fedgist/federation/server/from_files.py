"""A server without a network: it adds up the replies in files, and writes the sites' models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedgist.core.method import Context, Order
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer, Scores, Split
from fedgist.errors import FederationError, RecipeError, SiteError, listed
from fedgist.federation.agreement.by_file import FilePlan, file_plan, only_exchange
from fedgist.federation.agreement.recipe_check import check_stated
from fedgist.federation.keys.kits import Kit
from fedgist.federation.keys.roster import ROSTER, Roster, read_roster
from fedgist.federation.network.signed_file import (
    SUFFIX,
    SignedFile,
    joined,
    read_signed,
    write_signed,
)
from fedgist.federation.server.serving import checked_context
from fedgist.recipe.reading import Recipe
from fedgist.runs.files.record import RECIPE, STATE
from fedgist.runs.files.run_directory import locked
from fedgist.runs.round import Observer, ServerRun
from fedgist.runs.run_rounds import Place, run_server
from fedgist.wire.envelope import Header, seal
from fedgist.wire.remote_engine import Patience, RemoteEngine
from fedgist.wire.wire import Parts
from fedgist.world.server_context import ServerContext

MODELS = f"models{SUFFIX}"
REPLIES = "replies.txt"  # in a run directory: the sites whose replies were added, with digests

Replies = Mapping[int, SignedFile]  # by the number of the site


def serve_files(kit: Kit, recipe: Recipe, replies: Path, folder: Path, observer: Observer) -> None:
    """Do the only round of a run with the replies in a folder, and write its run directory.

    With more replies than before, the round is done again with all of them, in a new run directory
    that takes the place of the old one when it is complete.

    Raises
    ------
    InputError
        If a file is damaged, of another recipe or not of a site; if there are too few; or if one
        that was added before is missing or another.
    """
    check_stated(recipe)
    roster, plan = read_roster(kit.folder / ROSTER), file_plan(recipe, kit)
    names = sorted(roster.numbers, key=lambda name: roster.numbers[name])
    side = checked_context(recipe, names, observer)
    only_exchange(side)
    found = _by_site(kit, plan, roster, replies, observer)
    _check_enough(side, found)
    whole = folder.absolute()
    part, old = (whole.with_name(f".{whole.name}.fedgist-{word}") for word in ("new", "old"))
    if old.exists() and not folder.exists():  # a process was killed between two steps below
        old.rename(whole)
    with locked(folder):
        _check_before(folder, found)
        _clear(old, folder)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _do_round(kit, plan, side, found, Place(part, named=folder), observer)
        if folder.exists():
            whole.rename(old)
        part.rename(whole)
        _clear(old, folder)
    missing = [name for name in names if roster.numbers[name] not in found]
    without = f"; without {listed(missing)}" if missing else ""
    observer.note(f"{len(found)} of {len(names)} sites sent a file{without}")
    observer.note(f"{folder / MODELS} is for the sites; look at the run: fedgist show {folder}")


def _by_site(kit: Kit, plan: FilePlan, roster: Roster, folder: Path, observer: Observer) -> Replies:
    """Return the replies in a folder by the number of their site, after all checks."""
    if not folder.is_dir():
        raise FederationError(f"{folder} is no folder: --from-files names that of the replies")
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise FederationError(f"{folder} has no file that ends in {SUFFIX}")
    found: dict[int, SignedFile] = {}
    for path in paths:
        file = read_signed(path, kit, "reply")
        assert file.identity is not None  # a reply is a site's
        if reason := roster.why_refused(file.identity):
            raise SiteError(f"{path}: {reason}")
        if file.header.run != plan.run:
            raise SiteError(
                f"{path} was made for a recipe with the digest {file.header.recipe[:12]}; this "
                f"one has {plan.digest[:12]}: all sites need the server's recipe, every key alike"
            )
        number = roster.numbers[file.identity.name]
        before = found.get(number)
        if before is not None and before.header.content != file.header.content:
            raise SiteError(
                f"{before.path} and {path} are different replies of {file.identity.name}: keep one"
            )
        if before is not None:
            observer.note(f"{path} is the same reply as {before.path}: it counts once")
        found[number] = file
    return dict(sorted(found.items()))


def _check_enough(side: ServerContext, found: Replies) -> None:
    """Raise an error if replies are too few, or not all would be used."""
    recipe = side.setup.recipe
    section = side.setup.federation
    least = max(1, recipe.privacy.min_replies, section.least_replies or 1)
    if len(found) < least:
        raise FederationError(
            f"there are replies of {len(found)} sites, and the recipe needs {least} "
            "(federation.least_replies, privacy.min_replies)"
        )
    if recipe.train.fraction_train < 1:
        raise RecipeError(
            f"train.fraction_train = {recipe.train.fraction_train:g} draws sites, and every file "
            "is used: state 1"
        )


def _lines(found: Replies) -> list[str]:
    return [f"{site} {file.header.content}" for site, file in found.items()]


def _clear(old: Path, folder: Path) -> None:
    """Remove the run directory whose place ``folder`` took, but keep what is in the old one alone.

    That is what a user put there, such as figures.
    """
    for path in sorted(old.iterdir()) if old.exists() else ():
        if not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(old, ignore_errors=True)


def _check_before(folder: Path, found: Replies) -> None:
    """Raise an error if a run directory is not one of files, or a reply of it is missing now."""
    if not (folder / REPLIES).exists():
        others = {path.name for path in folder.glob("*")} - {STATE.parent.name}
        if RECIPE in others:
            raise RecipeError(f"{folder} holds a run that was not made from files: choose another")
        if others:
            raise RecipeError(
                f"{folder / min(others)} is no file of a run, and a run directory is written as a "
                "whole: choose another --out"
            )
        return
    lines = (folder / REPLIES).read_text(encoding="utf-8").splitlines()
    if gone := [line for line in lines if line not in _lines(found)]:
        site = gone[0].partition(" ")[0]
        raise SiteError(
            f"the reply of site number {site} that is part of {folder} is missing or another: put "
            "it back, or choose another --out"
        )


@dataclass(frozen=True)
class FileWire:
    """A wire whose sites have answered already: with a file each."""

    found: Replies

    def present(self) -> frozenset[int]:
        """Return the sites with a file."""
        return frozenset(self.found)

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the replies in the files, in the order of the sites; a larger one as no bytes."""
        del deadline_s
        asked = {client for client, _ in envelopes}
        for client, file in self.found.items():
            if client in asked:
                yield client, file.content if len(file.content) <= largest else b""

    def unasked(self) -> Mapping[int, int]:
        """Return nothing: a file is read once."""
        return {}

    def close(self) -> None:
        """Do nothing: no connection is open."""


@dataclass(frozen=True)
class FilesEngine:
    """Sites that have answered by files, and cannot be asked for scores."""

    remote: RemoteEngine

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Return the replies in the files, checked as those of a network."""
        return self.remote.ask(ctx, orders, downs)

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Return no scores."""
        del ctx, orders, downs, split
        return Scores({})

    def close(self) -> None:
        """Do nothing: no connection is open."""


def _do_round(
    kit: Kit, plan: FilePlan, side: ServerContext, found: Replies, place: Place, observer: Observer
) -> None:
    """Do the round, and write the run directory, the list of replies and the sites' models."""
    there, folder = [client for client in side.clients if client.id in found], place.folder
    assert folder is not None  # the caller's

    def save_models(server_run: ServerRun, number: int | None) -> None:
        if number is not None:
            return
        orders, downs, ctx = server_run.downloads(server_run.round)
        envelopes = [
            _last(plan, order, down, ctx) for order, down in zip(orders, downs, strict=True)
        ]
        content = joined(envelopes)
        write_signed(folder / MODELS, kit, "models", plan.run, plan.digest, content)
        (folder / REPLIES).write_text("\n".join([*_lines(found), ""]), encoding="utf-8")

    patience = Patience(least_replies=len(found))
    remote = RemoteEngine(side.method, FileWire(found), run=plan.run, patience=patience)
    about = replace(side, online=lambda _: there)
    run_server(about, FilesEngine(remote), place, observer, save_arrays=save_models)


def _last(plan: FilePlan, order: Order, down: Tree, ctx: Context) -> bytes:
    """Return an envelope with a site's last download."""
    header = Header(
        purpose="finish",
        run=plan.run,
        round=ctx.round,
        stage=ctx.stage,
        client=order.client,
        architecture=order.architecture,
    )
    return seal(header, {"download": down})
