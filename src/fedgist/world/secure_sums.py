"""Which runs can have secure sums: checked before anything is trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from fedgist.core import random
from fedgist.core.message import Form, reduction
from fedgist.core.method import Context, Method, Order
from fedgist.engines.message_form import asks_clients, upload_form
from fedgist.errors import RecipeError
from fedgist.wire.secure.shares import LEAST
from fedgist.world.server_context import ServerContext

KEY = "federation.sums = 'secure'"
MOST_NUMBERS = 50_000_000  # in a message: an upload of 400 MB, and a second for each other site


def check_secure_sums(side: ServerContext) -> None:
    """Raise RecipeError if a recipe asks for secure sums that would show a site's message.

    Raises
    ------
    RecipeError
        If a message is read by itself, a group is too small, noise would be added to what nobody
        has opened, or the same sums would be opened for other groups again.
    """
    recipe, method = side.setup.recipe, side.setup.recipe.method.name
    if side.setup.federation.sums != "secure":
        return
    for form in _uploads(side):
        if reduction(form.kind) != "sum":
            raise RecipeError(
                f"{KEY}: the server of method {method} reads each {form.kind.__name__} by itself"
            )
        count = sum(math.prod(shape) for _, shape in form.arrays.values())
        if count > MOST_NUMBERS:
            raise RecipeError(
                f"{KEY}: a message of {count:,} numbers would be masked for each other site; the "
                f"limit is {MOST_NUMBERS:,}"
            )
    counts = Counter(name for client in side.clients for name in client.architectures)
    for name, count in sorted(counts.items()):
        if count < LEAST:
            raise RecipeError(
                f"{KEY}: {count} clients have {name}, and a total that nobody can open needs "
                f"{LEAST} of an architecture"
            )
    problems = {
        "privacy.where = 'central' adds noise at the server, which the sites cannot see: use "
        "'local'": recipe.privacy.unit != "none" and recipe.privacy.where == "central",
        "train.round_seconds would tell the server how many steps each site takes": (
            recipe.train.round_seconds is not None
        ),
        "a late message cannot be added to a total: clients.delay = 0": recipe.clients.delay > 0,
    }
    if found := [problem for problem, applies in problems.items() if applies]:
        raise RecipeError(f"{KEY}: {found[0]}")
    frozen = [s for s in side.task.starts.values() if s.arch.frozen is not None and not s.body]
    sends_once = type(side.method).sent_in is not Method.sent_in
    if frozen and recipe.train.num_rounds > 1 and not sends_once:
        raise RecipeError(
            f"{KEY}: over frozen bodies a site sends the same sums in each round, and the "
            "difference of two totals of other groups may be one site's: train.num_rounds = 1, or "
            "method.name = 'analytic'"
        )


def _uploads(side: ServerContext) -> Iterator[Form]:
    """Yield the form of each message that clients send in the first rounds."""
    method, task, key = side.method, side.task, random.key(0)
    server = method.init_server(Context(key, task, 0, "init"))
    for number in (0, 1):
        for stage in method.stages(Context(key, task, number, "")):
            ctx = Context(key, task, number, stage)
            for name in task.architectures:
                clients = [c.id for c in side.clients if name in c.architectures]
                if clients and asks_clients(method, ctx, order := Order(clients[0], name)):
                    yield upload_form(method, ctx, name, method.download(server, order, ctx))
