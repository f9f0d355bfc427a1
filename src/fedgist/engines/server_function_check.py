"""Check of a method's server functions during the first rounds: draws, changes and results.

A function that draws from a global generator makes two runs of one seed differ. A function that
changes its input in place corrupts other values. Every client refuses a server state of another
shape. None of these faults raises an error by itself, so the first rounds of a run are checked.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from fedgist.core.message import Shapes, is_finite, shapes
from fedgist.core.method import Method, Replies
from fedgist.core.tree import Tree, leaves, named
from fedgist.engines.method_check import broken, kind_of

LAST_WATCHED = 1  # rounds 0 and 1 call every function


@contextlib.contextmanager
def watched(method: Method, function: str, number: int, *given: Tree) -> Iterator[None]:
    """Watch a function of the server in round ``number``, if that is one of the first.

    ``given`` are the trees that it gets. Within a method, torch's version counters tell which
    tensor was changed in place; they cost nothing, whatever its size. A change of a tensor's
    ``.data`` escapes them; ``check_laws`` compares the numbers.
    """
    if number > LAST_WATCHED:
        yield
        return
    tensors = [leaf for tree in given for leaf in leaves(tree)]
    versions, drawn = [t._version for t in tensors], _generators()
    yield
    for name, state in _generators().items():
        if state != drawn[name]:
            problem = f"draws from {name}, so that two runs of one seed would differ: "
            broken(method, function, problem + "draw from ctx.draw with fedgist.core.random")
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            problem = f"changed {kind_of(tensor)} that it was given, in place: "
            broken(method, function, problem + "return a new tensor")


def sums_of(replies: Replies) -> list[Tree]:
    """Return all messages of replies; for messages that are summed, the totals."""
    totals: list[Tree] = [total.message for total in replies.totals]
    return totals + [reply.message for reply in replies.each]


def check_shapes(method: Method, function: str, before: Tree, after: Tree) -> None:
    """Raise MethodError unless a server's state has the same arrays as before."""
    old, new = shapes(before), shapes(after)
    if type(after) is not type(before):
        broken(method, function, f"returned {kind_of(after)}; the state was {kind_of(before)}")
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            problem = f"returned a state with {_said(name, new)}; it had {_said(name, old)}"
            broken(method, function, problem)


def lost_numbers(before: Tree, after: Tree) -> str | None:
    """Return the name of an array of a server's state that is no longer finite, or None."""
    old = named(before)
    for name, array in named(after).items():
        if not is_finite(array) and is_finite(old[name]):
            return name
    return None


def _said(name: str, of: Shapes) -> str:
    if name not in of:
        return f"no array {name!r}"
    dtype, shape = of[name]
    return f"{name!r} as {list(shape)} of {str(dtype).removeprefix('torch.')}"


def _generators() -> dict[str, object]:
    """Return the states of the global generators, as comparable values."""
    kind, keys, place, *gauss = np.random.get_state()
    gpus = torch.cuda.default_generators  # none before CUDA is used
    return {
        "torch's generator on a GPU": [bytes(g.get_state().numpy()) for g in gpus],
        "torch's generator": bytes(torch.get_rng_state().numpy()),
        "NumPy's global generator": (kind, bytes(np.asarray(keys)), place, *gauss),
        "Python's random module": random.getstate(),
    }
