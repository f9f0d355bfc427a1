"""The gate: what a valid upload looks like, and which of a cohort's uploads pass."""

from __future__ import annotations

from typing import Any

import torch

from fedgist.core.message import Shapes, reduction, refuse, shapes
from fedgist.core.method import Batch, Context, Method
from fedgist.core.tree import leaves, map_leaves, named, take


def template(method: Method, ctx: Context, architecture: str, down: Any) -> Shapes:
    """What a valid upload of this stage looks like.

    Found by making one from a start and a row of zeros.
    """
    net = ctx.task.starts[architecture]
    x = torch.zeros(1, *ctx.task.input_shape, device=ctx.key.device)
    batch = Batch(
        x,
        torch.zeros(1, dtype=torch.int64, device=x.device),
        torch.ones(1, dtype=torch.bool, device=x.device),
    )
    with torch.no_grad():
        net, own = method.receive(net, method.init_client(net, ctx), down, ctx)
        sums = method.summarize(net, batch, own, down, ctx)
        message, _ = method.upload(net, own, sums, down, ctx)
    return shapes(message)


def settle(message: Any, expected: Shapes, count: int) -> tuple[Any, dict[int, str]]:
    """Pass K stacked uploads through the gate; return what passed, and who was refused and why.

    Of messages that sum, the total is made first: if it is finite, so is every term, and nothing
    else need be looked at.
    """
    adds = reduction(type(message)) == "sum"
    seen = map_leaves(lambda leaf: leaf.sum(0), message) if adds else message
    sound = {name: (a.dtype, tuple(a.shape[1:])) for name, a in named(message).items()} == dict(
        expected
    )
    if sound and all(bool(torch.isfinite(a).all()) for a in leaves(seen)):
        return seen, {}
    reasons = {k: reason for k in range(count) if (reason := refuse(take(message, k), expected))}
    accepted = take(
        message, torch.tensor([k for k in range(count) if k not in reasons], dtype=torch.int64)
    )
    return map_leaves(lambda leaf: leaf.sum(0), accepted) if adds else accepted, reasons
