"""Which clients take part in a round."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedgist.core import random
from fedgist.core.replies import ClientInfo, Order
from fedgist.core.training import Training


def drawn_clients(
    online: Sequence[ClientInfo], training: Training, num_clients: int, key: Tensor
) -> list[Order]:
    """Return an order for each client of a round, drawn from those that are online.

    With ``"fixed"`` sampling they are ``fraction_train`` of all clients, at least one. With
    ``"poisson"`` each is drawn by itself, by its own number, whoever else is online.
    """
    share = training.fraction_train
    if training.sampling == "poisson":
        drawn = (random.uniform(key, (num_clients,)) < share).tolist()
        chosen = [client for client in online if drawn[client.id]]
    else:
        size = max(1, round(share * num_clients))
        chosen = [online[i] for i in random.choice(key, len(online), size)]
    return [Order(client.id, client.architectures[0]) for client in chosen]
