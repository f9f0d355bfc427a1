"""Model factories of a user's own package, good and bad."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def good(input_shape: tuple[int, ...], num_classes: int, *, width: int = 4) -> nn.Module:
    assert isinstance(input_shape, tuple)
    assert isinstance(num_classes, int)
    inputs = math.prod(input_shape)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, num_classes)
    )


def loads(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 4, body: bool = True
) -> nn.Module:
    """Loads the body's weights itself, or only a part of them; the head is new."""
    module = good(input_shape, num_classes, width=width)
    with torch.no_grad():
        for name, array in module.named_parameters():
            if name == "1.weight" or (body and name == "1.bias"):
                array.copy_(torch.linspace(-1, 1, array.numel()).view(array.shape))
    return module


def no_sizes() -> nn.Module:
    return nn.Linear(6, 3)


def one_size(x: int) -> nn.Module:
    return nn.Linear(x, 3)


def no_module(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return torch.zeros(num_classes)


def fails(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    empty: list[nn.Module] = []
    return empty[num_classes]


def giant(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(10**7, 10**7), nn.Linear(10**7, num_classes))


def looks_at_numbers(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Cannot be made without numbers: its head is scaled by one of them."""
    module = good(input_shape, num_classes)
    scale = next(module.parameters()).abs().max().item()
    with torch.no_grad():
        next(module.parameters()).div_(scale)
    return module


text = "no factory"
