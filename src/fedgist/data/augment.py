"""Augmentation of image batches, drawn from keys.

The same image of the same step is changed alike anywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedgist.core import random

Augmentation = Literal["crop", "flip"]
PAD = 4


def crop_and_flip(x: Tensor, keys: Tensor, kinds: tuple[Augmentation, ...]) -> Tensor:
    """Shift each image by up to 4 pixels (black beyond its edge) and mirror every other one.

    ``x`` (clients, batch, channels, height, width), ``keys`` (clients,); gives the same shape.
    """
    clients, batch, _, height, width = x.shape
    keys, device = keys.unsqueeze(1), x.device
    down = across = torch.zeros(clients, batch, dtype=torch.int64, device=device)
    mirrored = torch.zeros(clients, batch, dtype=torch.bool, device=device)
    if "crop" in kinds:
        down = random.integers(random.fold(keys, "crop", 0), (batch,), 2 * PAD + 1) - PAD
        across = random.integers(random.fold(keys, "crop", 1), (batch,), 2 * PAD + 1) - PAD
    if "flip" in kinds:
        mirrored = random.integers(random.fold(keys, "flip"), (batch,), 2) == 1
    i = torch.arange(height, device=device) + down.unsqueeze(-1)
    j = torch.arange(width, device=device)
    j = torch.where(mirrored.unsqueeze(-1), width - 1 - j, j) + across.unsqueeze(-1)
    inside = ((i >= 0) & (i < height)).unsqueeze(-1) & ((j >= 0) & (j < width)).unsqueeze(-2)
    place = i.clamp(0, height - 1).unsqueeze(-1) * width + j.clamp(0, width - 1).unsqueeze(-2)
    out = x.flatten(3).gather(3, place.flatten(2).unsqueeze(2).expand(-1, -1, x.shape[2], -1))
    return out.view_as(x).mul_(inside.unsqueeze(2))
