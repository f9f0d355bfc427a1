"""Kernels of single layers: which layers can have them, and what is done in the same pass.

A compiled convolution also pools and cuts at zero, if these follow it in a plain sequence. Dropout
of whole channels between them is moved behind them. This changes no number, because it multiplies a
channel by zero or by a positive number, and so does not change which of its numbers is largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from fedgist.core.nets.compiled.kernel_library import HOW, Kernel, library
from fedgist.core.nets.convolution import Conv2d, MaxPool2d
from fedgist.core.nets.layers import Dropout


def compilable(module: nn.Module) -> dict[str, Conv2d]:
    """Return the convolutions that the compiled kernels have, by name."""
    layers = module.named_modules()
    return {name: m for name, m in layers if isinstance(m, Conv2d) and m.compilable}


def use_kernels(module: nn.Module, kernels: Mapping[str, Kernel]) -> None:
    """Let the named convolutions of a module run by these kernels, in place.

    Raises
    ------
    ValueError
        If the kernels have not been built here, or a layer is not there or does not have one.
    """
    if not kernels:
        return
    able = compilable(module)
    for name, kernel in kernels.items():
        if name not in able:
            choices = ", ".join(able) or "none"
            raise ValueError(f"kernels.{name} = {kernel!r}: no such layer; choose from: {choices}")
        able[name].kernel = kernel
    if "compiled" in kernels.values() and library() is None:
        raise ValueError(f"this plan has compiled kernels, which are not on this machine; {HOW}")
    used = Counter(id(m) for _, m in module.named_modules(remove_duplicate=False))
    _join(module, used)


def _join(module: nn.Module, used: Mapping[int, int]) -> None:
    """Join compiled convolutions with the layers after them, in plain sequences.

    Only in a plain sequence, and in one within it, is it certain that no other code calls a layer.
    ``used`` says in how many places a layer is, by its id.
    """
    if type(module) is not nn.Sequential:
        return
    if all(used[id(layer)] == 1 for layer in module):
        _join_followers(module)
    for child in module.children():
        _join(child, used)


def _join_followers(sequence: nn.Sequential) -> None:
    """Give each compiled convolution of a sequence the pooling and the ReLU after it."""
    layers = list(sequence.named_children())
    for place, (_, conv) in enumerate(layers):
        if not isinstance(conv, Conv2d) or conv.kernel != "compiled":
            continue
        joined = list(_followers(conv, layers[place + 1 :]))
        drops = [layer for _, layer in joined if isinstance(layer, Dropout)]
        last = len(joined) - len(drops)
        for number, (name, _) in enumerate(joined):
            setattr(sequence, name, drops[number - last] if number >= last else nn.Identity())


def _followers(conv: Conv2d, after: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers behind a convolution that it takes over, and the dropouts among them."""
    waiting: list[tuple[str, nn.Module]] = []
    for name, layer in after:
        if isinstance(layer, MaxPool2d) and conv.pool is None and not layer.old.ceil_mode:
            conv.pool = layer
        elif type(layer) is nn.ReLU and not conv.relu:
            conv.relu = True
        elif type(layer) is nn.Identity or (isinstance(layer, Dropout) and layer.channels):
            waiting.append((name, layer))
            continue
        else:
            return
        yield from waiting
        yield name, layer
        waiting = []
