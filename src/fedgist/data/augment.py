"""Random image augmentation, of pixels' places and of colours, drawn from keys.

Shifts and reflections follow He, Zhang, Ren, Sun 2016, "Deep residual learning for image
recognition", section 4.2. Resized crops and colours follow SimCLR (Chen et al. 2020, "A simple
framework for contrastive learning of visual representations", appendix A), with FLESD's strength.
Changes of colour are defined as in torchvision, on images (images, 3, height, width) from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data import Augmentation

PAD = 4  # the largest shift, in pixels
AREA = (0.2, 1.0)  # range of a resized crop's share of the image's area
RATIO = (3 / 4, 4 / 3)  # range of the ratio of its width to its height
TRIES = 10  # number of drawn crops; the first that lies within the image is taken
IN_FLOATS = ("resized_crop", "color_jitter", "grayscale")
BRIGHTNESS = CONTRAST = SATURATION = 0.8  # largest deviation of a factor from 1
HUE = 0.2  # largest hue shift, as a share of the full circle
JITTERED, GREY = 0.8, 0.2  # probability of each change per image
LUMA = (0.2989, 0.587, 0.114)  # weights of red, green and blue in grey
RGB = 3
Change: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def augmented(x: Tensor, keys: Tensor, kinds: tuple[Augmentation, ...], scale: float) -> Tensor:
    """Return randomly augmented images; the order of ``kinds`` is that of this function.

    ``x`` is (clients, batch, channels, height, width), raw numbers from 0 to ``scale``, and
    ``keys`` is (clients,). A client's images depend only on its own key. The result has the shape
    of ``x``. It has the type of ``x`` if pixels are only moved, else float32.
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

    "flip_vertical" mirrors half of the images vertically. "batch_crop" and "batch_flip" draw once
    per batch, as in FedJAX's CIFAR-100, with shifts from -4 to 3 pixels.

    ``x`` is (clients, batch, channels, height, width) and ``keys`` is (clients,). The result has
    the shape and type of ``x``. Pixels from beyond the edge are 0. A client's images depend only on
    its own key.
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
    """Return a random crop of each image, resized bilinearly to the size of the image.

    ``x`` is (clients, batch, channels, height, width), ``keys`` (clients, 1).
    """
    top, left, tall, wide = crops(keys, x.shape[1], x.shape[3], x.shape[4])
    rows, columns = _resizing(top, tall, x.shape[3]), _resizing(left, wide, x.shape[4])
    return rows.unsqueeze(2) @ x @ columns.unsqueeze(2).mT


def crops(
    keys: Tensor, batch: int, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a crop of each image: top, left, height and width in pixels, (clients, batch) each.

    ``keys`` is (clients, 1). The area is uniform over ``AREA``, and the ratio of width to height is
    log-uniform over ``RATIO``. Of ten draws the first that lies within the image is taken; if none
    does, the last one is clipped.
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
    """Return matrices (..., size, size) that interpolate a part of a line to ``size`` pixels.

    ``start`` and ``length`` (...) are the first pixel and the number of pixels of the part. Row i
    holds the weights of the two pixels nearest to pixel i in the part; beyond the part's edge, only
    the edge pixel has weight.
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
