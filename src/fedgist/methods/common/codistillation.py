"""Codistillation at a server: the models of pools learn from each other's predictions.

Lichtarge, Amid, Kumar, Yang, Anil, Mathews, "Heterogeneous federated learning using knowledge
codistillation", appendix C.4 (https://arxiv.org/abs/2310.02549). All students start from the pools'
models and learn from frozen copies of these on the same batches of public rows. So each frozen
model runs once per batch: as a teacher of the other students, and as a regularizer of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.bounds import (
    NonNegativeInt,
    PerPool,
    Positive,
    PositiveInt,
    Share,
    Temperature,
    of_pool,
)
from fedgist.core.device_copy import copied
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import Net
from fedgist.core.optim import OptimizerState
from fedgist.core.task import Context, Task
from fedgist.core.training import Optimizer, Schedule
from fedgist.core.tree import map_leaves, take, tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Weights
from fedgist.methods.common.server_training import (
    after_steps,
    check_finite,
    check_rows,
    fresh_memory,
    gradient_step,
    stages_of,
    steps_in,
)

PAIR = 2  # the smallest number of pools: a student needs another pool's teacher


@dataclass(frozen=True)
class Distillation:
    """Settings of a distillation. Fields that accept a table may be set per pool."""

    steps: PositiveInt
    """Number of Adam steps of one distillation."""
    batch_size: PositiveInt = 128
    """Number of public rows per step."""
    lr: PerPool[Positive] = 1e-3
    """Learning rate of the distillation."""
    final_factor: PerPool[Share] = 1.0
    """Final learning rate as a fraction of ``lr``. The rate falls evenly over the rounds.

    With 0, a distillation in the last rounds changes nothing.
    """
    temperature: PerPool[Temperature] = 1.0
    """Temperature (T) of a teacher's predictions. A value below 1 sharpens them."""
    regularization: PerPool[Share] = 0.0
    """Weight (r) of the student's own first predictions in its target."""
    labels: Share = 0.0
    """Weight of true labels in the target. Needs ``data.public.labelled``."""
    mixup: NonNegativeInt = 0
    """Parameter of mixup's Beta distribution. 0 disables mixup."""

    def optimizer(self, pool: str, ctx: Context) -> Optimizer:
        """Return the optimizer of a pool's student in a round."""
        falling = Schedule(name="linear", min_factor=self._of("final_factor", pool))
        factor = falling.factor(ctx.round, ctx.task.training.num_rounds)
        return Optimizer("adam", lr=self._of("lr", pool) * factor)

    def rates(self, ctx: Context) -> dict[str, float]:
        """Return each student's learning rate in a round."""
        names = ctx.task.starts
        return {f"distillation/lr/{name}": self.optimizer(name, ctx).lr for name in names}

    def check(self, task: Task) -> None:
        """Raise MethodError if pools or public data are missing, or a pool has no setting."""
        if len(task.starts) < PAIR:
            raise MethodError(
                "codistillation needs two pools or more: give [clients.pools.NAME] for each"
            )
        if task.public is None:
            raise MethodError(
                "codistillation needs public data: give [data.public] with rows or a name"
            )
        if self.mixup and task.words:
            raise MethodError("method.distillation.mixup mixes numbers: texts cannot be mixed")
        if self.labels and not task.public_labels:
            raise MethodError("method.distillation.labels needs data.public.labelled = true")
        check_rows(task, self.batch_size, rest=False)
        for pool in task.starts:
            for name in ("lr", "final_factor", "temperature", "regularization"):
                self._of(name, pool)

    def stages(self) -> tuple[str, ...]:
        """Return the stages of a distillation."""
        return stages_of(self.steps)

    def target(self, pool: str, logits: Mapping[str, Tensor], truth: Tensor | None) -> Tensor:
        """Return the target distributions of a pool's student, (batch, classes).

        For texts they are (batch, length, classes). ``logits`` are the frozen models' by pool, and
        ``truth`` are the labels' distributions or None, both in the shape of the result. The target
        is ``(1 - r) mean_j softmax(z_j / T_j) + r softmax(z_i)``, j over the other pools.
        """
        others = [
            functional.softmax(z / self._of("temperature", name), -1)
            for name, z in logits.items()
            if name != pool
        ]
        r = self._of("regularization", pool)
        soft = (1.0 - r) * torch.stack(others).mean(0) + r * functional.softmax(logits[pool], -1)
        return soft if truth is None else (1.0 - self.labels) * soft + self.labels * truth

    def _of(self, name: str, pool: str) -> float:
        value: PerPool[float] = getattr(self, name)
        return of_pool(value, pool, f"method.distillation.{name}")


@tree
class Students:
    """The students of a distillation by pool, their optimizers' states, and their summed losses."""

    weights: dict[str, Weights]
    memory: dict[str, OptimizerState]
    losses: dict[str, Tensor]
    steps: Tensor

    def mean_losses(self) -> dict[str, float]:
        """Return each student's mean loss over the steps; nothing before the first step."""
        count = float(self.steps)
        return {name: float(s) / count for name, s in self.losses.items()} if count else {}


def begin(weights: Mapping[str, Weights], ctx: Context) -> Students:
    """Return students that equal their pools' models, with fresh optimizer state."""
    zero = torch.zeros((), device=ctx.key.device)
    starts = ctx.task.starts
    memory = {name: fresh_memory(net.params) for name, net in starts.items()}
    return Students(dict(weights), memory, dict.fromkeys(weights, zero), zero)


@tree
class Lesson:
    """What a step learns from: a batch, its labels' distributions, and the students' keys, ().

    The distributions are (batch, classes), or (batch, length, classes) for texts, or None.
    """

    batch: Batch
    truth: Tensor | None
    keys: dict[str, Tensor]


def learn(
    students: Students, frozen: Mapping[str, Weights], settings: Distillation, ctx: Context
) -> Students:
    """Return the students after the steps of a stage, all on the same batches."""
    nets = ctx.task.starts
    teachers = {name: nets[name].with_arrays(w.arrays) for name, w in frozen.items()}
    optimizers = {name: settings.optimizer(name, ctx) for name in students.weights}

    def step(students: Students, lesson: Lesson) -> Students:
        batch = lesson.batch
        with torch.no_grad():
            logits = {name: net(batch.x) for name, net in teachers.items()}
        weights: dict[str, Weights] = {}
        losses: dict[str, Tensor] = {}
        for name, old in students.weights.items():
            target = settings.target(name, logits, lesson.truth)
            student, run = nets[name].with_arrays(old.arrays), Pass(batch.mask, lesson.keys[name])
            far = functools.partial(_divergence, batch=batch, target=target)
            about = run, optimizers[name], students.memory[name]
            arrays, loss = gradient_step(student, far, *about)
            weights[name] = Weights(arrays)
            losses[name] = students.losses[name] + loss
        return replace(students, weights=weights, losses=losses)

    numbers = steps_in(ctx.stage, settings.steps)
    memory = {name: map_leaves(torch.clone, m) for name, m in students.memory.items()}
    students = replace(students, memory=memory, steps=students.steps + len(numbers))
    students = after_steps(step, students, _lessons(settings, numbers, ctx))
    for name, learned in students.weights.items():
        check_finite(learned.arrays, f"the student of pool {name!r}", ctx)
    return students


def _divergence(net: Net, batch: Batch, target: Tensor) -> Tensor:
    """Return ``KL(target || softmax(z))``, the mean over rows, or over all tokens of texts."""
    logits = functional.log_softmax(net(batch.x), -1)
    of_each = functional.kl_div(logits, target, reduction="none").sum(-1)
    counted = batch.y >= 0
    return torch.where(counted, of_each, 0.0).sum() / counted.sum()


def _lessons(settings: Distillation, numbers: Iterable[int], ctx: Context) -> Iterator[Lesson]:
    """Yield the lessons of these steps."""
    on_cpu = replace(
        ctx, key=ctx.key.cpu()
    )  # once: a number that is read from a GPU blocks the CPU
    for number in numbers:
        batch, truth = _batch(settings, ctx, on_cpu, number)
        keys = {name: ctx.draw("student", name, number) for name in ctx.task.starts}
        yield Lesson(batch, truth, keys)


def _batch(
    settings: Distillation, ctx: Context, on_cpu: Context, number: int
) -> tuple[Batch, Tensor | None]:
    """Return the batch of a step, and its labels' distributions, (batch, classes), if used."""
    public = ctx.task.public
    assert public is not None  # it was checked
    key = ctx.draw("batch", number)
    size = min(settings.batch_size, len(public))
    chosen = random.choice(on_cpu.draw("batch", number, "rows"), len(public), size)
    rows = copied(torch.tensor(chosen), key.device)
    keys = random.fold(key, "augment").unsqueeze(0)
    batch = take(public.batch(rows.unsqueeze(0), keys), 0)
    truth = (
        functional.one_hot(batch.y.clamp(min=0), ctx.task.num_classes).to(torch.float32)
        if settings.labels
        else None
    )
    if not settings.mixup:
        return batch, truth
    share = _beta(random.fold(key, "mixup"), size, settings.mixup)
    order = random.permutation(random.fold(key, "partners"), size)

    def mixed(values: Tensor) -> Tensor:
        weight = share.view(-1, *(1 for _ in values.shape[1:]))
        return weight * values + (1.0 - weight) * values[order]

    return replace(batch, x=mixed(batch.x)), None if truth is None else mixed(truth)


def _beta(key: Tensor, size: int, parameter: int) -> Tensor:
    """Draw from Beta(b, b), (size,): the median of 2 b - 1 uniform numbers."""
    draws = random.uniform(key, (size, 2 * parameter - 1))
    return draws.sort(1).values[:, parameter - 1]
