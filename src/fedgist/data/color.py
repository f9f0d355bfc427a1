"""Random changes of colours, drawn from keys: those of SimCLR, with FLESD's strength.

Chen et al. 2020, "A simple framework for contrastive learning of visual representations", appendix
A; what each change does is as in torchvision. Images are (images, 3, height, width), from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedgist.core import random

BRIGHTNESS = CONTRAST = SATURATION = 0.8  # a factor is at most so far from 1
HUE = 0.2  # and a hue moves at most so far around the circle, whose length is 1
JITTERED, GREY = 0.8, 0.2  # of all images
LUMA = (0.2989, 0.587, 0.114)  # of red, green, blue in grey
RGB = 3


def jittered(x: Tensor, keys: Tensor, rows: int) -> Tensor:
    """Return images of which most have other brightness, contrast, saturation and hue.

    The four changes come in an order of the image's own. ``x`` (clients * rows, 3, height, width)
    holds ``rows`` images of each client, ``keys`` are (clients, 1).
    """
    order = random.uniform(random.fold(keys.unsqueeze(-1), "order"), (rows, len(CHANGES)))
    order = order.argsort(-1).flatten(0, 1)
    draws = random.uniform(random.fold(keys.unsqueeze(-1), "factor"), (rows, len(CHANGES)))
    draws = 2 * draws.flatten(0, 1) - 1
    chosen = (random.uniform(random.fold(keys, "chosen"), (rows,)) < JITTERED).flatten()
    out = x.clone()
    for place in range(len(CHANGES)):
        for number, change in enumerate(CHANGES):
            which = ((order[:, place] == number) & chosen).nonzero().squeeze(1)
            by = draws[which, number].view(-1, 1, 1, 1)
            out[which] = change(out[which], by)
    return out


def grey_images(x: Tensor, keys: Tensor, rows: int) -> Tensor:
    """Return images of which some have lost their colours."""
    chosen = random.uniform(random.fold(keys, "chosen"), (rows,)) < GREY
    return torch.where(chosen.view(-1, 1, 1, 1), grey(x), x)


def grey(x: Tensor) -> Tensor:
    """Return how bright each pixel looks, (images, 1, height, width)."""
    weights = torch.tensor(LUMA, device=x.device).view(-1, 1, 1)
    return (x * weights).sum(1, keepdim=True)


def brightened(x: Tensor, by: Tensor) -> Tensor:
    """Return images times ``1 + 0.8 by``; ``by`` (images, 1, 1, 1) is from -1 to 1."""
    return _blend(x, torch.zeros_like(x), 1 + BRIGHTNESS * by)


def contrasted(x: Tensor, by: Tensor) -> Tensor:
    """Return images whose distance from their mean grey is ``1 + 0.8 by`` times as large."""
    return _blend(x, grey(x).mean((2, 3), keepdim=True), 1 + CONTRAST * by)


def saturated(x: Tensor, by: Tensor) -> Tensor:
    """Return images whose distance from grey is ``1 + 0.8 by`` times as large."""
    return _blend(x, grey(x), 1 + SATURATION * by)


def hue_shifted(x: Tensor, by: Tensor) -> Tensor:
    """Return images whose hues are turned by ``0.2 by`` of a circle: through HSV and back."""
    red, green, blue = x.unbind(1)
    value, least = x.amax(1), x.amin(1)
    span = value - least
    safe = torch.where(span > 0, span, 1.0)
    side = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    side = (side + 6 * HUE * by.view(-1, 1, 1)) % 6  # where on the hexagon of pure colours
    channels = []
    for start in (5, 3, 1):
        k = (start + side) % 6
        channels.append(value - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1).clamp(0, 1)


def _blend(x: Tensor, other: Tensor, share: Tensor) -> Tensor:
    return (share * x + (1 - share) * other).clamp(0, 1)


CHANGES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    brightened,
    contrasted,
    saturated,
    hue_shifted,
)
