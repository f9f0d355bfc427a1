"""The local engine: clients simulated on this machine.

Each stage is cut into cohorts: by architecture, sorted by number of steps, K at a time. Cohorts are the unit of
everything (of work, of sums, of stacking), and they depend on the plan alone, not on the number of workers: the same
plan gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.message import Nothing, payload_bytes, reduction
from fedgist.core.method import ClientInfo, Context, Method, Order, Replies, Reply, Task
from fedgist.core.net import Architecture, stacked
from fedgist.core.optim import OptimizerState
from fedgist.core.tree import STATIC, build, map_leaves, named, same, stack, take, tree
from fedgist.data.batches import Examples
from fedgist.data.order import Rows
from fedgist.engines import cohort as trainer
from fedgist.engines.base import Answer, Score, Scores, Split
from fedgist.engines.cohort import Clients, Cohort
from fedgist.engines.crew import Crew, default_workers
from fedgist.engines.home import Home
from fedgist.engines.plan import Plan

PIECE = 2048  # rows of one shared model that are evaluated as one task


@dataclass(frozen=True, eq=False)
class Population:
    """The clients and their rows. A method that merges clients has one client, but every client's test rows."""

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
class _Task:
    """What a worker is told: plain numbers and messages."""

    round: int = field(metadata=STATIC)
    stage: str = field(metadata=STATIC)
    ids: tuple[int, ...] = field(metadata=STATIC)
    architecture: str = field(metadata=STATIC)
    broadcast: bool = field(metadata=STATIC)
    split: Split | None = field(metadata=STATIC)  # None: train and upload
    down: Any
    rows: Tensor | None = None  # the rows on which one shared model is evaluated


@tree
class _Done:
    """What a worker answers: the accepted uploads (their sum, if they sum), who was refused and why, mean losses."""

    accepted: tuple[int, ...] = field(metadata=STATIC)
    refused: dict[int, str] = field(metadata=STATIC)
    message: Any
    losses: Tensor


class LocalEngine:
    """All clients on this machine, in one process or several."""

    def __init__(
        self, method: Method, task: Task, population: Population, settings: Settings, plans: Mapping[str, Plan]
    ) -> None:
        """``plans`` says for each architecture how its clients are stacked."""
        self.method, self.task, self.population, self.settings = method, task, population, settings
        self.plans = dict(plans)
        self.key = random.key(settings.seed).to(settings.device)
        self.shapes: dict[tuple[str, str], Any] = {}
        self.laid_out = {name: lay_out(arch, self.plans[name]) for name, arch in task.architectures.items()}
        self.own_type, self.homes = self._homes()
        on_cpu = settings.device == "cpu"  # a GPU is used by one process
        self.crew = Crew(
            self._work, settings.workers if settings.workers and on_cpu else default_workers(settings.device)
        )

    def start(self) -> None:
        """Fork the workers now: best done before anything else starts a thread."""
        self.crew.start()

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any]) -> Answer:
        """Train the clients ordered and collect their uploads."""
        tasks = list(self._tasks(ctx, orders, downs, None))
        done = self.crew.run(tasks)
        losses, refused, parts, each, size = {}, [], [], [], 0
        hears = {(o.client, o.architecture): o for o in orders}
        for task, result in zip(tasks, done, strict=True):
            refused += [(task.ids[k], reason) for k, reason in sorted(result.refused.items())]
            losses.update({task.ids[k]: float(result.losses[k]) for k in result.accepted})
            if not result.accepted:
                continue
            if reduction(type(result.message)) == "sum":
                parts.append((task.architecture, result.message, len(result.accepted)))
                size += payload_bytes(result.message) * len(result.accepted)
            else:
                for place, k in enumerate(result.accepted):
                    order = hears[task.ids[k], task.architecture]
                    each.append(Reply(order, ctx.round, take(result.message, place)))
                    size += payload_bytes(each[-1].message)
        each.sort(key=lambda reply: (reply.order.client, reply.order.architecture))
        replies = Replies(tuple(parts), tuple(each), self.settings.min_replies)
        return Answer(replies, tuple(sorted(refused)), dict(sorted(losses.items())), size)

    def score(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any], split: Split) -> Scores:
        """Evaluate each client's model as it would be after this download."""
        if self._one_model(downs):
            return self._score_shared(ctx, orders[0], downs[0], split)
        tasks = list(self._tasks(ctx, orders, downs, split))
        results = self.crew.run(tasks)
        at = torch.tensor([i for task in tasks for i in task.ids]).argsort()
        names = results[0].keys()
        return Scores(
            {n: map_leaves(lambda *a: torch.cat([v.cpu() for v in a])[at], *(r[n] for r in results)) for n in names}
        )

    def trial(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any]) -> tuple[Cohort, Clients]:
        """The first cohort of these orders, ready to train: for timing; what it learns is not kept."""
        task = next(self._tasks(ctx, orders, downs, None))
        cohort = self._cohort(task)
        return cohort, trainer.receive(cohort, self._clients(task))

    def client(self, ctx: Context, order: Order, down: Any) -> Clients:
        """What one client holds after this download."""
        _, clients = self.trial(ctx, [order], [down])
        return take(clients, 0)

    def state(self) -> dict[str, Tensor]:
        """What clients keep, by architecture and name."""
        return {f"{a}/{name}": array for a, home in self.homes.items() for name, array in home.state().items()}

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's state back."""
        for name, home in self.homes.items():
            home.restore({k.removeprefix(f"{name}/"): v for k, v in arrays.items() if k.startswith(f"{name}/")})

    def close(self) -> None:
        """End the workers."""
        self.crew.close()

    # What follows runs in the workers, but for the cutting of tasks.

    def _tasks(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any], split: Split | None
    ) -> Iterator[_Task]:
        # whoever learns is sorted by steps, as the trainer wants it: also before a test
        learns = split is None or self.method.before_test(ctx)
        counts = self._counts("train" if learns else split or "client")
        # by architecture, then by steps, then by client: arrival order cannot matter
        ranked = sorted(
            range(len(orders)), key=lambda i: (orders[i].architecture, -counts[orders[i].client], orders[i].client)
        )
        names = sorted({o.architecture for o in orders})
        for name in names:
            members = [i for i in ranked if orders[i].architecture == name]
            size = self.plans[name].cohort_size
            for start in range(0, len(members), size):
                some = members[start : start + size]
                broadcast = all(same(downs[i], downs[some[0]]) for i in some)
                down = downs[some[0]] if broadcast else stack([downs[i] for i in some])
                ids = tuple(orders[i].client for i in some)
                yield _Task(ctx.round, ctx.stage, ids, name, broadcast, split, down)

    def _work(self, task: _Task) -> Any:
        if task.split:
            return self._evaluate(task, task.split)
        cohort = self._cohort(task)
        clients = trainer.receive(cohort, self._clients(task))
        clients, losses = trainer.train(cohort, clients, self.method.phases(cohort.ctx))
        message, clients = trainer.upload(cohort, clients)
        self._keep(task, clients)
        shape_key = (task.stage, task.architecture)
        if shape_key not in self.shapes:
            first = task.down if task.broadcast else take(task.down, 0)
            self.shapes[shape_key] = trainer.template(self.method, cohort.ctx, task.architecture, first)
        message, refused = trainer.settle(message, self.shapes[shape_key], len(task.ids))
        accepted = tuple(k for k in range(len(task.ids)) if k not in refused)
        return _Done(accepted, refused, message, losses)

    def _cohort(self, task: _Task) -> Cohort:
        device = self.settings.device
        ctx = Context(self.key, self.task, task.round, task.stage)
        down = map_leaves(lambda leaf: leaf.to(device), task.down)
        table = self.population.train.table(task.ids).to(device)
        stack_them = self.plans[task.architecture].stack
        if not stack_them and task.broadcast:
            down = map_leaves(lambda leaf: leaf.unsqueeze(0), down)
        return Cohort(
            self.method, ctx, torch.tensor(task.ids, device=device), down, task.broadcast and stack_them,
            self.population.examples, table, stack_them,
        )  # fmt: skip

    def _evaluate(self, task: _Task, split: Split) -> dict[str, Any]:
        """Score the clients; or, of one shared model, mark each of the task's rows."""
        cohort = self._cohort(task)
        clients = trainer.receive(cohort, self._clients(task))
        examples = self.population.examples if split in {"train", "validation"} else self.population.test_examples
        table = self._table(split, task.ids) if task.rows is None else task.rows.unsqueeze(0)
        table = table.to(self.settings.device)
        found = {"": trainer.marks(cohort, clients, table, examples)}
        if phases := self.method.before_test(cohort.ctx):
            tuned, _ = trainer.train(cohort, clients, phases)
            found["finetuned"] = trainer.marks(cohort, tuned, table, examples)
        if task.rows is not None:
            return {name: (right[0], loss[0]) for name, (right, loss) in found.items()}
        counts = (table >= 0).sum(1)
        return {name: Score(right.sum(1), loss.sum(1), counts) for name, (right, loss) in found.items()}

    def _one_model(self, downs: Sequence[Any]) -> bool:
        """Whether all clients hold the same model, so that it is evaluated once."""
        alike = len(self.task.architectures) == 1 and all(same(d, downs[0]) for d in downs)
        stateless = self.method.keeps == "none" and not any(h.arrays for h in self.homes.values())
        merged = self.method.merges_clients
        return (merged or (alike and stateless)) and not self.method.before_test(
            Context(self.key, self.task, 0, "evaluate")
        )

    def _score_shared(self, ctx: Context, order: Order, down: Any, split: Split) -> Scores:
        """Evaluate one model once on all rows of a split, then give each client its own rows' share."""
        on_test = split in {"client", "test"}
        everything = torch.arange(len((self.population.test_examples if on_test else self.population.examples).y))
        tasks = [
            _Task(ctx.round, ctx.stage, (order.client,), order.architecture, True, split, down, piece)
            for piece in torch.split(everything, PIECE)
        ]
        done = [result[""] for result in self.crew.run(tasks)]
        right, loss = torch.cat([r.cpu() for r, _ in done]).to(torch.int64), torch.cat([v.cpu() for _, v in done])
        whole = Score(right.sum(), loss.sum(), torch.tensor(len(right)))
        count = len(self.population.test)
        if split == "test":
            return Scores({"": map_leaves(lambda leaf: leaf.expand(count), whole)}, whole)
        rows = self._rows(split)
        client = torch.repeat_interleave(torch.arange(len(rows)), rows.counts)
        correct = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, client, right[rows.rows])
        losses = torch.zeros(len(rows)).index_add_(0, client, loss[rows.rows])
        return Scores({"": Score(correct, losses, rows.counts)}, whole if on_test else None)

    def _rows(self, split: Split) -> Rows:
        p = self.population
        return {"client": p.test, "train": p.train, "validation": p.validation}[split]

    def _table(self, split: Split, ids: Sequence[int]) -> Tensor:
        if split == "test":
            return torch.arange(len(self.population.test_examples.y)).expand(len(ids), -1)
        return self._rows(split).table(ids)

    def _counts(self, split: Split) -> list[int]:
        counts: list[int] = (
            [len(self.population.test_examples.y)] * len(self.population.clients)
            if split == "test"
            else self._rows(split).counts.tolist()
        )
        return counts

    def _homes(self) -> tuple[type, dict[str, Home]]:
        homes, own_type = {}, Nothing
        for name, arch in self.laid_out.items():
            own = self.method.init_client(self._start_net(arch), Context(self.key, self.task, 0, "init"))
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
            memory |= trainer.memory_of(self.method, Context(self.key, self.task, 1, stage), clients)
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

    def _keep(self, task: _Task, clients: Clients) -> None:
        home = self.homes[task.architecture]
        if home.arrays:
            home.put(task.ids, self._kept(clients))

    def _clients(self, task: _Task) -> Clients:
        """The cohort's clients as they are at home, or at their start; what does not stay home is the common start."""
        home, arch = self.homes[task.architecture], self.laid_out[task.architecture]
        for client in home.absent(task.ids):
            home.put(
                [client], {n: a.unsqueeze(0) for n, a in self._kept(self._newcomer(client, task.architecture)).items()}
            )
        net = stacked(self._start_net(arch), len(task.ids))
        if not home.arrays:
            own = build(self.own_type, {})
            return Clients(net, own, {})
        arrays = home.get(task.ids)

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}

        own, memory = build(self.own_type, under("own/")), build(dict[str, OptimizerState], under("memory/"))
        return Clients(net.having(under("net/")), own, memory)

    def _newcomer(self, client: int, architecture: str) -> Clients:
        arch = self.laid_out[architecture]
        net = self._start_net(arch)
        if self.settings.own_start:
            seed = int(random.key(self.settings.seed, "start", architecture, client))
            net = map_leaves(lambda leaf: leaf.to(self.settings.device), replace(arch.start(seed), arch=arch))
        key = random.fold(self.key, "client", client, "init")
        own = self.method.init_client(net, Context(key, self.task, 0, "init"))
        return replace(self._one(architecture, own), net=net)


def lay_out(arch: Architecture, plan: Plan) -> Architecture:
    """Return the architecture with its convolutions as the plan says."""
    return arch.laid_out(each=plan.stack and plan.convolutions == "each")
