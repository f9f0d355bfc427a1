"""What a valid message looks like, worked out beforehand; and which uploads are valid.

A form is made by letting the method make the message once. On fake tensors (torch's device
``meta``), which have a type and a shape and no numbers, that costs nothing, however large the work
of a client is; a method that looks at numbers fails on them, and gets one made-up row instead.
Where clients are simulated, the first message of a stage is the form of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.batch import Batch, Labels, made_up
from fedgist.core.message import Form, can_be_summed, misfit, reduction, refuse, unaddable
from fedgist.core.method import Context, Method, Order, Task
from fedgist.core.privacy import count_range
from fedgist.core.tree import Tree, leaves, map_leaves, named, take
from fedgist.errors import MethodError

FAKE = "meta"


def upload_form(method: Method, ctx: Context, architecture: str, down: Tree) -> Form:
    """Return what a valid upload of this stage looks like, after the download ``down``."""

    def upload(ctx: Context, net: Any, down: Tree) -> Form:
        task, text = ctx.task, ctx.task.objective.text
        x, y = made_up(ctx.key, 1, task.input_shape, task.num_classes, text=text)
        beside = {name: torch.ones(1, device=x.device) for name in ctx.task.annotations}
        there = torch.ones(1, dtype=torch.bool, device=x.device)
        batch = Batch(x, y, there, annotations=beside)
        net, own = method.receive(net, method.init_client(net, ctx), down, ctx)
        rows = Labels(batch.y, batch.mask, batch.annotations)
        batch = replace(batch, picks=method.pick(rows, own, ctx))
        sums = method.summarize(net, batch, own, down, ctx)
        message, _ = method.upload(net, own, sums, down, ctx)
        return Form.of(message)

    form: Form = _on_fakes(upload, ctx, ctx.task.starts[architecture], down)
    return addable(form, ctx.task)


def download_form(method: Method, ctx: Context, order: Order) -> Form:
    """Return what a valid download of this stage looks like, from a fresh server."""

    def download(ctx: Context) -> Form:
        return Form.of(method.download(method.init_server(ctx), order, ctx))

    form: Form = _on_fakes(download, ctx)
    return form


def asks_clients(method: Method, ctx: Context, order: Order) -> bool:
    """Return whether this stage asks clients; if not, it is the server's own work."""

    def orders(ctx: Context) -> object:
        return method.orders(method.init_server(ctx), [order], ctx)

    return _on_fakes(orders, ctx) is not None


def _on_fakes(make: Callable[..., Any], *values: Any) -> Any:
    """Return what a function makes of fakes, or of the values if it fails on fakes."""
    with torch.no_grad():
        try:
            with torch.device(FAKE):
                return make(*(map_leaves(_fake, value) for value in values))
        except Exception:  # noqa: BLE001  # a method may fail on tensors without numbers in any way
            return make(*values)


def _fake(leaf: Tensor) -> Tensor:
    return leaf.to(FAKE)


def addable(form: Form, task: Task) -> Form:
    """Return the form of an upload, of which as many may be added up as there are clients.

    Its counts are those that rows can have, and the noise of clients where they add it themselves.
    """
    if reason := unaddable(form):
        raise MethodError(reason)
    counts = count_range(task.privacy, task.max_rows)
    return replace(form, terms=task.num_clients, counts=counts, max_norm=task.max_norm)


def form_of_stack(message: Tree) -> Form:
    """Return the form of the messages of which this is a stack."""
    arrays = {name: (a.dtype, tuple(a.shape[1:])) for name, a in named(message).items()}
    return Form(type(message), arrays)


def settle(message: Tree, form: Form, count: int) -> tuple[Any, dict[int, str]]:
    """Pass K stacked uploads through the gate; return what passed, and who was refused and why.

    Messages that sum are added up first: if the total is finite and small enough to be added to
    others, its terms need not be checked one by one, but for a bound of their norms.
    """
    adds = reduction(type(message)) == "sum"
    seen = map_leaves(lambda leaf: leaf.sum(0), message) if adds else message
    if (
        math.isinf(form.max_norm)
        and form_of_stack(message) == form
        and all(can_be_summed(a, form.terms) for a in leaves(seen))
        and misfit(named(message), form) is None
    ):
        return seen, {}
    reasons = {k: why for k in range(count) if (why := refuse(take(message, k), form))}
    passed = torch.tensor([k for k in range(count) if k not in reasons], dtype=torch.int64)
    accepted = take(message, passed)
    return map_leaves(lambda leaf: leaf.sum(0), accepted) if adds else accepted, reasons
