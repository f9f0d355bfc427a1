"""Random sampling: the clients of a round, and the rows of each class that a client chooses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgist.core import random, system_noise
from fedgist.core.batch import Labels
from fedgist.core.privacy import Source
from fedgist.core.replies import ClientInfo, Order
from fedgist.core.task import Task


def round_size(task: Task) -> int:
    """Return how many clients fixed sampling draws in a round, if so many are online."""
    taking_part = task.num_clients - len(task.newcomers)
    return max(1, round(task.training.fraction_train * taking_part))


def missing(task: Task, online: int, asked: int) -> int:
    """Return how many more clients would have been ``asked`` if all had been ``online``."""
    away, left = task.num_trainers - online, round_size(task) - asked
    if asked < online:
        return 0  # those who are away were replaced
    # pools have sizes of their own, and a method may ask more than are drawn
    return away if task.pools or left < 0 else min(away, left)


def drawn_clients(
    online: Sequence[ClientInfo], task: Task, key: Tensor, source: Source = "seed"
) -> list[Order]:
    """Return an order for each sampled client of a round, among the clients online.

    With ``"fixed"`` sampling, ``fraction_train`` of all clients take part, at least one, newcomers
    not counted. With ``"poisson"``, each client is sampled independently, whichever other clients
    are online. Each pool is sampled independently, so a client in several pools may train several
    models in a round. Privacy depends on the poisson draws; ``source`` says whether they come from
    the seed or from the system.
    """
    training, num_clients = task.training, task.num_clients

    def drawn(
        clients: Sequence[ClientInfo], size: int, share: float, pool_key: Tensor
    ) -> list[int]:
        if training.sampling == "poisson":
            places = (num_clients,)
            secret = source == "system"
            draws = system_noise.uniform(places) if secret else random.uniform(pool_key, places)
            heads = (draws < share).tolist()
            return [client.id for client in clients if heads[client.id]]
        return [clients[i].id for i in random.choice(pool_key, len(clients), size)]

    if not task.pools:
        first = {client.id: client.architectures[0] for client in online}
        chosen = drawn(online, round_size(task), training.fraction_train, key)
        return [Order(client, first[client]) for client in chosen]
    return [
        Order(client, name)
        for name, pool in task.pools.items()
        for client in drawn(
            online if pool.size == num_clients else [c for c in online if name in c.architectures],
            pool.per_round,
            pool.per_round / pool.size,
            random.fold(key, name),
        )
    ]


def drawn_of_each_class(key: Tensor, rows: Labels, num_classes: int, size: int) -> Tensor:
    """Return a mask (rows,) of ``size`` random rows of each class, or all rows of smaller classes.

    ``rows`` holds (rows,) labels and a mask of present rows.
    """
    (order,) = random.order(key.unsqueeze(0), rows.mask.unsqueeze(0))
    members = one_hot(rows.y, num_classes) * rows.mask.unsqueeze(1)
    rank = (members[order].cumsum(0) * members[order]).sum(1)  # 1, 2, ... within the class
    chosen = ((rank >= 1) & (rank <= size)).to(torch.float32)
    return torch.zeros_like(chosen).scatter(0, order, chosen)
