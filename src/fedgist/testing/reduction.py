"""A check that a method with a term of weight 0 is the method without the term, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedgist.core.method import Method, Order
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.plans.plan import Plan
from fedgist.errors import MethodError
from fedgist.runs.round import ServerRun
from fedgist.testing.laws import LawError
from fedgist.testing.small_nets import NORMED
from fedgist.testing.small_worlds import ALONE, PAIRS, federation, law_world, nets

ROUNDS = 2
Arrays = Mapping[str, Tensor]


def check_reduces_to(
    method: Method, other: Method, *, model: Mapping[str, object] | None = None
) -> None:
    """Check that two methods train the same nets, bit for bit: one with a term of weight 0.

    ``check_reduces_to(Moon(mu=0.0), FedAvg())`` finds a second model that changes the batch norm
    statistics or the dropout of the client's net, and terms that are not multiplied by their
    weight. After two rounds, the nets with which clients begin the next are compared.

    >>> from fedgist.methods import METHODS
    >>> check_reduces_to(METHODS["fedprox"](mu=0.0), METHODS["fedavg"]())

    Parameters
    ----------
    method
        The method with a weight of 0.
    other
        The method without the term.
    model
        The clients' model, as a recipe's ``[model]``. By default clients have one of two small nets
        with batch norm and dropout.

    Raises
    ------
    LawError
        If the nets differ; the message names an array, and by how much it differs.
    """
    for value in (method, other):
        if not isinstance(value, Method):
            raise MethodError(f"check_reduces_to takes method objects, not {value!r}")
    for plan in (ALONE, PAIRS):
        expected, seen = (_trained(each, model, plan) for each in (other, method))
        for name, array in expected.items():
            if not torch.equal(array, seen[name]):
                gap = float((array.double() - seen[name].double()).abs().max())
                raise LawError(
                    f"{type(method).__name__} does not reduce to {type(other).__name__}: {name} "
                    f"differs by {gap:.3g}; its largest number is {float(array.abs().max()):.3g}"
                )


def _trained(method: Method, model: Mapping[str, object] | None, plan: Plan) -> dict[str, Tensor]:
    """Return the arrays with which clients begin the round after the last, by client and name."""
    about = nets(method, NORMED)
    if model is not None:
        about = {"architectures": {}, "model": model}
    fed = federation(law_world(method, **about), plan)
    if method.stages(fed.context("", 0)):
        fed.do_round(0)
    for _ in range(ROUNDS):
        fed.advance()
    nets_of_clients = _begun(fed, ROUNDS + 1)
    fed.engine.close()
    return nets_of_clients


def _begun(fed: ServerRun, number: int) -> dict[str, Tensor]:
    engine, method = fed.engine, fed.method
    assert isinstance(engine, LocalEngine)  # for the type checker
    ctx = fed.context(method.stages(fed.context("", number))[0], number)
    out: dict[str, Tensor] = {}
    for client in fed.side.online(number):
        order = Order(client.id, client.architectures[0])
        net = engine.client(ctx, order, method.download(fed.server, order, ctx)).net
        out |= {f"{name} of client {client.id}": array for name, array in net.state().items()}
    return out
