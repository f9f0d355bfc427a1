"""Random shifts and reflections of images, drawn from keys.

He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data import Augmentation

PAD = 4  # the largest shift, in pixels


def crop_and_flip(x: Tensor, keys: Tensor, kinds: tuple[Augmentation, ...]) -> Tensor:
    """Shift each image by up to 4 pixels each way ("crop"), and mirror half of them ("flip").

    "flip_vertical" turns half of them upside down.

    ``x`` is (clients, batch, channels, height, width) and ``keys`` is (clients,); the result has
    the shape and type of ``x``. Pixels from beyond the edge are 0. A client's images depend on its
    own key alone.
    """
    clients, batch, channels, height, width = x.shape
    keys, device = keys.unsqueeze(1), x.device
    down = across = torch.zeros(clients, batch, dtype=torch.int64, device=device)
    mirrored = turned = torch.zeros(clients, batch, dtype=torch.bool, device=device)
    if "crop" in kinds:
        down = random.integers(random.fold(keys, "crop", 0), (batch,), 2 * PAD + 1) - PAD
        across = random.integers(random.fold(keys, "crop", 1), (batch,), 2 * PAD + 1) - PAD
    if "flip" in kinds:
        mirrored = random.integers(random.fold(keys, "flip"), (batch,), 2) == 1
    if "flip_vertical" in kinds:
        turned = random.integers(random.fold(keys, "flip_vertical"), (batch,), 2) == 1
    # pixel (i, j) of the result is pixel (row, column) of the image
    i = torch.arange(height, device=device)
    row = torch.where(turned.unsqueeze(-1), height - 1 - i, i) + down.unsqueeze(-1)
    j = torch.arange(width, device=device)
    column = torch.where(mirrored.unsqueeze(-1), width - 1 - j, j) + across.unsqueeze(-1)
    row_inside, column_inside = (row >= 0) & (row < height), (column >= 0) & (column < width)
    inside = row_inside.unsqueeze(-1) & column_inside.unsqueeze(-2)
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    pixel = (row.unsqueeze(-1) * width + column.unsqueeze(-2)).flatten(2)
    out = x.flatten(3).gather(3, pixel.unsqueeze(2).expand(-1, -1, channels, -1))
    return out.view_as(x).mul_(inside.unsqueeze(2))
