"""Central privacy: noise is added to the totals of a stage before the method sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedgist.core.message import scope
from fedgist.core.method import Context, Order, Replies, Task
from fedgist.core.privacy import with_central_noise
from fedgist.core.replies import EVERYBODY, Subtotal
from fedgist.core.tree import Tree
from fedgist.engines.message_form import upload_form
from fedgist.runs.releases import Releases
from fedgist.world.server_context import ServerContext


def hides_absence(task: Task) -> bool:
    """Return whether a round without drawn clients must be hidden, by releasing only noise."""
    central = task.privacy is not None and task.privacy.where == "central"
    return central and task.training.sampling == "poisson"


def add_central_noise(
    side: ServerContext,
    server: Tree,
    replies: Replies,
    orders: Sequence[Order],
    ctx: Context,
    releases: Releases | None = None,
) -> Replies:
    """Add central noise to the totals of a stage, and set the expected number of clients of each.

    Without privacy, replies are unchanged. If ``releases`` holds totals of this stage, they were
    released before the run was stopped. The method then sees these totals again instead of new
    ones.
    """
    privacy = side.task.privacy
    if privacy is None:
        return replies
    replies = replace(replies, expected=_expected(side, orders))
    if privacy.where == "local":
        return replies
    kept = releases.kept(ctx.round, ctx.stage) if releases is not None else None
    if kept is not None:
        return replace(replies, totals=kept)
    if hides_absence(side.task):
        replies = _completed(side, server, replies, ctx)
    replies = with_central_noise(replies, privacy, ctx.draw("privacy"))
    if releases is not None:
        releases.keep(ctx.round, ctx.stage, replies.totals)
    return replies


def _expected(side: ServerContext, orders: Sequence[Order]) -> dict[str, float]:
    """Return the expected number of clients behind each total, by architecture and for all.

    These numbers are public.
    """
    training, share = side.task.training, 1.0
    architectures = [order.architecture for order in orders]
    if training.sampling == "poisson":  # the number of drawn clients is not public
        architectures = [client.architectures[0] for client in side.clients]
        share = training.fraction_train
    counts = {name: share * architectures.count(name) for name in side.task.architectures}
    return {**counts, EVERYBODY: share * len(architectures)}


def _completed(side: ServerContext, server: Tree, replies: Replies, ctx: Context) -> Replies:
    """Add totals of zeros for architectures without a drawn client."""
    present, absent = {total.architecture for total in replies.totals}, []
    members = {client.architectures[0]: client.id for client in side.clients}
    for architecture, client in sorted(members.items()):
        down = side.method.download(server, Order(client, architecture), ctx)
        form = upload_form(side.method, ctx, architecture, down)
        name = EVERYBODY if scope(form.kind) == "all" else architecture
        if name not in present:
            present.add(name)
            zeros = form.zeros(ctx.key.device)
            absent.append(Subtotal(name, (), ctx.round, ctx.stage, zeros))
    totals = sorted((*replies.totals, *absent), key=lambda total: total.architecture)
    return replace(replies, totals=tuple(totals))
