"""Frozen bodies and low-rank adapters (LoRA): what does not learn is a constant of the task.

An architecture's module holds the arrays of a frozen body. The parameters of a net are then its
head and its adapters, and methods train, send and store nothing else. Hu et al. 2021, "LoRA:
Low-rank adaptation of large language models" (https://arxiv.org/abs/2106.09685), eq. 3:
``y = W x + (alpha / rank) B A x``. At the start, A is random and B is zero.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.nets.layers import Linear, linear
from fedgist.core.nets.net import Architecture, Net
from fedgist.core.nets.parts import Layers
from fedgist.core.nets.projection import head_and_projection
from fedgist.errors import listed

A, B = "lora_a", "lora_b"  # an adapter's matrices
PATTERNS = "model.adapters.layers"


@dataclass(frozen=True)
class Adapters:
    """Settings of adapters: their rank, ``alpha``, and patterns of the names of their layers."""

    rank: int = 8
    alpha: float = 16.0
    layers: tuple[str, ...] = ("*",)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, A (rank, in) and B (out, rank)."""

    def __init__(self, old: Linear, adapters: Adapters) -> None:
        super().__init__()
        self.frozen, self.bias = old.weight, old.bias
        self.out_features, self.in_features = old.weight.shape
        self.settings, self.scale = adapters, adapters.alpha / adapters.rank
        # a net's own arrays take the place of these
        self.lora_a = nn.Parameter(old.weight.new_zeros(adapters.rank, self.in_features))
        self.lora_b = nn.Parameter(old.weight.new_zeros(self.out_features, adapters.rank))

    @property
    def weight(self) -> Tensor:
        """``W + (alpha / rank) B A``, (out, in), for modules that read a layer's weight."""
        return self.merged(self.lora_a, self.lora_b)

    def merged(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``W + (alpha / rank) B A``, (out, in), for ``a`` (rank, in), ``b`` (out, rank)."""
        return self.frozen + self.scale * (b @ a)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, ..., in) to (batch, ..., out) (eq. 3)."""
        low = self.scale * linear(x, self.lora_a, None)
        # stacked clients share W: torch's own layer makes one product of the rows of all
        shared = nn.functional.linear(x, self.frozen, self.bias)
        return shared + linear(low, self.lora_b, None)

    def extra_repr(self) -> str:
        """Return the adapter's settings, for a description of the model."""
        return f"rank={self.settings.rank}, alpha={self.settings.alpha:g}"


def frozen(start: Net, adapters: Adapters | None = None, *, body: bool = True) -> Architecture:
    """Return the architecture of a net in which some arrays are constants, those of ``start``.

    Parameters that the module fixes by ``requires_grad = False`` are constants. If the whole
    ``body`` is, only the head goes on learning, a projection before the head, and adapters if they
    are given. This body always computes as in evaluation: batch norm uses its stored statistics,
    and dropout in the body is off.

    Raises
    ------
    ValueError
        If a pattern of layers matches no linear layer, or an adapter cannot be in a layer, or
        nothing learns.
    """
    plain = start.arch
    module = copy.deepcopy(plain.module).to(next(iter(start.params.values())).device)
    module.load_state_dict(start.body | start.buffers, strict=False)
    learned = f"{head_and_projection(module, plain.head)}."
    learning = [name for name in start.params if name not in plain.fixed]
    kept = [name for name in learning if not body or name.startswith(learned)]
    adapted = _insert(module, adapters, learned, plain.name) if adapters else {}
    if not (kept or adapted):
        raise ValueError("no parameter learns: all have requires_grad = False")
    buffers = [] if body else [*start.buffers]

    def begin(seed: int) -> Net:
        drawn, key = plain.start(seed), random.key(seed, "adapters")
        arrays: dict[str, Tensor] = {}
        for name, layer in adapted.items():
            arrays |= _first(name, layer, random.fold(key, name))
        arrays |= {name: drawn.params[name] for name in kept}
        return Net(arrays, {name: drawn.buffers[name] for name in buffers}, arch)

    arch = replace(
        plain,
        module=module.requires_grad_(requires_grad=False),
        layers=_layers(plain.layers, [*kept, *buffers], adapted),
        start=begin,
        drops_features=plain.drops_features and not body,
        frozen=start,
        evaluates=body,
    )
    return arch


def merged(net: Net) -> Net:
    """Return the whole model of a net with constants: its adapters are added to its weights.

    A net without constants is returned unchanged.
    """
    if net.arch.frozen is None:
        return net
    whole = net.arch.frozen
    arrays = {name: array for name, array in net.params.items() if name in whole.params}
    arrays |= net.buffers
    for name, layer in adapted_layers(net.arch).items():
        arrays[f"{name}.weight"] = layer.merged(*(net.params[f"{name}.{part}"] for part in (A, B)))
    return whole.with_arrays(arrays)


def adapted_layers(arch: Architecture) -> dict[str, Adapted]:
    """Return the layers of an architecture that have adapters, by name."""
    return {n: layer for n, layer in arch.module.named_modules() if isinstance(layer, Adapted)}


def _first(name: str, layer: Adapted, key: Tensor) -> dict[str, Tensor]:
    """Return the arrays of an adapter at its start: A x is as large as x on average, B is 0."""
    rank = layer.settings.rank
    a = random.normal(key, (rank, layer.in_features)) / math.sqrt(layer.in_features)
    arrays = {A: a, B: torch.zeros(layer.out_features, rank)}
    return {f"{name}.{part}": array.to(layer.frozen.dtype) for part, array in arrays.items()}


def _insert(module: nn.Module, adapters: Adapters, learned: str, model: str) -> dict[str, Adapted]:
    """Insert adapters into the linear layers of a body, in place; return them by name.

    A layer that is used in two places gets one adapter. Layers below ``learned`` go on learning.
    """
    places: dict[Linear, list[str]] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        if type(layer) is Linear and not path.startswith(learned):
            places.setdefault(layer, []).append(path)
    _check_patterns(adapters.layers, [path for paths in places.values() for path in paths], model)
    uses = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    inserted = {}
    for layer, paths in places.items():
        if not any(fnmatch.fnmatchcase(n, p) for n in paths for p in adapters.layers):
            continue
        if uses[id(layer.weight)] > 1:
            raise ValueError(
                f"layer {paths[0]!r} shares its weight with another one, so that it cannot have an "
                f"adapter: name the other layers in {PATTERNS}"
            )
        inserted[paths[0]] = adapter = Adapted(layer, adapters)
        for path in paths:
            outer, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(outer), leaf, adapter)
    return inserted


def _check_patterns(patterns: Collection[str], names: Collection[str], model: str) -> None:
    """Raise ValueError if a pattern matches no layer."""
    if not names:
        raise ValueError(
            f"the body of {model} has no linear layer for adapters: use model.frozen = true "
            "without model.adapters"
        )
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{PATTERNS}: {pattern!r} matches no linear layer of the body; it has "
                f"{listed(names)}"
            )


def _layers(plain: Layers, kept: Collection[str], adapted: Mapping[str, Adapted]) -> Layers:
    """Return the layers of a frozen model: those of the whole model, with what learns in them."""
    matrices = {f"{name}.weight": (f"{name}.{A}", f"{name}.{B}") for name in adapted}
    return Layers(
        tuple(
            tuple(
                array
                for name in layer
                for array in matrices.get(name, (name,) if name in kept else ())
            )
            for layer in plain.names
        ),
        plain.norms & set(kept),
    )
