"""Programs of torch's operations: what a calculation does is recorded once, and then done again.

A step of small models takes most of its time in Python: in vmap, in autograd and in the method's
own code. What comes out of them are the same operations on tensors of the same shapes in each step.
Done directly, they give the same bits.
"""

from __future__ import annotations

import operator
import random as python_random
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

#: Tensors in, tensors out.
Program: TypeAlias = Callable[..., Sequence[Tensor]]

# what only names the same numbers anew; of an unchanged shape and stride it is left out
_VIEWS = frozenset({"detach", "alias", "expand", "view", "_unsafe_view"})


class UnrecordableError(RuntimeError):
    """A calculation does more than torch's operations on the tensors that it is given."""


class Unread:
    """A value that must not be read while a calculation is recorded, for it may differ later."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UnrecordableError("the calculation depends on the round")

    __bool__ = __index__ = __int__ = __float__ = __len__ = __iter__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __repr__ = __str__ = __format__ = __reduce__ = _refuse


def record(function: Program, inputs: Sequence[Tensor]) -> tuple[Program, Sequence[Tensor]]:
    """Do a calculation; return it as a program, which takes such inputs, and its results.

    Raises
    ------
    UnrecordableError
        If it reads a number out of a tensor, or draws random numbers but by fedgist's keys.
    """
    draws = _draws()
    aliases = [tensor.detach() for tensor in inputs]  # none is there twice
    with _Recorder(aliases) as recorder:
        results = function(*aliases)
    if _draws() != draws:
        raise UnrecordableError("the calculation draws random numbers")
    return recorder.program(results), results


class _Recorder(TorchDispatchMode):
    """Notes each operation below vmap and autograd, with the values that it takes from others."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self.graph, self.held = fx.Graph(), list(inputs)  # what is held keeps its identity
        self.nodes = {id(t): self.graph.placeholder(f"x{i}") for i, t in enumerate(inputs)}
        self.constants: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports its compiler, which takes each process a second."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[fx.node.Argument, ...] = (),
        kwargs: dict[str, fx.node.Argument] | None = None,
    ) -> object:
        """Do an operation and note it."""
        kwargs = kwargs or {}
        result: object = func(*args, **kwargs)
        if isinstance(result, Tensor) and _is_same_view(func, result, args):
            self.held.append(result)
            self.nodes[id(result)] = cast("fx.Node", self._node(args[0]))
            return result
        node = self.graph.call_function(
            func, map_aggregate(args, self._node), map_aggregate(kwargs, self._node)
        )
        if isinstance(result, Tensor):
            self._note(result, node)
        elif isinstance(result, (tuple, list)):
            for place, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._note(part, self.graph.call_function(operator.getitem, (node, place)))
                elif part is not None:
                    raise UnrecordableError(f"{func} returns {type(part).__name__}")
        else:  # a number, by which the calculation may decide what it does
            raise UnrecordableError(f"{func} returns {type(result).__name__}")
        return result

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        self.held.append(tensor)
        self.nodes[id(tensor)] = node

    def _node(self, value: fx.node.Argument) -> fx.node.Argument:
        """Return the node of a tensor, or any other value as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:  # the calculation has it from elsewhere
            self.constants.append(value)
            self._note(value, self.graph.placeholder(f"c{len(self.constants)}"))
        return self.nodes[id(value)]

    def program(self, results: Sequence[Tensor]) -> Program:
        """Return what was noted as a function."""
        self.graph.output(tuple(self._node(result) for result in results))
        self.graph.eliminate_dead_code()
        forward: Callable[..., Sequence[Tensor]] = fx.GraphModule(
            torch.nn.Module(), self.graph
        ).forward
        constants = tuple(self.constants)

        def program(*inputs: Tensor) -> Sequence[Tensor]:
            with torch.no_grad():
                return forward(*inputs, *constants)

        return program


def _is_same_view(func: OpOverload, result: Tensor, args: tuple[object, ...]) -> bool:
    if func.overloadpacket.__name__ not in _VIEWS or not isinstance(of := args[0], Tensor):
        return False
    return result.shape == of.shape and result.stride() == of.stride()


def _draws() -> tuple[object, ...]:
    """Return the states of the generators that a calculation could draw from."""
    of_numpy = operator.methodcaller("get_state")(np.random)  # the old one, for all of a process
    return python_random.getstate(), repr(of_numpy), torch.get_rng_state().tolist()
