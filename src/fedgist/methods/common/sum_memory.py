"""Memory of class sums of features at a server, so that absent clients keep their weight.

FedLog's head is the solution for S, the sum over all clients (eq. 2). If only some clients answer
in a round, S holds only their sums, and a class that none of them has gets no head. So the server
remembers earlier sums, in one of these ways (the hyper-parameter ``memory``):

==============  ==================================================================================
a number rho    T <- S + rho T: the sums so far, discounted, are the prior of eq. 14, counts
                included (chi = rho T, nu = nu_0 + rho n). Only sums are kept, and a repeated, lost
                or late upload needs no rule. rho = 0 is the paper: T = S.
``"auto"``      rho = 1 - the fraction of the clients that may train which answered: 0 if all did.
``"class"``     a class that no client sent keeps its sums; the others are replaced.
``"newest"``    the sum over the newest upload of each client. The server sees single uploads.
==============  ==================================================================================
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedgist.core.bounds import Share
from fedgist.core.counts import COUNTS_FIRST
from fedgist.core.message import message
from fedgist.core.privacy import total_floor
from fedgist.core.replies import Replies
from fedgist.core.task import Context, Task
from fedgist.core.tree import tree
from fedgist.errors import MethodError
from fedgist.methods.common.conjugate_head import ClassSums
from fedgist.methods.common.latest_messages import LatestMessages, check_pools

Memory: TypeAlias = Share | Literal["auto", "class", "newest"]
FADED = 0.01  # the weight at which a sum counts as forgotten


@message(reduce="each")
class ClientSums:
    """One client's S, (classes, m + 1), for a server that stores each client's newest sums."""

    total: Tensor = field(metadata=COUNTS_FIRST)


@tree
class Remembered:
    """Server state: T, (classes, m + 1), and each client's newest sums, if they are stored."""

    total: Tensor
    newest: LatestMessages | None = None


def check(memory: Memory, task: Task, method: str) -> None:
    """Raise MethodError if single uploads may not be stored, or classes are not kept apart."""
    if memory == "class" and task.objective.target == "labels" and not task.missing_labels:
        raise MethodError(
            f"method {method}: method.memory = 'class' keeps earlier sums of a label that nobody "
            "sent, but not those of the rows without it: use 'auto'"
        )
    if memory == "newest":
        check_pools(task, f"{method} with method.memory = 'newest'")
        check_single(task, f"method {method}: method.memory = 'newest'")


def check_single(task: Task, setting: str) -> None:
    """Raise MethodError if a setting shows the server single uploads, where it may see none."""
    key = f"{setting} shows the server each client's sums"
    if task.min_replies > 1:
        raise MethodError(
            f"{key}, privacy.min_replies = {task.min_replies} only totals: use another"
        )
    if task.privacy is not None and task.privacy.where == "central":
        raise MethodError(
            f"{key}, which central noise does not protect: use another, or privacy.where = 'local'"
        )


def start(memory: Memory, total: Tensor, ctx: Context) -> Remembered:
    """Return a memory without uploads; ``total`` (classes, m + 1) is its first T, of no rows."""
    if memory != "newest":
        return Remembered(total)
    example = ClientSums(torch.zeros_like(total))
    return Remembered(total, LatestMessages.of_nobody(example, ctx.task.num_clients))


def sent(memory: Memory, sums: ClassSums) -> ClassSums | ClientSums:
    """Return a client's upload: its own sums, or a part of the total."""
    return ClientSums(sums.total) if memory == "newest" else sums


def remember(memory: Memory, before: Remembered, replies: Replies, ctx: Context) -> Remembered:
    """Return the memory after the replies of a round."""
    if before.newest is not None:
        newest = before.newest.with_replies(replies)
        return Remembered(newest.arrays["total"].sum(0), newest)
    s = replies.total().total
    kept = torch.where(
        before.total[:, :1] != 0, before.total, 0.0
    )  # sums of no rows are only a start
    if memory == "class":
        floor = total_floor(ctx.task.privacy, len(replies))
        return Remembered(torch.where(s[:, :1] > floor, s, kept))
    return Remembered(s + _decay(memory, replies, ctx.task) * kept)


def forget(memory: Memory, before: Remembered, client: int) -> Remembered:
    """Return the memory without a client's sums."""
    if before.newest is None:
        raise MethodError(
            f"the server keeps a total, from which the sums of client {client} cannot be taken: "
            f"with method.memory = {memory!r} they {_fading(memory)}"
        )
    newest = before.newest.without(client)
    return Remembered(newest.arrays["total"].sum(0), newest)


def _fading(memory: Memory) -> str:
    """Return a description of how the weight of an absent client falls in a total."""
    if memory == "class":
        return "stay until a client sends rows of the same classes"
    if memory == "auto":
        return "fade with each round, by the share of the clients that answer in it"
    rho = float(memory)
    if rho in {0.0, 1.0}:
        return "never fade" if rho else "are gone after one more round"
    rounds = math.ceil(math.log(FADED) / math.log(rho) - 1e-9)
    return f"weigh {100 * FADED:g} % after {rounds} more rounds"


def _decay(memory: Memory, replies: Replies, task: Task) -> float:
    """Return rho, the discount of the old sums."""
    if memory != "auto":
        return float(memory)
    privacy = task.privacy
    if task.training.sampling == "poisson" and privacy is not None and privacy.where == "central":
        return 1.0 - task.training.fraction_train  # the number of sampled clients is secret
    return 1.0 - len(replies.clients) / task.num_trainers  # a client in two pools counts once
