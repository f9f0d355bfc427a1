"""Forms of valid messages, derived before a message arrives, and validation of uploads.

A form is derived from one message that the method makes. On fake tensors (torch's device ``meta``),
which have a type and a shape but no numbers, this takes no time, however large a client's work is.
A method that reads numbers fails on fake tensors, and gets one made-up row instead. For simulated
clients, the first message of a stage is the form of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.batch import Labels
from fedgist.core.message import (
    Form,
    can_be_summed,
    reduction,
    why_not_as_declared,
    why_not_summable,
    why_refused,
)
from fedgist.core.method import Context, Method, Order, Task
from fedgist.core.peer_method import PeerMethod
from fedgist.core.privacy import count_range
from fedgist.core.task import fake_batch
from fedgist.core.tree import Tree, leaves, map_leaves, named, take
from fedgist.errors import MethodError

FAKE = "meta"


def upload_form(method: Method, ctx: Context, architecture: str, down: Tree) -> Form:
    """Return the form of a valid upload of this stage, after the download ``down``."""
    ctx = replace(ctx, architecture=architecture)

    def upload(ctx: Context, net: Any, down: Tree) -> Form:
        batch = fake_batch(ctx.task, ctx.key, 1)
        net, own = method.receive(net, method.init_client(net, ctx), down, ctx)
        if isinstance(method, PeerMethod):
            rows = Labels(batch.y, batch.mask, batch.annotations)
            batch = replace(batch, picks=method.pick(rows, own, ctx))
        sums = method.summarize(net, batch, own, down, ctx)
        message, _ = method.upload(net, own, sums, down, ctx)
        return Form.of(message)

    form: Form = _on_fakes(upload, ctx, ctx.task.starts[architecture], down)
    return addable(form, ctx.task)


def download_form(method: Method, ctx: Context, order: Order) -> Form:
    """Return the form of a valid download of this stage, from a fresh server."""

    def download(ctx: Context) -> Form:
        return Form.of(method.download(method.init_server(ctx), order, ctx))

    form: Form = _on_fakes(download, ctx)
    return form


def asks_clients(method: Method, ctx: Context, order: Order) -> bool:
    """Return whether this stage involves clients; if not, it is the server's own work."""

    def orders(ctx: Context) -> object:
        return method.orders(method.init_server(ctx), [order], ctx)

    return _on_fakes(orders, ctx) is not None


def _on_fakes(make: Callable[..., Any], *values: Any) -> Any:
    """Return a function's result for fake tensors, or for the values if it fails on fakes."""
    with torch.no_grad():
        try:
            with torch.device(FAKE):
                return make(*(map_leaves(_fake, value) for value in values))
        except Exception:  # noqa: BLE001  # a method may fail on tensors without numbers in any way
            return make(*values)


def _fake(leaf: Tensor) -> Tensor:
    return leaf.to(FAKE)


def addable(form: Form, task: Task) -> Form:
    """Return the form of an upload that can be summed over all clients.

    Its counts are limited to possible numbers of rows, plus the clients' own noise.
    """
    if reason := why_not_summable(form):
        raise MethodError(reason)
    counts = count_range(task.privacy, task.max_rows)
    return replace(form, terms=task.num_clients, counts=counts, max_norm=task.max_norm)


def form_of_stack(message: Tree) -> Form:
    """Return the form of a single message of this stack (K, ...)."""
    arrays = {name: (a.dtype, tuple(a.shape[1:])) for name, a in named(message).items()}
    return Form(type(message), arrays)


def screen_uploads(message: Tree, form: Form, count: int) -> tuple[Any, dict[int, str]]:
    """Validate K stacked uploads; return the accepted ones, and refused clients with reasons.

    Messages that are summed are added up first. If the total is finite and can be added to other
    totals, its terms are not checked one by one, unless their norms are bounded.
    """
    adds = reduction(type(message)) == "sum"
    seen = map_leaves(lambda leaf: leaf.sum(0), message) if adds else message
    if (
        math.isinf(form.max_norm)
        and form_of_stack(message) == form
        and all(can_be_summed(a, form.terms) for a in leaves(seen))
        and why_not_as_declared(named(message), form) is None
    ):
        return seen, {}
    reasons = {k: why for k in range(count) if (why := why_refused(take(message, k), form))}
    passed = torch.tensor([k for k in range(count) if k not in reasons], dtype=torch.int64)
    accepted = take(message, passed)
    return map_leaves(lambda leaf: leaf.sum(0), accepted) if adds else accepted, reasons
