"""FedTGP: the server trains prototypes that are farther apart than the clients' class means.

Zhang, Liu, Hua, Cao 2024, "FedTGP: trainable global prototypes with adaptive-margin-enhanced
contrastive learning for data and model heterogeneity in federated learning", eq. 7 to 11 (AAAI
2024, https://arxiv.org/abs/2401.03230). See docs/methods/fedtgp.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedgist.core import random
from fedgist.core.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Order, Part, Replies, Task
from fedgist.core.objectives.target import Target
from fedgist.core.tree import Tree, tree
from fedgist.methods.common.class_message import ClassMeans, FeatureSums, lessons, steps
from fedgist.methods.common.linear_head import class_means, one_feature_width
from fedgist.methods.common.prototypes import Prototypes, by_nearest, near_prototypes

LEAST = 1e-12  # of a squared distance, whose root has no slope at 0


@tree
class Trained:
    """Server state: what makes the prototypes, and the prototypes that clients receive.

    ``points`` (classes, m) go through a hidden layer ``first`` (m, m + 1) with ReLU and a layer
    ``last`` (m, m + 1), biases first.
    """

    points: Tensor
    first: Tensor
    last: Tensor
    prototypes: Prototypes


@dataclass(frozen=True)
class FedTGP(Method):
    """FedProto with prototypes that the server trains to keep their distance."""

    lam: NonNegative = 10.0
    """Weight of the distance between features and the prototype of their class, lambda."""
    threshold: Positive = 100.0
    """Largest margin between prototypes, tau."""
    server_epochs: NonNegativeInt = 100
    """Passes over the clients' class means in a round, S. 0 sends their plain means: FedProto."""
    server_lr: Positive = 0.01
    """Learning rate of the server."""
    batch_size: PositiveInt = 10
    """Class means in a step of the server."""
    inference: Literal["prototype", "logits"] = "logits"
    """How clients predict: by their own head, or by the nearest prototype."""

    keeps: ClassVar[Part] = "all"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})

    def check(self, task: Task) -> None:
        """Raise MethodError unless all bodies have one feature width."""
        one_feature_width(task, "fedtgp", shares="class means")

    def init_server(self, ctx: Context) -> Trained:
        """Return random points and layers, as torch begins them, and no prototypes."""
        width = one_feature_width(ctx.task, "fedtgp", shares="class means")
        none = Prototypes.of_nobody(ctx.task.num_classes, width, ctx.key.device)
        points = random.normal(ctx.draw("points"), tuple(none.mean.shape))
        first, last = (
            (random.uniform(ctx.draw(name), (width, width + 1)) * 2 - 1) / math.sqrt(width)
            for name in ("first", "last")
        )
        return Trained(points, first, last, none)

    def download(self, server: Trained, order: Order, ctx: Context) -> Prototypes:
        """Return the prototypes."""
        return server.prototypes

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Prototypes, ctx: Context) -> Tensor:
        """Return the task's loss plus lambda times the distance to the prototypes, ().

        ``batch.x`` is ``(batch, *input)``.
        """
        return near_prototypes(self.lam, net, batch, down, ctx)

    def summarize(
        self, net: Net, batch: Batch, own: Nothing, down: Prototypes, ctx: Context
    ) -> FeatureSums:
        """Return class sums and counts of features over a batch."""
        return FeatureSums.of(net, batch, ctx)

    def upload(
        self, net: Net, own: Tree, sums: FeatureSums, down: Prototypes, ctx: Context
    ) -> tuple[ClassMeans, Tree]:
        """Return the mean features of each class that the client has."""
        return ClassMeans.of(sums), own

    def server_update(self, server: Trained, replies: Replies, ctx: Context) -> Trained:
        """Return the state after S passes over the clients' class means."""
        z, y = lessons(replies)
        if not len(y):
            return server
        of_class = one_hot(y, ctx.task.num_classes).to(z.dtype)
        mean, sent = class_means(of_class.T @ z, of_class.sum(0))
        exists = torch.maximum(sent, server.prototypes.exists)
        if not self.server_epochs:
            kept = torch.where(sent.unsqueeze(1) > 0, mean, server.prototypes.mean)
            return Trained(server.points, server.first, server.last, Prototypes(kept, exists))
        margin = self.margin(mean, sent)
        made = [a.clone().requires_grad_() for a in (server.points, server.first, server.last)]
        for rows in steps(ctx, len(y), self.server_epochs, self.batch_size):
            with torch.enable_grad():
                value = self.contrast(prototypes(*made), exists, z[rows], y[rows], margin)
                slopes = torch.autograd.grad(value, made)
            with torch.no_grad():
                for array, slope in zip(made, slopes, strict=True):
                    array.sub_(slope, alpha=self.server_lr)
        points, first, last = (array.detach() for array in made)
        return Trained(points, first, last, Prototypes(prototypes(points, first, last), exists))

    def margin(self, mean: Tensor, sent: Tensor) -> Tensor:
        """Return the largest distance of two class means, (), at most tau (eq. 10).

        ``mean`` is (classes, m), and the mask ``sent`` (classes,).
        """
        both = sent.unsqueeze(0) * sent.unsqueeze(1)
        return (torch.cdist(mean, mean) * both).max().clamp(max=self.threshold)

    @staticmethod
    def contrast(made: Tensor, exists: Tensor, z: Tensor, y: Tensor, margin: Tensor) -> Tensor:
        """Return the contrast of class means to prototypes, with a margin (eq. 11), ().

        ``made`` is (classes, m), ``exists`` (classes,), ``z`` (batch, m) and ``y`` (batch,).
        Classes that no client has are left out.
        """
        square = (z.unsqueeze(1) - made).square().sum(2)
        distance = square.clamp(min=LEAST).sqrt() + margin * one_hot(y, len(made))
        return cross_entropy(torch.where(exists > 0, -distance, -math.inf), y)

    def predict(self, net: Net, own: Nothing, down: Prototypes, x: Tensor, ctx: Context) -> Tensor:
        """Return the head's logits, or minus the distances to prototypes, (batch, classes)."""
        if self.inference == "logits":
            return net(x)
        return by_nearest(net, x, down.mean, down.exists > 0)


def prototypes(points: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return the prototypes (classes, m) that two layers make of points (eq. 7)."""
    hidden = (points @ first[:, 1:].T + first[:, 0]).relu()
    return hidden @ last[:, 1:].T + last[:, 0]
