"""CUDA graphs that are pretended on a CPU: a tape of torch's operations, which is played again.

As with a real graph, a replay runs no Python of the step: the same operations read and write the
same tensors, and numbers that Python gave them are fixed. Reading a number from a tensor fails, and
so does a copy from one device to another.
Unlike a real capture, a pretended one does its work at once, so whatever the trainer fails to undo
shows in the results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedgist.core.cuda_graphs import Capturing, Replay

aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.is_nonzero)
#: Between devices, all of these copy; a real graph refuses copies from memory that is not pinned.
COPIES = (aten.copy_, aten._to_copy, aten.index, aten.index_put, aten.index_put_)
REFUSED = "operation not permitted when stream is capturing"


class _Tape(TorchDispatchMode):
    """The operations of some work, with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has none
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READS:
            raise RuntimeError(f"{REFUSED}\n{func}")
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in COPIES and len(_devices((args, made))) > 1:
            raise RuntimeError(f"{REFUSED}\n{func} between devices")
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def play(self) -> None:
        """Do the operations again, in the same memory."""
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                if is_view(func):
                    continue  # of memory that has the new numbers
                new = func(*args, **kwargs)
                if not writes(func):
                    copies = zip(*map(_pytree.tree_leaves, (made, new)), strict=True)
                    for old, value in copies:
                        if isinstance(old, Tensor):  # a gradient that nobody needs is None
                            old.copy_(value)


def _devices(value: Any) -> set[str]:
    return {leaf.device.type for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)}


def writes(func: Any) -> bool:
    """Return whether an operation writes to its arguments."""
    return any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)


def is_view(func: Any) -> bool:
    """Return whether an operation only returns views of its arguments."""
    return not writes(func) and any(r.alias_info for r in func._schema.returns)


@dataclass
class PretendedGraphs:
    """Counts of what was done. ``fails_at`` is the number of the capture that fails, from 1.

    A capture that fails has changed everything that a step changes.
    """

    fails_at: int = 0
    aside: int = 0
    captures: int = 0
    replays: int = 0
    alive: weakref.WeakSet[Replay] = field(default_factory=weakref.WeakSet)

    def capturing_on(self, device: torch.device) -> Capturing:
        """Stand in for ``cuda_graphs.capturing_on``."""
        return Capturing(self._aside, self._record)

    def _aside(self, work: Callable[[], object]) -> None:
        self.aside += 1
        work()

    def _record(self, work: Callable[[], object]) -> Replay:
        self.captures += 1
        with _Tape() as tape:
            work()
        if self.captures == self.fails_at:
            raise RuntimeError(f"{REFUSED}\nand more")

        def replay() -> None:
            self.replays += 1
            tape.play()

        self.alive.add(replay)
        return replay
