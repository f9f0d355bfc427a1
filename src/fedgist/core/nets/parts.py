"""Names of the parts of a net, for the parts that a method keeps, sends or trains.

==================  =============================================================
``all``             every parameter and buffer
``none``            nothing
``head``            the linear layer that makes the logits
``body``            everything but the head
``last:k``          the last k layers including the head: ``last:1`` is the head
``but_last:k``      everything but the last k layers
``batch_norm``      weights, biases and running statistics of all batch norms
``but_batch_norm``  everything but these
==================  =============================================================

A layer is a module with its own weight matrix or kernel. A module without one (a normalization)
belongs to the layer before it. Layers are in the order of registration in the module; the head is
last.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from fedgist.core.nets.layers import BatchNorm
from fedgist.errors import MethodError, did_you_mean

Part: TypeAlias = str
LAST, BUT_LAST = "last", "but_last"
NORMS, BUT_NORMS = "batch_norm", "but_batch_norm"
KNOWN = ("all", "body", "head", "none", f"{LAST}:k", f"{BUT_LAST}:k", NORMS, BUT_NORMS)
MATRIX = 2  # dimensions of the smallest weight that makes a layer


def is_part(name: str) -> bool:
    """Return whether ``name`` names a part of a net."""
    kind, colon, count = name.partition(":")
    if not colon:
        return name in KNOWN
    return kind in {LAST, BUT_LAST} and count.isascii() and count.isdecimal() and int(count) > 0


def check_part(name: str, key: str) -> None:
    """Raise MethodError, which names ``key``, if ``name`` is no part of a net."""
    if not (isinstance(name, str) and is_part(name)):
        raise MethodError(f"{key} = {name!r}{did_you_mean(str(name), KNOWN)}")


@dataclass(frozen=True)
class Layers:
    """The names of a net's parameters and buffers, layer by layer, with the head last.

    ``norms`` are those of batch norms.
    """

    names: tuple[tuple[str, ...], ...]
    norms: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def place(self) -> Mapping[str, int]:
        """The layer of each array, counted from the end: 1 is the head."""
        layers = enumerate(reversed(self.names), start=1)
        return {name: place for place, layer in layers for name in layer}

    def holds(self, part: Part, name: str) -> bool:
        """Return whether the array ``name`` belongs to ``part``."""
        if part in {"all", "none"}:
            return part == "all"
        if part in {NORMS, BUT_NORMS}:
            return (name in self.norms) == (part == NORMS)
        last, count = _cut(part)
        self._need(count, part)
        return (self.place[name] <= count) == last

    def last(self, count: int) -> dict[str, str]:
        """Return the names of the last ``count`` layers' arrays, by names that all nets share.

        A shared name consists of the layer's position from the end, the module within the layer
        unless it is the first, and the array: ``"1.weight"`` is the head's, ``"2.1.running_mean"``
        that of a batch norm after the layer before.
        """
        self._need(count, f"{LAST}:{count}")
        shared = {}
        for place, layer in enumerate(reversed(self.names[len(self) - count :]), start=1):
            owners = list(dict.fromkeys(name.rpartition(".")[0] for name in layer))
            for name in layer:
                owner, _, leaf = name.rpartition(".")
                follower = f"{owners.index(owner)}." if owner != owners[0] else ""
                shared[f"{place}.{follower}{leaf}"] = name
        return shared

    def _need(self, count: int, part: Part) -> None:
        if count > len(self):
            raise MethodError(f"{part!r} counts {count} layers, but the net has {len(self)}")


def check_depth(nets: Mapping[str, Layers], key: str, count: int, *, rest: bool = False) -> None:
    """Raise MethodError, which names ``key``, unless all nets have ``count`` layers.

    With ``rest``, they need at least one more.
    """
    for name, layers in nets.items():
        if rest and len(layers) == count:
            raise MethodError(f"{key} = {count} leaves nothing to share: {name} has {count} layers")
        if len(layers) < count:
            raise MethodError(f"{key} = {count}, but {name} has {len(layers)} layers")


@functools.cache
def _cut(part: Part) -> tuple[bool, int]:
    """Return whether a part is the last layers or the rest, and the number of last layers."""
    check_part(part, "part")
    kind, _, count = part.partition(":")
    return kind in {"head", LAST}, int(count or 1)


def layers_of(body: nn.Module, head: str, names: Collection[str]) -> Layers:
    """Return the layers of a net: its body as a module, its head's name, and all arrays' names."""
    layers: list[list[str]] = []
    before: list[str] = []  # modules before the first layer belong to it
    norms = set[str]()
    for path, module in body.named_modules():
        parameters = list(module.named_parameters(path, recurse=False))
        arrays = itertools.chain(parameters, module.named_buffers(path, recurse=False))
        held = [name for name, _ in arrays if name in names]
        if isinstance(module, BatchNorm):
            norms.update(held)
        weighs = any("weight" in n and p.dim() >= MATRIX for n, p in parameters if n in names)
        if weighs and not isinstance(module, nn.LayerNorm):
            layers.append(held)
        else:
            (layers[-1] if layers else before).extend(held)
    layers.append([name for name in names if name.startswith(f"{head}.")])
    layers[0] += before
    return Layers(tuple(tuple(layer) for layer in layers), frozenset(norms))
