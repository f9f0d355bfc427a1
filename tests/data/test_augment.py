"""Augmentation against a loop over pixels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data import Augmentation
from fedgist.data.augment import crop_and_flip

KEYS = random.fold(random.key(0), torch.arange(3))
KINDS: list[tuple[Augmentation, ...]] = [
    (),
    ("crop",),
    ("flip",),
    ("crop", "flip"),
    ("flip_vertical",),
    ("crop", "flip", "flip_vertical"),
]


def images(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(1, 200, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def moved(image: Tensor, down: int, across: int, *, mirrored: bool, turned: bool) -> Tensor:
    """Shift by (down, across), black outside, then mirror and turn: pixel by pixel."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                a, b = i + down, j + across
                if 0 <= a < height and 0 <= b < width:
                    out[c, i, j] = image[c, a, b]
    out = out.flip(-1) if mirrored else out
    return out.flip(-2) if turned else out


def draws(
    kinds: tuple[Augmentation, ...], key: Tensor, batch: int
) -> list[tuple[int, int, bool, bool]]:
    zero = torch.zeros(batch, dtype=torch.int64)
    down = (
        random.integers(random.fold(key, "crop", 0), (batch,), 9) - 4 if "crop" in kinds else zero
    )
    across = (
        random.integers(random.fold(key, "crop", 1), (batch,), 9) - 4 if "crop" in kinds else zero
    )
    mirrored = random.integers(random.fold(key, "flip"), (batch,), 2) if "flip" in kinds else zero
    turned = zero
    if "flip_vertical" in kinds:
        turned = random.integers(random.fold(key, "flip_vertical"), (batch,), 2)
    flags = (mirrored == 1).tolist(), (turned == 1).tolist()
    return list(zip(down.tolist(), across.tolist(), *flags, strict=True))


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_are_moved_and_mirrored_as_drawn(
    kinds: tuple[Augmentation, ...], dtype: torch.dtype
) -> None:
    # rejects edges that repeat instead of black ones, height taken for width, and one shift for a
    # whole batch
    x = images(dtype, 3, 4, 2, 6, 5)
    before = x.clone()
    out = crop_and_flip(x, KEYS, kinds)
    assert torch.equal(x, before)
    assert out.dtype == dtype
    for k, key in enumerate(KEYS):
        for b, (down, across, mirrored, turned) in enumerate(draws(kinds, key, 4)):
            expected = moved(x[k, b], down, across, mirrored=mirrored, turned=turned)
            assert torch.equal(out[k, b], expected)


def test_a_clients_images_are_changed_alike_beside_anybody() -> None:
    x = images(torch.uint8, 3, 4, 1, 8, 8)
    together = crop_and_flip(x, KEYS, ("crop", "flip"))
    for k in range(3):
        assert torch.equal(
            together[k], crop_and_flip(x[k : k + 1], KEYS[k : k + 1], ("crop", "flip"))[0]
        )


def test_shifts_reach_four_pixels_each_way_and_half_the_images_are_mirrored() -> None:
    x = torch.zeros(1, 2000, 1, 16, 16)
    x[..., 8, 7] = 1.0
    place = crop_and_flip(x, KEYS[:1], ("crop",))[0, :, 0].flatten(1).argmax(1)
    for shift in (place // 16 - 8, place % 16 - 7):
        assert set(shift.tolist()) == set(range(-4, 5))
        assert float(shift.double().mean()) == pytest.approx(0.0, abs=0.25)
    mirrored = crop_and_flip(x, KEYS[:1], ("flip",))[0, :, 0, 8, 8]
    assert float(mirrored.mean()) == pytest.approx(0.5, abs=0.05)
