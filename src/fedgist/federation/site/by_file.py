"""A site without a network: it writes its reply into a file, and reads the model from one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from fedgist.core.method import Context, Order
from fedgist.core.tree import Tree
from fedgist.errors import KitError, SiteError
from fedgist.federation.agreement.by_file import FilePlan, file_plan, only_exchange
from fedgist.federation.keys.kits import Kit
from fedgist.federation.network.invitation import Invitation, recipe_text
from fedgist.federation.network.signed_file import (
    SUFFIX,
    certificate_in,
    envelopes_in,
    read_signed,
    write_signed,
)
from fedgist.federation.site.agent import RUNS, SiteAgent
from fedgist.federation.site.file import SiteFile
from fedgist.federation.site.process import check_rows_of_owner
from fedgist.federation.site.setup import sites_named
from fedgist.recipe.reading import Recipe
from fedgist.runs.files import atomic_files as files
from fedgist.runs.round import start_server
from fedgist.wire.envelope import Header, header_of, seal
from fedgist.world.server_context import ServerContext


def write_reply(
    kit: Kit, site: SiteFile, recipe: Recipe, path: Path, say: Callable[[str], None]
) -> None:
    """Write a site's reply to the only exchange of a recipe's run.

    The second time, the file of the first is written again: the same bytes, and no second release.
    With another certificate, the same reply is signed anew.

    Raises
    ------
    InputError
        If the data, the model or the policy do not fit the recipe, or it has several exchanges.
    """
    plan = file_plan(recipe, kit)
    with _prepared(kit, site, plan, say) as agent:
        kept = site.state_folder / RUNS / plan.run / f"reply{SUFFIX}"
        if kept.exists() and certificate_in(kept) == kit.certificate:
            say("this reply was made before: the same file is written again")
        else:
            reply = _answer(agent, plan)
            write_signed(kept, kit, "reply", plan.run, plan.digest, reply)
        files.write(path, kept.read_bytes(), private=True)
    say(f"{path} is for the server (fedgist server KIT RECIPE --from-files FOLDER)")


def read_model(
    kit: Kit, site: SiteFile, recipe: Recipe, path: Path, say: Callable[[str], None]
) -> None:
    """Take the site's last download from the server's file, with which its model is complete.

    Raises
    ------
    MessageError
        If the file is not the server's, or of another recipe, or has no model of this site.
    """
    plan = file_plan(recipe, kit)
    signed = read_signed(path, kit, "models")
    if signed.header.run != plan.run:
        raise SiteError(
            f"{path} was made for a recipe with the digest {signed.header.recipe[:12]}; this one "
            f"has {plan.digest[:12]}: give the server's recipe"
        )
    with _prepared(kit, site, plan, say) as agent:
        number = number_of(kit)
        for envelope in envelopes_in(signed.content):
            if header_of(envelope).client == number:
                _accepted(agent.answer(envelope))
                return
    raise SiteError(f"{path} has no model of site {kit.name}")


def number_of(kit: Kit) -> int:
    """Return the site's number in its federation.

    Raises
    ------
    KitError
        If the kit was made before kits held it.
    """
    if kit.number is None:
        raise KitError(
            f"{kit.folder} does not hold the site's number: the authority writes kit.toml again "
            "with fedgist provision --renew server --address HOST:PORT --out KITS"
        )
    return kit.number


@contextlib.contextmanager
def _prepared(
    kit: Kit, site: SiteFile, plan: FilePlan, say: Callable[[str], None]
) -> Iterator[SiteAgent]:
    """Prepare a site for a run, and let go of its folder afterwards."""
    agent, number = SiteAgent(site, say), number_of(kit)
    others = [name for name in sites_named(plan.setup.recipe, kit.name) if name != kit.name]
    others += [f"place {i}" for i in range(len(others), number)]
    names = (*others[:number], kit.name, *others[number:])
    invitation = Invitation(
        run=plan.run,
        recipe=recipe_text(plan.setup.recipe),
        digest=plan.digest,
        number=number,
        names=names,
        certificate="",
        last=None,
        state_lost="refuse",
    )
    agent.hold()
    check_rows_of_owner(site)
    with contextlib.closing(agent):
        agent.prepare(invitation.model_dump(mode="json"))
        yield agent


def _answer(agent: SiteAgent, plan: FilePlan) -> bytes:
    """Return the site's reply to a fresh server."""
    assert agent.prepared is not None  # the caller's
    side = agent.prepared.part.side
    ctx, client = only_exchange(side), side.clients[agent.prepared.hello.number]
    order = Order(client.id, client.architectures[0])
    request = Header(
        purpose="train",
        run=plan.run,
        round=ctx.round,
        stage=ctx.stage,
        client=order.client,
        architecture=order.architecture,
    )
    return _accepted(agent.answer(seal(request, {"download": _download(side, order, ctx)})))


def _accepted(reply: bytes) -> bytes:
    """Return a reply that is no refusal; raise SiteError if it is one."""
    header = header_of(reply)
    if header.purpose == "refusal":
        raise SiteError(f"the site refuses: {header.words}")
    return reply


def _download(side: ServerContext, order: Order, ctx: Context) -> Tree:
    return side.method.download(start_server(side), order, ctx)
