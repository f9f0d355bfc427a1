"""FedGen: the server trains a generator of features that all clients' heads know.

Zhu, Hong, Zhou 2021, "Data-free knowledge distillation for heterogeneous federated learning",
algorithm 1 (ICML 2021, https://arxiv.org/abs/2105.10056). See docs/methods/fedgen.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from fedgist.core import optim, random
from fedgist.core.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt
from fedgist.core.counts import COUNTS
from fedgist.core.message import message
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Order, Part, Replies, Task
from fedgist.core.objectives.target import Target
from fedgist.core.training import Optimizer
from fedgist.core.tree import Tree, tree
from fedgist.methods.common.linear_head import LinearHead, one_feature_width


@tree
class Generator:
    """Two layers with a ReLU between them: noise and a class, as a unit vector, become features.

    ``first`` is (hidden, noise + classes + 1) and ``last`` (m, hidden + 1), the biases first.
    """

    first: Tensor
    last: Tensor

    @staticmethod
    def drawn(ctx: Context, noise: int, hidden: int, width: int) -> Generator:
        """Return layers as torch begins them."""
        sizes = {"first": (hidden, noise + ctx.task.num_classes), "last": (width, hidden)}
        layers = (
            (random.uniform(ctx.draw(name), (out, into + 1)) * 2 - 1) / math.sqrt(into)
            for name, (out, into) in sizes.items()
        )
        return Generator(*layers)

    def __call__(self, noise: Tensor, y: Tensor, classes: int) -> Tensor:
        """Return features (batch, m) of noise (batch, noise) and classes ``y`` (batch,)."""
        x = torch.cat([noise, one_hot(y, classes).to(noise.dtype)], dim=1)
        hidden = linear(x, self.first[:, 1:], self.first[:, 0]).relu()
        return linear(hidden, self.last[:, 1:], self.last[:, 0])


@message(reduce="sum")
class Lesson:
    """The average head, the generator, and all clients' rows of each class, (classes,)."""

    head: LinearHead
    generator: Generator
    counts: Tensor


@message(reduce="sum")
class WeightedHead:
    """A client's head times its rows, (classes, m + 1), and its rows of each class, (classes,)."""

    eta: Tensor
    counts: Tensor = field(metadata=COUNTS)


@tree
class Counts:
    """A client's rows of each class, (classes,)."""

    rows: Tensor


@dataclass(frozen=True)
class FedGen(Method):
    """Averaged heads, and features of a generator in each client's loss."""

    weight: NonNegative = 1.0
    """Weight of generated features in a client's loss. 0: clients average heads alone."""
    rows: PositiveInt = 32
    """Generated features in a step, of a client and of the server."""
    noise: PositiveInt = 32
    """Numbers of noise that a feature is made of."""
    hidden: PositiveInt = 256
    """Width of the generator's hidden layer."""
    steps: NonNegativeInt = 100
    """Steps of the generator in a round."""
    lr: Positive = 1e-3
    """Learning rate of the generator, by Adam."""
    diversity: NonNegative = 1.0
    """Weight of the term that keeps features of unlike noise apart."""

    keeps: ClassVar[Part] = "body"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})

    def check(self, task: Task) -> None:
        """Raise MethodError unless one head fits all bodies."""
        one_feature_width(task, "fedgen")

    def init_server(self, ctx: Context) -> Lesson:
        """Return the head of the architecture that is named first, and a random generator."""
        weight, bias = next(iter(ctx.task.starts.values())).head
        assert bias is not None  # check has looked
        eta = torch.cat([bias.unsqueeze(1), weight], dim=1)
        generator = Generator.drawn(ctx, self.noise, self.hidden, weight.shape[1])
        return Lesson(LinearHead(eta), generator, torch.zeros_like(bias))

    def download(self, server: Lesson, order: Order, ctx: Context) -> Lesson:
        """Return head, generator and counts."""
        return server

    def receive(self, net: Net, own: Tree, down: Lesson, ctx: Context) -> tuple[Net, Tree]:
        """Return the client's body under the average head."""
        return net.with_head(down.head.weight, down.head.bias), own

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Lesson, ctx: Context) -> Tensor:
        """Return the task's loss plus the head's loss of generated features (eq. 5), ().

        ``batch.x`` is ``(batch, *input)``. Before the generator has learned, it teaches nothing.
        """
        value = ctx.task.objective.loss(net(batch.x), batch)
        if not self.weight:
            return value
        z, y, _ = self.made(down.generator, down.counts, ctx.draw("features"))
        present = torch.ones_like(y, dtype=torch.bool)
        generated = cross_entropy(net.for_rows(present).logits(z.detach()), y)
        return value + self.weight * generated * (down.counts.sum() > 0)

    def made(self, generator: Generator, counts: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        """Return features (rows, m), their classes (rows,) and the noise (rows, noise).

        Classes are drawn in proportion to ``counts`` (classes,).
        """
        up_to = counts.cumsum(0)
        point = random.uniform(random.fold(key, "class"), (self.rows, 1)) * up_to[-1]
        y = (point >= up_to).sum(1).clamp(max=len(counts) - 1)
        noise = random.normal(random.fold(key, "noise"), (self.rows, self.noise))
        return generator(noise, y, len(counts)), y, noise

    def summarize(self, net: Net, batch: Batch, own: Nothing, down: Lesson, ctx: Context) -> Counts:
        """Return the rows of each class in a batch."""
        of_class = one_hot(batch.y, ctx.task.num_classes) * batch.mask.unsqueeze(1)
        return Counts(of_class.sum(0).to(torch.float32))

    def upload(
        self, net: Net, own: Tree, sums: Counts, down: Lesson, ctx: Context
    ) -> tuple[WeightedHead, Tree]:
        """Return the client's head times its rows, and its rows of each class."""
        weight, bias = net.head
        assert bias is not None
        eta = torch.cat([bias.unsqueeze(1), weight], dim=1)
        return WeightedHead(sums.rows.sum() * eta, sums.rows), own

    def server_update(self, server: Lesson, replies: Replies, ctx: Context) -> Lesson:
        """Average the heads by rows, and train the generator against the average.

        The average of linear heads has the average of their logits: it is the ensemble of eq. 4.
        """
        total = replies.total()
        head = LinearHead(total.eta / total.counts.sum().clamp(min=1.0))
        if not float(total.counts.sum()) > 0:
            return server
        return Lesson(head, self._trained(server.generator, head, total.counts, ctx), total.counts)

    def _trained(
        self, generator: Generator, head: LinearHead, counts: Tensor, ctx: Context
    ) -> Generator:
        params = {name: array.clone().unsqueeze(0) for name, array in vars(generator).items()}
        optimizer = Optimizer("adam", lr=self.lr)
        memory = optim.init(optimizer, params)
        for number in range(self.steps):
            leaves = [p.detach().requires_grad_() for p in params.values()]
            with torch.enable_grad():
                now = Generator(*(p[0] for p in leaves))
                value = self.generator_loss(now, head, counts, ctx.draw("step", number))
                slopes = torch.autograd.grad(value, leaves)
            with torch.no_grad():
                optim.step(optimizer, params, dict(zip(params, slopes, strict=True)), memory)
        return Generator(*(p[0] for p in params.values()))

    def generator_loss(
        self, generator: Generator, head: LinearHead, counts: Tensor, key: Tensor
    ) -> Tensor:
        """Return the loss of a batch of generated features under a head (eq. 4), ().

        The term of diversity is ``exp(-mean |z_i - z_j| |e_i - e_j|^2)`` over pairs of features z
        and noise e, where distances are means over the numbers of each.
        """
        z, y, noise = self.made(generator, counts, key)
        known = cross_entropy(linear(z, head.weight, head.bias), y)
        if not self.diversity:
            return known
        apart = (z.unsqueeze(1) - z).abs().mean(2)
        unlike = (noise.unsqueeze(1) - noise).square().mean(2)
        return known + self.diversity * torch.exp(-(apart * unlike).mean())
