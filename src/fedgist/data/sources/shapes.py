"""Images of shapes with the class of each pixel, drawn from the run's seed for several clients."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import NonNegative, PositiveInt
from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.sources.splits import moments
from fedgist.errors import DataError

CLASSES = ("background", "disc", "square", "cross")
WHITE = 255.0
MOST_SHAPES = 3  # of an image
SMALLEST, LARGEST = 0.12, 0.25  # half the size of a shape, as a share of the image's side
FAVOURED = 0.6  # share of a client's shapes that are of its own favourite class
AtLeastOne = PositiveInt


def shapes(
    *,
    clients: AtLeastOne = 6,
    rows: AtLeastOne = 40,
    test_rows: AtLeastOne = 20,
    size: Annotated[int, Field(ge=8)] = 32,
    noise: NonNegative = 0.15,
    seed: int = 0,
    target: Target = "pixels",
) -> Dataset:
    """Draw grey images of discs, squares and crosses; predict the class of each pixel.

    Parameters
    ----------
    clients
        Number of clients.
    rows
        Number of training images of each client.
    test_rows
        Number of test images of each client.
    size
        Height and width of an image in pixels.
    noise
        Standard deviation of the noise of each pixel, where black is 0 and white 1.

    Notes
    -----
    An image has one to three shapes; later ones cover earlier ones. Clients differ: each favours a
    class of shapes, has its own brightness, and some draw dark shapes on a light ground. All images
    are drawn from the run's seed, so every seed has different images. Pooled normalization: mean
    and deviation over all pixels of the training images.

    Examples
    --------
    A recipe's section::

        [data]
        name = "shapes"

        [objective]
        name = "segmentation"

        [partition]
        name = "natural"

        [model]
        name = "unet"
    """
    if target != "pixels":
        raise DataError("shapes has classes of pixels: use objective.name = 'segmentation'")
    key = random.key(seed, "shapes")
    parts = []
    for split, count in (("train", rows), ("test", test_rows)):
        drawn = [
            _drawn(random.fold(key, split, client), client, count, size, noise)
            for client in range(clients)
        ]
        x, y = (torch.cat(part) for part in zip(*drawn, strict=True))
        parts.append((x, y, torch.arange(clients).repeat_interleave(count)))
    (x, y, owner), (x_test, y_test, owner_test) = parts
    return Dataset(
        "shapes",
        x,
        y,
        x_test,
        y_test,
        len(CLASSES),
        WHITE,
        *moments(x, WHITE),
        classes=CLASSES,
        clients=owner,
        clients_test=owner_test,
        client_names=tuple(f"artist {client}" for client in range(clients)),
        target="pixels",
        measured=frozenset({"moments"}),
    )


def _drawn(key: Tensor, client: int, count: int, size: int, noise: float) -> tuple[Tensor, Tensor]:
    """Return a client's images, uint8 (rows, 1, size, size), and classes (rows, size, size)."""
    y = torch.zeros(count, size, size, dtype=torch.int16)
    number = 1 + random.integers(random.fold(key, "number"), (count,), MOST_SHAPES)
    favourite = 1 + client % (len(CLASSES) - 1)
    for place in range(MOST_SHAPES):
        at = random.fold(key, "shape", place)
        other = 1 + random.integers(random.fold(at, "class"), (count,), len(CLASSES) - 1)
        favours = random.uniform(random.fold(at, "favours"), (count,)) < FAVOURED
        kind = torch.where(favours, favourite, other)
        inside = _inside(at, kind, count, size) & (place < number).view(-1, 1, 1)
        y = torch.where(inside, kind.view(-1, 1, 1).to(torch.int16), y)
    dark, light = 0.25 + 0.05 * (client % 3), 0.65 + 0.05 * (client % 4)
    ground, ink = (light, dark) if client % 2 else (dark, light)
    shade = torch.where(y > 0, ink, ground)
    shade = shade + noise * random.normal(random.fold(key, "noise"), (count, size, size))
    return (shade.clamp(0, 1) * WHITE).round().to(torch.uint8).unsqueeze(1), y


def _inside(key: Tensor, kind: Tensor, count: int, size: int) -> Tensor:
    """Return which pixels lie inside a drawn shape of each image: (rows, size, size)."""
    half = SMALLEST + (LARGEST - SMALLEST) * random.uniform(random.fold(key, "half"), (count, 1, 1))
    middle = random.uniform(random.fold(key, "middle"), (count, 2))
    line = (torch.arange(size) + 0.5) / size
    down = (line.view(1, -1, 1) - middle[:, 0].view(-1, 1, 1)) / half
    across = (line.view(1, 1, -1) - middle[:, 1].view(-1, 1, 1)) / half
    square = (down.abs() < 1) & (across.abs() < 1)
    disc = down.square() + across.square() < 1
    cross = square & ((down.abs() < 1 / 3) | (across.abs() < 1 / 3))
    of_class = torch.stack([disc, square, cross])  # in the order of CLASSES
    return of_class[kind - 1, torch.arange(count)]
