"""A visit: what is done with one cohort, in whichever process.

A :class:`Site` knows the clients' rows and what they keep; it turns a :class:`Visit` into its
outcome by the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.message import Nothing
from fedgist.core.method import ClientInfo, Context, Method, Task
from fedgist.core.net import Architecture, stacked
from fedgist.core.optim import OptimizerState
from fedgist.core.tree import STATIC, build, map_leaves, named, take, tree
from fedgist.data.client_rows import Rows
from fedgist.data.examples import Examples
from fedgist.engines import message_form as gate
from fedgist.engines import trainer
from fedgist.engines.client_store import Home
from fedgist.engines.engine import Score, Split
from fedgist.engines.stacking_plan import Plan
from fedgist.engines.trainer import Clients, Cohort


@dataclass(frozen=True, eq=False)
class Population:
    """The clients and their rows.

    A method that merges clients has one client, but every client's test rows.
    """

    clients: tuple[ClientInfo, ...]
    examples: Examples
    test_examples: Examples
    train: Rows
    validation: Rows
    test: Rows


@dataclass(frozen=True)
class Settings:
    """How the engine works; of these only the plans can move results, and only their last bits."""

    seed: int
    own_start: bool = False
    workers: int | None = None
    device: str = "cpu"
    min_replies: int = 1


@tree
class Visit:
    """What is to be done with a cohort.

    Plain numbers and messages, so that it can be sent to a worker.
    """

    round: int = field(metadata=STATIC)
    stage: str = field(metadata=STATIC)
    ids: tuple[int, ...] = field(metadata=STATIC)
    architecture: str = field(metadata=STATIC)
    broadcast: bool = field(metadata=STATIC)
    split: Split | None = field(metadata=STATIC)  # None: train and upload
    down: Any
    rows: Tensor | None = None  # the rows on which one shared model is evaluated


@tree
class Outcome:
    """What a visit brought.

    The accepted uploads (their sum, if they sum), who was refused and why, mean losses.
    """

    accepted: tuple[int, ...] = field(metadata=STATIC)
    refused: dict[int, str] = field(metadata=STATIC)
    message: Any
    losses: Tensor


class Site:
    """The clients of this machine: their rows, their models, what they keep."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: Settings,
        plans: Mapping[str, Plan],
    ) -> None:
        """``plans`` says for each architecture how its clients are stacked."""
        self.method, self.task, self.population, self.settings = method, task, population, settings
        self.plans = dict(plans)
        self.key = random.key(settings.seed).to(settings.device)
        self.shapes: dict[tuple[str, str], Any] = {}
        self.laid_out = {
            name: lay_out(arch, self.plans[name]) for name, arch in task.architectures.items()
        }
        self.own_type, self.homes = self._homes()

    def do(self, visit: Visit) -> Any:
        """Train and upload (an :class:`Outcome`), or evaluate (scores by model)."""
        if visit.split:
            return self._evaluate(visit, visit.split)
        cohort = self.cohort(visit)
        clients = trainer.receive(cohort, self.clients(visit))
        clients, losses = trainer.train(cohort, clients, self.method.phases(cohort.ctx))
        message, clients = trainer.upload(cohort, clients)
        self._keep(visit, clients)
        shape_key = (visit.stage, visit.architecture)
        if shape_key not in self.shapes:
            first = visit.down if visit.broadcast else take(visit.down, 0)
            self.shapes[shape_key] = gate.template(
                self.method, cohort.ctx, visit.architecture, first
            )
        message, refused = gate.settle(message, self.shapes[shape_key], len(visit.ids))
        accepted = tuple(k for k in range(len(visit.ids)) if k not in refused)
        return Outcome(accepted, refused, message, losses)

    def cohort(self, visit: Visit) -> Cohort:
        """The clients visited, for the trainer."""
        device = self.settings.device
        ctx = Context(self.key, self.task, visit.round, visit.stage)
        down = map_leaves(lambda leaf: leaf.to(device), visit.down)
        table = self.population.train.table(visit.ids).to(device)
        stack_them = self.plans[visit.architecture].stack
        if not stack_them and visit.broadcast:
            down = map_leaves(lambda leaf: leaf.unsqueeze(0), down)
        return Cohort(
            self.method,
            ctx,
            torch.tensor(visit.ids, device=device),
            down,
            visit.broadcast and stack_them,
            self.population.examples,
            table,
            stack_them,
        )

    def clients(self, visit: Visit) -> Clients:
        """The cohort's clients as they are at home, or at their start.

        What does not stay home is the common start.
        """
        home, arch = self.homes[visit.architecture], self.laid_out[visit.architecture]
        for client in home.absent(visit.ids):
            home.put(
                [client],
                {
                    n: a.unsqueeze(0)
                    for n, a in self._kept(self._newcomer(client, visit.architecture)).items()
                },
            )
        net = stacked(self._start_net(arch), len(visit.ids))
        if not home.arrays:
            own = build(self.own_type, {})
            return Clients(net, own, {})
        arrays = home.get(visit.ids)

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}

        own, memory = (
            build(self.own_type, under("own/")),
            build(dict[str, OptimizerState], under("memory/")),
        )
        return Clients(net.having(under("net/")), own, memory)

    def _evaluate(self, visit: Visit, split: Split) -> dict[str, Any]:
        """Score the clients; or, of one shared model, mark each of the task's rows."""
        cohort = self.cohort(visit)
        clients = trainer.receive(cohort, self.clients(visit))
        examples = (
            self.population.examples
            if split in {"train", "validation"}
            else self.population.test_examples
        )
        table = self._table(split, visit.ids) if visit.rows is None else visit.rows.unsqueeze(0)
        table = table.to(self.settings.device)
        found = {"": trainer.marks(cohort, clients, table, examples)}
        if phases := self.method.before_test(cohort.ctx):
            tuned, _ = trainer.train(cohort, clients, phases)
            found["finetuned"] = trainer.marks(cohort, tuned, table, examples)
        if visit.rows is not None:
            return {name: (right[0], loss[0]) for name, (right, loss) in found.items()}
        counts = (table >= 0).sum(1)
        return {
            name: Score(right.sum(1), loss.sum(1), counts) for name, (right, loss) in found.items()
        }

    def rows(self, split: Split) -> Rows:
        """Each client's rows of a split."""
        p = self.population
        return {"client": p.test, "train": p.train, "validation": p.validation}[split]

    def _table(self, split: Split, ids: Sequence[int]) -> Tensor:
        if split == "test":
            return torch.arange(len(self.population.test_examples.y)).expand(len(ids), -1)
        return self.rows(split).table(ids)

    def _homes(self) -> tuple[type, dict[str, Home]]:
        homes, own_type = {}, Nothing
        for name, arch in self.laid_out.items():
            own = self.method.init_client(
                self._start_net(arch), Context(self.key, self.task, 0, "init")
            )
            own_type = type(own)
            members = [c.id for c in self.population.clients if name in c.architectures]
            homes[name] = Home(members, self._kept(self._one(name, own)), self.settings.device)
        return own_type, homes

    def _one(self, name: str, own: Any) -> Clients:
        """One client at its start, with the optimizer memory that it will keep."""
        net = self._start_net(self.laid_out[name])
        clients = trainer.begin(net, own, 1)
        memory: dict[str, OptimizerState] = {}
        for stage in self.method.stages(Context(self.key, self.task, 1, "")):
            memory |= trainer.memory_of(
                self.method, Context(self.key, self.task, 1, stage), clients
            )
        return take(replace(clients, memory=memory), 0)

    def _start_net(self, arch: Architecture) -> Any:
        return replace(self.task.starts[arch.name], arch=arch)

    def _kept(self, clients: Clients) -> dict[str, Tensor]:
        """The arrays that stay home, by name; ``clients`` may be one client or a stack."""
        return {
            **{f"net/{n}": a for n, a in clients.net.state(self.method.keeps).items()},
            **{f"own/{n}": a for n, a in named(clients.own).items()},
            **{f"memory/{n}": a for n, a in named(clients.memory).items()},
        }

    def _keep(self, visit: Visit, clients: Clients) -> None:
        home = self.homes[visit.architecture]
        if home.arrays:
            home.put(visit.ids, self._kept(clients))

    def _newcomer(self, client: int, architecture: str) -> Clients:
        arch = self.laid_out[architecture]
        net = self._start_net(arch)
        if self.settings.own_start:
            seed = int(random.key(self.settings.seed, "start", architecture, client))
            net = map_leaves(
                lambda leaf: leaf.to(self.settings.device), replace(arch.start(seed), arch=arch)
            )
        key = random.fold(self.key, "client", client, "init")
        own = self.method.init_client(net, Context(key, self.task, 0, "init"))
        return replace(self._one(architecture, own), net=net)


def lay_out(arch: Architecture, plan: Plan) -> Architecture:
    """Return the architecture with its convolutions as the plan says."""
    return arch.laid_out(each=plan.stack and plan.convolutions == "each")
