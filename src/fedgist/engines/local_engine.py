"""The local engine, which simulates all clients on this machine.

Each stage is split into cohorts: by architecture, sorted by number of steps, K at a time. Cohorts
are the unit of work, of sums and of stacking. They depend only on the execution plan, not on the
number of workers: the same plan gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from fedgist.core.message import reduction
from fedgist.core.method import Context, Method, Order, Reply, Task
from fedgist.core.replies import Asked, Subtotal
from fedgist.core.tree import Tree, same, stack, take
from fedgist.engines.client_host import ClientHost
from fedgist.engines.client_requests import ScoreRequest, SentCohort, Trained, TrainRequest
from fedgist.engines.engine import Answer, Scores, ScoreTable, Split, collect
from fedgist.engines.population import HostSettings, Population
from fedgist.engines.reader_pool import ReaderPool
from fedgist.engines.shared_scoring import score_shared
from fedgist.engines.worker_pool import WorkerPool, default_readers, default_workers
from fedgist.training import cohort as cohorts
from fedgist.training.cohort import Clients, Cohort
from fedgist.training.stacking_plan import Plan


class LocalEngine:
    """All clients on this machine, in one process or several."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: HostSettings,
        plans: Mapping[str, Plan],
    ) -> None:
        """Host a population of clients with an execution plan for each architecture."""
        self.method, self.task, self.settings = method, task, settings
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
        order_of = {(o.client, o.architecture): o for o in orders}
        for sent, trained in zip(cohorts_sent, results, strict=True):
            participants = [Asked(client, sent.architecture) for client in sent.ids]
            refused += [(participants[k], reason) for k, reason in sorted(trained.refused.items())]
            if self.settings.share_measurements:
                means = trained.losses.tolist()
                losses.update({participants[k]: means[k] for k in trained.accepted})
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
        return Answer(
            tuple(subtotals),
            tuple(each),
            tuple(sorted(refused)),
            losses=dict(sorted(losses.items())),
            upload_bytes=sizes,
        )

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Evaluate each client's model after this download.

        A model that several clients share is evaluated once. Before a second test, each client
        trains its own copy, if the method or the settings require it.
        """
        if not self.settings.share_measurements:
            return Scores({})
        tunes = bool(self.host.second_tests(ctx, split))
        tables: dict[str, list[ScoreTable]] = {}
        apart, shared, whole = [], [], None
        names = sorted({o.architecture for o in orders})
        for name in names:
            members = [i for i, order in enumerate(orders) if order.architecture == name]
            if not self._shared([downs[i] for i in members]):
                apart += members
                continue
            shared += members
            sent = self._sent(ctx, [orders[i] for i in members], downs[members[0]], broadcast=True)
            table, on_all = score_shared(self.host, self.pool, sent, split, alone=len(names) == 1)
            tables.setdefault("", []).append(table)
            whole = on_all or whole
        sorted_by: Split = "train" if tunes else split  # steps, if any
        requests = [
            ScoreRequest(sent, split, tuned_only=members is shared)
            for members in (apart, shared if tunes else [])
            for sent in self._cut(
                ctx, [orders[i] for i in members], [downs[i] for i in members], sorted_by
            )
        ]
        for result in self.pool.run(requests):
            for model, table in result.items():
                tables.setdefault(model, []).append(table)
        return Scores({model: collect(parts) for model, parts in tables.items()}, whole)

    def trial(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]
    ) -> tuple[Cohort, Clients]:
        """Return the first cohort of these orders, ready to train; its results are not stored."""
        sent = next(self._cut(ctx, orders, downs, "train"))
        cohort = self.host.cohort(sent)
        return cohort, cohorts.receive(cohort, self.host.clients(sent))

    def client(self, ctx: Context, order: Order, down: Tree) -> Clients:
        _, clients = self.trial(ctx, [order], [down])
        return take(clients, 0)

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

        # by architecture, then by steps, then by client: independent of the order of arrival
        def rank(i: int) -> tuple[str, int, int]:
            client = orders[i].client
            return orders[i].architecture, -counts[place[client]], client

        ranked = sorted(range(len(orders)), key=rank)
        for name in sorted({o.architecture for o in orders}):
            members = [i for i in ranked if orders[i].architecture == name]
            size = self.host.plans[name].cohort_size
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                broadcast = all(same(downs[i], downs[chosen[0]]) for i in chosen)
                down = downs[chosen[0]] if broadcast else stack([downs[i] for i in chosen])
                yield self._sent(ctx, [orders[i] for i in chosen], down, broadcast=broadcast)

    def _sent(
        self, ctx: Context, orders: Sequence[Order], down: Tree, *, broadcast: bool
    ) -> SentCohort:
        ids = tuple(order.client for order in orders)
        return SentCohort(ctx.round, ctx.stage, ids, orders[0].architecture, broadcast, down)

    def _shared(self, downs: Sequence[Tree]) -> bool:
        """Return whether clients of one architecture all have the same model after ``downs``."""
        kept = any(store.arrays for store in self.host.stores.values())
        alike = self.method.keeps == "none" and not kept and all(same(d, downs[0]) for d in downs)
        return self.method.merges_clients or alike

    def _counts(self, split: Split) -> list[int]:
        """Return each client's number of rows in a split."""
        population = self.host.population
        if split == "test":
            return [len(population.test_examples.y)] * len(population.clients)
        counts: list[int] = population.rows(split).counts.tolist()
        return counts
