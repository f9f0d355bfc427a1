"""One exchange of second moments, and the exact head of all rows: for bodies that do not learn.

Clients send counts, class sums and the triangle of ``sum z z^T`` of their features, once. The
server solves for a head: FedLog's on whitened features, linear or quadratic discriminant analysis
(FedCGS, https://arxiv.org/abs/2503.06962), ridge regression (Fed3R, AFL,
https://arxiv.org/abs/2405.16068), or LDA from the class means of clients alone (FedCOF,
https://arxiv.org/abs/2412.14326). See docs/methods/analytic.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core.bounds import NonNegative, NonNegativeInt
from fedgist.core.counts import COUNTS
from fedgist.core.message import Nothing, message
from fedgist.core.method import Batch, Context, Method, Net, Order, Part, Phase, Replies, Task
from fedgist.core.nets.net import Architecture
from fedgist.core.objectives.target import Target
from fedgist.core.tree import Tree, map_leaves, tree
from fedgist.errors import MethodError
from fedgist.methods.common import sum_memory
from fedgist.methods.common.latest_messages import LatestMessages
from fedgist.methods.common.linear_head import WIRES, LinearHead, check_heads, with_constant
from fedgist.methods.common.moment_heads import (
    Moments,
    Scores,
    cross_validated,
    from_means,
    lda,
    qda,
    ridge,
    whitened,
)
from fedgist.methods.common.moment_sums import (
    Statistics,
    Sums,
    as_sent,
    moments_of,
    no_statistics,
    summed,
    targets_of,
    weights_of,
    with_random_features,
)
from fedgist.methods.common.solved_head import check_target
from fedgist.methods.common.sum_memory import ClientSums
from fedgist.methods.common.triangles import symmetric, triangle

LINEAR: Mapping[str, Callable[[Moments, Tensor], Scores]] = MappingProxyType(
    {"whitened": whitened, "lda": lda, "ridge": ridge}
)
#: What scores are multiplied by before priors are added: no head is calibrated by itself.
SCALES: Mapping[str, float] = MappingProxyType(
    {"whitened": 0.2, "lda": 1 / 3, "qda": 1 / 3, "means": 1 / 3, "ridge": 10.0}
)
ABSENT = -100.0  # the logit of a class without rows
MOST_NUMBERS = 1 << 24  # in an upload of QDA: 64 MiB
FACTORS = 41  # of scores, tried by calibration: 1/20 to 20
ENOUGH = 10  # rows for each feature, from which rows that were trained on say how sure to be
LEAST_SIZE = 1e-12  # of squared weights: less is none
EXCHANGE, CALIBRATE, REFINE = "exchange", "calibrate", "refine"


@message(reduce="sum")
class Head:
    """A head and its prior: what clients predict by if a net cannot hold it.

    ``eta`` (K, m + 1) has the biases first, without the prior (K,), which is added to the scores.
    Of QDA, ``bend`` (K, m (m + 1) / 2) are triangles, and ``center`` (m,) is subtracted from
    features; both are empty otherwise. ``key`` (1,) is that of the random features, empty without.
    """

    eta: Tensor
    prior: Tensor
    bend: Tensor
    center: Tensor
    key: Tensor


@message(reduce="sum")
class Key:
    """The key (1,) of the random features, which clients need before they send anything."""

    key: Tensor


@message(reduce="sum", over="architecture")
class Losses:
    """The log loss of a client's rows, summed, for each factor of the scores: (FACTORS,)."""

    total: Tensor
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum", over="architecture")
class Gradient:
    """The gradient of a client's log loss in the head, (K, m + 1), and its number of rows, (1,)."""

    total: Tensor
    rows: Tensor = field(metadata=COUNTS)


Down: TypeAlias = LinearHead | Head | Key | Nothing


@tree
class Known:
    """What the server has of one architecture: the head, and all sums so far in float64.

    For ``head = "means"``, ``newest`` has each client's class sums in place of the total ``sums``.
    ``ahead`` (K, m + 1) is the head with its prior, moved on by momentum: where the next gradient
    is asked for. ``steps`` () counts gradients, and ``ridge`` () is the penalty of these steps.
    """

    head: Head
    ahead: Tensor
    steps: Tensor
    ridge: Tensor
    sums: Statistics | None = None
    newest: LatestMessages | None = None


@tree
class Server:
    """Server state: what is known by architecture, and whose sums it is, (clients,) of 0 or 1."""

    known: dict[str, Known]
    heard: Tensor


@tree
class OwnCounts:
    """A client's own counts (K,), and its number of rows (): they stay at the client."""

    counts: Tensor
    rows: Tensor


Own: TypeAlias = OwnCounts | Nothing


@dataclass(frozen=True)
class Analytic(Method):
    """Second moments of frozen features in one exchange, and the exact head of all rows."""

    head: Literal["whitened", "lda", "ridge", "qda", "means"] = "whitened"
    """The head: FedLog's of whitened features, or another one.

    ``qda`` sends a matrix for each class. ``means`` sends class means alone, which the server sees
    client by client. Numbers always have ridge regression.
    """
    prior: Literal["counts", "uniform", "own"] = "counts"
    """What the shares of classes are taken to be: those of all training rows, equal, or a client's.

    ``own`` are the shares of a client's own training rows, which never leave it.
    """
    penalty: Literal["cross_validated"] | NonNegative = "cross_validated"
    """Penalty l of the covariance W + l I. ``cross_validated``: computed from the sums."""
    expand: NonNegativeInt = 0
    """Number of random ReLU features that are put beside the features, for rows of no encoder."""
    calibrate: bool = False
    """Whether a second exchange finds how sure the head may be, by the clients' training rows."""
    refine: Literal["enough_rows"] | bool = "enough_rows"
    """Whether further rounds (``train.num_rounds``) move the head toward logistic regression.

    ``enough_rows``: if there are ten rows for each feature; with fewer it would overfit.
    """
    wire: Literal["float32", "float64"] = "float32"
    """Type of the numbers that clients compute and send: float64 doubles bytes and time."""

    keeps: ClassVar[Part] = "none"  # bodies do not learn, and heads come with each download
    targets: ClassVar[frozenset[Target]] = frozenset({"class", "numbers", "labels"})

    def check(self, task: Task) -> None:
        """Raise MethodError unless bodies are common, and the head can be had from their sums."""
        target = task.objective.target
        bodies = [name for name, start in task.starts.items() if start.body]
        if bodies and not task.common_starts:
            raise MethodError(
                "method analytic adds up features of clients, so they need one body with the same "
                "weights: clients.init = 'shared'"
            )
        if task.privacy is not None and task.privacy.unit == "record":
            raise MethodError(
                "method analytic: the sensitivity of its sums to a row is not known; privacy.unit "
                "= 'client' protects whole clients"
            )
        if target == "numbers":
            self._check_numbers(task)
        elif target == "labels" and self.head in {"qda", "means"}:
            raise MethodError(
                f"method.head = {self.head!r}: several labels of a row have 'whitened', 'lda' or "
                "'ridge'"
            )
        if task.missing_labels:
            raise MethodError("method analytic needs all numbers or labels of each row; some miss")
        if self.head == "ridge" and target == "labels" and self.prior != "counts":
            raise MethodError("method.prior: 'ridge' of several labels has 'counts'")
        if self.refine is True and not self._can_refine(task):
            raise MethodError(
                "method.refine = true: logistic regression has a linear head of classes or labels, "
                "and method.prior = 'counts'"
            )
        if self.head == "means":
            sum_memory.check("newest", task, "analytic")
        check_heads(task, "analytic")
        for architecture in task.architectures.values():
            self._check_size(task, self._width(architecture))

    def _check_size(self, task: Task, m: int) -> None:
        """Raise MethodError if QDA would send too much, or class means be too few."""
        sent, means = task.num_classes * m**2 // 2, (task.num_clients - 1) * task.num_classes
        if self.head == "qda" and sent > MOST_NUMBERS:
            raise MethodError(
                f"method.head = 'qda' would send {sent:.3g} numbers, above {MOST_NUMBERS:.3g}: use "
                "'whitened' or 'lda', or fewer features (model.project)"
            )
        if self.head == "means" and means < m:
            raise MethodError(
                f"method.head = 'means': {task.num_clients} clients have at most {means} class "
                f"means more than there are classes, and {m} features need as many: use 'whitened'"
            )

    def _check_numbers(self, task: Task) -> None:
        if self.head not in {"whitened", "ridge"} or self.prior != "counts" or self.calibrate:
            raise MethodError(
                f"method.head = {self.head!r}, method.prior = {self.prior!r}: numbers have ridge "
                "regression, without a prior or calibration"
            )
        check_target(task, "analytic")

    def _can_refine(self, task: Task) -> bool:
        linear = self.head in LINEAR and task.objective.target != "numbers"
        return linear and self.prior == "counts" and self.refine is not False

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"exchange"``, for clients that have not sent their sums yet, and what follows.

        Calibration is part of every round, and a step of refinement of each but the first.
        """
        if ctx.round == 0:
            return ()
        if ctx.round > 1 and self._can_refine(ctx.task):
            return (EXCHANGE, REFINE)
        return (EXCHANGE, CALIBRATE) if self.calibrate else (EXCHANGE,)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return no phase: nothing is trained."""
        return ()

    def init_server(self, ctx: Context) -> Server:
        """Return heads of zeros, and no sums."""
        heard = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.key.device)
        architectures = ctx.task.architectures.items()
        return Server({name: self._start(a, heard, ctx) for name, a in architectures}, heard)

    def _start(self, architecture: Architecture, like: Tensor, ctx: Context) -> Known:
        m, k, quadratic = self._width(architecture), ctx.task.num_classes, self.head == "qda"
        single = like.new_zeros(0, dtype=torch.float32)
        head = Head(
            eta=single.new_zeros(k, m + 1),
            prior=single.new_zeros(k),
            bend=single.new_zeros(k, m * (m + 1) // 2) if quadratic else single,
            center=single.new_zeros(m) if quadratic else single,
            key=ctx.draw("features").view(1) if self.expand else ctx.key.new_zeros(0),
        )
        known = Known(head, head.eta.double(), like.new_zeros(()), like.new_ones(()))
        if self.head == "means":
            example = ClientSums(like.new_zeros(k, m + 1, dtype=WIRES[self.wire]))
            newest = LatestMessages.of_nobody(example, ctx.task.num_clients)
            return replace(known, newest=newest)
        return replace(known, sums=no_statistics(ctx.task, m, like, by_class=quadratic))

    def _width(self, architecture: Architecture) -> int:
        return architecture.feature_width + self.expand

    def orders(self, server: Server, selected: Sequence[Order], ctx: Context) -> Sequence[Order]:
        """Return the orders to clients whose sums are not there yet, or, afterwards, are there.

        With too few rows for refinement or calibration, nobody is asked.
        """
        there, heard = ctx.stage != EXCHANGE, server.heard.tolist()
        known = server.known.items()
        few = {name for name, one in known if there and self._has_few(one, ctx)}
        return [
            order
            for order in selected
            if bool(heard[order.client]) == there and order.architecture not in few
        ]

    def _has_few(self, known: Known, ctx: Context) -> bool:
        if ctx.stage == REFINE and self.refine is True:
            return False
        rows = _rows(known, ctx.task)
        return not rows.is_meta and bool(rows < ENOUGH * (known.ahead.shape[1] - 1))

    def download(self, server: Server, order: Order, ctx: Context) -> Down:
        """Return the head; in the exchange, the key of the random features if there are any."""
        known = server.known[order.architecture]
        head = known.head
        if ctx.stage == EXCHANGE:
            return Key(head.key) if self.expand else Nothing()
        if ctx.stage == REFINE:
            return replace(head, eta=known.ahead.float(), prior=torch.zeros_like(head.prior))
        if ctx.stage == CALIBRATE or self.expand or self.head == "qda":
            return head
        return LinearHead(_whole(head))

    def init_client(self, net: Net, ctx: Context) -> Own:
        """Return no counts, if they are needed."""
        if self.prior != "own":
            return Nothing()
        counts = torch.zeros(ctx.task.num_classes, device=ctx.key.device)
        return OwnCounts(counts, counts.sum())

    def receive(self, net: Net, own: Own, down: Down, ctx: Context) -> tuple[Net, Own]:
        """Return the net with the head installed, if it can hold it."""
        if isinstance(down, LinearHead):
            net = net.with_head(down.weight, down.bias + _own_prior(own, ctx.task))
        return net, own

    def summarize(self, net: Net, batch: Batch, own: Own, down: Down, ctx: Context) -> Tree:
        """Return counts, sums and second moments over a batch, in float64.

        In later stages: the log loss for each factor, or its gradient in the head.
        """
        task, work = ctx.task, WIRES[self.wire]
        z = net.features(batch.x).to(work)
        if isinstance(down, Key | Head) and self.expand:
            z = with_random_features(z, down.key.view(()), self.expand)
        if not isinstance(down, Head):
            by_class, first_only = self.head == "qda", self.head == "means"
            return summed(z, batch, task, by_class=by_class, first_only=first_only)
        weight = weights_of(batch, z)
        rows = weight.sum().view(1)
        if ctx.stage == CALIBRATE:
            scores, prior = self._scores(z, down), down.prior + _own_prior(own, task)
            losses = [_loss(s * scores + prior, batch, task, weight) for s in _factors()]
            return Losses(torch.stack(losses), rows)
        logits = self._scores(z, down)
        chances = logits.sigmoid() if task.objective.target == "labels" else logits.softmax(1)
        apart = (chances - targets_of(batch, task, z)) * weight.unsqueeze(1)
        return Gradient(apart.mT @ with_constant(z), rows)

    def upload(self, net: Net, own: Own, sums: Tree, down: Down, ctx: Context) -> tuple[Tree, Own]:
        """Return the sums, with triangles in place of symmetric matrices."""
        if not isinstance(sums, Sums):
            return sums, own
        if isinstance(own, OwnCounts):
            counts, k = sums.counted[:, 0].to(own.counts.dtype), ctx.task.num_classes
            of_labels = ctx.task.objective.target == "labels"
            own = OwnCounts(counts[:k], counts[-1] if of_labels else counts.sum())
        if self.head == "means":
            return ClientSums(sums.counted.to(WIRES[self.wire])), own
        return as_sent(sums, WIRES[self.wire]), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Return the heads of all sums so far, or calibrated or refined ones."""
        known, at = dict(server.known), torch.tensor(replies.clients, device=server.heard.device)
        heard = server.heard.index_fill(0, at, 1.0)
        for name in replies.architectures:
            of = replies.by(name)
            if ctx.stage == CALIBRATE:
                known[name] = _calibrated(known[name], of.total())
            elif ctx.stage == REFINE:
                known[name] = _refined(known[name], of.total(), ctx.task)
            else:
                known[name] = self._with(known[name], of, ctx.task.starts[name], ctx.task)
        return Server(known, heard)

    def _with(self, before: Known, replies: Replies, start: Net, task: Task) -> Known:
        """Return what is known of an architecture with some more of its clients."""
        if before.newest is not None:
            return self._of_means(before, before.newest.with_replies(replies), task)
        total: Statistics = replies.total()
        assert before.sums is not None
        sums = map_leaves(lambda old, new: old + new.double(), before.sums, total)
        head = self._solved(before.head, sums, start, task)
        return _begun(replace(before, head=head, sums=sums))

    def _of_means(self, before: Known, newest: LatestMessages, task: Task) -> Known:
        """Return LDA of the clients' class means."""
        penalty = None if isinstance(self.penalty, str) else self.penalty
        scores, moments = from_means(newest.arrays["total"].double(), penalty)
        head = self._scaled(before.head, scores.weight, scores.bias, moments)
        return _begun(replace(before, head=head, newest=newest))

    def forget(self, server: Server, client: int, ctx: Context) -> Server:
        """Return the heads without a client, if the server has its class means apart.

        Raises
        ------
        MethodError
            If the server keeps a total only.
        """
        known, at = dict(server.known), torch.tensor([client], device=server.heard.device)
        heard = server.heard.index_fill(0, at, 0.0)
        for name, before in server.known.items():
            if before.newest is None:
                raise MethodError(
                    f"the server keeps a total, from which the sums of client {client} cannot be "
                    "taken"
                )
            known[name] = self._of_means(before, before.newest.without(client), ctx.task)
        return Server(known, heard)

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the model of each architecture, if a net can hold its head."""
        if self.expand or self.head == "qda":
            return {}
        etas = {name: _whole(known.head) for name, known in server.known.items()}
        starts = ctx.task.starts
        return {n: starts[n].with_head(eta[:, 1:], eta[:, 0]) for n, eta in etas.items()}

    def predict(self, net: Net, own: Own, down: Down, x: Tensor, ctx: Context) -> Tensor:
        """Return the scores of ``x`` (batch, *input) plus the logarithms of priors: (batch, K)."""
        if not isinstance(down, Head):
            return net(x)
        z = net.features(x)
        if self.expand:
            z = with_random_features(z, down.key.view(()), self.expand)
        return self._scores(z, down) + down.prior + _own_prior(own, ctx.task)

    def _scores(self, z: Tensor, head: Head) -> Tensor:
        """Return the scores of features (batch, m) without the prior, (batch, K)."""
        z = z - head.center if self.head == "qda" else z
        scores = z @ head.eta[:, 1:].mT.to(z.dtype) + head.eta[:, 0]
        if self.head == "qda":
            bend = symmetric(head.bend, z.shape[1]).to(z.dtype)
            scores = scores - torch.einsum("bi,kij,bj->bk", z, bend, z) / 2
        return scores

    def _solved(self, before: Head, sums: Statistics, start: Net, task: Task) -> Head:
        """Return the head of the sums."""
        moments = moments_of(sums, task)
        deviations = moments.deviations()
        # a row that no body encoded, and random features: columns of unlike scale
        raw = self.expand or (start.arch.frozen is None and not start.body)
        scale = deviations if raw else torch.ones_like(deviations)
        scaled = moments.scaled(scale)
        penalty = cross_validated(scaled)
        if not isinstance(self.penalty, str):
            penalty = torch.full_like(penalty, self.penalty)
        if task.objective.target == "numbers":
            head = ridge(scaled, penalty).of_unscaled(scale)
            return replace(before, eta=_eta(head.weight, head.bias))
        if self.head == "qda":
            curves = qda(scaled, penalty).of_unscaled(scale)
            bend = (triangle(curves.bend) * SCALES["qda"]).float()
            before = replace(before, bend=bend, center=curves.center.float())
            return self._scaled(before, curves.weight, curves.bias, moments)
        if self.head == "ridge" and self.prior != "counts":
            scaled = scaled.alike()
        head = LINEAR[self.head](scaled, penalty).of_unscaled(scale)
        return self._scaled(before, head.weight, head.bias, moments)

    def _scaled(self, before: Head, weight: Tensor, bias: Tensor, moments: Moments) -> Head:
        """Return a head with these scores, scaled, and the prior of the counts."""
        scale, counts, rows = SCALES[self.head], moments.counts, moments.rows
        bias, prior = scale * bias, torch.zeros_like(bias)
        if self.head == "ridge":  # it regresses on shares, which are its prior
            bias = bias - scale / 2 if moments.overlap else bias
        elif self.prior == "counts" and moments.overlap:
            prior = ((counts + 1) / (rows - counts + 1)).log()
        elif self.prior == "counts":
            prior = ((counts + 1) / (rows + len(counts))).log()
        if not moments.overlap:
            prior = torch.where((counts > 0) | (rows <= 0), prior, ABSENT)
            bias = torch.where(counts > 0, bias, 0.0)
        return replace(before, eta=_eta(scale * weight, bias), prior=prior.float())


def _eta(weight: Tensor, bias: Tensor) -> Tensor:
    """Return weights (K, m) and biases (K,) as one matrix in single precision."""
    return torch.cat([bias.unsqueeze(1), weight], dim=1).float()


def _whole(head: Head) -> Tensor:
    """Return eta with the prior in its biases, (K, m + 1)."""
    return torch.cat([head.eta[:, :1] + head.prior.unsqueeze(1), head.eta[:, 1:]], dim=1)


def _own_prior(own: Own, task: Task) -> Tensor | float:
    """Return the logarithm of the client's own shares of classes, or odds of labels, (K,)."""
    if isinstance(own, Nothing):
        return 0.0
    if task.objective.target == "labels":
        return ((own.counts + 1) / (own.rows - own.counts + 1)).log()
    return ((own.counts + 1) / (own.rows + task.num_classes)).log()


def _rows(known: Known, task: Task) -> Tensor:
    """Return the number of rows behind a head, ()."""
    if known.newest is not None:
        return known.newest.arrays["total"][..., 0].sum()
    assert known.sums is not None
    rows = known.sums.counted[:, 0]  # of classes; else the last is that of all rows
    return rows.sum() if task.objective.target == "class" else rows[-1]


def _factors() -> list[float]:
    """Return the factors of the scores that calibration tries; 1 is in the middle."""
    return torch.logspace(-math.log10(20), math.log10(20), FACTORS).tolist()


def _loss(logits: Tensor, batch: Batch, task: Task, weight: Tensor) -> Tensor:
    """Return the sum of the weighted log losses of the rows, ()."""
    if task.objective.target == "labels":
        t = targets_of(batch, task, logits)
        of_row = functional.binary_cross_entropy_with_logits(logits, t, reduction="none").mean(1)
    else:
        of_row = functional.cross_entropy(logits, batch.y, reduction="none")
    return torch.where(weight > 0, of_row * weight, 0.0).sum()


def _calibrated(known: Known, losses: Losses) -> Known:
    """Return the head with its scores multiplied by the factor of the least loss."""
    factors = torch.tensor(_factors(), device=losses.total.device)
    best, head = factors[losses.total.argmin()], known.head
    return _begun(replace(known, head=replace(head, eta=best * head.eta, bend=best * head.bend)))


def _begun(known: Known) -> Known:
    """Return what is known with refinement at its beginning."""
    return replace(known, ahead=_whole(known.head).double(), steps=torch.zeros_like(known.steps))


def _refined(known: Known, gradient: Gradient, task: Task) -> Known:
    """Return the head after a step of logistic regression, by an upper bound of its curvature.

    The Hessian of the log loss is at most G / 2, or G / 4 of labels, with G the second moments of
    all rows (Boehning 1992), so the step needs no learning rate. The step has Nesterov's momentum.
    Weights of standardized features have the penalty m (K - 1) / |weights|^2 of the first head.
    """
    assert known.sums is not None
    moments, before = moments_of(known.sums, task), _whole(known.head).double()
    k, m = before.shape[0], before.shape[1] - 1
    variance = moments.deviations().square()
    size = (before[:, 1:].square() * variance).sum()
    first = m * max(k - 1, 1) / size.clamp(min=LEAST_SIZE)
    penalty = torch.where(known.steps > 0, known.ridge, first)
    total = moments.total.unsqueeze(0)
    rows = moments.rows.clamp(min=1.0).view(1, 1)
    gram = moments.gram.reshape(-1, m, m).sum(0)
    second = torch.cat([torch.cat([rows, total], 1), torch.cat([total.mT, gram], 1)])
    shrink = penalty * torch.cat([variance.new_zeros(1), variance])
    bound = second / (4 if task.objective.target == "labels" else 2) + shrink.diag()
    share = moments.rows / gradient.rows.double().clamp(min=1.0)
    slope = gradient.total.double() * share + shrink * known.ahead
    after = known.ahead - torch.linalg.solve(bound, slope.mT).mT
    ahead = after + known.steps / (known.steps + 3) * (after - before)
    bias = after[:, :1] - known.head.prior.unsqueeze(1)
    head = replace(known.head, eta=torch.cat([bias, after[:, 1:]], dim=1).float())
    return replace(known, head=head, ahead=ahead, steps=known.steps + 1, ridge=penalty)
