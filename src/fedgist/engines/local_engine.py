"""The local engine: clients simulated on this machine.

Each stage is cut into cohorts: by architecture, sorted by number of steps, K at a time. Cohorts are
the unit of everything (of work, of sums, of stacking), and they depend on the plan alone, not on
the number of workers: the same plan gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedgist.core.message import payload_bytes, reduction
from fedgist.core.method import Context, Method, Order, Replies, Reply, Task
from fedgist.core.tree import map_leaves, same, stack, take
from fedgist.engines import trainer
from fedgist.engines.client_work import Population, Settings, Site, Visit
from fedgist.engines.engine import Answer, Score, Scores, Split
from fedgist.engines.stacking_plan import Plan
from fedgist.engines.trainer import Clients, Cohort
from fedgist.engines.worker_pool import Crew, default_workers

PIECE = 2048  # rows of one shared model that are evaluated as one visit


class LocalEngine:
    """All clients on this machine, in one process or several."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: Settings,
        plans: Mapping[str, Plan],
    ) -> None:
        """``plans`` says for each architecture how its clients are stacked."""
        self.method, self.task, self.settings = method, task, settings
        self.site = Site(method, task, population, settings, plans)
        on_cpu = settings.device == "cpu"  # a GPU is used by one process
        workers = (
            settings.workers if settings.workers and on_cpu else default_workers(settings.device)
        )
        self.crew = Crew(self.site.do, workers)

    def start(self) -> None:
        """Fork the workers now: best done before anything else starts a thread."""
        self.crew.start()

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any]) -> Answer:
        """Train the clients ordered and collect their uploads."""
        visits = list(self._visits(ctx, orders, downs, None))
        done = self.crew.run(visits)
        losses, refused, parts, each, size = {}, [], [], [], 0
        hears = {(o.client, o.architecture): o for o in orders}
        for visit, result in zip(visits, done, strict=True):
            refused += [(visit.ids[k], reason) for k, reason in sorted(result.refused.items())]
            means = result.losses.tolist()
            losses.update({visit.ids[k]: means[k] for k in result.accepted})
            if not result.accepted:
                continue
            if reduction(type(result.message)) == "sum":
                parts.append((visit.architecture, result.message, len(result.accepted)))
                size += payload_bytes(result.message) * len(result.accepted)
            else:
                for place, k in enumerate(result.accepted):
                    order = hears[visit.ids[k], visit.architecture]
                    each.append(Reply(order, ctx.round, take(result.message, place)))
                    size += payload_bytes(each[-1].message)
        each.sort(key=lambda reply: (reply.order.client, reply.order.architecture))
        replies = Replies(tuple(parts), tuple(each), self.settings.min_replies)
        return Answer(replies, tuple(sorted(refused)), dict(sorted(losses.items())), size)

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any], split: Split
    ) -> Scores:
        """Evaluate each client's model as it would be after this download."""
        if self._one_model(downs):
            return self._score_shared(ctx, orders[0], downs[0], split)
        visits = list(self._visits(ctx, orders, downs, split))
        results = self.crew.run(visits)
        at = torch.tensor([i for visit in visits for i in visit.ids]).argsort()
        names = results[0].keys()
        return Scores(
            {
                n: map_leaves(
                    lambda *a: torch.cat([v.cpu() for v in a])[at], *(r[n] for r in results)
                )
                for n in names
            }
        )

    def trial(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any]
    ) -> tuple[Cohort, Clients]:
        """The first cohort of these orders, ready to train.

        For timing; what it learns is not kept.
        """
        visit = next(self._visits(ctx, orders, downs, None))
        cohort = self.site.cohort(visit)
        return cohort, trainer.receive(cohort, self.site.clients(visit))

    def client(self, ctx: Context, order: Order, down: Any) -> Clients:
        """What one client holds after this download."""
        _, clients = self.trial(ctx, [order], [down])
        return take(clients, 0)

    def state(self) -> dict[str, Tensor]:
        """What clients keep, by architecture and name."""
        return {
            f"{a}/{name}": array
            for a, home in self.site.homes.items()
            for name, array in home.state().items()
        }

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's state back."""
        for name, home in self.site.homes.items():
            home.restore(
                {
                    k.removeprefix(f"{name}/"): v
                    for k, v in arrays.items()
                    if k.startswith(f"{name}/")
                }
            )

    def close(self) -> None:
        """End the workers."""
        self.crew.close()

    def _visits(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any], split: Split | None
    ) -> Iterator[Visit]:
        # whoever learns is sorted by steps, as the trainer wants it: also before a test
        learns = split is None or self.method.before_test(ctx)
        counts = self._counts("train" if learns else split or "client")
        # by architecture, then by steps, then by client: arrival order cannot matter
        ranked = sorted(
            range(len(orders)),
            key=lambda i: (orders[i].architecture, -counts[orders[i].client], orders[i].client),
        )
        names = sorted({o.architecture for o in orders})
        for name in names:
            members = [i for i in ranked if orders[i].architecture == name]
            size = self.site.plans[name].cohort_size
            for start in range(0, len(members), size):
                some = members[start : start + size]
                broadcast = all(same(downs[i], downs[some[0]]) for i in some)
                down = downs[some[0]] if broadcast else stack([downs[i] for i in some])
                ids = tuple(orders[i].client for i in some)
                yield Visit(ctx.round, ctx.stage, ids, name, broadcast, split, down)

    def _one_model(self, downs: Sequence[Any]) -> bool:
        """Whether all clients hold the same model, so that it is evaluated once."""
        alike = len(self.task.architectures) == 1 and all(same(d, downs[0]) for d in downs)
        stateless = self.method.keeps == "none" and not any(
            h.arrays for h in self.site.homes.values()
        )
        merged = self.method.merges_clients
        return (merged or (alike and stateless)) and not self.method.before_test(
            Context(self.site.key, self.task, 0, "evaluate")
        )

    def _score_shared(self, ctx: Context, order: Order, down: Any, split: Split) -> Scores:
        """Evaluate one model once on all rows, then give each client its own rows' share."""
        on_test = split in {"client", "test"}
        population = self.site.population
        everything = torch.arange(
            len((population.test_examples if on_test else population.examples).y)
        )
        visits = [
            Visit(
                ctx.round, ctx.stage, (order.client,), order.architecture, True, split, down, piece
            )
            for piece in torch.split(everything, PIECE)
        ]
        done = [result[""] for result in self.crew.run(visits)]
        right, loss = (
            torch.cat([r.cpu() for r, _ in done]).to(torch.int64),
            torch.cat([v.cpu() for _, v in done]),
        )
        whole = Score(right.sum(), loss.sum(), torch.tensor(len(right)))
        count = len(population.test)
        if split == "test":
            return Scores({"": map_leaves(lambda leaf: leaf.expand(count), whole)}, whole)
        rows = self.site.rows(split)
        client = torch.repeat_interleave(torch.arange(len(rows)), rows.counts)
        correct = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, client, right[rows.rows])
        losses = torch.zeros(len(rows)).index_add_(0, client, loss[rows.rows])
        return Scores({"": Score(correct, losses, rows.counts)}, whole if on_test else None)

    def _counts(self, split: Split) -> list[int]:
        """How many rows each client has in a split."""
        if split == "test":
            return [len(self.site.population.test_examples.y)] * len(self.site.population.clients)
        counts: list[int] = self.site.rows(split).counts.tolist()
        return counts
