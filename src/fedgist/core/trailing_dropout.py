"""Dropout between features and head: it belongs to the head, so that features are never dropped.

A term of a loss on features, such as FedProto's distance to a prototype c, must not see dropout.
Of a feature z that is doubled or zeroed, each with probability one half, the mean squared distance
to c is ``(z - c)^2 + z^2``. Its minimum is c / 2, not c.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.layers import Dropout, Pass, current

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
COMMUTING = (nn.Identity, nn.Flatten, nn.ReLU)  # with a factor of 0 or 1 / (1 - p)


class Trailing(NamedTuple):
    """The dropout that was moved out of a body, and whether its features are still dropped out."""

    moved: Dropout | None
    drops_features: bool


class _Memory(NamedTuple):
    """Which numbers a tensor holds: where they lie, how many, and how often they were changed."""

    address: int
    size: int
    version: int


class _Call(NamedTuple):
    """One call of a layer in a pass."""

    layer: nn.Module
    given: _Memory
    made: _Memory
    output: Tensor  # kept: while it lives, no other tensor gets its address


def move_trailing(body: nn.Module, x: Tensor) -> Trailing:
    """Switch the dropout before the head off in ``body``, in place, and return it.

    It is found by a training pass on ``x``, rows of the body's input: the dropout layer from which
    only Identity, Flatten and ReLU lead to the features. Left in the body are dropout as a
    function, a layer that is called twice, and the dropout of channels of several places each;
    then features are dropped out in training. A body that fails on ``x`` is left as it is.
    """
    try:
        features, calls = _pass(body, x, seed=0)
        layer, output = _last_dropout(features, calls)
        if layer is None:
            return Trailing(None, _zeroes(features, _pass(body, x, seed=1)[0]))
    except FAILURES:  # of a user's module; its first use says how
        return Trailing(None, drops_features=False)
    called_twice = sum(call.layer is layer for call in calls) > 1
    if called_twice or (layer.channels and output[:1, :1].numel() > 1):
        return Trailing(None, drops_features=True)
    moved = Dropout(layer.p, channels=layer.channels)
    layer.p = 0.0
    # a second layer before it stays in the body
    dropped = _zeroes(_pass(body, x, seed=0)[0], _pass(body, x, seed=1)[0])
    return Trailing(moved, drops_features=dropped)


def _pass(body: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, list[_Call]]:
    """Run a training pass; return the features, and the calls of dropout and commuting layers."""
    calls: list[_Call] = []
    given: dict[nn.Module, _Memory] = {}

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given[layer] = _memory(inputs[0])  # a layer that works in place changes what it is given

    def after(layer: nn.Module, _: object, output: Tensor) -> None:
        calls.append(_Call(layer, given[layer], _memory(output), output))

    watched = [layer for layer in body.modules() if isinstance(layer, (Dropout, *COMMUTING))]
    hooks = [layer.register_forward_pre_hook(before) for layer in watched]
    hooks += [layer.register_forward_hook(after) for layer in watched]
    token = current.set(Pass(torch.ones(len(x), dtype=torch.bool), random.key(seed)))
    try:
        with torch.no_grad(), random.torch_draws(seed):
            return body.train()(x), calls
    finally:
        current.reset(token)
        body.eval()
        for hook in hooks:
            hook.remove()


def _last_dropout(features: Tensor, calls: list[_Call]) -> tuple[Dropout | None, Tensor]:
    """Return the dropout from which only commuting layers lead to the features, and its output."""
    wanted = _memory(features)
    for call in reversed(calls):
        if call.made != wanted:
            continue
        if isinstance(call.layer, Dropout) and call.layer.p > 0:
            return call.layer, call.output
        wanted = call.given
    return None, features


def _memory(tensor: Tensor) -> _Memory:
    # a view, as Flatten makes one, holds the same numbers
    return _Memory(tensor.untyped_storage().data_ptr(), tensor.numel(), tensor._version)


def _zeroes(one: Tensor, other: Tensor) -> bool:
    """Return whether two passes differ only where one has 0: dropout made these features."""
    return not torch.equal(one, other) and bool(((one == other) | (one == 0) | (other == 0)).all())
