"""Storage of each client's newest message, for servers that relay messages of single clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.core.replies import Replies, Reply
from fedgist.core.task import Task
from fedgist.core.tree import Tree, build, map_leaves, named, tree
from fedgist.errors import MethodError

NEVER = -1


def check_pools(task: Task, method: str) -> None:
    """Raise MethodError if a client of several pools would send several messages in a round."""
    if task.pools_overlap:
        raise MethodError(
            f"method {method} keeps one message of each client: no client may be in several of "
            "clients.pools"
        )


@tree
class LatestMessages:
    """The newest message of each client, stacked: arrays ``(clients, ...)`` by name.

    ``round`` (clients,) is the round of each message. It is ``NEVER``, and the arrays are zeros,
    for a client that has sent no message or has been forgotten.
    """

    arrays: dict[str, Tensor]
    round: Tensor

    @staticmethod
    def of_nobody(example: Tree, clients: int) -> LatestMessages:
        """Return an empty storage for messages like ``example`` of this number of clients."""
        arrays = {
            name: array.new_zeros(clients, *array.shape) for name, array in named(example).items()
        }
        device = next(iter(arrays.values())).device
        return LatestMessages(arrays, torch.full((clients,), NEVER, device=device))

    def messages(self, kind: type) -> Tree:
        """Return the messages as one stack of this type, ``(clients, ...)``."""
        return build(kind, self.arrays)

    def with_replies(self, replies: Replies) -> LatestMessages:
        """Return the storage with these replies in place of older ones.

        A reply for an earlier round than the stored message is dropped.
        """
        kept = self.round.tolist()
        newest: dict[int, Reply] = {}
        for reply in replies:
            client = reply.order.client
            if reply.round >= kept[client]:  # replies of one client are in the order of rounds
                newest[client] = reply
        if not newest:
            return self
        at = torch.tensor(list(newest), device=self.round.device)
        rounds = torch.tensor([reply.round for reply in newest.values()], device=at.device)
        sent = map_leaves(lambda *leaf: torch.stack(leaf), *(r.message for r in newest.values()))
        arrays = {name: self.arrays[name].index_copy(0, at, a) for name, a in named(sent).items()}
        return LatestMessages(arrays, self.round.index_copy(0, at, rounds))

    def without(self, client: int) -> LatestMessages:
        """Return the storage without a client's message."""
        at = torch.tensor([client], device=self.round.device)
        arrays = {name: array.index_fill(0, at, 0) for name, array in self.arrays.items()}
        return LatestMessages(arrays, self.round.index_fill(0, at, NEVER))
