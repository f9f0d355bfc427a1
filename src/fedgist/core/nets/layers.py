"""Replacements of torch's layers that give wrong results or are slow for stacked clients.

Batch norm must not see absent rows and must return its statistics instead of storing them. Dropout
must draw from a key instead of torch's generator. A convolution of many small nets is sometimes
faster net by net. :func:`replace_layers` replaces torch's layers with these, in a builder's module
or a user's own. The layers read their mode from the *pass* that :mod:`fedgist.core.nets.net` opens
around a call.
"""

from __future__ import annotations

import contextlib
import itertools
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.autograd_types import Lot, SavedTensors
from fedgist.core.nets.batch_norm import by_channel, of_each, of_stack
from fedgist.core.nets.convolution import AveragePool2d, Conv2d, MaxPool2d, can_pool, pools_by_two
from fedgist.core.nets.user_module import has_own_forward, is_hooked


@dataclass(eq=False)
class Pass:
    """One training pass through a net: the present rows, the key, and new batch norm statistics.

    Batch norm normalizes each of ``parts`` equal parts of a batch separately. ``whole`` says that
    no row is absent and there is one client; torch's own batch norm is then faster. With ``half``,
    the body computes in bfloat16 wherever torch's autocast does.

    A pass is the only mutable value in the core: the trainer opens it, runs a loss, and reads
    ``all_updates`` afterwards. ``kept`` are passes of second models whose statistics stay with the
    client, by their place in its own state.
    """

    mask: Tensor  # (batch,) bool
    key: Tensor
    parts: int = 1
    whole: bool = False
    half: bool = False
    updates: dict[str, Tensor] = field(default_factory=dict)
    draws: int = 0
    asides: int = 0
    kept: dict[str, Pass] = field(default_factory=dict)

    @property
    def all_updates(self) -> dict[str, Tensor]:
        """New statistics by name: those of the net, and those of second models that are kept."""
        found = dict(self.updates)
        for place, other in self.kept.items():
            found |= {f"{place}.{name}": new for name, new in other.updates.items()}
        return found

    def cast(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return the context of the body's forward pass."""
        if not self.half:
            return contextlib.nullcontext()
        # without the cache: a cast of one client's view must not be reused for another client
        return torch.autocast(device, torch.bfloat16, cache_enabled=False)

    def of_rows(self, mask: Tensor) -> Pass:
        """Return a pass over other rows, ``mask`` (rows,), with new draws and these ``updates``."""
        key = random.fold(self.next_key(), "rows")
        return Pass(mask, key, half=self.half, updates=self.updates)

    def aside(self) -> Pass:
        """Return a pass of another net over the same rows, with updates and draws of its own.

        The other net's statistics are not the client's, and its draws leave this pass's as they
        are: a net that runs aside changes no bit of the client's own training.
        """
        self.asides += 1
        key = random.fold(self.key, "aside", self.asides)
        return Pass(self.mask, key, self.parts, self.whole, self.half)

    def next_key(self) -> Tensor:
        """Return a different key, (), at every call.

        So two dropout layers, or two views of a batch, do not share random numbers.
        """
        self.draws += 1
        return random.fold(self.key, "dropout", self.draws)


_MATRIX = 2  # dimensions: rows, and the numbers in each
_SMALL = 4096  # weights: up to this size, a custom function costs more time than it saves

current: ContextVar[Pass | None] = ContextVar("pass", default=None)  # None: evaluation


class Dropout(nn.Module):
    """Dropout by key; ``channels`` drops whole channels (torch's Dropout2d)."""

    def __init__(self, p: float, *, channels: bool) -> None:
        super().__init__()
        self.p, self.channels = p, channels

    def forward(self, x: Tensor) -> Tensor:
        """Zero a fraction ``p`` of ``x`` (batch, ...) and scale the rest, in training only."""
        run = current.get()
        if run is None or self.p == 0.0:
            return x
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.channels else tuple(x.shape)
        keep = random.uniform(run.next_key(), shape) >= self.p
        return x * (keep.to(x.dtype) / (1.0 - self.p)) if self.p < 1.0 else torch.zeros_like(x)


class BatchNorm(nn.Module):
    """Batch norm over the present rows, which returns its running statistics through the pass.

    It runs client by client (``each``), or on a whole stack at once; on a GPU always the latter.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, old: nn.modules.batchnorm._BatchNorm, name: str) -> None:
        super().__init__()
        self.name, self.eps, self.each = name, old.eps, False
        self.fixed, self.momentum = not old.training, old.momentum or 0.0
        self.weight, self.bias = old.weight, old.bias
        if old.running_mean is None or old.running_var is None:
            raise ValueError(
                f"{name}: batch norm without running statistics cannot be evaluated; use "
                "track_running_stats=True"
            )
        self.register_buffer("running_mean", old.running_mean)
        self.register_buffer("running_var", old.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` (batch, channels, ...)."""
        run = current.get()
        if run is None or self.fixed:
            return self._evaluated(x)
        parts = zip(x.chunk(run.parts), run.mask.chunk(run.parts), strict=True)
        seen = [self._of_batch(run, part, mask) for part, mask in parts]
        return torch.cat(seen) if len(seen) > 1 else seen[0]

    def _evaluated(self, x: Tensor) -> Tensor:
        """Normalize by the running statistics, in one pass over ``x``."""
        scale, shift = torch.rsqrt(self.running_var + self.eps), -self.running_mean
        if self.weight is not None:
            scale = scale * self.weight
        shift = shift * scale if self.bias is None else shift * scale + self.bias
        shape = by_channel(x)
        return torch.addcmul(shift.view(shape), x.to(scale.dtype), scale.view(shape))

    def _of_batch(self, run: Pass, x: Tensor, mask: Tensor) -> Tensor:
        """Normalize a batch by its own statistics, which are added to the pass."""
        about = self.weight, self.bias, self.eps
        if run.whole or (self.each and x.device.type == "cpu"):
            out, mean, var = of_each(x, None if run.whole else mask, *about)
        else:  # statistics in full precision
            out, mean, var = of_stack(x.to(self.running_mean.dtype), mask, *about)
        if run.whole:  # a number of Python's, so that a GPU starts fewer kernels
            count = len(x) * x[0, 0].numel()
            self._remember(run, mean, var * count / max(count - 1.0, 1.0))
            return out
        seen = mask.sum() * x[0, 0].numel()
        self._remember(run, mean, var * seen / (seen - 1.0).clamp(min=1.0))
        return out

    def _remember(self, run: Pass, mean: Tensor, var: Tensor) -> None:
        for name, new in (("running_mean", mean), ("running_var", var)):
            full = f"{self.name}.{name}"
            old = run.updates.get(full, getattr(self, name))
            run.updates[full] = old + self.momentum * (new - old)


class Linear(nn.Module):
    """A linear layer; a large one has contiguous gradients when clients are stacked."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, in) to (batch, out)."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W' + b, (batch, ..., out).

    ``x`` is (batch, ..., in), ``weight`` (out, in) and ``bias`` (out,).
    """
    if x.dim() < _MATRIX or weight.numel() <= _SMALL:
        return F.linear(x, weight, bias)
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    if x.dim() > _MATRIX:
        return linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))
    # torch does not cast a custom function's inputs; meta tensors have no cast
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        half = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(half), weight.to(half), bias.to(half)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """A linear map with contiguous gradients.

    The gradient of torch's own layer is a transposed view, on which optimizers are ten times
    slower.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.matmul(x, weight.mT) + bias.unsqueeze(-2)

    @staticmethod
    def setup_context(ctx: SavedTensors, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: SavedTensors, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        for_x = torch.matmul(grad, weight) if ctx.needs_input_grad[0] else None
        for_weight = torch.matmul(grad.mT, x) if ctx.needs_input_grad[1] else None
        return for_x, for_weight, grad.sum(-2)

    @staticmethod
    def vmap(info: Lot, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        x, weight, bias = (
            a.expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)
            for a, d in zip(inputs, in_dims, strict=True)
        )
        out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out, 0


def replace_layers(module: nn.Module) -> nn.Module:
    """Replace torch's layers in a module with those of this file; names are unchanged.

    A layer that is used in two places, at any depth, gets one replacement, used in both.
    """
    _join(module)
    return _replace(module, "", {})


def _join(module: nn.Module) -> None:
    """Join convolutions with the max-pooling after them, in plain sequences.

    Only in a plain sequence is it certain that no other code calls these layers.
    """
    if type(module) is not nn.Sequential:
        return
    places = list(module._modules.items())  # noqa: SLF001  # named_children leaves out a layer's second place
    for (name, layer), (after, pool) in itertools.pairwise(places):
        if is_hooked(layer) or is_hooked(pool):
            continue
        if type(layer) is nn.Conv2d and type(pool) is nn.MaxPool2d and can_pool(layer, pool):
            setattr(module, name, Conv2d(layer, pool))
            setattr(module, after, nn.Identity())
    for child in module.children():
        _join(child)


def _replace(module: nn.Module, prefix: str, stand_ins: dict[nn.Module, nn.Module]) -> nn.Module:
    places = [(n, m) for n, m in module.named_modules(remove_duplicate=False) if n and "." not in n]
    for name, child in places:
        full = f"{prefix}.{name}" if prefix else name
        stand_in = stand_ins.get(child) or _stand_in(child, full)
        if stand_in is None:
            _replace(child, full, stand_ins)
        else:
            stand_ins[child] = stand_in
            setattr(module, name, stand_in)
    return module


def _by_pass(layer: nn.Module, name: str) -> nn.Module | None:
    """Return the layer that computes by the pass what torch's layer computes by a global state."""
    if has_own_forward(layer):
        return None
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001  # torch has no public base of its three
        return BatchNorm(layer, name)
    if isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
        p = layer.p if layer.training else 0.0
        return Dropout(p, channels=not isinstance(layer, nn.Dropout))
    return None


def _stand_in(layer: nn.Module, name: str) -> nn.Module | None:
    new = _by_pass(layer, name)
    if new is None and is_hooked(layer):
        return None
    if new is not None:
        vars(new).update({key: value for key, value in vars(layer).items() if "_hooks" in key})
    elif type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        new = Conv2d(layer)
    elif type(layer) is nn.Linear:
        new = Linear(layer)
    elif type(layer) is nn.MaxPool2d and pools_by_two(layer):
        new = MaxPool2d(layer)
    elif type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)):
        new = AveragePool2d(layer)
    for setting in getattr(layer, "__constants__", ()) if new is not None else ():
        if not hasattr(new, setting):  # a user's module may read the sizes of its layers
            setattr(new, setting, getattr(layer, setting))
    return new
