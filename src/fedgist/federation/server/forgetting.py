"""A site that leaves after a run: its sums are taken out of the server's totals.

The server has totals alone. So the site makes its reply to the only exchange once more, as a file
(``fedgist site --to-file``): the same sums, which the server subtracts.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import tomli_w

from fedgist.core.method import Order, Reply
from fedgist.errors import RecipeError, SiteError
from fedgist.federation.agreement.by_file import FilePlan, file_plan, only_exchange
from fedgist.federation.keys.kits import Kit
from fedgist.federation.keys.roster import ROSTER, read_roster
from fedgist.federation.network.signed_file import SignedFile, read_signed
from fedgist.federation.server.from_files import FilesEngine, FileWire
from fedgist.federation.server.run_state import RunStateFile
from fedgist.federation.server.serving import checked_context
from fedgist.recipe.reading import Recipe, read_recorded, recorded
from fedgist.runs.files.record import RECIPE
from fedgist.runs.files.run_directory import SITES_STATE, locked
from fedgist.runs.forgetting import forget_in
from fedgist.runs.round import Observer, ServerRun, start_server
from fedgist.wire.remote_engine import RemoteEngine


def forget_site(kit: Kit, folder: Path, path: Path, observer: Observer) -> str:
    """Take a site's reply out of the totals of a finished run, and return the site's name.

    Other sites get the new model when the server is started again.

    Raises
    ------
    InputError
        If the reply is not a site's of this run, if noise is in the totals, or if the server has no
        sums of the site.
    """
    if not (folder / SITES_STATE).exists():
        raise RecipeError(
            f"{folder} is not a run of fedgist server over a network: one of files is made again "
            "without the site's file, in another folder"
        )
    recipe = read_recorded(folder / RECIPE)
    if recipe.privacy.unit != "none":
        raise RecipeError(
            f"privacy.unit = {recipe.privacy.unit!r}: the site's noise is in the totals, and it "
            "cannot be drawn again"
        )
    if recipe.federation is not None and recipe.federation.sums == "secure":
        raise RecipeError(
            "federation.sums = 'secure': the difference of totals with and without a site is what "
            "the site sent"
        )
    with locked(folder):
        state = RunStateFile.open(folder, ())
        side = checked_context(recipe, state.state.names, observer)
        signed = read_signed(path, kit, "reply")
        assert signed.identity is not None  # a reply is a site's
        name, plan = signed.identity.name, _plan_of(signed, recipe, kit)
        number = read_roster(kit.folder / ROSTER).numbers[name]
        engine = FilesEngine(RemoteEngine(side.method, FileWire({number: signed}), run=plan.run))
        server_run = ServerRun(side, engine, start_server(side))
        forget_in(server_run, folder, number, name, _reply(server_run, number))
        state.forget(number)
    return name


def _plan_of(signed: SignedFile, run: Recipe, kit: Kit) -> FilePlan:
    """Return the plan of a site's file, which was made with the recipe of the run.

    The run's own recipe states the number of clients, which the users' may leave open.
    """
    left_open = tomllib.loads(run.to_toml())
    left_open["clients"].pop("num_clients", None)
    plans = [file_plan(recipe, kit) for recipe in (run, recorded(tomli_w.dumps(left_open)))]
    for plan in plans:
        if plan.digest == signed.header.recipe:
            return plan
    raise SiteError(
        f"{signed.path} was made for a recipe with the digest {signed.header.recipe[:12]}; the run "
        f"has {plans[0].digest[:12]}: the site needs the run's recipe, every key alike"
    )


def _reply(server_run: ServerRun, number: int) -> Reply:
    """Return what the site sent, from its file: checked as a reply over a network is."""
    side = server_run.side
    ctx, order = only_exchange(side), Order(number, side.clients[number].architectures[0])
    answer = server_run.engine.ask(
        ctx, [order], [side.method.download(server_run.server, order, ctx)]
    )
    if not answer.subtotals:
        (_, reason), *_ = *answer.refused, *answer.absent
        raise SiteError(f"the reply of site number {number} cannot be used: {reason}")
    return Reply(order, ctx.round, ctx.stage, answer.subtotals[0].message)
