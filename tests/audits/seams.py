"""Releases at the seams, many at once, as an attacker sees them who knows all but one thing.

That is whether the *canary* is there: a row whose features, or gradient, or a client whose message
is as large as the clip allows. Everything that has noise is seen. What an attacker makes of it is
the logarithm of how much more likely it is with the canary than without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import optim, random
from fedgist.core.method import (
    Batch,
    ClientInfo,
    Context,
    Count,
    Labels,
    Method,
    Net,
    Nothing,
    Order,
    Phase,
)
from fedgist.core.peer_method import PeerMethod
from fedgist.core.privacy import (
    Privacy,
    PrivacyUnit,
    PrivateSteps,
    Source,
    Where,
    grid_of,
    sensitivity,
    with_central_noise,
)
from fedgist.core.replies import Replies, Subtotal
from fedgist.core.sampling import drawn_clients
from fedgist.core.training import Optimizer
from fedgist.core.tree import Tree, leaves, map_leaves
from fedgist.testing.small_worlds import blobs, world
from fedgist.training import local_training
from fedgist.training.cohort import Cohort, begin
from fedgist.training.inference import protected_upload
from fedgist.training.timetable import Turn, batches_of

CLIP, GRADIENT_CLIP = 1.5, 1.0
CANARY = 31  # the last of 32 rows


@dataclass(frozen=True)
class Trials:
    """So many releases, each by itself: with the canary or without, and with how much noise.

    ``noise`` is the multiplier: the deviation by the sensitivity. ``system``: noise and draws are
    the operating system's.
    """

    key: Tensor
    count: int
    noise: float
    present: bool
    system: bool = False

    def privacy(self, unit: PrivacyUnit, where: Where = "central", terms: int = 32) -> Privacy:
        """Releases that are sums of up to so many terms."""
        grid = grid_of(CLIP * terms, 24) if self.system else 0.0
        return Privacy(unit, where, CLIP, self.noise * sensitivity(unit, CLIP), grid=grid)

    def keys(self, rounds: int) -> list[Tensor]:
        """A key of each round."""
        return [random.fold(self.key, "round", number) for number in range(rounds)]

    def repeated(self, message: Tree) -> Tree:
        """The same message in each release."""
        return map_leaves(lambda leaf: leaf.expand(self.count, *leaf.shape), message)


def fedlog(trials: Trials, *, rounds: int = 2) -> Tensor:
    """A row in the sums of each round; noise on their total."""
    privacy = trials.privacy("record")
    method, ctx = method_and_context(trials, "fedlog", privacy)
    quiet, loud = (message_of(method, ctx, canary=there) for there in (False, True))
    sent = trials.repeated(loud if trials.present else quiet)
    return sum_of(
        evidence(totals(sent, privacy, key, trials.count), quiet, loud, privacy.deviation)
        for key in trials.keys(rounds)
    )


def analytic(trials: Trials) -> Tensor:
    """A row in counts, sums and second moments, in shares of the budget; noise on their total."""
    grid = grid_of(32, 48) if trials.system else 0.0
    deviation = trials.noise * sensitivity("record", 1.0)
    privacy = Privacy("record", "central", 1.0, deviation, grid=grid)
    method, ctx = method_and_context(trials, "analytic", privacy, wire="float64")
    ctx = replace(ctx, stage="exchange")
    quiet, loud = (message_of(method, ctx, canary=there) for there in (False, True))
    sent = trials.repeated(loud if trials.present else quiet)
    seen = totals(sent, privacy, trials.keys(1)[0], trials.count)
    return evidence(seen, quiet, loud, privacy.deviation)


def repshare(trials: Trials) -> Tensor:
    """A row in the sums over all rows and in each of two observations; noise at the client."""
    privacy = trials.privacy("record", "local")
    method, ctx = method_and_context(trials, "repshare", privacy, pick_rate=1.0, m_up=2)
    quiet, loud = (message_of(method, ctx, canary=there) for there in (False, True))
    sent = trials.repeated(loud if trials.present else quiet)
    seen = protected_upload(cohort_of(trials, method, ctx), sent)
    return evidence(seen, quiet, loud, privacy.deviation)


def fedavg(trials: Trials, *, rate: float = 1.0, rounds: int = 1) -> Tensor:
    """A client, asked with this chance in each round, whose weights move far; noise on the sum."""
    privacy = trials.privacy("client", terms=1)
    method, ctx = method_and_context(trials, "fedavg", privacy)
    loud = far_away(trials, method, ctx)
    quiet = map_leaves(torch.zeros_like, loud)

    def seen(key: Tensor) -> Tree:
        there = asked(ctx, trials, key, rate) if trials.present else torch.zeros(trials.count)
        sent = map_leaves(lambda leaf: torch.einsum("k,...->k...", there, leaf), loud)
        return totals(sent, privacy, key, trials.count)

    keys = trials.keys(rounds)
    return sum_of(evidence(seen(key), quiet, loud, privacy.deviation, rate) for key in keys)


def dp_sgd(trials: Trials, *, rate: float, releases: int = 0) -> Tensor:
    """A row that is drawn with this chance in each step, and in the sums that are sent after it."""
    grid = grid_of(GRADIENT_CLIP, 40) if trials.system else 0.0
    steps = PrivateSteps(GRADIENT_CLIP, trials.noise * GRADIENT_CLIP, rate, grid)
    privacy = replace(trials.privacy("record"), steps=steps)
    method, ctx = method_and_context(trials, "fedlog", privacy)
    net = ctx.task.starts["mlp"]
    loud = {name: torch.ones_like(value) for name, value in net.params.items()}
    length = torch.cat([value.flatten() for value in loud.values()]).norm()
    loud = {name: value * GRADIENT_CLIP * (1 - 1e-6) / length for name, value in loud.items()}
    quiet = map_leaves(torch.zeros_like, loud)
    of_steps = sum_of(
        evidence(seen, quiet, loud, steps.deviation, rate)
        for seen in noisy_gradients(cohort_of(trials, method, ctx), net)
    )
    return of_steps + (fedlog(trials, rounds=releases) if releases else 0.0)


def noisy_gradients(cohort: Cohort, net: Net) -> Iterator[dict[str, Tensor]]:
    """The noised sum of gradients (count, ...) of each step of an epoch."""

    def slope(net: Net, batch: Batch, own: Any, down: Any, ctx: Context) -> Tensor:
        """A loss whose gradient is the same everywhere, and far too large."""
        return sum_of(5.0 * value.sum() for value in net.params.values())

    phase = Phase(("all",), epochs=1, loss=slope)
    clients = begin(net, Nothing(), len(cohort.ids))
    learned = {name: value.clone() for name, value in clients.net.params.items()}
    plain = Optimizer("sgd", lr=float(cohort.ctx.task.training.batch_size))
    state = optim.init(plain, learned)
    step = local_training._Step(cohort, phase, plain, clients, learned, state)
    keys = random.fold(cohort.keys, "phase", "train-0")
    for number, rows in enumerate(batches_of(cohort, phase, keys, "train-0")):
        before = {name: value.clone() for name, value in learned.items()}
        step_keys = random.fold(keys, "step", number)
        step(cohort.examples.batch(rows, step_keys), step_keys, Turn(len(rows)))
        yield {name: before[name] - value for name, value in learned.items()}


def method_and_context(
    trials: Trials, name: str, privacy: Privacy, **options: Any
) -> tuple[Method, Context]:
    """A method in a tiny world with just this privacy, and the context of a stage."""
    side = world(name, options=options).server
    return side.method, Context(trials.key, replace(side.task, privacy=privacy), 1, "train")


def message_of(method: Method, ctx: Context, *, canary: bool) -> Tree:
    """What one client would send, with the canary or without, by the method's own functions."""
    x, y = 5 * blobs().x, blobs().y  # features that need clipping
    mask = torch.arange(len(y)) != (-1 if canary else CANARY)
    net, y = ctx.task.starts["mlp"], torch.where(mask, y, 0)
    down = method.download(method.init_server(ctx), Order(0, "mlp"), ctx)
    own = method.init_client(net, ctx)
    rows = Labels(y, mask)
    picks = method.pick(rows, own, ctx) if isinstance(method, PeerMethod) else None
    batch = Batch(x, y, mask, picks=picks)
    sums = method.summarize(net, batch, own, down, ctx)
    return method.upload(net, own, sums, down, ctx)[0]


def far_away(trials: Trials, method: Method, ctx: Context) -> Tree:
    """What a client sends whose weights moved far, as it may leave the client."""
    net = ctx.task.starts["mlp"]
    down = method.download(method.init_server(ctx), Order(0, "mlp"), ctx)
    moved = net.with_arrays({name: value + 9.0 for name, value in net.params.items()})
    message, _ = method.upload(moved, Nothing(), Count(torch.ones(())), down, ctx)
    one = cohort_of(replace(trials, count=1), method, ctx)
    stacked = protected_upload(one, map_leaves(lambda leaf: leaf.unsqueeze(0), message))
    return map_leaves(lambda leaf: leaf[0], stacked)


def cohort_of(trials: Trials, method: Method, ctx: Context) -> Cohort:
    """A client for each trial; its only row is the canary, or it has none."""
    down = method.download(method.init_server(ctx), Order(0, "mlp"), ctx)
    table = torch.full((trials.count, 1), CANARY if trials.present else -1)
    examples = world("fedavg").population.examples
    ids = torch.arange(trials.count)
    return Cohort(method, ctx, ids, down, broadcast=True, examples=examples, table=table)


def asked(ctx: Context, trials: Trials, key: Tensor, rate: float) -> Tensor:
    """In which trials the client is asked, 1 or 0: as many clients of one draw, each by itself."""
    drawing = {"sampling": "poisson", "fraction_train": rate}
    training = ctx.task.training.model_copy(update=drawing)
    task = replace(ctx.task, training=training, num_clients=trials.count)
    clients = [ClientInfo(number, ("mlp",)) for number in range(trials.count)]
    source: Source = "system" if trials.system else "seed"
    orders = drawn_clients(clients, task, random.fold(key, "select"), source)
    there = torch.zeros(trials.count)
    there[[order.client for order in orders]] = 1.0
    return there


def totals(message: Tree, privacy: Privacy, key: Tensor, count: int) -> Tree:
    """Totals (count, ...) behind the server's seam."""
    keys = random.fold(key, torch.arange(count))
    total = Subtotal("all", (0,), 1, "train", message)
    return with_central_noise(Replies(totals=(total,)), privacy, keys).totals[0].message


def evidence(seen: Tree, quiet: Tree, loud: Tree, deviation: float, rate: float = 1.0) -> Tensor:
    """The log likelihood ratio of each release: a canary that is in it with this chance, or none.

    ``quiet`` and ``loud`` are what is sent without the canary and with it.
    """
    base = flat(quiet, 1)
    shift = (flat(loud, 1) - base).squeeze(0)
    along = (flat(seen, len(leaves(seen)[0])) - base) @ shift
    ratio = (along - shift.square().sum() / 2) / deviation**2
    return torch.log1p(rate * torch.expm1(ratio))


def flat(message: Tree, count: int) -> Tensor:
    """All numbers of stacked messages, (count, numbers)."""
    return torch.cat([leaf.reshape(count, -1).double() for leaf in leaves(message)], dim=1)


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)
