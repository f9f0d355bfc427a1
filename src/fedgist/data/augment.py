"""Random changes of images, drawn from keys: what moves pixels here, colours in ``color.py``.

Shifts and reflections are those of He, Zhang, Ren, Sun 2016, "Deep residual learning for image
recognition", section 4.2; crops of a random size and their views' colours those of SimCLR (Chen et
al. 2020, appendix A), with FLESD's strength.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data import Augmentation
from fedgist.data.color import grey_images, jittered

PAD = 4  # the largest shift, in pixels
AREA = (0.2, 1.0)  # of a resized crop, as a share of the image's
RATIO = (3 / 4, 4 / 3)  # of its width to its height
TRIES = 10  # crops that are drawn until one lies within the image
IN_FLOATS = ("resized_crop", "color_jitter", "grayscale")


def augmented(x: Tensor, keys: Tensor, kinds: tuple[Augmentation, ...], scale: float) -> Tensor:
    """Return images changed at random, each by ``kinds``: always in the order of this function.

    ``x`` is (clients, batch, channels, height, width), raw numbers from 0 to ``scale``, and
    ``keys`` (clients,): a client's images depend on its own key alone. The result has the shape of
    ``x``, in its type where pixels are only moved, else in float32.
    """
    x = crop_and_flip(x, keys, kinds)
    if not set(IN_FLOATS) & set(kinds):
        return x
    keys = keys.unsqueeze(1)
    out = x.to(torch.float32) / scale
    if "resized_crop" in kinds:
        out = _resized_crops(out, random.fold(keys, "resized_crop"))
    images, rows = out.flatten(0, 1), x.shape[1]
    if "color_jitter" in kinds:
        images = jittered(images, random.fold(keys, "color_jitter"), rows)
    if "grayscale" in kinds:
        images = grey_images(images, random.fold(keys, "grayscale"), rows)
    return images.view_as(x) * scale


def crop_and_flip(x: Tensor, keys: Tensor, kinds: tuple[Augmentation, ...]) -> Tensor:
    """Shift each image by up to 4 pixels each way ("crop"), and mirror half of them ("flip").

    "flip_vertical" turns half of them upside down. "batch_crop" and "batch_flip" draw once for all
    images of a batch, as FedJAX's CIFAR-100 does, where a shift is from -4 to 3 pixels.

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
    if "batch_crop" in kinds:
        down = random.integers(random.fold(keys, "crop", 0), (1,), 2 * PAD) - PAD
        across = random.integers(random.fold(keys, "crop", 1), (1,), 2 * PAD) - PAD
    if "batch_flip" in kinds:
        mirrored = random.integers(random.fold(keys, "flip"), (1,), 2) == 1
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
    row, column = (at.expand(clients, batch, -1) for at in (row, column))
    pixel = (row.unsqueeze(-1) * width + column.unsqueeze(-2)).flatten(2)
    out = x.flatten(3).gather(3, pixel.unsqueeze(2).expand(-1, -1, channels, -1))
    return out.view_as(x).mul_(inside.unsqueeze(2))


def _resized_crops(x: Tensor, keys: Tensor) -> Tensor:
    """Return a random part of each image, resized to the whole's size, bilinearly.

    ``x`` is (clients, batch, channels, height, width), ``keys`` (clients, 1).
    """
    top, left, tall, wide = crops(keys, x.shape[1], x.shape[3], x.shape[4])
    rows, columns = _resizing(top, tall, x.shape[3]), _resizing(left, wide, x.shape[4])
    return rows.unsqueeze(2) @ x @ columns.unsqueeze(2).mT


def crops(
    keys: Tensor, batch: int, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a part of each image: its top, left, height and width in pixels, (clients, batch) each.

    Its area is a random share of the image's, its shape a random ratio, evenly in logarithms. Of
    ten draws the first that lies within the image is taken; if none does, the last one is cut.
    """
    shape = (batch, TRIES)
    keys = keys.unsqueeze(-1)
    area = AREA[0] + (AREA[1] - AREA[0]) * random.uniform(random.fold(keys, "area"), shape)
    least, most = (math.log(ratio) for ratio in RATIO)
    ratio = torch.exp(least + (most - least) * random.uniform(random.fold(keys, "ratio"), shape))
    wide = (area * height * width * ratio).sqrt().round().long().clamp(min=1)
    tall = (area * height * width / ratio).sqrt().round().long().clamp(min=1)
    fits = (wide <= width) & (tall <= height)
    first = torch.where(fits.any(-1), fits.int().argmax(-1), TRIES - 1).unsqueeze(-1)
    wide = wide.gather(-1, first).squeeze(-1).clamp(max=width)
    tall = tall.gather(-1, first).squeeze(-1).clamp(max=height)
    keys = keys.squeeze(-1)
    top = (random.uniform(random.fold(keys, "top"), (batch,)) * (height - tall + 1)).long()
    left = (random.uniform(random.fold(keys, "left"), (batch,)) * (width - wide + 1)).long()
    return top, left, tall, wide


def _resizing(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return the matrices (..., size, size) that stretch a part of a line over all of it.

    Row i holds the weights of the two pixels nearest to where pixel i lies in the part; beyond its
    edge there is only the edge.
    """
    i = torch.arange(size, device=start.device)
    last = (length - 1).unsqueeze(-1)
    place = (i + 0.5) * (length / size).unsqueeze(-1) - 0.5
    place = torch.minimum(place.clamp(min=0), last)
    low = place.long()
    high = torch.minimum(low + 1, last)
    weight = (place - low).unsqueeze(-1)
    out = torch.zeros(*place.shape, size, device=start.device)
    begin = start.unsqueeze(-1)
    out.scatter_add_(-1, (begin + low).unsqueeze(-1), 1 - weight)
    return out.scatter_add_(-1, (begin + high).unsqueeze(-1), weight)
