"""The local engine, which simulates all clients on this machine.

Each stage is split into cohorts: by shard and architecture, sorted by number of steps, K at a time.
Cohorts are the unit of work, of sums and of stacking. They depend only on the execution plan and on
the number of shards, not on the number of workers: the same plan and shards give the same bits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedgist.core.message import reduction
from fedgist.core.method import Context, Method, Order, Reply, Task
from fedgist.core.objectives.objective import RowPredictions
from fedgist.core.replies import Asked, Subtotal
from fedgist.core.tree import Tree, same, stack, take
from fedgist.engines.client_host import ClientHost
from fedgist.engines.client_requests import (
    PredictRequest,
    ScoreRequest,
    SentCohort,
    Trained,
    TrainRequest,
)
from fedgist.engines.engine import Answer, Scores, ScoreTable, Split
from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import HostSettings, Population
from fedgist.engines.reader_pool import ReaderPool
from fedgist.engines.scoring import Separate, score_models
from fedgist.engines.sharding import added, by_shard, in_order
from fedgist.engines.worker_pool import WorkerPool, default_readers, default_workers
from fedgist.training import cohort as cohorts
from fedgist.training.cohort import Clients, Cohort

ROWS_PER_REQUEST = 2048  # rows that one worker predicts at a time


class LocalEngine:
    """All clients on this machine, in one process or several."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: HostSettings,
        plans: Mapping[str, Plan],
        shards: int = 1,
    ) -> None:
        """Host a population of clients with an execution plan for each architecture.

        Cohorts and sums do not cross ``shards``: so the bits are those of an engine on a cluster.
        """
        self.method, self.task, self.settings, self.shards = method, task, settings, shards
        on_cpu = settings.device == "cpu"  # a GPU is used by one process
        workers = (settings.workers if on_cpu else None) or default_workers(settings.device)
        each = settings.readers
        if each is None:
            each = default_readers(min(workers, len(population.clients)))
        readers = ReaderPool(population.sources, each)
        self.host = ClientHost(method, task, population.served(readers), settings, plans)
        self.pool = WorkerPool(self.host.answer, workers, readers)

    def start(self) -> None:
        """Fork the readers and workers now; call this before any other code starts a thread."""
        self.pool.start()

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Train the clients of these orders and collect their uploads."""
        cohorts_sent = list(self._cut(ctx, orders, downs, "train"))
        results: list[Trained] = self.pool.run([TrainRequest(sent) for sent in cohorts_sent])
        losses, refused, subtotals, each, sizes = {}, [], [], [], Counter[str]()
        steps: dict[Asked, tuple[int, ...]] = {}
        order_of = {(o.client, o.architecture): o for o in orders}
        for sent, trained in zip(cohorts_sent, results, strict=True):
            participants = [Asked(client, sent.architecture) for client in sent.ids]
            refused += [(participants[k], reason) for k, reason in sorted(trained.refused.items())]
            if self.settings.share_measurements and trained.losses is not None:
                means = trained.losses.tolist()
                losses.update({participants[k]: means[k] for k in trained.accepted})
            if self.task.training.round_seconds is not None:
                steps.update({participants[k]: trained.steps for k in trained.accepted})
            if not trained.accepted:
                continue
            sizes[sent.architecture] += trained.payload_bytes
            clients = tuple(sent.ids[k] for k in trained.accepted)
            if reduction(type(trained.message)) == "sum":
                part = Subtotal(sent.architecture, clients, ctx.round, ctx.stage, trained.message)
                subtotals.append(part)
            else:
                for place, client in enumerate(clients):
                    order, message = order_of[client, sent.architecture], trained.message
                    each.append(Reply(order, ctx.round, ctx.stage, take(message, place)))
        if self.shards > 1:
            subtotals = list(added((self._shard(part.clients[0]), part) for part in subtotals))
        return Answer(
            tuple(subtotals),
            tuple(each),
            tuple(sorted(refused)),
            losses=dict(sorted(losses.items())),
            upload_bytes=sizes,
            steps=dict(sorted(steps.items())),
        )

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Evaluate each client's model after this download, by :func:`score_models`."""
        return score_models(self, self.host, ctx, orders, downs, split)

    def score_each(
        self, ctx: Context, requests: Sequence[Separate], split: Split
    ) -> list[dict[str, ScoreTable]]:
        """Evaluate each client's own model; return the cohorts' tables, by name of the model."""
        tunes = self.host.has_second_tests(ctx, split)
        sorted_by: Split = "train" if tunes else split  # steps, if any
        return self.pool.run(
            [
                ScoreRequest(sent, split, tuned_only=part.tuned_only)
                for part in requests
                for sent in self._cut(ctx, part.orders, part.downs, sorted_by)
            ]
        )

    def predict(
        self, ctx: Context, orders: Sequence[Order], down: Tree, split: Split, rows: Tensor
    ) -> RowPredictions:
        """Return the per-row results of rows (rows,) by the model that these clients share."""
        groups = by_shard(self.host.population, split, rows, orders, self.shards)
        requests = [
            PredictRequest(self._sent(ctx, [order], down, broadcast=True), split, piece)
            for order, at in groups
            for piece in torch.split(rows[at], ROWS_PER_REQUEST)
        ]
        return in_order(self.pool.run(requests), [at for _, at in groups])

    def trial(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]
    ) -> tuple[Cohort, Clients]:
        """Return the first cohort of these orders, ready to train; its results are not stored."""
        sent = next(self._cut(ctx, orders, downs, "train"))
        cohort = self.host.cohort(sent)
        return cohort, cohorts.receive(cohort, self.host.clients(sent))

    def client(self, ctx: Context, order: Order, down: Tree) -> Clients:
        _, clients = self.trial(ctx, [order], [down])
        return take(self.host.whole(clients), 0)

    def state(self) -> dict[str, Tensor]:
        """Return the clients' state: arrays (clients, ...) by architecture and name."""
        return self.host.state()

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the clients' state, arrays (clients, ...) by name, from a checkpoint."""
        self.host.restore(arrays)

    def close(self) -> None:
        """End the workers and readers."""
        self.pool.close()

    def _cut(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Iterator[SentCohort]:
        """Split orders into cohorts, sorted by the clients' numbers of rows in a split."""
        counts, place = self._counts(split), self.host.population.place

        # of one length of training: the clients of a cohort with most rows take most steps
        def group(order: Order) -> tuple[int, str, str]:
            client, name = order.asked
            key, usual = (ctx.round, ctx.stage, client, name), self.task.training.work
            work = self.host.settings.length(key, usual)
            return self._shard(client), name, "" if work is None else str(work)

        groups = [group(order) for order in orders]

        # then by steps, then by client: independent of the order of arrival
        def rank(i: int) -> tuple[tuple[int, str, str], int, int]:
            client = orders[i].client
            return groups[i], -counts[place[client]], client

        ranked = sorted(range(len(orders)), key=rank)
        for (_, name, _), of_group in itertools.groupby(ranked, groups.__getitem__):
            members, size = list(of_group), self.host.plans[name].cohort_size
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                broadcast = all(same(downs[i], downs[chosen[0]]) for i in chosen)
                down = downs[chosen[0]] if broadcast else stack([downs[i] for i in chosen])
                yield self._sent(ctx, [orders[i] for i in chosen], down, broadcast=broadcast)

    def _shard(self, client: int) -> int:
        return self.host.population.place[client] % self.shards

    def _sent(
        self, ctx: Context, orders: Sequence[Order], down: Tree, *, broadcast: bool
    ) -> SentCohort:
        ids = tuple(order.client for order in orders)
        return SentCohort(ctx.round, ctx.stage, ids, orders[0].architecture, broadcast, down)

    def _counts(self, split: Split) -> list[int]:
        """Return each client's number of rows in a split."""
        population = self.host.population
        if split == "test":
            return [len(population.test_examples.y)] * len(population.clients)
        counts: list[int] = population.rows(split).counts.tolist()
        return counts
