"""The trainer: K clients of one architecture, stacked, go through a stage together.

Every tensor of the clients has a first dimension K. A method's functions, written for one client,
run under ``torch.func.vmap``; one backward pass on the sum of the clients' losses gives each client
exactly its own gradient; one optimizer step moves all. Clients are sorted by their number of steps,
so those that still have rows are always the first k: the others are simply left out of the step. K
= 1 without stacking is the same code, for models that cannot be stacked and for a real site.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import optim, random
from fedgist.core.layers import Pass
from fedgist.core.method import Batch, Context, Count, Method, Phase
from fedgist.core.net import Net, stacked
from fedgist.core.optim import Optimizer, OptimizerState
from fedgist.core.tree import SEPARATOR, build, leaves, map_leaves, named, take, tree
from fedgist.data.client_rows import schedule
from fedgist.data.examples import Examples

# rows of a stack that are evaluated together: bounds memory, whatever the number of clients
ROWS_AT_ONCE = 1024
OWN = "own."  # how a phase names tensors of the client's own state


@tree
class Clients:
    """What K clients hold, stacked.

    Nets, own states, and optimizer states that live for the whole run (by phase).
    """

    net: Net
    own: Any
    memory: dict[str, OptimizerState]


@dataclass(frozen=True)
class Cohort:
    """K clients of one architecture at one stage.

    Who they are, what they were sent, which rows they hold.
    """

    method: Method
    ctx: Context  # its key is the run's, without client
    ids: Tensor  # (K,)
    down: Any  # one message for all (broadcast), or stacked
    broadcast: bool
    examples: Examples
    table: Tensor  # (K, rows), -1 where there is none
    stack: bool = True  # False: K = 1, without vmap

    @functools.cached_property
    def keys(self) -> Tensor:
        """Each client's key of this round and stage, (K,)."""
        return random.fold(self.ctx.key, "client", self.ids, self.ctx.round, self.ctx.stage)

    def lift(
        self, function: Callable[..., Any], dims: tuple[int | None, ...]
    ) -> Callable[..., Any]:
        """Turn a function of one client into one of all.

        ``None`` in ``dims`` marks what they share.
        """
        if self.stack:
            return torch.func.vmap(function, in_dims=dims)

        def alone(*args: Any) -> Any:
            one = [take(a, 0) if d == 0 else a for a, d in zip(args, dims, strict=True)]
            return map_leaves(lambda leaf: leaf.unsqueeze(0), function(*one))

        return alone

    @property
    def down_dim(self) -> int | None:
        """Where the clients stand in the download."""
        return None if self.broadcast else 0

    def at(self, key: Tensor) -> Context:
        """Return the context of one client."""
        return replace(self.ctx, key=key)


def memory_of(method: Method, ctx: Context, clients: Clients) -> dict[str, OptimizerState]:
    """Return fresh states of the optimizers that live for the whole run, by phase."""
    return {
        f"{ctx.stage}-{index}": optim.init(phase.optimizer or ctx.task.training.optimizer, tensors)
        for index, phase in enumerate(method.phases(ctx))
        if phase.remembers == "run" and (tensors := _learned(phase, clients))
    }


def receive(cohort: Cohort, clients: Clients) -> Clients:
    """Install the downloads."""

    def one(net: Net, own: Any, down: Any, key: Tensor) -> tuple[Net, Any]:
        return cohort.method.receive(net, own, down, cohort.at(key))

    with torch.no_grad():
        net, own = cohort.lift(one, (0, 0, cohort.down_dim, 0))(
            clients.net, clients.own, cohort.down, cohort.keys
        )
    return replace(clients, net=net, own=own)


def train(cohort: Cohort, clients: Clients, phases: tuple[Phase, ...]) -> tuple[Clients, Tensor]:
    """Go through the phases.

    Return the clients and each one's mean loss over the rows it saw, (K,).
    """
    seen = torch.zeros(len(cohort.ids), 2, device=cohort.table.device)
    for index, phase in enumerate(phases):
        clients, sums = _phase(cohort, clients, phase, f"{cohort.ctx.stage}-{index}")
        seen = seen + sums
    return clients, seen[:, 0] / seen[:, 1].clamp(min=1.0)


def _learned(phase: Phase, clients: Clients) -> dict[str, Tensor]:
    parts = {"all", "body", "head", "none"}
    arch = clients.net.arch
    own = {_own_name(path): value for path, value in named(clients.own).items()}
    wanted = [p for p in phase.learns if p not in parts]
    if unknown := [p for p in wanted if p not in own]:
        msg = f"a phase learns {unknown[0]!r}; known: {', '.join([*sorted(parts), *own])}"
        raise ValueError(msg)
    net = {
        name: value
        for name, value in clients.net.params.items()
        if any(part in parts and arch.holds(part, name) for part in phase.learns)  # type: ignore[arg-type]
    }
    return net | {name: own[name] for name in wanted}


def _install(net: Net, own: Any, values: Mapping[str, Tensor]) -> tuple[Net, Any]:
    net = net.having({name: v for name, v in values.items() if not name.startswith(OWN)})
    mine = {path: values.get(_own_name(path), value) for path, value in named(own).items()}
    return net, build(type(own), mine)


def _own_name(path: str) -> str:
    return OWN + path.replace(SEPARATOR, ".")


def _phase(cohort: Cohort, clients: Clients, phase: Phase, name: str) -> tuple[Clients, Tensor]:
    training = cohort.ctx.task.training
    total = torch.zeros(len(cohort.ids), 2, device=cohort.table.device)
    learned = {
        n: t.clone(memory_format=torch.contiguous_format)
        for n, t in _learned(phase, clients).items()
    }
    if not learned:  # a body without parameters
        return clients, total
    optimizer = phase.optimizer or training.optimizer
    keys = random.fold(cohort.keys, "phase", name)
    batches = schedule(cohort.table, keys, training.batch_size, phase.epochs, phase.steps)
    present = (batches >= 0).sum(2)  # (K, steps)
    memory = clients.memory.get(name)
    memory = optim.init(optimizer, learned) if memory is None else map_leaves(torch.clone, memory)
    buffers = {n: b.clone() for n, b in clients.net.buffers.items()}
    clients = replace(clients, net=replace(clients.net, buffers=buffers))
    step = _Step(cohort, phase, optimizer, clients, learned, memory)
    step_keys = random.fold(
        keys.unsqueeze(1), "step", torch.arange(batches.shape[1], device=keys.device)
    )
    active = (
        (present > 0).sum(0).tolist()
    )  # clients are sorted by steps, so the active ones are the first
    per_epoch = -(-(cohort.table >= 0).sum(1) // training.batch_size)
    for s, count in enumerate(active):
        if phase.remembers == "epoch":
            step.forget(per_epoch[:count], s)
        losses = step(count, batches[:count, s], step_keys[:count, s])
        total[:count, 0] += losses * present[:count, s]
        total[:count, 1] += present[:count, s]
    net, own = _install(clients.net, clients.own, learned)
    kept = clients.memory | ({name: memory} if phase.remembers == "run" else {})
    return Clients(net, own, kept), total


class _Step:
    """One stacked step: loss, gradient, update, in place on the first ``count`` clients."""

    def __init__(
        self,
        cohort: Cohort,
        phase: Phase,
        optimizer: Optimizer,
        clients: Clients,
        learned: dict[str, Tensor],
        memory: OptimizerState,
    ) -> None:
        self.cohort, self.optimizer = cohort, optimizer
        self.clients, self.learned, self.memory = clients, learned, memory
        loss = phase.loss or cohort.method.loss

        def one(
            values: dict[str, Tensor], net: Net, own: Any, down: Any, batch: Batch, key: Tensor
        ) -> Any:
            run = Pass(batch.mask, key)
            net, own = _install(net, own, values)
            value = loss(replace(net, run=run), batch, own, down, cohort.at(key))
            return value, run.updates

        self.loss = cohort.lift(one, (0, 0, 0, cohort.down_dim, 0, 0))
        self.count = -1

    def _slice(self, count: int) -> None:
        """Prepare views of the first ``count`` clients, once for all steps that have so many."""
        self.count = count
        cut = slice(0, count)
        self.params = take(self.learned, cut)
        self.net, self.own = take(self.clients.net, cut), take(self.clients.own, cut)
        self.down = self.cohort.down if self.cohort.broadcast else take(self.cohort.down, cut)
        self.rows = take(self.memory, cut)

    def __call__(self, count: int, rows: Tensor, keys: Tensor) -> Tensor:
        if count != self.count:
            self._slice(count)
        batch = self.cohort.examples.batch(rows, keys)
        values = {name: p.detach().requires_grad_() for name, p in self.params.items()}
        with torch.enable_grad(), _torch_draws(self.cohort, keys):
            losses, updates = self.loss(values, self.net, self.own, self.down, batch, keys)
            grads = torch.autograd.grad(losses.sum(), list(values.values()), materialize_grads=True)
        with torch.no_grad():
            optim.step(
                self.optimizer, self.params, dict(zip(self.params, grads, strict=True)), self.rows
            )
            for name, new in updates.items():
                self.clients.net.buffers[name][:count] = new
        mine: Tensor = losses.detach()
        return mine

    def forget(self, per_epoch: Tensor, step: int) -> None:
        """Reset the optimizer of the clients that begin an epoch at this step."""
        begin = ((step % per_epoch) == 0).nonzero().squeeze(1)
        for leaf in leaves(self.memory):
            leaf[begin] = 0


@contextlib.contextmanager
def _torch_draws(cohort: Cohort, keys: Tensor) -> Iterator[None]:
    """Seed torch's generator for one step of a model that draws from it.

    Such a model runs alone, never stacked.
    """
    if cohort.stack:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(keys[0]))
        yield


def upload(cohort: Cohort, clients: Clients) -> tuple[Any, Clients]:
    """Summarize all rows of each client, batch by batch, and make the uploads, (K, ...)."""
    method = cohort.method

    def one(net: Net, own: Any, sums: Any, down: Any, key: Tensor) -> tuple[Any, Any]:
        return method.upload(net, own, sums, down, cohort.at(key))

    with torch.no_grad():
        sums = _summaries(cohort, clients)
        dims = (0, 0, 0, cohort.down_dim, 0)
        message, own = cohort.lift(one, dims)(
            clients.net, clients.own, sums, cohort.down, cohort.keys
        )
    return message, replace(clients, own=own)


def _summaries(cohort: Cohort, clients: Clients) -> Any:
    method = cohort.method
    if type(method).summarize is Method.summarize:  # counting needs no examples
        return Count((cohort.table >= 0).sum(1).to(torch.float32))

    def one(net: Net, batch: Batch, own: Any, down: Any, key: Tensor) -> Any:
        return method.summarize(net, batch, own, down, cohort.at(key))

    summarize = cohort.lift(one, (0, 0, 0, cohort.down_dim, 0))
    sums: Any = None
    for count, rows in _pieces(cohort.table):
        first, down = _first(cohort, clients, count)
        part = summarize(
            first.net, cohort.examples.batch(rows), first.own, down, cohort.keys[:count]
        )
        sums = part if sums is None else map_leaves(_add_first, sums, part)
    return sums


def _add_first(total: Tensor, part: Tensor) -> Tensor:
    return torch.cat([total[: len(part)] + part, total[len(part) :]])


def _first(cohort: Cohort, clients: Clients, count: int) -> tuple[Clients, Any]:
    if count == len(cohort.ids):
        return clients, cohort.down
    return take(clients, slice(0, count)), cohort.down if cohort.broadcast else take(
        cohort.down, slice(0, count)
    )


def _pieces(table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cut a table of rows into pieces of bounded size.

    Each names how many clients, from the first, it has rows for.
    """
    width = max(1, ROWS_AT_ONCE // max(1, len(table)))
    pieces = (
        torch.split(table, width, dim=1)
        if table.shape[1]
        else [table.new_full((len(table), 1), -1)]
    )
    for index, rows in enumerate(pieces):
        somebody = (rows >= 0).any(1).nonzero()
        count = len(table) if index == 0 or not len(somebody) else int(somebody[-1]) + 1
        yield count, rows[:count]


def marks(
    cohort: Cohort, clients: Clients, table: Tensor, examples: Examples
) -> tuple[Tensor, Tensor]:
    """Predict rows: whether each is right, and its cross-entropy.

    Both (K, rows), 0 where there is none.
    """

    def one(net: Net, own: Any, down: Any, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        logits = cohort.method.predict(net, own, down, batch.x, cohort.at(key))
        losses = torch.logsumexp(logits, -1) - logits.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        return (logits.argmax(-1) == batch.y) & batch.mask, torch.where(batch.mask, losses, 0.0)

    predict = cohort.lift(one, (0, 0, cohort.down_dim, 0, 0))
    right, losses = (
        torch.zeros_like(table, dtype=torch.bool),
        torch.zeros_like(table, dtype=torch.float32),
    )
    start = 0
    for count, rows in _pieces(table) if table.shape[1] else ():
        first, down = _first(cohort, clients, count)
        end = min(start + rows.shape[1], table.shape[1])
        with torch.no_grad():
            hit, loss = predict(
                first.net, first.own, down, examples.batch(rows), cohort.keys[:count]
            )
        right[:count, start:end], losses[:count, start:end] = (
            hit[:, : end - start],
            loss[:, : end - start],
        )
        start = end
    return right, losses


def begin(net: Net, own: Any, count: int) -> Clients:
    """Return K clients at one start."""
    return Clients(
        stacked(net, count), map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), own), {}
    )
