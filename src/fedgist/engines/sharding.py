"""Shards: a fixed division of a run's clients, which cohorts and sums of messages do not cross.

Client i of a population is in shard i % shards. The number of shards is part of a run as its
execution plans are: the same shards give the same bits, wherever each shard is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgist.core.message import total
from fedgist.core.method import ClientInfo, Order
from fedgist.core.objectives.objective import RowPredictions
from fedgist.core.replies import Subtotal
from fedgist.core.tree import Tree, map_leaves
from fedgist.data.client_rows import Rows
from fedgist.engines.engine import Answer, Split
from fedgist.engines.population import Population


@dataclass(frozen=True, eq=False)
class Shard:
    """The clients of one shard, with their rows alone.

    ``train_rows`` and ``test_rows`` are the numbers, sorted, (rows,), that the shard's training and
    test rows have among all clients' rows.
    """

    population: Population
    train_rows: Tensor
    test_rows: Tensor

    def rows_here(self, split: Split, rows: Tensor) -> Tensor:
        """Return the shard's own numbers (rows,) of rows (rows,) that are numbered in the whole."""
        every = self.test_rows if split in {"client", "test"} else self.train_rows
        return torch.searchsorted(every, rows)


def shard_of(population: Population, number: int, shards: int, *, all_tests: bool) -> Shard:
    """Return a shard of a population.

    With ``all_tests`` it has all test rows, else those of its clients and some that no client has.
    """
    train, test = population.examples, population.test_examples
    if shards == 1:
        return Shard(population, torch.arange(len(train)), torch.arange(len(test)))
    places = range(number, len(population.clients), shards)
    splits = population.train, population.validation, population.test
    of_train, of_validation, of_test = ([rows[p] for p in places] for rows in splits)
    train_rows = torch.unique(Rows.of([*of_train, *of_validation]).rows)
    if all_tests:
        test_rows = torch.arange(len(test))
    else:
        mine = row_shards(population, "client", shards) == number
        test_rows = torch.unique(torch.cat([mine.nonzero()[:, 0], Rows.of(of_test).rows]))

    def numbered(lists: Sequence[Tensor], kept: Tensor) -> Rows:
        return Rows.of([torch.searchsorted(kept, rows) for rows in lists])

    part = replace(
        population,
        clients=population.clients[number::shards],
        examples=train.only(train_rows.to(train.y.device)),
        test_examples=test if all_tests else test.only(test_rows.to(test.y.device)),
        train=numbered(of_train, train_rows),
        validation=numbered(of_validation, train_rows),
        test=numbered(of_test, test_rows),
        whole_test=population.whole_test if all_tests else None,
    )
    return Shard(part, train_rows, test_rows)


def row_shards(
    population: Population, split: Split, shards: int, clients: Iterable[int] | None = None
) -> Tensor:
    """Return the shard that predicts each row of a split with a model that all share, (rows,).

    It is the shard of one of the ``clients`` (all by default) that has the row. The other rows are
    spread over all shards, if they can be in a batch.
    """
    examples = population.examples_of(split)
    home = torch.arange(len(examples)) % shards
    if split == "test" or shards == 1:
        return home
    lines = population.rows(split)
    if not examples.complete:
        home = torch.full_like(home, -1)
    client = torch.arange(len(lines)).repeat_interleave(lines.counts)  # of each entry of lines
    if clients is None:
        home[lines.rows] = client % shards
        return home
    chosen = torch.zeros(len(lines), dtype=torch.bool)
    chosen[[population.place[c] for c in clients]] = True
    mine = chosen[client]
    home[lines.rows[mine]] = client[mine] % shards
    return home


def by_shard(
    population: Population, split: Split, rows: Tensor, orders: Sequence[Order], shards: int
) -> list[tuple[Order, Tensor]]:
    """Divide ``rows`` (rows,), which one model predicts for these orders, among the shards.

    Return one order of each shard that has some, and the places of its rows in ``rows``, (count,).
    """
    first: dict[int, Order] = {}
    for order in orders:
        first.setdefault(population.place[order.client] % shards, order)
    homes = row_shards(population, split, shards, [order.client for order in orders])[rows]
    return [(order, (homes == shard).nonzero()[:, 0]) for shard, order in sorted(first.items())]


def in_order(parts: Sequence[RowPredictions], places: Sequence[Tensor]) -> RowPredictions:
    """Join the results of rows, (rows, ...), which stand at these places of the whole."""
    at = torch.cat(list(places))

    def join(*pieces: Tensor) -> Tensor:
        joint = torch.cat([piece.cpu() for piece in pieces])
        return joint[at.argsort()]

    joint: RowPredictions = map_leaves(join, *parts)
    return joint


def added(subtotals: Iterable[tuple[Hashable, Subtotal]]) -> tuple[Subtotal, ...]:
    """Add up the subtotals that have the same key and architecture, in the order given."""
    groups: dict[Hashable, list[Subtotal]] = {}
    for key, part in subtotals:
        groups.setdefault((key, part.architecture), []).append(part)
    return tuple(
        replace(
            parts[0],
            clients=tuple(client for part in parts for client in part.clients),
            message=total([part.message for part in parts]),
        )
        for parts in groups.values()
    )


def joined(answers: Sequence[Answer], device: str = "cpu") -> Answer:
    """Return the answers of all shards, in their order, as one, with its messages on a device."""
    sizes: Counter[str] = Counter()
    for answer in answers:
        sizes.update(answer.upload_bytes)
    losses = {key: loss for answer in answers for key, loss in answer.losses.items()}

    def here(message: Tree) -> Tree:
        return map_leaves(lambda leaf: leaf.to(device), message)

    return Answer(
        tuple(replace(p, message=here(p.message)) for a in answers for p in a.subtotals),
        tuple(replace(r, message=here(r.message)) for a in answers for r in a.each),
        tuple(sorted(pair for answer in answers for pair in answer.refused)),
        tuple(sorted(pair for answer in answers for pair in answer.absent)),
        losses=dict(sorted(losses.items())),
        upload_bytes=sizes,
    )


def divided(
    state: Mapping[str, Tensor], clients: Sequence[ClientInfo], shards: int
) -> list[dict[str, Tensor]]:
    """Return each shard's part of the clients' state, (clients, ...) by architecture and name."""
    homes = {name: _homes(name, clients, shards) for name in state}
    return [{n: array[homes[n] == shard] for n, array in state.items()} for shard in range(shards)]


def merged(
    states: Sequence[Mapping[str, Tensor]], clients: Sequence[ClientInfo]
) -> dict[str, Tensor]:
    """Return the state of all clients from all shards' parts: the inverse of :func:`divided`."""
    whole = {}
    for name, first in states[0].items():
        homes = _homes(name, clients, len(states))
        whole[name] = first.new_empty(len(homes), *first.shape[1:])
        for shard, state in enumerate(states):
            whole[name][homes == shard] = state[name]
    return whole


def _homes(name: str, clients: Sequence[ClientInfo], shards: int) -> Tensor:
    """Return the shards of the clients that have an array of this name, (clients,)."""
    places = [
        i % shards
        for i, client in enumerate(clients)
        if any(name.startswith(f"{architecture}/") for architecture in client.architectures)
    ]
    return torch.tensor(places, dtype=torch.int64)
