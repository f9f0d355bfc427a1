"""Random colour augmentation of SimCLR, drawn from keys, with FLESD's strength.

Chen et al. 2020, "A simple framework for contrastive learning of visual representations", appendix
A. Each change is defined as in torchvision. Images are (images, 3, height, width), from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fedgist.core import random

BRIGHTNESS = CONTRAST = SATURATION = 0.8  # largest deviation of a factor from 1
HUE = 0.2  # largest hue shift, as a share of the full circle
JITTERED, GREY = 0.8, 0.2  # probability of each change per image
LUMA = (0.2989, 0.587, 0.114)  # weights of red, green and blue in grey
RGB = 3

Change: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def jittered(x: Tensor, keys: Tensor, rows: int) -> Tensor:
    """Return images with random brightness, contrast, saturation and hue, most of them changed.

    Each image has its own random order of the four changes. ``x`` (clients * rows, 3, height,
    width) holds ``rows`` images per client, and ``keys`` is (clients, 1). The result has the shape
    of ``x``.
    """
    order = random.uniform(random.fold(keys.unsqueeze(-1), "order"), (rows, len(CHANGES)))
    order = order.argsort(-1).flatten(0, 1)
    draws = random.uniform(random.fold(keys.unsqueeze(-1), "factor"), (rows, len(CHANGES)))
    draws = 2 * draws.flatten(0, 1) - 1
    chosen = (random.uniform(random.fold(keys, "chosen"), (rows,)) < JITTERED).flatten()
    out = x.clone()
    for place in range(len(CHANGES)):
        for number, change in enumerate(CHANGES):
            which = (order[:, place] == number) & chosen
            out = _changed(out, which, change, draws[:, number].view(-1, 1, 1, 1))
    return out


def _changed(x: Tensor, which: Tensor, change: Change, by: Tensor) -> Tensor:
    """Return ``x`` (images, 3, height, width) with those images changed that a mask selects.

    ``which`` is (images,), and ``by`` (images, 1, 1, 1). On a CPU, ``x`` itself is changed.
    """
    if x.device.type == "cpu":
        at = which.nonzero().squeeze(1)
        x[at] = change(x[at], by[at])
        return x
    # reading from a GPU which images these are would block the CPU: it changes all of them
    return torch.where(which.view(-1, 1, 1, 1), change(x, by), x)


def grey_images(x: Tensor, keys: Tensor, rows: int) -> Tensor:
    """Return images (clients * rows, 3, height, width), a random part of them made grey.

    ``keys`` is (clients, 1), and each client has ``rows`` images.
    """
    chosen = random.uniform(random.fold(keys, "chosen"), (rows,)) < GREY
    return torch.where(chosen.view(-1, 1, 1, 1), grey(x), x)


def grey(x: Tensor) -> Tensor:
    """Return the luma of images (images, 3, height, width): (images, 1, height, width)."""
    red, green, blue = x.chunk(RGB, 1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def brightened(x: Tensor, by: Tensor) -> Tensor:
    """Return images scaled by ``1 + 0.8 by``, with ``by`` (images, 1, 1, 1) in [-1, 1]."""
    return _blend(x, torch.zeros_like(x), 1 + BRIGHTNESS * by)


def contrasted(x: Tensor, by: Tensor) -> Tensor:
    """Return images whose distance from their mean grey is scaled by ``1 + 0.8 by``.

    ``by`` (images, 1, 1, 1) is in [-1, 1].
    """
    return _blend(x, grey(x).mean((2, 3), keepdim=True), 1 + CONTRAST * by)


def saturated(x: Tensor, by: Tensor) -> Tensor:
    """Return images whose distance from grey is scaled by ``1 + 0.8 by``.

    ``by`` (images, 1, 1, 1) is in [-1, 1].
    """
    return _blend(x, grey(x), 1 + SATURATION * by)


def hue_shifted(x: Tensor, by: Tensor) -> Tensor:
    """Return images whose hues are rotated by ``0.2 by`` of a circle, through HSV and back.

    ``by`` (images, 1, 1, 1) is in [-1, 1].
    """
    red, green, blue = x.unbind(1)
    value, least = x.amax(1), x.amin(1)
    span = value - least
    safe = torch.where(span > 0, span, 1.0)
    side = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    side = (side + 6 * HUE * by.view(-1, 1, 1)) % 6  # position on the hexagon of pure colours
    channels = []
    for start in (5, 3, 1):
        k = (start + side) % 6
        channels.append(value - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1).clamp(0, 1)


def _blend(x: Tensor, other: Tensor, share: Tensor) -> Tensor:
    return (share * x + (1 - share) * other).clamp(0, 1)


CHANGES: tuple[Change, ...] = (
    brightened,
    contrasted,
    saturated,
    hue_shifted,
)
