"""Feature shift: each client sees the same kind of images in another way.

Images of client i of N are turned, coloured and made noisy by amounts that grow with i, so that
what a class looks like differs between clients and its share does not (Li, Diao, Chen, He 2022,
"Federated learning on non-IID data silos: an experimental study", for noise).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedgist.core import random
from fedgist.data.dataset import Dataset
from fedgist.data.examples import owners
from fedgist.data.partition import Partition
from fedgist.errors import DataError

AT_ONCE = 1024  # images that are changed together


def shifted(
    data: Dataset, parts: Partition, key: Tensor, *, rotate: float, color: float, noise: float
) -> Dataset:
    """Return the data with the images of each client as that client sees them.

    ``key`` () draws colours and noise. Rows without a client stay as they are. Client i of N turns
    its images by ``rotate * i / (N - 1)`` degrees to the left. It multiplies each channel by its
    own factor from ``1 - color`` to ``1 + color``. It adds Gaussian noise with a deviation of
    ``noise * (i + 1) / N``, where 1 is the range of an image's numbers. Numbers outside that range
    are cut; bytes are rounded.

    Raises
    ------
    DataError
        If rows are no images in memory, or a row belongs to several clients.
    """
    lazy = not (isinstance(data.inputs, Tensor) and isinstance(data.inputs_test, Tensor))
    if lazy or data.text or len(data.input_shape) != len(("channel", "height", "width")):
        raise DataError(f"data.shift is for images in memory; {data.name} has other inputs")
    about = key, len(parts.train), data.scale, (rotate, color, noise)
    train = owners([parts.train, parts.validation], len(data.y), "training", "data.shift")
    test = owners([parts.test], len(data.y_test), "test", "data.shift")
    x = _changed(data.x, train, "train", *about)
    return replace(data, x=x, x_test=_changed(data.x_test, test, "test", *about))


def _changed(
    x: Tensor,
    owner: Tensor,
    split: str,
    key: Tensor,
    clients: int,
    scale: float,
    amounts: tuple[float, float, float],
) -> Tensor:
    """Return images (rows, channels, height, width), each as its ``owner`` (rows,) has it."""
    rotate, color, noise = amounts
    out = x.clone()
    drawn = random.uniform(random.fold(key, "color"), (clients, x.shape[1]))
    factors = 1 + color * (2 * drawn - 1)
    for rows in torch.split((owner >= 0).nonzero().flatten(), AT_ONCE):
        of = owner[rows]
        images = x[rows].to(torch.float32) / scale
        if rotate:
            images = _turned(images, rotate * of / max(clients - 1, 1))
        images = images * factors[of][:, :, None, None]
        if noise:
            keys = random.fold(random.fold(key, "noise", split), rows)
            drawn_noise = torch.stack([random.normal(k, tuple(x.shape[1:])) for k in keys.unbind()])
            images = images + (noise * (of + 1) / clients)[:, None, None, None] * drawn_noise
        images = images.clamp(0, 1) * scale
        out[rows] = images.to(x.dtype) if x.is_floating_point() else images.round().to(x.dtype)
    return out


def _turned(images: Tensor, degrees: Tensor) -> Tensor:
    """Return images (rows, channels, height, width), turned to the left by ``degrees`` (rows,).

    Numbers between pixels are interpolated, and those beyond the edge are the edge's.
    """
    angle = degrees.to(torch.float32) * math.pi / 180
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    height, width = images.shape[-2:]
    # in coordinates from -1 to 1, so that pixels stay square
    rows = [cos, -sin * height / width, zero], [sin * width / height, cos, zero]
    theta = torch.stack([torch.stack(row, 1) for row in rows], 1)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
