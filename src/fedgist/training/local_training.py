"""Local training of a cohort: the phases of a stage, with a separate gradient for each client.

One backward pass on the sum of the clients' losses gives each client exactly its own gradient. One
optimizer step updates all clients. Clients are sorted by their number of steps, so that clients
with rows left are always the first k. The others are left out of the step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fedgist.core import optim, random
from fedgist.core.device_copy import copied
from fedgist.core.method import Batch, Context, Method, Net, Phase
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.parts import KNOWN, is_part
from fedgist.core.optim import OptimizerState
from fedgist.core.privacy import PrivateSteps
from fedgist.core.recorded import Unread
from fedgist.core.training import Life, Optimizer
from fedgist.core.tree import SEPARATOR, Tree, build, leaves, map_leaves, named, take
from fedgist.errors import MethodError
from fedgist.training.captured_step import captured
from fedgist.training.clock import Ends, ends_of
from fedgist.training.cohort import Clients, Cohort
from fedgist.training.private_steps import private_gradients, with_noise
from fedgist.training.recorded_step import Calculation, Forms, RecordedCalculation
from fedgist.training.timetable import Turn, batches_of, timetable

PARAMS = ".params"  # of a second model
OWN = "own."  # prefix in a phase for tensors of the client's own state


def memory_of(method: Method, ctx: Context, clients: Clients) -> dict[str, OptimizerState]:
    """Return fresh states of the optimizers that live for the whole run, by phase."""
    return {
        f"{ctx.stage}-{index}": optim.init(
            phase.optimizer or ctx.task.training.local_optimizer, tensors
        )
        for index, phase in enumerate(method.phases(ctx))
        if _life(phase, ctx) == "run" and (tensors := learned(phase, clients.net, clients.own))
    }


def train(
    cohort: Cohort,
    clients: Clients,
    phases: tuple[Phase, ...],
    lr_factor: float = 1.0,
    seconds: float | None = None,
) -> tuple[Clients, Tensor, tuple[int, ...]]:
    """Train through the phases; return the clients, their mean losses over rows seen, and steps.

    The losses are (K,). ``lr_factor`` multiplies the learning rate of every phase. After so many
    ``seconds``, if given, the training ends, with the step that it is in. The steps are those of
    each phase, of the client with most of them.
    """
    seen = torch.zeros(len(cohort.ids), 2, device=cohort.table.device)
    ends = ends_of(cohort, phases, seconds)
    taken = []
    for index, phase in enumerate(phases):
        optimizer = phase.optimizer or cohort.ctx.task.training.local_optimizer
        optimizer = replace(optimizer, lr=lr_factor * optimizer.lr)
        name = f"{cohort.ctx.stage}-{index}"
        clients, sums, steps = _phase(cohort, clients, phase, optimizer, name, ends[index])
        seen = seen + sums
        taken.append(steps)
    return clients, seen[:, 0] / seen[:, 1].clamp(min=1.0), tuple(taken)


def _life(phase: Phase, ctx: Context) -> Life:
    return phase.remembers or ctx.task.training.optimizer_memory


def learned(phase: Phase, net: Net, own: Tree) -> dict[str, Tensor]:
    """Return the tensors that a phase learns, of any shape, by name.

    ``"own.v"`` names a tensor of the own state, or all tensors of a tree or dictionary.

    Raises
    ------
    MethodError
        If the phase names something that does not exist, or that holds no real numbers.
    """
    parts = [part for part in phase.learns if is_part(part)]
    own_arrays = {_own_name(path): value for path, value in named(own).items()}
    out = {
        name: value
        for name, value in net.params.items()
        if any(net.arch.layers.holds(part, name) for part in parts)
    }
    for wanted in phase.learns:
        below = {n: a for n, a in own_arrays.items() if f"{n}.".startswith(f"{wanted}.")}
        if not below and wanted not in parts:
            fields = dict.fromkeys(OWN + path.split(SEPARATOR)[0] for path in named(own))
            choices = ", ".join([*KNOWN, *fields])
            raise MethodError(
                f"a phase learns {wanted!r}, which does not exist; choices: {choices}"
            )
        if strange := [n for n, a in below.items() if not a.is_floating_point()]:
            kind = str(below[strange[0]].dtype).removeprefix("torch.")
            raise MethodError(
                f"a phase learns {strange[0]}, which is {kind}: only floats can learn"
            )
        out |= below
    return out


def _install(net: Net, own: Tree, values: Mapping[str, Tensor]) -> tuple[Net, Tree]:
    net = net.with_arrays({name: v for name, v in values.items() if not name.startswith(OWN)})
    own_arrays = {path: values.get(_own_name(path), value) for path, value in named(own).items()}
    return net, build(type(own), own_arrays)


def _own_name(path: str) -> str:
    return OWN + path.replace(SEPARATOR, ".")


def _second_buffers(phase: Phase, own: Tree) -> dict[str, Tensor]:
    """Return the buffers of second models that a phase trains, (K, ...), by name."""
    trained = [p.removesuffix(PARAMS) for p in phase.learns if p.startswith(OWN)]
    places = tuple(f"{place}.buffers." for place in trained)
    arrays = {_own_name(path): array for path, array in named(own).items()}
    return {name: array for name, array in arrays.items() if name.startswith(places)}


def _phase(
    cohort: Cohort, clients: Clients, phase: Phase, optimizer: Optimizer, name: str, ends: Ends
) -> tuple[Clients, Tensor, int]:
    """Train through one phase; return the clients, (K, 2) sums of losses and rows seen, and steps.

    The phase ends before its last step if ``ends``.
    """
    seen = torch.zeros(len(cohort.ids), 2, device=cohort.table.device)
    values = learned(phase, clients.net, clients.own)
    if not values:  # a body without parameters
        return clients, seen, 0
    shared = _are_shared(cohort, phase, optimizer, values)
    if not shared:
        values = map_leaves(_contiguous, values)
    keys, life = random.fold(cohort.keys_on_cpu, "phase", name), _life(phase, cohort.ctx)
    turns, step_keys = timetable(cohort, phase, keys, life, kept=name in clients.memory)
    buffers = {n: b.clone() for n, b in clients.net.buffers.items()}
    second = {name: b.clone() for name, b in _second_buffers(phase, clients.own).items()}
    _, own = _install(clients.net, clients.own, second)
    clients = replace(clients, net=replace(clients.net, buffers=buffers), own=own)
    memory = _memory(clients.memory.get(name), optimizer, values)
    step = _Step(cohort, phase, optimizer, clients, values, memory, shared=shared)
    take_step = captured(step, cohort, turns)
    if take_step is not step:
        step.forms = None  # a graph has its operations
    rows_and_keys = (
        (rows, step_keys[s, : len(rows)])
        for s, rows in enumerate(batches_of(cohort, phase, keys, name))
    )
    batches = zip(turns, cohort.examples.batches(rows_and_keys), strict=True)
    taken = 0
    for taken, (turn, (rows, keys_now, batch)) in enumerate(batches, 1):
        present = (rows >= 0).sum(1)
        step.forget(turn)
        losses = take_step(batch, keys_now, turn)
        seen[: turn.count, 0] += losses * present
        seen[: turn.count, 1] += present
        if ends(taken):
            break
    net, own = _install(clients.net, clients.own, values)
    kept = clients.memory | ({name: memory} if life == "run" else {})
    return Clients(net, own, kept), seen, taken


def _are_shared(
    cohort: Cohort, phase: Phase, optimizer: Optimizer, learned: Mapping[str, Tensor]
) -> bool:
    """Return whether clients begin with one model of which no copies are made.

    The first step of plain SGD makes each client's own, so a round of one step moves a third fewer
    bytes. All clients must take it. On a GPU, graphs need tensors that stay in place.
    """
    plain = optimizer.name == "sgd" and cohort.private_steps is None
    if not plain or cohort.table.device.type != "cpu" or not cohort.stack:
        return False
    expanded = all(tensor.stride(0) == 0 for tensor in learned.values())
    counts = (cohort.table >= 0).sum(1)
    least = phase.least_rows(cohort.ctx.task, cohort.ctx.architecture)
    return expanded and bool((counts >= least).all())


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _memory(
    kept: OptimizerState | None, optimizer: Optimizer, learned: Mapping[str, Tensor]
) -> OptimizerState:
    return optim.init(optimizer, learned) if kept is None else map_leaves(torch.clone, kept)


def _lifted(cohort: Cohort, loss: Calculation) -> Calculation:
    """Return the losses of stacked clients, (K,), and their new buffers, (K, ...), by name."""
    whole = not cohort.stack and cohort.private_steps is None
    half = cohort.ctx.task.training.precision == "bfloat16" and cohort.private_steps is None
    parts = cohort.ctx.task.objective.norm_parts

    def client_loss(
        values: dict[str, Tensor], net: Net, own: Tree, down: Tree, batch: Batch, key: Tensor
    ) -> Any:
        run = Pass(batch.mask, key, parts, whole, half)
        net, own = _install(net, own, values)
        value = loss(replace(net, run=run), batch, own, down, cohort.at(key))
        return value, run.all_updates

    return cohort.lift(client_loss, (0, 0, 0, cohort.down_dim, 0, 0))


def _is_recorded(cohort: Cohort, loss: Calculation) -> bool:
    """Return whether steps are recorded: of stacks on a CPU, by one function in all rounds."""
    plain = cohort.ctx.task.training.precision == "float32" and cohort.private_steps is None
    on_cpu = cohort.table.device.type == "cpu"
    own = inspect.ismethod(loss) and loss.__self__ is cohort.method
    return cohort.stack and plain and on_cpu and own


def _of_any_round(cohort: Cohort) -> Cohort:
    """Return a cohort for recordings, whose round cannot be read."""
    return replace(cohort, ctx=replace(cohort.ctx, round=cast("int", Unread())))


def _gradients(
    loss: Calculation,
    params: dict[str, Tensor],
    net: Net,
    own: Tree,
    down: Tree,
    batch: Batch,
    keys: Tensor,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return each client's loss (K,), and its gradients and new buffers, (K, ...), by name."""
    values = {name: p.detach().requires_grad_() for name, p in params.items()}
    with torch.enable_grad():
        losses, updates = loss(values, net, own, down, batch, keys)
        gradients = torch.autograd.grad(losses.sum(), list(values.values()), materialize_grads=True)
    return losses.detach(), dict(zip(params, gradients, strict=True)), updates


class _Step:
    """One stacked step: loss, gradient and update, in place on the first ``count`` clients."""

    def __init__(
        self,
        cohort: Cohort,
        phase: Phase,
        optimizer: Optimizer,
        clients: Clients,
        learned: dict[str, Tensor],
        memory: OptimizerState,
        *,
        shared: bool = False,
    ) -> None:
        self.cohort, self.optimizer = cohort, optimizer
        self.clients, self.learned, self.memory = clients, learned, memory
        self.training = cohort.ctx.task.training
        self.class_weights, self.class_counts = cohort.class_weights, cohort.class_counts
        loss = phase.loss or cohort.method.loss
        self.buffers = clients.net.buffers | _second_buffers(phase, clients.own)
        self.loss = _lifted(cohort, loss)
        self.gradients: Calculation = functools.partial(_gradients, self.loss)
        self.forms: Callable[[Tree], Forms] | None = None
        if cohort.recordings is not None and _is_recorded(cohort, loss):
            self.watched = functools.partial(_gradients, _lifted(_of_any_round(cohort), loss))
            about = (
                getattr(loss, "__func__", loss),
                cohort.ctx.stage,
                cohort.ctx.work,
                cohort.broadcast,
            )
            self.forms = functools.partial(cohort.recordings.of, about)
        self.count, self.shared = -1, shared

    def _slice(self, count: int) -> None:
        """Prepare views of the first ``count`` clients, once for all steps of this size."""
        self.count = count
        cut = slice(0, count)
        self.params = take(self.learned, cut)
        self.net, self.own = take(self.clients.net, cut), take(self.clients.own, cut)
        self.down = self.cohort.down if self.cohort.broadcast else take(self.cohort.down, cut)
        self.rows = take(self.memory, cut)
        fixed = self.params, self.net, self.own, self.down
        self.calculate: Calculation = functools.partial(self.gradients, *fixed)
        if self.forms is not None:
            about = fixed, self.forms(fixed), self.net.arch.module
            self.calculate = RecordedCalculation(self.gradients, self.watched, *about)

    def __call__(self, batch: Batch, keys: Tensor, turn: Turn) -> Tensor:
        if turn.count != self.count:
            self._slice(turn.count)
        batch = self._weighted(turn.count, batch)
        with self._draws(turn):
            if self.cohort.private_steps is None:
                losses, grads = self._gradients(batch, keys)
            else:
                losses, grads = self._private_gradients(self.cohort.private_steps, batch, keys)
        with torch.no_grad():
            if self.shared:
                self._part(optim.from_shared(self.optimizer, self.params, grads, self.rows))
            else:
                optim.step(self.optimizer, self.params, grads, self.rows, together=turn.together)
        return losses

    def _part(self, moved: Mapping[str, Tensor]) -> None:
        """Let the clients, who shared their parameters until now, have their own."""
        self.learned.update({name: p.contiguous() for name, p in moved.items()})
        self.shared, self.count = False, -1

    def changed(self, count: int) -> list[Tensor]:
        """Return all tensors that a step of the first ``count`` clients changes, (count, ...)."""
        changing = (self.learned, self.memory, self.buffers)
        return [leaf[:count] for part in changing for leaf in leaves(part)]

    def _draws(self, turn: Turn) -> AbstractContextManager[None]:
        # a model that draws from torch's generator cannot be stacked: the cohort has one client
        return nullcontext() if self.cohort.stack else random.torch_draws(turn.seed)

    def _gradients(self, batch: Batch, keys: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses, grads, updates = self.calculate(batch, keys)
        for name, new in updates.items():
            if (buffer := self.buffers.get(name)) is not None:
                buffer[: len(keys)] = new
        if self.training.clip_norm:
            grads = optim.clipped_gradients(grads, self.training.clip_norm)
        return losses, grads

    def _private_gradients(
        self, steps: PrivateSteps, batch: Batch, keys: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return mean losses (K,), and private gradients divided by the public batch size."""
        losses, sums = private_gradients(
            self.loss,
            self.params,
            (self.net, self.own, self.down),
            batch,
            keys,
            broadcast=self.cohort.broadcast,
            stack=self.cohort.stack,
            steps=steps,
        )
        secret = random.fold(self.cohort.private_keys("steps"), "step", keys)
        noisy = with_noise(sums, steps, secret)
        size = self.training.batch_size
        return losses, {name: g.to(self.params[name].dtype) / size for name, g in noisy.items()}

    def _weighted(self, count: int, batch: Batch) -> Batch:
        batch = self.cohort.weighted(batch)
        if self.class_counts is not None:
            batch = replace(batch, class_counts=self.class_counts[:count])
        if self.class_weights is None:
            return batch
        weight = self.class_weights[:count].gather(1, batch.y)
        return replace(batch, weight=weight if batch.weight is None else weight * batch.weight)

    def forget(self, turn: Turn) -> None:
        """Reset the optimizers of the clients that begin an epoch with this step."""
        if turn.fresh is None or not bool(turn.fresh.any()):
            return
        fresh = copied(turn.fresh, self.memory.count.device)
        for leaf in leaves(self.memory):
            leaf[: turn.count].masked_fill_(fresh.view(-1, *(1 for _ in leaf.shape[1:])), 0)
