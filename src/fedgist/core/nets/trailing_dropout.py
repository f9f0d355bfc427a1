"""Dropout between features and head, which moves to the head so that features are complete.

A term of a loss on features, such as FedProto's distance to a prototype c, must not see dropout.
If a feature z is doubled or zeroed, each with probability one half, its mean squared distance to c
is ``(z - c)^2 + z^2``. The minimum is at c / 2, not at c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedgist.core import random
from fedgist.core.nets.layers import Dropout, Pass, current
from fedgist.core.nets.user_module import FAILURES, tensor_of

COMMUTING = (nn.Identity, nn.Flatten, nn.ReLU)  # with a factor of 0 or 1 / (1 - p)


class Trailing(NamedTuple):
    """The dropout moved out of a body, and whether the body still drops features."""

    moved: Dropout | None
    drops_features: bool


class _Memory(NamedTuple):
    """The identity of a tensor's data: its address, its size and its version."""

    address: int
    size: int
    version: int


class _Call(NamedTuple):
    """One call of a layer in a pass."""

    layer: nn.Module
    given: _Memory
    made: _Memory
    output: Tensor  # kept: while it lives, no other tensor gets its address


class _LastUse(TorchFunctionMode):
    """A recorder of whether dropout was called after the last use of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dropout = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name, given = getattr(func, "__name__", ""), [*args, *(kwargs or {}).values()]
        if "dropout" in name:
            self.is_dropout |= _drops(args, kwargs or {})
        elif name != "__get__" and any(_is_learned(value) for value in given):
            self.is_dropout = False
        return func(*args, **(kwargs or {}))


def _drops(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a call f(x, p=0.5, training=True) of torch's drops any number."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    p = given.get("p", 0.5)
    return bool(given.get("training", True)) and p != 0.0


def _is_learned(value: object) -> bool:
    # torch's LSTM gives its weights as a list
    if isinstance(value, (list, tuple)):
        return any(_is_learned(part) for part in value)
    return isinstance(value, nn.Parameter)


def move_trailing(body: nn.Module, x: Tensor) -> Trailing:
    """Disable the dropout before the head in ``body``, in place, and return it.

    ``x`` ``(rows, *input)`` is an input of the body. A training pass on ``x`` finds the dropout
    layer after which only Identity, Flatten and ReLU lead to the features. Dropout stays in the
    body if it is a function, a layer that is called twice, or a channel dropout with several
    positions per channel. If dropout that stays comes after the last of the body's parameters,
    features are dropped in training. A body that fails on ``x`` is unchanged.
    """
    try:
        features, calls, drops = _pass(body, x)
    except FAILURES:  # of a user's module; its first use says how
        return Trailing(None, drops_features=False)
    layer, output = _last_dropout(features, calls)
    if layer is None:
        return Trailing(None, drops)
    called_twice = sum(call.layer is layer for call in calls) > 1
    if called_twice or (layer.channels and output[:1, :1].numel() > 1):
        return Trailing(None, drops_features=True)
    moved = Dropout(layer.p, channels=layer.channels)
    layer.p = 0.0
    # a second layer before it stays in the body
    return Trailing(moved, drops_features=_pass(body, x)[2])


def _pass(body: nn.Module, x: Tensor) -> tuple[Tensor, list[_Call], bool]:
    """Run a training pass on ``x``.

    Return the features, the calls of dropout and commuting layers, and whether dropout comes after
    the last parameter.
    """
    calls: list[_Call] = []
    last = _LastUse()
    given: dict[nn.Module, _Memory] = {}

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given[layer] = _memory(inputs[0])  # a layer that works in place changes its input

    def after(layer: nn.Module, _: object, output: Tensor) -> None:
        calls.append(_Call(layer, given[layer], _memory(output), output))
        last.is_dropout |= isinstance(layer, Dropout) and layer.p > 0

    watched = [layer for layer in body.modules() if isinstance(layer, (Dropout, *COMMUTING))]
    hooks = [layer.register_forward_pre_hook(before) for layer in watched]
    hooks += [layer.register_forward_hook(after) for layer in watched]
    token = current.set(Pass(torch.ones(len(x), dtype=torch.bool), random.key(0)))
    try:
        with torch.no_grad(), random.torch_draws(0), last:
            features = tensor_of(body.train()(x))
        return features, calls, last.is_dropout
    finally:
        current.reset(token)
        body.eval()
        for hook in hooks:
            hook.remove()


def _last_dropout(features: Tensor, calls: list[_Call]) -> tuple[Dropout | None, Tensor]:
    """Return the dropout followed only by commuting layers, and its output."""
    wanted = _memory(features)
    for call in reversed(calls):
        if call.made != wanted:
            continue
        if isinstance(call.layer, Dropout) and call.layer.p > 0:
            return call.layer, call.output
        wanted = call.given
    return None, features


def _memory(tensor: Tensor) -> _Memory:
    # a view, such as the result of Flatten, has the same data
    return _Memory(tensor.untyped_storage().data_ptr(), tensor.numel(), tensor._version)
