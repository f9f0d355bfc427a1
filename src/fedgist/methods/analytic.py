"""One exchange of second moments, and the exact head of all rows: for bodies that do not learn.

Clients send counts, class sums and the triangle of ``sum z z^T`` of their features, once. The
server solves for a head: FedLog's on whitened features, linear or quadratic discriminant analysis
(FedCGS, https://arxiv.org/abs/2503.06962), ridge regression (Fed3R, AFL,
https://arxiv.org/abs/2405.16068), or LDA from the class means of clients alone (FedCOF,
https://arxiv.org/abs/2412.14326). See docs/methods/analytic.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import NonNegative, NonNegativeInt
from fedgist.core.counts import COUNTS_FIRST
from fedgist.core.message import Nothing, message
from fedgist.core.method import Batch, Context, Method, Net, Order, Part, Phase, Replies, Task
from fedgist.core.nets.net import Architecture
from fedgist.core.objectives.regression import Regression
from fedgist.core.objectives.target import Target
from fedgist.core.tree import map_leaves, tree
from fedgist.errors import MethodError
from fedgist.methods.common import sum_memory
from fedgist.methods.common.latest_messages import LatestMessages
from fedgist.methods.common.linear_head import (
    WIRES,
    LinearHead,
    members,
    with_constant,
)
from fedgist.methods.common.moment_heads import (
    Moments,
    Scores,
    cross_validated,
    from_means,
    lda,
    qda,
    ridge,
    symmetric,
    triangle,
    whitened,
)
from fedgist.methods.common.solved_head import check_target
from fedgist.methods.common.sum_memory import ClientSums

LINEAR: Mapping[str, Callable[[Moments, Tensor], Scores]] = MappingProxyType(
    {"whitened": whitened, "lda": lda, "ridge": ridge}
)
#: What scores are multiplied by before priors are added: no head is calibrated by itself.
SCALES: Mapping[str, float] = MappingProxyType(
    {"whitened": 0.2, "lda": 1 / 3, "qda": 1 / 3, "means": 1 / 3, "ridge": 10.0}
)
ABSENT = -100.0  # the logit of a class without rows
MOST_NUMBERS = 1 << 24  # in an upload of QDA: 64 MiB


@message(reduce="sum", over="architecture")
class Statistics:
    """Sums over a client's rows, with the constant 1 put before the m features.

    ``counted`` (rows, m + 1) are sums of features, with numbers of rows first: of each class; of
    each label and then of all rows; or, of numbers, of all rows. ``second`` (rows, entries) are the
    triangles of ``z z^T``, of all rows or by class. Of numbers y, ``sum y (1, z)`` and ``sum y^2``
    follow.
    """

    counted: Tensor = field(metadata=COUNTS_FIRST)
    second: Tensor


@message(reduce="sum")
class Head:
    """A head that a net cannot hold: over expanded features, or a quadratic one.

    ``eta`` (K, m + 1) has the biases first. Of QDA, ``bend`` (K, m (m + 1) / 2) are triangles, and
    ``center`` (m,) is subtracted from features; both are empty otherwise. ``key`` (1,) is that of
    the random features, empty without.
    """

    eta: Tensor
    bend: Tensor
    center: Tensor
    key: Tensor


@message(reduce="sum")
class Key:
    """The key (1,) of the random features, which clients need before they send anything."""

    key: Tensor


Down: TypeAlias = LinearHead | Head | Key | Nothing
Sent: TypeAlias = Statistics | ClientSums


@tree
class Known:
    """What the server has of one architecture: the head, and all sums so far in float64.

    For ``head = "means"``, ``newest`` has each client's class sums in place of the total ``sums``.
    """

    head: Head
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


@tree
class Sums:
    """What a client adds up: ``counted`` as it is sent, and whole matrices ``gram`` (1 or K, m, m).

    Of K numbers, ``cross`` (1, K (m + 2)) is what follows the triangle; else it is empty.
    """

    counted: Tensor
    gram: Tensor
    cross: Tensor


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
    wire: Literal["float32", "float64"] = "float32"
    """Type of the numbers that clients compute and send: float64 doubles bytes and time."""

    keeps: ClassVar[Part] = "body"
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
        if task.privacy is not None:
            raise MethodError("method analytic: the noise of its sums is not known: no privacy")
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
        if self.head == "means":
            sum_memory.check("newest", task, "analytic")
        for name, architecture in task.architectures.items():
            self._check_size(task, self._width(architecture))
            if not architecture.head_bias:
                raise MethodError(f"method analytic needs a head with a bias; {name} has none")

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
        if self.head not in {"whitened", "ridge"} or self.prior != "counts":
            raise MethodError(
                f"method.head = {self.head!r}, method.prior = {self.prior!r}: numbers have ridge "
                "regression, without a prior"
            )
        check_target(task, "analytic")

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"exchange"``, in which clients take part that have not sent their sums yet."""
        return ("exchange",) if ctx.round > 0 else ()

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
            bend=single.new_zeros(k, m * (m + 1) // 2) if quadratic else single,
            center=single.new_zeros(m) if quadratic else single,
            key=ctx.draw("features").view(1) if self.expand else ctx.key.new_zeros(0),
        )
        if self.head == "means":
            example = ClientSums(like.new_zeros(k, m + 1, dtype=WIRES[self.wire]))
            return Known(head, newest=LatestMessages.of_nobody(example, ctx.task.num_clients))
        first, second = self._shapes(ctx.task, m)
        return Known(head, Statistics(like.new_zeros(first), like.new_zeros(second)))

    def _width(self, architecture: Architecture) -> int:
        return architecture.feature_width + self.expand

    def _shapes(self, task: Task, m: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of ``counted`` and ``second``."""
        k, entries = task.num_classes, m * (m + 1) // 2
        if task.objective.target == "numbers":
            return (1, m + 1), (1, entries + k * (m + 2))
        if task.objective.target == "labels":
            return (k + 1, m + 1), (1, entries)
        return (k, m + 1), (k if self.head == "qda" else 1, entries)

    def orders(self, server: Server, selected: Sequence[Order], ctx: Context) -> Sequence[Order]:
        """Return the orders to clients whose sums are not there yet."""
        return [order for order in selected if not server.heard[order.client]]

    def download(self, server: Server, order: Order, ctx: Context) -> Down:
        """Return the head; in the exchange, the key of the random features if there are any."""
        head = server.known[order.architecture].head
        if ctx.stage == "exchange":
            return Key(head.key) if self.expand else Nothing()
        return head if self.expand or self.head == "qda" else LinearHead(head.eta)

    def init_client(self, net: Net, ctx: Context) -> OwnCounts | Nothing:
        """Return no counts, if they are needed."""
        if self.prior != "own":
            return Nothing()
        counts = torch.zeros(ctx.task.num_classes, device=ctx.key.device)
        return OwnCounts(counts, counts.sum())

    def receive(
        self, net: Net, own: OwnCounts | Nothing, down: Down, ctx: Context
    ) -> tuple[Net, OwnCounts | Nothing]:
        """Return the net with the head installed, if it can hold it."""
        if isinstance(down, LinearHead):
            net = net.with_head(down.weight, down.bias + self._own_prior(own, ctx.task))
        return net, own

    def _own_prior(self, own: OwnCounts | Nothing, task: Task) -> Tensor | float:
        """Return the logarithm of the client's own shares of classes, or odds of labels, (K,)."""
        if isinstance(own, Nothing):
            return 0.0
        if task.objective.target == "labels":
            return ((own.counts + 1) / (own.rows - own.counts + 1)).log()
        return ((own.counts + 1) / (own.rows + task.num_classes)).log()

    def summarize(
        self, net: Net, batch: Batch, own: OwnCounts | Nothing, down: Down, ctx: Context
    ) -> Sums:
        """Return counts, sums and second moments over a batch, in float64."""
        task, work = ctx.task, WIRES[self.wire]
        z = self._expanded(net.features(batch.x).to(work), down)
        phi = with_constant(z)
        weight = batch.mask.to(work)
        if batch.weight is not None:
            weight = weight * batch.weight
        weighted, cross = phi * weight.unsqueeze(1), z.new_zeros(1, 0)
        every = weighted.sum(0, keepdim=True)
        if task.objective.target == "numbers":
            assert isinstance(task.objective, Regression)
            y = task.objective.standardized(batch.y.to(work))
            products = [(y.mT @ weighted).flatten(), y.square().mT @ weight]
            counted, cross = every, torch.cat(products).unsqueeze(0)
        else:
            of_class = members(batch, task).to(work)
            counted = of_class.mT @ weighted
            if task.objective.target == "labels":
                counted = torch.cat([counted, every])
        if self.head == "means":
            gram = z.new_zeros(1, 0, 0)
        elif self.head == "qda":
            gram = (of_class.mT.unsqueeze(2) * weighted[:, 1:]).mT @ z
        else:
            gram = (weighted[:, 1:].mT @ z).unsqueeze(0)
        return Sums(counted.double(), gram.double(), cross.expand(len(gram), -1).double())

    def upload(
        self, net: Net, own: OwnCounts | Nothing, sums: Sums, down: Down, ctx: Context
    ) -> tuple[Sent, OwnCounts | Nothing]:
        """Return the sums, with triangles in place of symmetric matrices."""
        work = WIRES[self.wire]
        if isinstance(own, OwnCounts):
            counts, k = sums.counted[:, 0], ctx.task.num_classes
            rows = counts[-1] if ctx.task.objective.target == "labels" else counts.sum()
            own = OwnCounts(counts[:k].to(own.counts.dtype), rows.to(own.rows.dtype))
        if self.head == "means":
            return ClientSums(sums.counted.to(work)), own
        second = torch.cat([triangle(sums.gram), sums.cross], dim=1)
        return Statistics(sums.counted.to(work), second.to(work)), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Return the heads of all sums so far."""
        heard, known = server.heard.clone(), dict(server.known)
        heard[list(replies.clients)] = 1.0
        for name in replies.architectures:
            known[name] = self._with(known[name], replies.by(name), ctx.task.starts[name], ctx)
        return Server(known, heard)

    def _with(self, before: Known, replies: Replies, start: Net, ctx: Context) -> Known:
        """Return what is known of an architecture with some more of its clients."""
        if before.newest is not None:
            newest = before.newest.with_replies(replies)
            return Known(self._of_means(before.head, newest), newest=newest)
        total: Statistics = replies.total()
        assert before.sums is not None
        sums = map_leaves(lambda old, new: old + new.double(), before.sums, total)
        return Known(self._solved(before.head, sums, start, ctx.task), sums)

    def forget(self, server: Server, client: int, ctx: Context) -> Server:
        """Return the heads without a client, if the server has its class means apart.

        Raises
        ------
        MethodError
            If the server keeps a total only.
        """
        heard, known = server.heard.clone(), dict(server.known)
        heard[client] = 0.0
        for name, before in server.known.items():
            if before.newest is None:
                raise MethodError(
                    f"the server keeps a total, from which the sums of client {client} cannot be "
                    "taken"
                )
            newest = before.newest.without(client)
            known[name] = Known(self._of_means(before.head, newest), newest=newest)
        return Server(known, heard)

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the model of each architecture, if a net can hold its head."""
        if self.expand or self.head == "qda":
            return {}
        etas = {name: known.head.eta for name, known in server.known.items()}
        starts = ctx.task.starts
        return {n: starts[n].with_head(eta[:, 1:], eta[:, 0]) for n, eta in etas.items()}

    def predict(
        self, net: Net, own: OwnCounts | Nothing, down: Down, x: Tensor, ctx: Context
    ) -> Tensor:
        """Return the scores of ``x`` (batch, *input) plus the logarithms of priors: (batch, K)."""
        if not isinstance(down, Head):
            return net(x)
        z = self._expanded(net.features(x), down)
        z = z - down.center if self.head == "qda" else z
        scores = z @ down.eta[:, 1:].mT + down.eta[:, 0]
        if self.head == "qda":
            bend = symmetric(down.bend, z.shape[1])
            scores = scores - torch.einsum("bi,kij,bj->bk", z, bend, z) / 2
        return scores + self._own_prior(own, ctx.task)

    def _expanded(self, z: Tensor, down: Down) -> Tensor:
        """Return features (batch, m) with the random ones put behind, (batch, m + expand).

        A row is first brought to the length sqrt(m), which needs no statistics of others.
        """
        if not self.expand or not isinstance(down, Head | Key):
            return z
        m, key = z.shape[1], down.key.view(())
        matrix = random.normal(random.fold(key, 0), (m, self.expand)).to(z.dtype)
        shift = random.normal(random.fold(key, 1), (self.expand,)).to(z.dtype)
        length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        unit = z / torch.where(length > 0, length, 1.0)
        return torch.cat([z, (unit @ matrix + shift / 2).relu()], dim=1)

    def _solved(self, before: Head, sums: Statistics, start: Net, task: Task) -> Head:
        """Return the head of the sums."""
        moments = _moments(sums, task, before.eta.shape[1] - 1)
        deviations = moments.deviations()
        # a row that no body encoded, and random features: columns of unlike scale
        raw = self.expand or not start.body
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
            eta = self._eta_of(moments, curves.weight, curves.bias)
            bend = triangle(curves.bend) * SCALES["qda"]
            return replace(before, eta=eta, bend=bend.float(), center=curves.center.float())
        if self.head == "ridge" and self.prior != "counts":
            scaled = scaled.alike()
        head = LINEAR[self.head](scaled, penalty).of_unscaled(scale)
        return replace(before, eta=self._eta_of(moments, head.weight, head.bias))

    def _of_means(self, before: Head, newest: LatestMessages) -> Head:
        """Return LDA of the clients' class means."""
        each = newest.arrays["total"]
        penalty = None if isinstance(self.penalty, str) else self.penalty
        scores, moments = from_means(each.double(), penalty)
        return replace(before, eta=self._eta_of(moments, scores.weight, scores.bias))

    def _eta_of(self, moments: Moments, weight: Tensor, bias: Tensor) -> Tensor:
        """Return scaled scores plus the logarithms of priors: eta, (K, m + 1)."""
        scale, counts, rows = SCALES[self.head], moments.counts, moments.rows
        if self.head == "ridge":  # it regresses on shares, which are its prior
            prior = bias.new_full((), -0.5 * scale if moments.overlap else 0.0)
        elif self.prior != "counts":
            prior = bias.new_zeros(())
        elif moments.overlap:
            prior = ((counts + 1) / (rows - counts + 1)).log()
        else:
            prior = ((counts + 1) / (rows + len(counts))).log()
        bias = scale * bias + prior
        if not moments.overlap:
            bias = torch.where((counts > 0) | (rows <= 0), bias, ABSENT)
        return _eta(scale * weight, bias)


def _eta(weight: Tensor, bias: Tensor) -> Tensor:
    """Return weights (K, m) and biases (K,) as one matrix in single precision."""
    return torch.cat([bias.unsqueeze(1), weight], dim=1).float()


def _moments(sums: Statistics, task: Task, m: int) -> Moments:
    """Return the sums with their names, and matrices in place of triangles."""
    k, entries = task.num_classes, m * (m + 1) // 2
    gram = symmetric(sums.second[:, :entries], m)
    gram = gram if len(gram) > 1 else gram[0]
    counted, every = sums.counted, sums.counted[-1]
    if task.objective.target == "numbers":
        after = sums.second[0, entries:]
        cross, squares = after[:-k].view(k, m + 1), after[-k:]
        return Moments(cross[:, 0], cross[:, 1:], every[0], every[1:], gram, squares)
    if task.objective.target == "labels":
        counts, of_labels = counted[:-1, 0], counted[:-1, 1:]
        return Moments(counts, of_labels, every[0], every[1:], gram, counts, overlap=True)
    counts, total = counted[:, 0], counted.sum(0)
    return Moments(counts, counted[:, 1:], total[0], total[1:], gram, counts)
