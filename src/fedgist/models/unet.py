"""A small U-Net, which predicts a class for each pixel of an image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

IMAGE = 3  # dimensions: colours, height, width


def unet(
    input_shape: Sequence[int], num_classes: int, *, channels: int = 16, levels: int = 2
) -> nn.Module:
    """Return a small U-Net: convolutions at several resolutions, and a linear layer per pixel.

    It maps images (batch, colours, height, width) to logits (batch, height, width, classes). Each
    level halves the sides and doubles the channels. A level has two 3x3 convolutions with ReLU on
    the way down, and two on the way up, where the channels of the same resolution are joined.
    Features are a vector per pixel.

    Ronneberger, Fischer, Brox 2015, "U-Net: Convolutional networks for biomedical image
    segmentation"; here without batch norm, padded, and with nearest-neighbour upsampling.

    Parameters
    ----------
    channels
        Number of channels at full resolution, and the width of the features.
    levels
        Number of halvings of the sides.
    """
    if len(input_shape) != IMAGE:
        raise ValueError(f"unet takes images, not inputs of {list(input_shape)}")
    for name, size in (("channels", channels), ("levels", levels)):
        if isinstance(size, bool) or size < 1:
            raise ValueError(f"model.{name} must be at least 1, not {size!r}")
    if any(side % 2**levels for side in input_shape[1:]):
        raise ValueError(
            f"model.levels = {levels}: the sides of images, {list(input_shape[1:])}, must be "
            f"multiples of {2**levels}"
        )
    return nn.Sequential(
        UNet(input_shape[0], channels, levels), ChannelsLast(), nn.Linear(channels, num_classes)
    )


class UNet(nn.Module):
    """The body: (batch, colours, height, width) to (batch, channels, height, width)."""

    def __init__(self, colors: int, channels: int, levels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            _twice(before, after) for before, after in zip([colors, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            _twice(deep + flat, flat) for flat, deep in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of each pixel."""
        seen = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else torch.max_pool2d(x, 2))
            seen.append(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([_doubled(x), seen[level]], dim=1))
        return x


class ChannelsLast(nn.Module):
    """Moves channels to the last dimension: (batch, height, width, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the pixels' features in the order in which a linear layer takes them."""
        return x.permute(0, 2, 3, 1)


def _twice(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1),
        nn.ReLU(),
    )


def _doubled(x: Tensor) -> Tensor:
    """Return images (batch, channels, height, width) of twice the size: each pixel four times."""
    batch, channels, height, width = x.shape
    x = x.unsqueeze(3).unsqueeze(5).expand(batch, channels, height, 2, width, 2)
    return x.reshape(batch, channels, 2 * height, 2 * width)
