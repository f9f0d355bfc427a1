"""FedGH: the server trains one head on the clients' class means, for bodies of any structure.

Yi, Wang, Liu, Shi, Yu 2023, "FedGH: heterogeneous federated learning with generalized global
header", algorithm 1 (ACM Multimedia 2023, https://arxiv.org/abs/2303.13137). See
docs/methods/fedgh.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import one_hot

from fedgist.core.bounds import NonNegativeInt, Positive, PositiveInt
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Order, Part, Replies, Task
from fedgist.core.objectives.target import Target
from fedgist.core.tree import Tree
from fedgist.methods.common.class_message import ClassMeans, FeatureSums, lessons, steps
from fedgist.methods.common.linear_head import LinearHead, one_feature_width, with_constant


@dataclass(frozen=True)
class FedGH(Method):
    """Clients send class means of features; the server's head, trained on them, replaces theirs."""

    server_lr: Positive = 0.01
    """Learning rate of the server's head."""
    server_epochs: NonNegativeInt = 1
    """Passes over the clients' class means in a round."""
    batch_size: PositiveInt = 10
    """Class means in a step of the server."""

    keeps: ClassVar[Part] = "body"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})

    def check(self, task: Task) -> None:
        """Raise MethodError unless one head fits all bodies."""
        one_feature_width(task, "fedgh")

    def init_server(self, ctx: Context) -> LinearHead:
        """Return the head of the architecture that is named first."""
        weight, bias = next(iter(ctx.task.starts.values())).head
        assert bias is not None  # check has looked
        return LinearHead(torch.cat([bias.unsqueeze(1), weight], dim=1))

    def download(self, server: LinearHead, order: Order, ctx: Context) -> LinearHead:
        """Return the head."""
        return server

    def receive(self, net: Net, own: Tree, down: LinearHead, ctx: Context) -> tuple[Net, Tree]:
        """Return the client's body under the server's head."""
        return net.with_head(down.weight, down.bias), own

    def summarize(
        self, net: Net, batch: Batch, own: Nothing, down: LinearHead, ctx: Context
    ) -> FeatureSums:
        """Return class sums and counts of features over a batch."""
        return FeatureSums.of(net, batch, ctx)

    def upload(
        self, net: Net, own: Tree, sums: FeatureSums, down: LinearHead, ctx: Context
    ) -> tuple[ClassMeans, Tree]:
        """Return the mean features of each class that the client has."""
        return ClassMeans.of(sums), own

    def server_update(self, server: LinearHead, replies: Replies, ctx: Context) -> LinearHead:
        """Return the head after steps on the cross-entropy of the class means, in random order."""
        z, y = lessons(replies)
        if not len(y):
            return server
        phi, of_class = with_constant(z), one_hot(y, ctx.task.num_classes).to(z.dtype)
        eta = server.eta
        for rows in steps(ctx, len(y), self.server_epochs, self.batch_size):
            errors = (phi[rows] @ eta.T).softmax(1) - of_class[rows]
            eta = eta - self.server_lr * errors.T @ phi[rows] / len(rows)
        return LinearHead(eta)
