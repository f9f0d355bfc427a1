"""Laws 14 and 15: averages have fixed points, and a server's state is all that a server knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedgist.core.message import reduction
from fedgist.core.method import Context, Net, Order, Reply
from fedgist.core.replies import Subtotal
from fedgist.core.tree import SEPARATOR, Tree, named, take
from fedgist.engines.engine import Answer
from fedgist.engines.local_engine import LocalEngine
from fedgist.testing.method_under_test import MethodUnderTest
from fedgist.testing.small_worlds import federation, state_of
from fedgist.testing.stages import Stage, stages
from fedgist.training import inference

FIXED = 1e-4  # tolerance, relative to the largest number of an array: an average rounds
ROUNDS = 2  # of runs side by side: what round 1 leaves is read in round 2


def averages_have_fixed_points(subject: MethodUnderTest) -> None:
    """Let clients return the weights that they received; the server must send the same again.

    Only stages whose uploads are multiples of the received weights, or zero differences, are
    concerned: the server may do something else with other messages.
    """
    for stage in stages(federation(subject.world()), rounds=(0, 1)):
        before = [_Untrained(stage, order, down) for order, down in _sent(stage)]
        if not all(client.returns_what_it_got() for client in before):
            continue
        server = stage.update(_answer(stage.ctx, before))
        for client in before:
            down = stage.fed.method.download(server, client.order, stage.ctx)
            after = _Untrained(stage, client.order, down).net.state()
            moved = [n for n, a in client.net.state().items() if not _is_near(a, after[n])]
            assert not moved, (
                f"all clients return the weights that they received, but the server's {moved[0]} "
                "is another afterwards: is the sum divided by the sum of its weights?"
            )


def _sent(stage: Stage) -> list[tuple[Order, Tree]]:
    return list(zip(stage.orders, stage.downs, strict=True))


class _Untrained:
    """A client that receives a download and uploads without training."""

    def __init__(self, stage: Stage, order: Order, down: Tree) -> None:
        engine = stage.fed.engine
        assert isinstance(engine, LocalEngine)  # for the type checker
        engine.restore(stage.own)
        cohort, clients = engine.trial(stage.ctx, [order], [down])
        self.order, self.down = order, down
        self.net: Net = take(clients.net, 0)
        self.upload: Tree = take(inference.upload(cohort, clients)[0], 0)

    def returns_what_it_got(self) -> bool:
        """Return whether the upload's arrays are one multiple of what was received."""
        received = {n.split(SEPARATOR)[-1]: a for n, a in self.net.state().items()}
        received |= named(self.down)
        pairs = [
            (sent, received[place])
            for name, sent in named(self.upload).items()
            for place in (name, name.split(SEPARATOR)[-1])
            if place in received and sent.shape == received[place].shape and sent.numel() > 1
        ]
        if not pairs:
            return False
        up, down = (
            torch.cat([a.double().flatten() for a in side]) for side in zip(*pairs, strict=True)
        )
        factor = up.dot(down) / down.dot(down).clamp(min=1e-12)
        return bool(down.any()) and _is_near(up, factor * down)


def _answer(ctx: Context, clients: Sequence[_Untrained]) -> Answer:
    """Return the answer of clients that were not trained."""
    at = ctx.round, ctx.stage
    if reduction(type(clients[0].upload)) == "each":
        return Answer((), tuple(Reply(c.order, *at, c.upload) for c in clients))
    parts = (Subtotal(c.order.architecture, (c.order.client,), *at, c.upload) for c in clients)
    return Answer(tuple(parts), ())


def _is_near(a: Tensor, b: Tensor) -> bool:
    size = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=FIXED * max(size, 1e-3))


def runs_do_not_meet(subject: MethodUnderTest) -> None:
    """Do two runs round by round in turn; the first must be as if it were alone.

    A value that a method keeps outside its states, in its module or in itself, is the other run's.
    """
    expected = subject.in_pairs.until(ROUNDS).state
    runs = [federation(subject.world()), federation(subject.world(seed=1))]
    for fed in runs:
        if fed.method.stages(fed.context("", 0)):
            fed.do_round(0)
    for _ in range(ROUNDS):
        for fed in runs:
            fed.advance()
    first = state_of(runs[0])
    for fed in runs:
        fed.engine.close()
    same = first.keys() == expected.keys() and all(
        torch.equal(first[name], expected[name]) for name in first
    )
    assert same, (
        "a run beside it changes a run's state: keep values in the server's or a client's state, "
        "not in the method or its module"
    )


SERVER_LAWS: Mapping[str, Callable[[MethodUnderTest], None]] = {
    "14 clients that return what they got leave the server as it was": averages_have_fixed_points,
    "15 runs side by side do not meet": runs_do_not_meet,
}
