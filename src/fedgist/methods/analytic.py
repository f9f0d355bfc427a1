"""One exchange of second moments, and the exact head of all rows: for bodies that do not learn.

Clients send counts, class sums and the triangle of ``sum z z^T`` of their features, once. The
server solves for a head: FedLog's on whitened features, linear or quadratic discriminant analysis
(FedCGS, https://arxiv.org/abs/2503.06962), ridge regression (Fed3R, AFL,
https://arxiv.org/abs/2405.16068), or LDA from the class means of clients alone (FedCOF,
https://arxiv.org/abs/2412.14326). See docs/methods/analytic.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from fedgist.core.bounds import NonNegative, NonNegativeInt
from fedgist.core.message import Nothing
from fedgist.core.method import (
    Batch,
    Context,
    Method,
    Net,
    Order,
    Part,
    Phase,
    Replies,
    Reply,
    Task,
)
from fedgist.core.nets.net import Architecture
from fedgist.core.objectives.target import Target
from fedgist.core.privacy import Privacy, counted, of_records
from fedgist.core.tree import Tree, map_leaves, tree
from fedgist.errors import MethodError
from fedgist.methods.common import sum_memory
from fedgist.methods.common.latest_messages import LatestMessages
from fedgist.methods.common.left_out_rows import Spread, losses_without, no_spread, spread_of
from fedgist.methods.common.linear_head import (
    WIRES,
    LinearHead,
    check_heads,
    unit_rows,
    weights_of,
    with_constant,
)
from fedgist.methods.common.moment_heads import (
    LINEAR,
    SCALES,
    Moments,
    Scores,
    cross_validated,
    from_means,
    precision_of,
    qda,
    ridge,
)
from fedgist.methods.common.moment_steps import (
    Gradient,
    Head,
    Key,
    Known,
    Losses,
    Own,
    OwnCounts,
    begun,
    calibrated,
    eta_of,
    factors,
    head_of,
    loss_of,
    own_prior,
    refined,
    rows_behind,
    whole_head,
)
from fedgist.methods.common.moment_sums import (
    Sums,
    Wire,
    as_sent,
    moments_of,
    no_statistics,
    noise_radius,
    private_rows,
    received,
    summed,
    targets_of,
    widened,
)
from fedgist.methods.common.solved_head import check_target
from fedgist.methods.common.sum_memory import ClientSums
from fedgist.methods.common.triangles import symmetric, triangle

RANDOM = 512  # features of a row that no body encoded
MOST_NUMBERS = 1 << 24  # in an upload of QDA: 64 MiB
ENOUGH = 10  # rows for each feature, from which rows that were trained on say how sure to be
FEW = 2_000  # rows times epsilon, below which class sums alone say more than second moments
OF_NOISE = 0.5  # the penalty beside the largest eigenvalue of noise
EXCHANGE, CALIBRATE, REFINE = "exchange", "calibrate", "refine"

Down: TypeAlias = LinearHead | Head | Spread | Key | Nothing


@tree
class Server:
    """Server state: what is known by architecture, and when each client was ``heard``, (clients,).

    That is the round of its sums; 0 before, and -1 after it was forgotten.
    """

    known: dict[str, Known]
    heard: Tensor


@dataclass(frozen=True)
class Analytic(Method):
    """Second moments of frozen features in one exchange, and the exact head of all rows."""

    head: Literal["whitened", "lda", "ridge", "qda", "means", "cosine"] = "whitened"
    """The head: FedLog's of whitened features, or another one.

    ``qda`` sends a matrix for each class. ``means`` sends class means alone, which the server sees
    client by client. ``cosine`` compares a row with class sums of rows of length 1, and sends
    nothing else. Numbers always have ridge regression.
    """
    prior: Literal["counts", "uniform", "own"] = "counts"
    """What the shares of classes are taken to be: those of all training rows, equal, or a client's.

    ``own`` are the shares of a client's own training rows, which never leave it.
    """
    penalty: Literal["cross_validated"] | NonNegative = "cross_validated"
    """Penalty l of the covariance W + l I. ``cross_validated``: computed from the sums."""
    expand: Literal["raw_rows"] | NonNegativeInt = "raw_rows"
    """Number of random ReLU features that are put beside the features.

    ``raw_rows``: 512 if no body encodes the rows (``model.name = "logistic"``), the head is linear
    and nothing is private; else 0. State 0 if the rows are features of an encoder.
    """
    roots: bool = False
    """Whether signed square roots are put beside the features of an encoder.

    A linear head of both is more accurate, and a message up to four times as long.
    """
    calibrate: bool = False
    """Whether a second exchange finds how sure the head may be, by the clients' training rows.

    With ``lda`` each row is scored by all others, otherwise by a head that has learnt from it.
    """
    refine: Literal["enough_rows"] | bool = "enough_rows"
    """Whether further rounds (``train.num_rounds``) move the head toward logistic regression.

    ``enough_rows``: if there are ten rows for each feature; with fewer it would overfit.
    """
    wire: Wire = "float32"
    """The numbers that clients send; with ``float64`` they compute in it, too, in twice the time.

    ``float16``, ``bfloat16`` and ``int8`` are codes of sums: the second moments of i and j are
    divided by the roots of those of i and of j, class sums by the largest of a class.
    """
    project: NonNegativeInt = 0
    """Number of random projections that replace the features; 0 keeps them."""
    declared_rows: NonNegativeInt = 0
    """Number of training rows of all clients, which privacy of records does not measure.

    If it is stated and small beside epsilon, class sums alone are released, for ``cosine``.
    """

    version: ClassVar[int] = 3  # 1 had no random features by default; 2 scaled each by itself
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
        if task.privacy is not None:
            self._check_private(task.privacy)
        if target == "numbers" or (target == "labels" and of_records(task.privacy)):
            check_target(task, "analytic")  # a private row is in the sums of each of its labels
        if target == "numbers":
            self._check_numbers()
        elif target == "labels" and self.head not in LINEAR:
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
        check_heads(task, "analytic")
        for architecture in task.architectures.values():
            self._check_size(task, architecture)

    def _check_private(self, privacy: Privacy) -> None:
        """Raise MethodError for settings without a known sensitivity."""
        unit, records = f"privacy.unit = {privacy.unit!r}", of_records(privacy)
        problems = {
            f"method.wire = {self.wire!r}: noise takes numbers off the codes; use 'float32'": (
                self.wire not in WIRES
            ),
            f"privacy.clip = {privacy.clip:g}: method analytic brings rows to length 1: state 1": (
                records and privacy.clip != 1.0
            ),
            f"method.head = {self.head!r} has no form for private rows: use 'whitened', 'lda', "
            "'ridge' or 'cosine'": records and self.head in {"qda", "means"},
            "method.expand and method.roots need columns of like scale, which noisy sums do not "
            "give: 0 and false": records and (self.roots or self.expand not in {0, "raw_rows"}),
            "method.calibrate and method.refine send sums of unknown sensitivity to a row": (
                records and (self.calibrate or self.refine is True)
            ),
            "privacy.noise = 'system' needs method.wire = 'float64': products of features are not "
            "exact in float32": records and privacy.grid > 0 and self.wire != "float64",
        }
        for problem, applies in problems.items():
            if applies:
                raise MethodError(f"{unit}: {problem}")

    def _check_size(self, task: Task, architecture: Architecture) -> None:
        """Raise MethodError if QDA would send too much, or class means be too few."""
        m = sum(self._kinds(task.starts[architecture.name], task))
        if self.head == "means":
            sum_memory.check_single(task, "method analytic: method.head = 'means'")
        if self.head == "means" and self.wire not in WIRES:
            raise MethodError(f"method.wire = {self.wire!r}: 'means' sends 'float32' or 'float64'")
        if self.project >= architecture.feature_width:
            raise MethodError(
                f"method.project = {self.project}: {architecture.name} has "
                f"{architecture.feature_width} features; project to fewer, or use 0"
            )
        sent, means = task.num_classes * m**2 // 2, (task.num_clients - 1) * task.num_classes
        if self.head == "qda" and sent > MOST_NUMBERS:
            raise MethodError(
                f"method.head = 'qda' would send {sent:.3g} numbers, above {MOST_NUMBERS:.3g}: use "
                "'whitened' or 'lda', or fewer features (method.project)"
            )
        if self.head == "means" and means < m:
            raise MethodError(
                f"method.head = 'means': {task.num_clients} clients have at most {means} class "
                f"means more than there are classes, and {m} features need as many: use 'whitened'"
            )

    def notes(self, task: Task) -> tuple[str, ...]:
        """Return what privacy of records changes, and that rows without an encoder are expanded."""
        if self.expand == "raw_rows" and any(self._extra(s, task) for s in task.starts.values()):
            leave = "method.expand = 0 leaves them out, for rows that are features of an encoder"
            return (f"no body encodes the rows: each gets {RANDOM} random features ({leave})",)
        if not of_records(task.privacy):
            return ()
        assert task.privacy is not None
        budget = f"method.declared_rows = {self.declared_rows} at epsilon {task.privacy.epsilon:g}"
        if self.head != "cosine" and self._released(task) == "cosine":
            return (f"{budget} are few: class sums alone are released, for method.head = 'cosine'",)
        if not self.declared_rows and self.head != "cosine":
            needed = f"which need rows times epsilon of {FEW:,} or more"
            return (f"method.declared_rows is not stated: second moments are released, {needed}",)
        return ()

    def _released(self, task: Task) -> str:
        """Return the head, which is ``cosine`` if private rows are declared to be few."""
        if task.privacy is None or not of_records(task.privacy) or not self.declared_rows:
            return self.head
        return "cosine" if self.declared_rows * task.privacy.epsilon < FEW else self.head

    @property
    def record_terms(self) -> int:
        """A row adds one term to counts, sums and second moments (methods/common/moment_sums)."""
        return 0 if self.head in {"qda", "means"} else 1

    @property
    def release_digits(self) -> int:
        """Bits in which totals are exact: float64 holds products of features on a grid."""
        return 48 if self.wire == "float64" else 24

    def _check_numbers(self) -> None:
        if self.head not in {"whitened", "ridge"} or self.prior != "counts" or self.calibrate:
            raise MethodError(
                f"method.head = {self.head!r}, method.prior = {self.prior!r}: numbers have ridge "
                "regression, without a prior or calibration"
            )

    def _can_refine(self, task: Task) -> bool:
        linear = self.head in LINEAR and task.objective.target != "numbers"
        told = of_records(task.privacy)
        return linear and self.prior == "counts" and self.refine is not False and not told

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
        starts = ctx.task.starts.items()
        return Server({name: self._start(start, heard, ctx) for name, start in starts}, heard)

    def _start(self, start: Net, like: Tensor, ctx: Context) -> Known:
        task, quadratic = ctx.task, self.head == "qda"
        m, k = sum(self._kinds(start, task)), task.num_classes
        draws = self.project > 0 or self._extra(start, task) > 0
        single = like.new_zeros(0, dtype=torch.float32)
        head = Head(
            eta=single.new_zeros(k, m + 1),
            prior=single.new_zeros(k),
            bend=single.new_zeros(k, m * (m + 1) // 2) if quadratic else single,
            center=single.new_zeros(m) if quadratic else single,
            key=ctx.draw("features").view(1) if draws else ctx.key.new_zeros(0),
        )
        zero, one = like.new_zeros(()), like.new_ones(())
        known = Known(head, head.eta.double(), steps=zero, ridge=one, noises=zero)
        if self.head == "means":
            example = ClientSums(like.new_zeros(k, m + 1, dtype=WIRES[self.wire]))
            newest = LatestMessages.of_nobody(example, task.num_clients)
            return replace(known, newest=newest)
        first_only = self._released(task) == "cosine"
        sums = no_statistics(task, m, like, by_class=quadratic, first_only=first_only)
        known = replace(known, sums=sums)
        if self.calibrate and self.head == "lda" and task.objective.target == "class":
            known = replace(known, spread=no_spread(k, m, head.key, like))
        return known

    def _extra(self, start: Net, task: Task) -> int:
        """Return the number of random features that an architecture's rows get."""
        if self.expand != "raw_rows":
            return self.expand
        raw = _is_raw(start) and task.privacy is None and not self.project
        return RANDOM if raw and self.head in LINEAR else 0

    def _kinds(self, start: Net, task: Task) -> list[int]:
        """Return the numbers of columns of one unit; columns of raw rows have one each."""
        count, extra = self.project or start.arch.feature_width, self._extra(start, task)
        columns = [1] * count if _is_raw(start) else [count]
        return columns * (2 if self.roots else 1) + ([extra] if extra else [])

    def _plain(self, head: Head, task: Task) -> bool:
        """Whether scores are linear in the features of a net, so that it can hold the head."""
        own_rows = self.roots or len(head.key) > 0 or of_records(task.privacy)
        return not own_rows and self.head not in {"cosine", "qda"}

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
            if (heard[order.client] > 0 if there else heard[order.client] == 0)
            and order.architecture not in few
        ]

    def _has_few(self, known: Known, ctx: Context) -> bool:
        left_out = ctx.stage == CALIBRATE and known.spread is not None
        if left_out or (ctx.stage == REFINE and self.refine is True):
            return False
        rows, m = rows_behind(known, ctx.task), known.ahead.shape[1] - 1
        return not rows.is_meta and bool(rows < ENOUGH * m)

    def download(self, server: Server, order: Order, ctx: Context) -> Down:
        """Return the head; in the exchange, the key of the random features if there are any."""
        head = (known := server.known[order.architecture]).head
        if ctx.stage == EXCHANGE:
            return Key(head.key) if len(head.key) else Nothing()
        if ctx.stage == REFINE:
            return replace(head, eta=known.ahead.float(), prior=torch.zeros_like(head.prior))
        if ctx.stage == CALIBRATE and known.spread is not None:
            return known.spread
        if ctx.stage == CALIBRATE or not self._plain(head, ctx.task):
            return head
        return LinearHead(whole_head(head))

    def init_client(self, net: Net, ctx: Context) -> Own:
        """Return no counts, if they are needed."""
        if self.prior != "own":
            return Nothing()
        counts = torch.zeros(ctx.task.num_classes, device=ctx.key.device)
        return OwnCounts(counts, counts.sum())

    def receive(self, net: Net, own: Own, down: Down, ctx: Context) -> tuple[Net, Own]:
        """Return the net with the head installed, if it can hold it."""
        if isinstance(down, LinearHead):
            net = net.with_head(down.weight, down.bias + own_prior(own, ctx.task))
        return net, own

    def summarize(self, net: Net, batch: Batch, own: Own, down: Down, ctx: Context) -> Tree:
        """Return counts, sums and second moments over a batch, in float64.

        In later stages: the log loss for each factor, or its gradient in the head.
        """
        task = ctx.task
        z = net.features(batch.x)
        batch = counted(z, batch, task.privacy)
        z = self._features(z, down, task)
        if isinstance(down, Spread):
            shares = own.counts if isinstance(own, OwnCounts) else down.counts
            shares = shares.new_zeros(0) if self.prior == "uniform" else shares
            weight = weights_of(batch, z)
            return Losses(*losses_without(z, batch, weight, down, shares, factors()))
        if not isinstance(down, Head):
            by_class, first_only = self.head == "qda", self._released(task) in {"means", "cosine"}
            return summed(z, batch, task, by_class=by_class, first_only=first_only)
        weight = weights_of(batch, z)
        rows = weight.sum().view(1)
        if ctx.stage == CALIBRATE:
            scores, prior = self._scores(z, down), down.prior + own_prior(own, task)
            losses = [loss_of(s * scores + prior, batch, task, weight) for s in factors()]
            return Losses(torch.stack(losses), rows)
        logits = self._scores(z, down)
        chances = logits.sigmoid() if task.objective.target == "labels" else logits.softmax(1)
        apart = (chances - targets_of(batch, task, z)) * weight.unsqueeze(1)
        return Gradient(apart.mT @ with_constant(z), rows)

    def _features(self, z: Tensor, down: Down, task: Task) -> Tensor:
        """Return what scores are linear in, of features (batch, m) of the net."""
        z = z.to(WIRES.get(self.wire, torch.float32))
        key = down.key if isinstance(down, Key | Head | Spread) else z.new_zeros(0)
        extra = (0 if self.project else RANDOM) if self.expand == "raw_rows" else self.expand
        z = widened(z, key, self.project, extra, roots=self.roots)
        if task.privacy is not None and of_records(task.privacy):
            return private_rows(z, task.privacy)
        return unit_rows(z) if self.head == "cosine" else z

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
        return as_sent(sums, self.wire, private=of_records(ctx.task.privacy)), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Return the heads of all sums so far, or calibrated or refined ones."""
        known, at = dict(server.known), torch.tensor(replies.clients, device=server.heard.device)
        heard = server.heard
        if ctx.stage == EXCHANGE:
            heard = heard.index_fill(0, at, float(ctx.round))
        for name in replies.architectures:
            of, start = replies.by(name), ctx.task.starts[name]
            if ctx.stage == CALIBRATE:
                known[name] = calibrated(known[name], of.total())
            elif ctx.stage == REFINE:
                kinds = self._kinds(start, ctx.task)
                known[name] = refined(known[name], of.total(), kinds, ctx.task)
            else:
                known[name] = self._with(known[name], of, start, ctx.task)
        return Server(known, heard)

    def _with(self, before: Known, replies: Replies, start: Net, task: Task) -> Known:
        """Return what is known of an architecture with some more of its clients."""
        if before.newest is not None:
            return self._of_means(before, before.newest.with_replies(replies), task)
        total = received(replies.total(), private=of_records(task.privacy))
        assert before.sums is not None
        sums = map_leaves(torch.add, before.sums, total)
        local = task.privacy is not None and task.privacy.where == "local"
        noises = before.noises + (len(replies) if local else 1)
        return self._solved(replace(before, sums=sums, noises=noises), start, task)

    def _of_means(self, before: Known, newest: LatestMessages, task: Task) -> Known:
        """Return LDA of the clients' class means."""
        penalty = None if isinstance(self.penalty, str) else self.penalty
        scores, moments = from_means(newest.arrays["total"], penalty, noisy=bool(task.privacy))
        head = head_of(before.head, scores, moments, "means", self.prior)
        return begun(replace(before, head=head, newest=newest))

    def forget(self, server: Server, client: int, ctx: Context) -> Server:
        """Return the heads without a client, if the server has its class means apart."""
        known = dict(server.known)
        for name, before in server.known.items():
            if before.newest is not None:
                known[name] = self._of_means(before, before.newest.without(client), ctx.task)
        return Server(known, _gone(server.heard, client))

    def sent_in(self, server: Server, client: int) -> tuple[int, str] | None:
        """Return the round in which a client sent the sums that are in a total."""
        number = int(server.heard[client])
        return None if self.head == "means" or number <= 0 else (number, EXCHANGE)

    def without(self, server: Server, reply: Reply, ctx: Context) -> Server:
        """Return the heads without a client's sums, which it sent again."""
        known, order, task = dict(server.known), reply.order, ctx.task
        before = known[order.architecture]
        own = received(reply.message, private=of_records(task.privacy))
        assert before.sums is not None
        sums = map_leaves(torch.sub, before.sums, own)
        local = task.privacy is not None and task.privacy.where == "local"
        now = replace(before, sums=sums, noises=before.noises - (1 if local else 0))
        known[order.architecture] = self._solved(now, task.starts[order.architecture], task)
        return Server(known, _gone(server.heard, order.client))

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the model of each architecture, if a net can hold its head."""
        known, starts = server.known.items(), ctx.task.starts
        etas = {n: whole_head(of.head) for n, of in known if self._plain(of.head, ctx.task)}
        return {n: starts[n].with_head(eta[:, 1:], eta[:, 0]) for n, eta in etas.items()}

    def predict(self, net: Net, own: Own, down: Down, x: Tensor, ctx: Context) -> Tensor:
        """Return the scores of ``x`` (batch, *input) plus the logarithms of priors: (batch, K)."""
        if not isinstance(down, Head):
            return net(x)
        z = self._features(net.features(x), down, ctx.task)
        return (self._scores(z, down) + down.prior + own_prior(own, ctx.task)).to(torch.float32)

    def _scores(self, z: Tensor, head: Head) -> Tensor:
        """Return the scores of features (batch, m) without the prior, (batch, K)."""
        z = z - head.center if self.head == "qda" else z
        scores = z @ head.eta[:, 1:].mT.to(z.dtype) + head.eta[:, 0]
        if self.head == "qda":
            bend = symmetric(head.bend, z.shape[1]).to(z.dtype)
            scores = scores - torch.einsum("bi,kij,bj->bk", z, bend, z) / 2
        return scores

    def _solved(self, known: Known, start: Net, task: Task) -> Known:
        """Return what is known, with the head of the sums."""
        assert known.sums is not None
        moments = moments_of(known.sums, task)
        if self._released(task) == "cosine":
            scores = Scores(unit_rows(moments.sums), torch.zeros_like(moments.counts))
            head = head_of(known.head, scores, moments, "cosine", self.prior)
            return begun(replace(known, head=head))
        kinds = self._kinds(start, task)
        one_unit = of_records(task.privacy) or (len(kinds) == 1 and not _is_raw(start))
        scale = torch.ones_like(moments.total) if one_unit else moments.deviations(kinds)
        scaled = moments.scaled(scale)
        penalty = self._penalty(scaled, known, task)
        now = replace(known, head=self._head(known.head, scaled, scale, penalty, task))
        if known.spread is not None:
            precision = precision_of(scaled, penalty) / torch.outer(scale, scale)
            spread = spread_of(moments, precision, SCALES["lda"], known.head.key)
            now = replace(now, spread=spread)
        return begun(now)

    def _head(
        self, before: Head, moments: Moments, scale: Tensor, penalty: Tensor, task: Task
    ) -> Head:
        """Return the head of sums of features that were divided by ``scale`` (m,)."""
        if task.objective.target == "numbers":
            scores = ridge(moments, penalty).of_unscaled(scale)
            return replace(before, eta=eta_of(scores.weight, scores.bias))
        if self.head == "qda":
            curves = qda(moments, penalty).of_unscaled(scale)
            bend = (triangle(curves.bend) * SCALES["qda"]).float()
            before = replace(before, bend=bend, center=curves.center.float())
            scores = Scores(curves.weight, curves.bias)
            return head_of(before, scores, moments, self.head, self.prior)
        even = self.head == "ridge" and self.prior != "counts"
        scores = LINEAR[self.head](moments.alike() if even else moments, penalty).of_unscaled(scale)
        return head_of(before, scores, moments, self.head, self.prior)

    def _penalty(self, moments: Moments, known: Known, task: Task) -> Tensor:
        """Return l, (): a number, from the known noise, or by cross-validation."""
        if not isinstance(self.penalty, str):
            return torch.full_like(moments.rows, self.penalty)
        if task.privacy is not None:
            return OF_NOISE * noise_radius(task.privacy, known.noises, len(moments.total))
        return cross_validated(moments)


def _is_raw(start: Net) -> bool:
    """Whether no body encodes the rows; a site's private body is one, though it is not seen."""
    arch = start.arch
    return (
        arch.frozen is None and not start.body and arch.feature_width == math.prod(arch.input_shape)
    )


def _gone(heard: Tensor, client: int) -> Tensor:
    """Return whom the server has heard, without a client that is never asked again."""
    return heard.index_fill(0, torch.tensor([client], device=heard.device), -1.0)
