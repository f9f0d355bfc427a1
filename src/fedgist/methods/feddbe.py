"""FedDBE: FedAvg with a client's own bias on the features, and a penalty on drifting feature means.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan 2023, "Eliminating domain bias for federated learning in
representation space" (NeurIPS 2023, https://arxiv.org/abs/2311.14975). See docs/methods/feddbe.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgist.core.bounds import NonNegative
from fedgist.core.counts import COUNTS
from fedgist.core.message import Nothing, message
from fedgist.core.method import (
    Batch,
    ClientInfo,
    Context,
    Count,
    Method,
    Net,
    Order,
    Part,
    Phase,
    Replies,
)
from fedgist.core.objectives.target import Target
from fedgist.core.privacy import LEAST_WEIGHT, least_count
from fedgist.core.tree import Tree, tree
from fedgist.methods.common.averaging import Averages, Averaging, Moved, Weighted, Weights
from fedgist.methods.common.linear_head import weights_of

AVERAGE = Averaging()


@message(reduce="sum", over="architecture")
class FeatureSum:
    """The sum of features (m,) and its number of rows ()."""

    total: Tensor
    rows: Tensor = field(metadata=COUNTS)

    def mean(self, least: float) -> Tensor:
        """Return the mean features (m,), divided by ``least`` rows at least: zeros without rows."""
        return self.total / self.rows.clamp(min=least)


@message(reduce="sum")
class Common:
    """The weights, and the sum over all clients of the features before round 1."""

    weights: Weights
    consensus: FeatureSum


@tree
class Server:
    """Server state: the averages, and each architecture's sum of features."""

    averages: Averages
    consensus: dict[str, FeatureSum]


@tree
class Bias:
    """The personalized representation bias memory of a client, (m,)."""

    bias: Tensor


def _alone(net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tensor:
    """Return the task's loss of the net without a bias, ()."""
    del own, down
    return ctx.task.objective.loss(net(batch.x), batch)


@dataclass(frozen=True)
class FedDBE(Method):
    """Domain bias eliminator on FedAvg, with momentum 1: a batch's mean replaces the client's."""

    kappa: NonNegative = 25.0
    """Weight of the mean regularization: how strongly mean features are held together."""
    consensus: Literal["trained", "start"] = "trained"
    """Bodies whose mean features are held: trained locally before round 1, or the common start."""
    bias: Literal["as_net", "sgd"] = "as_net"
    """How the bias learns: by the net's optimizer, or by plain SGD of the same rate."""

    version: ClassVar[int] = 2
    keeps: ClassVar[Part] = "none"
    targets: ClassVar[frozenset[Target]] = frozenset({"class", "numbers", "labels"})

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"means"`` in round 0, and ``"train"`` afterwards."""
        return ("train",) if ctx.round else ("means",)

    def init_server(self, ctx: Context) -> Server:
        """Return the common initial weights, and no means."""
        device = ctx.key.device
        nothing = {
            name: FeatureSum(
                torch.zeros(arch.feature_width, device=device), torch.zeros((), device=device)
            )
            for name, arch in ctx.task.architectures.items()
        }
        return Server(AVERAGE.init_server(ctx), nothing)

    def init_client(self, net: Net, ctx: Context) -> Bias:
        """Return a bias of zeros, (m,)."""
        return Bias(torch.zeros(net.arch.feature_width, device=ctx.key.device))

    def select(self, server: Server, online: Sequence[ClientInfo], ctx: Context) -> list[Order]:
        """Return all clients online for the means, and a fraction of all clients afterwards."""
        if ctx.round == 0:
            return [Order(client.id, client.architectures[0]) for client in online]
        return super().select(server, online, ctx)

    def download(self, server: Server, order: Order, ctx: Context) -> Common | Nothing:
        """Return the weights and the consensus; for the means, nothing is sent."""
        if ctx.stage == "means":
            return Nothing()
        name = order.architecture
        return Common(server.averages.weights[name], server.consensus[name])

    def receive(
        self, net: Net, own: Bias, down: Common | Nothing, ctx: Context
    ) -> tuple[Net, Bias]:
        """Return the net with the global weights."""
        return (net if isinstance(down, Nothing) else net.with_arrays(down.weights.arrays)), own

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one phase in which the net and the client's bias learn together.

        For the means, the net learns alone, if at all; what it learned is not kept.
        """
        if ctx.stage == "means":
            return (Phase(loss=_alone),) if self.consensus == "trained" else ()
        plain = ("own.bias",) if self.bias == "sgd" else ()
        return (
            Phase(
                ("all", "own.bias"),
                optimizer=replace(ctx.task.training.local_optimizer, plain=plain),
            ),
        )

    def loss(self, net: Net, batch: Batch, own: Bias, down: Common, ctx: Context) -> Tensor:
        """Return the task's loss of z + bias, plus kappa times MSE(mean of z, consensus), ().

        ``batch.x`` is ``(batch, *input)``, z (batch, m), the bias and the consensus are (m,).
        """
        z = net.features(batch.x)
        mean = _sum(z, batch).mean(LEAST_WEIGHT)
        far = (mean - down.consensus.mean(least_count(ctx.task.privacy))).square().mean()
        rows = down.consensus.rows
        has_consensus = (rows > 0).to(rows.dtype)  # 0 if no client has sent a mean
        return (
            ctx.task.objective.loss(net.logits(z + own.bias), batch)
            + self.kappa * has_consensus * far
        )

    def summarize(
        self, net: Net, batch: Batch, own: Bias, down: Common | Nothing, ctx: Context
    ) -> FeatureSum | Count:
        """Return the sum of features for the means; otherwise the number of rows."""
        if ctx.stage != "means":
            return Count(batch.mask.sum().to(torch.float32))
        return _sum(net.features(batch.x), batch)

    def upload(
        self, net: Net, own: Bias, sums: Tree, down: Tree, ctx: Context
    ) -> tuple[FeatureSum | Weighted | Moved, Tree]:
        """Return the sum of features, or n_k w_k and n_k."""
        if isinstance(sums, FeatureSum):
            return sums, own
        return AVERAGE.upload(net, own, sums, down.weights, ctx)

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Store each architecture's sum of features, or average its weights."""
        if ctx.stage != "means":
            averages = AVERAGE.server_update(server.averages, replies, ctx)
            return Server(averages, server.consensus)
        heard = {name: replies.by(name).total() for name in replies.architectures}
        return Server(server.averages, server.consensus | heard)

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return no model: a model is complete only with a client's bias."""
        return {}

    def predict(
        self, net: Net, own: Bias, down: Common | Nothing, x: Tensor, ctx: Context
    ) -> Tensor:
        """Return the logits (batch, classes) of z + bias."""
        return net.logits(net.features(x) + own.bias)


def _sum(z: Tensor, batch: Batch) -> FeatureSum:
    """Return the sum of features ``z`` (batch, m) over the rows of a batch, by their weights."""
    z = torch.where(batch.mask.unsqueeze(1), z, 0.0)
    if batch.weight is not None:
        z = z * batch.weight.unsqueeze(1)
    return FeatureSum(z.sum(0), weights_of(batch, z.float()).sum())
