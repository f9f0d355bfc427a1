"""RepShare, representation sharing: clients share class means of features and learn from them.

Berdoz, Singh, Jaggi, Raskar 2022, "Scalable collaborative learning via representation sharing",
algorithm 1 (https://arxiv.org/abs/2211.10943). The server stores each client's newest release,
averages and draws. The server trains no model. See docs/methods/repshare.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid, one_hot, pad

from fedgist.core import random
from fedgist.core.bounds import Fraction, NonNegative, NonNegativeInt, PositiveInt
from fedgist.core.counts import COUNTS
from fedgist.core.losses import contrast, information_bound, weighted_mean
from fedgist.core.message import message
from fedgist.core.method import (
    Batch,
    Context,
    Labels,
    Net,
    Order,
    Part,
    Phase,
    Replies,
    Task,
)
from fedgist.core.nets.layers import linear
from fedgist.core.objectives.metrics import INFORMATION, Metric
from fedgist.core.objectives.target import Target
from fedgist.core.peer_method import PeerMethod
from fedgist.core.privacy import bounded, check_weights, counted, noise_floor, total_floor
from fedgist.core.sampling import drawn_of_each_class
from fedgist.core.tree import take, tree
from fedgist.core.wire_form import FLAGS, NONZERO, rows_where
from fedgist.errors import MethodError
from fedgist.methods.common.latest_messages import LatestMessages, check_pools
from fedgist.methods.common.linear_head import class_means, one_feature_width, weights_of

Draw = Literal["client", "class", "nearest"]
LEAST = 1e-6  # the smallest total weight of a class that divides its sum


@dataclass(frozen=True)
class Release:
    """A client's own settings: the observations that it releases and receives."""

    m_up: int | None = None
    """Number of observations per class that the client releases, at most the method's ``m_up``."""
    classes: tuple[int, ...] = ()
    """Numbers of the classes whose summaries the client releases. The default is all."""
    m_down: int | None = None
    """Number of observations per class that the client receives, at most the method's ``m_down``.
    """
    hears: tuple[int, ...] = ()
    """Numbers of the clients whose observations the client receives. The default is all others."""


@message(reduce="each")
class Released:
    """A client's release: sums of features by class, and their numbers of rows.

    ``total`` is (1 + M_up, classes, m) and ``rows`` (1 + M_up, classes): first over all of the
    client's rows, then over the rows of each observation. A class without rows is not sent. If the
    method reads wishes, ``gets`` (1,) is the number of observations that the client wants, and
    ``hears`` (clients,) marks the clients that it wants them from.
    """

    total: Tensor = field(metadata=rows_where("rows"))
    rows: Tensor = field(metadata=NONZERO | COUNTS)
    gets: Tensor
    hears: Tensor = field(metadata=FLAGS)


@message(reduce="each")
class PeerRepresentations:
    """A client's download: the global mean of each class, and other clients' observations.

    ``mean`` is (classes, m) and ``known`` (classes,). ``seen`` is (M_down, classes, m) and
    ``there`` (M_down, classes). ``known`` and ``there`` are masks of 1 or 0.
    """

    mean: Tensor = field(metadata=rows_where("known"))
    known: Tensor = field(metadata=FLAGS)
    seen: Tensor = field(metadata=rows_where("there"))
    there: Tensor = field(metadata=FLAGS)

    def targets(self) -> tuple[Tensor, Tensor]:
        """Return the target mean of each class (classes, m), and a mask of classes with a target.

        The mask is (classes,). Without a global mean, as among peers, the mean of the observations
        replaces it.
        """
        total = (self.seen * self.there.unsqueeze(2)).sum(0)
        stand_in, some = class_means(total, self.there.sum(0))
        has_mean = self.known.unsqueeze(1) > 0
        return torch.where(has_mean, self.mean, stand_in), torch.maximum(self.known, some)


@tree
class Relay:
    """Server state: each client's last release, and the mean of each class over all clients.

    ``mean`` is (classes, m) and ``known`` (classes,).
    """

    newest: LatestMessages
    mean: Tensor
    known: Tensor

    @staticmethod
    def of(newest: LatestMessages, ctx: Context) -> Relay:
        """Return the state with the mean of each class, weighted by clients' numbers of rows."""
        total, rows = (newest.arrays[name][:, 0].sum(0) for name in ("total", "rows"))
        floor = total_floor(ctx.task.privacy, ctx.task.num_clients)
        return Relay(newest, *class_means(total, rows, floor, LEAST))

    @property
    def released(self) -> Released:
        """Each client's last release, stacked."""
        stack: Released = self.newest.messages(Released)
        return stack

    def of_client(self, client: int) -> Released | None:
        """Return a client's last release, or None."""
        release: Released = take(self.released, client)
        return release if bool(release.rows.any()) else None


def download(
    relay: Relay, order: Order, m_down: int, draw: Draw, key: Tensor, floor: float = 0.0
) -> PeerRepresentations:
    """Return a client's download: the global means, and ``m_down`` observations of others.

    ``draw`` selects the observations: all classes of one other client, each class from another
    client, or the observations nearest to the client's own means. If the order names neighbors, the
    client gets observations of its neighbors only, and no global mean. Observations with counts of
    at most ``floor`` are treated as noise.
    """
    released = relay.released
    there = _audible(released, relay, order, floor)
    wanted = m_down
    if len(released.gets[order.client]) and bool(relay.newest.round[order.client] >= 0):
        wanted = int(released.gets[order.client])
    places = _places(released, there, order.client, draw, key)[: min(wanted, m_down)]
    seen, flags = _observations(released, there, places)
    missing = m_down - len(flags)
    seen, flags = pad(seen, (0, 0, 0, 0, 0, missing)), pad(flags, (0, 0, 0, missing))
    if order.hears is None:
        return PeerRepresentations(relay.mean, relay.known, seen, flags)
    nothing = torch.zeros_like(relay.known)
    return PeerRepresentations(torch.zeros_like(relay.mean), nothing, seen, flags)


def _audible(released: Released, relay: Relay, order: Order, floor: float) -> Tensor:
    """Return a mask of observations that a client may receive, (clients, M_up, classes)."""
    there = released.rows[:, 1:] > floor
    there[order.client] = False  # never the client's own
    heard = torch.ones(len(there), dtype=torch.bool, device=there.device)
    if order.hears is not None:
        peers = torch.tensor(order.hears, dtype=torch.int64, device=heard.device)
        heard = torch.zeros_like(heard).index_fill(0, peers, True)
    if released.hears.shape[1] and bool(relay.newest.round[order.client] >= 0):
        heard &= released.hears[order.client].bool()
    return there & heard[:, None, None]


def _places(released: Released, there: Tensor, client: int, draw: Draw, key: Tensor) -> Tensor:
    """Return the order in which a client gets observations: (clients * M_up, 1 or classes).

    Observations are numbered through all clients. Existing observations come first.
    """
    flat = there.flatten(0, 1)
    lines = flat.T if draw == "class" else flat.any(1).unsqueeze(0)
    keys = random.fold(key, torch.arange(len(lines), device=key.device).unsqueeze(1))
    order = random.order(keys, lines)
    if draw == "nearest":
        far = torch.where(lines[0], _distances(released, client), torch.inf)
        order = order[:, torch.argsort(far[order[0]], stable=True)]
    return order.T


def _distances(released: Released, client: int) -> Tensor:
    """Return the distance of each observation to a client's own means: (clients * M_up,).

    The distance is the mean square over features and over the classes that both have.
    """
    own_means, has = class_means(released.total[client, 0], released.rows[client, 0], least=LEAST)
    theirs, have = class_means(released.total[:, 1:], released.rows[:, 1:], least=LEAST)
    both = have * has
    far = ((theirs - own_means).square().mean(3) * both).sum(2) / both.sum(2)
    return far.nan_to_num(torch.finfo(far.dtype).max).flatten()


def _observations(released: Released, there: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the observations at ``places``, (..., classes, m), and a mask (..., classes)."""
    _, m_up, classes = there.shape
    if not len(places):
        shape = (0, classes, released.total.shape[-1])
        return released.total.new_zeros(shape), released.rows.new_zeros(shape[:2])
    column = torch.arange(classes, device=there.device)
    at = (places // m_up, 1 + places % m_up, column)
    present = there.flatten(0, 1)[places, column]
    return class_means(released.total[at], released.rows[at] * present, least=LEAST)


@tree
class ReleaseSums:
    """Sums of features by class, and their numbers of rows, in the shapes of a release."""

    total: Tensor
    rows: Tensor


@tree
class Own:
    """A client's state: its releases, its wishes, and the matrix of its discriminator.

    ``releases`` (1 + M_up, classes) is 1 or 0. ``gets`` (1,) and ``hears`` (clients,), 1 or 0, are
    sent; both are empty if the method reads no wishes. ``frequency`` (classes,) is the fraction of
    each class among the client's rows. ``form`` (m, m) exists if the discriminator is learned.
    """

    releases: Tensor
    gets: Tensor
    hears: Tensor
    frequency: Tensor
    form: Tensor | None = None


@dataclass(frozen=True)
class RepShare(PeerMethod):
    """Representation sharing with the paper's weights and numbers, and its authors' reductions."""

    lambda_kd: NonNegative = 10.0
    """Weight of the distance between features and the global mean of their class."""
    lambda_disc: NonNegative = 1.0
    """Weight of the loss that classifies features by comparing them with other clients' means."""
    n_avg: PositiveInt = 10
    """Number of rows in one observation (a mean of a few rows of one class)."""
    m_up: NonNegativeInt = 1
    """Number of observations per class that a client releases in a round."""
    m_down: PositiveInt = 1
    """Number of observations per class that a client receives in a round."""
    reduction: Literal["mean", "paper"] = "mean"
    """Whether the two loss terms are means over features and classes, or sums as in the paper."""
    draw: Draw = "client"
    """Whose observations a client receives.

    ``client``: all classes of one other client. ``class``: each class from another client, drawn
    independently. ``nearest``: those nearest to the client's own class means.
    """
    start: Literal["masked", "random"] = "masked"
    """What clients compare with before anything was shared.

    ``masked``: nothing, so both loss terms are 0. ``random``: random numbers, as in the paper.
    """
    discriminator: Literal["classifier", "learned"] = "classifier"
    """How features and means are compared: by the client's classifier, or by a learned matrix."""
    wishes: bool = False
    """Whether clients tell the server how many observations they want, and from whom."""
    shared_width: PositiveInt | None = None
    """Only the first features, this many, are shared. The default is all.

    Needed if bodies have different widths.
    """
    release_weight: str = ""
    """Name of the annotation with each row's weight, from 0 to 1.

    A released sum counts the row with this weight.
    """
    log_bound: bool = False
    """Whether every evaluation measures the paper's lower bound (theorem 1).

    It bounds the mutual information of features and representations.
    """
    pick_rate: Fraction | None = None
    """Probability that a row is in an observation. It replaces ``n_avg``.

    Differential privacy for records needs it.
    """
    control: bool = False
    """Whether clients release zeros in place of features, for an experiment's control.

    What is gained then comes from noise and from the pull of features to zero, not from sharing.
    """

    keeps: ClassVar[Part] = "all"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})
    accepts_late: ClassVar[bool] = True
    own_settings: ClassVar[type] = Release
    among_peers: ClassVar[bool] = True

    @property
    def record_terms(self) -> int:
        """One per-row sum over all rows, and one per observation.

        The number is 0 if each observation has a fixed number of rows: the choice of a row then
        depends on the other rows.
        """
        return 0 if self.m_up and self.pick_rate is None else 1 + self.m_up

    def check(self, task: Task) -> None:
        """Raise MethodError unless all bodies have one feature width, or the shared width."""
        check_pools(task, "repshare")
        if self.shared_width is None:
            one_feature_width(task, "repshare", shares="class means")
        for name, arch in task.architectures.items():
            if arch.feature_width < (self.shared_width or 0):
                raise MethodError(
                    f"method.shared_width = {self.shared_width}: the body of {name} ends in "
                    f"{arch.feature_width} features"
                )
        if self.release_weight:
            check_weights(task.annotations, self.release_weight, task.privacy)
        if self.release_weight and self.log_bound:
            raise MethodError("method.log_bound counts rows: it does not go with release_weight")

    def check_client(self, client: int, settings: Release, task: Task) -> None:
        """Raise MethodError if a client's settings exceed the method's, or have no reader."""
        up, down = settings.m_up or 0, settings.m_down or 0
        strange = [c for c in settings.classes if not 0 <= c < task.num_classes]
        unknown = [c for c in settings.hears if not 0 <= c < task.num_clients]
        unheard = not self.wishes and (settings.m_down is not None or settings.hears)
        problems = {
            f"m_up must be from 0 to {self.m_up}, the method's": not 0 <= up <= self.m_up,
            f"m_down must be from 0 to {self.m_down}, the method's": not 0 <= down <= self.m_down,
            f"classes has {strange}; there are 0..{task.num_classes - 1}": bool(strange),
            f"hears has {unknown}; there are 0..{task.num_clients - 1}": bool(unknown),
            "hears names nobody but the client itself": set(settings.hears) == {client},
            "m_down and hears need method.wishes = true, for the server to hear of them": unheard,
        }
        if problem := next((text for text, wrong in problems.items() if wrong), None):
            raise MethodError(problem)

    def init_server(self, ctx: Context) -> Relay:
        """Return a relay without any release."""
        width = self.shared_width or one_feature_width(ctx.task, "repshare", shares="class means")
        classes, device = ctx.task.num_classes, ctx.key.device
        rows = torch.zeros(1 + self.m_up, classes, device=device)
        wishes = self._wishes(Release(), ctx)
        nothing = Released(rows.unsqueeze(2).expand(-1, -1, width), rows, *wishes)
        return Relay.of(LatestMessages.of_nobody(nothing, ctx.task.num_clients), ctx)

    def init_client(self, net: Net, ctx: Context) -> Own:
        """Return the client's releases and wishes, and the first matrix of its discriminator.

        Under that matrix, similar features score above dissimilar features.
        """
        settings, classes = ctx.settings or Release(), ctx.task.num_classes
        releases = torch.zeros(1 + self.m_up, classes, device=ctx.key.device)
        m_up = self.m_up if settings.m_up is None else settings.m_up
        releases[: 1 + m_up, list(settings.classes or range(classes))] = 1.0
        width, form = self.shared_width or net.arch.feature_width, None
        if self.discriminator == "learned":
            form = torch.eye(width, device=ctx.key.device) / width**0.5
        return Own(releases, *self._wishes(settings, ctx), torch.zeros_like(releases[0]), form)

    def _wishes(self, settings: Release, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return a client's number of observations (1,), and a mask of heard clients (clients,)."""
        if not self.wishes:
            return torch.zeros(0, device=ctx.key.device), torch.zeros(0, device=ctx.key.device)
        m_down = self.m_down if settings.m_down is None else settings.m_down
        hears = torch.zeros(ctx.task.num_clients, device=ctx.key.device)
        hears[list(settings.hears or range(len(hears)))] = 1.0
        return torch.full((1,), float(m_down), device=hears.device), hears

    def download(self, server: Relay, order: Order, ctx: Context) -> PeerRepresentations:
        """Return the global means, and M_down observations of other clients, drawn by key."""
        key = ctx.draw("download", order.client)
        if self.start == "random" and not bool((server.newest.round >= 0).any()):
            return self._random(server, key)
        return download(server, order, self.m_down, self.draw, key, noise_floor(ctx.task.privacy))

    def _random(self, server: Relay, key: Tensor) -> PeerRepresentations:
        seen = random.normal(random.fold(key, "seen"), (self.m_down, *server.mean.shape))
        mean = random.normal(random.fold(key, "mean"), tuple(server.mean.shape))
        there = torch.ones_like(seen[:, :, 0])
        return PeerRepresentations(mean, there[0], seen, there)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one phase in which the net and a learned discriminator learn together."""
        learns = ("all",) if self.discriminator == "classifier" else ("all", "own.form")
        return (Phase(learns),)

    def loss(
        self,
        net: Net,
        batch: Batch,
        own: Own,
        down: PeerRepresentations,
        ctx: Context,
    ) -> Tensor:
        """Return L_CE + lambda_KD L_KD + lambda_disc L_disc (eq. 6), a scalar ().

        ``batch.x`` is ``(batch, *input)``.
        """
        z = net.features(batch.x)
        logits = net.logits(z)
        mean, has_target = down.targets()
        far = (z[:, : mean.shape[1]] - mean[batch.y]).square()
        far = far.mean(1) if self.reduction == "mean" else far.sum(1)
        kd = weighted_mean(far * has_target[batch.y], batch.mask, batch.weight)
        # one m for each row, among the observations that have any class
        lots = down.there.amax(1).sum().clamp(min=1.0)
        m = (random.uniform(ctx.draw("observation"), (len(batch.y),)) * lots).to(torch.int64)
        log_h = self._log_h(net, own, z, down.seen)[torch.arange(len(m), device=m.device), m]
        terms = contrast(log_h, batch.y) * down.there[m]
        disc = terms.mean(1) if self.reduction == "mean" else terms.sum(1)
        loss = ctx.task.objective.loss(logits, batch)
        disc = weighted_mean(disc, batch.mask, batch.weight)
        return loss + self.lambda_kd * kd + self.lambda_disc * disc

    def _log_h(self, net: Net, own: Own, z: Tensor, seen: Tensor) -> Tensor:
        """Return ln h(s, t) of every row and observation, (batch, M_down, classes) (eq. 5)."""
        width = seen.shape[2]
        if own.form is not None:
            return logsigmoid(torch.einsum("bi,ij,mcj->bmc", z[:, :width], own.form, seen))
        weight, bias = net.head
        of_row, of_seen = (
            log_softmax(linear(part, weight[:, :width], bias), -1) for part in (z[:, :width], seen)
        )
        return torch.logsumexp(of_row[:, None, None] + of_seen, 3)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The bound of theorem 1, with ``log_bound``."""
        return (INFORMATION,) if self.log_bound else ()

    def measure(
        self, net: Net, batch: Batch, own: Own, down: PeerRepresentations, ctx: Context
    ) -> dict[str, Tensor]:
        """Return the bound on I(Phi_s; Phi_t) of each row (theorem 1), mean over observations."""
        log_h = self._log_h(net, own, net.features(batch.x), down.seen)
        bounds = information_bound(log_h, batch.y, own.frequency, down.there)
        return {INFORMATION.name: bounds}

    def pick(self, rows: Labels, own: Own, ctx: Context) -> Tensor:
        """Return a mask (rows, M_up) of each observation's rows.

        They are ``n_avg`` rows of each class, or all rows of smaller classes. With ``pick_rate``,
        rows are sampled independently, under privacy of records by their content.
        """
        for name in filter(None, (self.release_weight, ctx.task.training.sample_weights)):
            rows = replace(rows, mask=rows.mask & (rows.annotations[name] > 0))

        def picked(key: Tensor) -> Tensor:
            if self.pick_rate is None:
                return drawn_of_each_class(key, rows, ctx.task.num_classes, self.n_avg)
            draws = _draws(key, rows) < self.pick_rate
            return (draws & rows.mask).to(torch.float32)

        picks = [picked(ctx.draw("pick", m)) for m in range(self.m_up)]
        return torch.stack(picks, 1) if picks else super().pick(rows, own, ctx)

    def summarize(
        self,
        net: Net,
        batch: Batch,
        own: Own,
        down: PeerRepresentations,
        ctx: Context,
    ) -> ReleaseSums:
        """Return sums of features by class, over all rows and over each observation's rows."""
        z = net.features(batch.x)[:, : down.mean.shape[1]]
        z = torch.zeros_like(z) if self.control else z
        batch, z = counted(z, batch, ctx.task.privacy), bounded(z, ctx.task.privacy)
        assert batch.picks is not None  # for the type checker
        chosen = torch.cat([torch.ones_like(z[:, :1]), batch.picks.to(z.dtype)], 1)
        members = one_hot(batch.y, ctx.task.num_classes) * weights_of(batch, z).unsqueeze(1)
        if self.release_weight:
            members = members * batch.annotations[self.release_weight].unsqueeze(1)
        members = chosen.T.unsqueeze(2) * members  # (1 + M_up, batch, classes)
        return ReleaseSums(members.transpose(1, 2) @ z, members.sum(1))

    def upload(
        self,
        net: Net,
        own: Own,
        sums: ReleaseSums,
        down: PeerRepresentations,
        ctx: Context,
    ) -> tuple[Released, Own]:
        """Return the released part of the client's sums, and its wishes."""
        rows, total = sums.rows * own.releases, sums.total * own.releases.unsqueeze(2)
        own = replace(own, frequency=sums.rows[0] / sums.rows[0].sum().clamp(min=1.0))
        return Released(total, rows, own.gets, own.hears), own

    def server_update(self, server: Relay, replies: Replies, ctx: Context) -> Relay:
        """Store each client's last release, and average the releases."""
        return Relay.of(server.newest.with_replies(replies), ctx)

    def forget(self, server: Relay, client: int, ctx: Context) -> Relay:
        """Return the relay without a client's release."""
        return Relay.of(server.newest.without(client), ctx)

    def kept_of(self, server: Relay, client: int) -> Released | None:
        """Return a client's last release."""
        return server.of_client(client)


def _draws(key: Tensor, rows: Labels) -> Tensor:
    """Return a number from 0 to just below 1 for each row, (rows,)."""
    if rows.fates is None:
        return random.uniform(key, (len(rows.y),))
    return random.uniform(random.fold(key, rows.fates).unsqueeze(1), (1,)).squeeze(1)
