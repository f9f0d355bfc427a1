"""Augmentation against a loop over pixels."""

from __future__ import annotations

import colorsys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedgist.core import random
from fedgist.data import Augmentation, augment
from fedgist.data.augment import augmented, crop_and_flip, crops

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


def test_a_batch_may_share_one_shift_and_one_mirroring() -> None:
    # rejects a draw for each image, one for all clients, and shifts of 4 pixels, which
    # the offsets of FedJAX, from 0 to 7, reach on one side alone
    x = torch.zeros(300, 5, 1, 16, 16)
    x[..., 8, 7] = 1.0
    keys = random.fold(random.key(0), torch.arange(300))
    place = crop_and_flip(x, keys, ("batch_crop",))[:, :, 0].flatten(2).argmax(2)
    assert torch.equal(place, place[:, :1].expand(300, 5))
    for shift in (8 - place[:, 0] // 16, 7 - place[:, 0] % 16):
        assert set(shift.tolist()) == set(range(-4, 4))
    mirrored = crop_and_flip(x, keys, ("batch_flip",))[:, :, 0, 8, 8]
    assert torch.equal(mirrored, mirrored[:, :1].expand(300, 5))
    assert 0.4 < float(mirrored.mean()) < 0.6


VIEW: tuple[Augmentation, ...] = ("resized_crop", "flip", "color_jitter", "grayscale")


def pictures(count: int, side: int = 8) -> Tensor:
    return random.uniform(random.key(3), (count, 3, side, side + 2))


def test_a_resized_crop_is_what_interpolation_makes_of_the_part_that_was_drawn() -> None:
    x = images(torch.uint8, 3, 5, 3, 8, 10)
    out = augmented(x, KEYS, ("resized_crop",), 255.0)
    drawn = crops(random.fold(KEYS.unsqueeze(1), "resized_crop"), 5, 8, 10)
    for client in range(3):
        for i in range(5):
            top, left, tall, wide = (int(part[client, i]) for part in drawn)
            part = x[client, i, :, top : top + tall, left : left + wide].float()
            whole = interpolate(part.unsqueeze(0), (8, 10), mode="bilinear", align_corners=False)
            assert torch.allclose(out[client, i], whole[0], atol=1e-3)


def test_crops_lie_within_the_image_and_have_the_shares_and_shapes_asked_for() -> None:
    top, left, tall, wide = crops(random.key(0).view(1, 1), 4000, 32, 32)
    assert int(top.min()) == int(left.min()) == 0
    assert int((top + tall).max()) <= 32
    assert int((left + wide).max()) <= 32
    area = (tall * wide) / 32**2
    assert 0.17 < float(area.min()) < 0.25
    assert float(area.mean()) == pytest.approx(0.57, abs=0.05)  # large ones fit less often
    ratio = wide / tall
    assert 0.65 < float(ratio.min()) < 0.78
    assert 1.28 < float(ratio.max()) < 1.5


def test_every_change_of_colours_is_that_of_its_definition() -> None:
    x = pictures(4)
    by = torch.tensor([-1.0, -0.3, 0.4, 0.9]).view(-1, 1, 1, 1)
    grey = 0.2989 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    share = 1 + 0.8 * by
    mean = grey.mean((1, 2)).view(-1, 1, 1, 1)
    expected = {
        augment.brightened: share * x,
        augment.contrasted: share * x + (1 - share) * mean,
        augment.saturated: share * x + (1 - share) * grey.unsqueeze(1),
    }
    for change, wanted in expected.items():
        assert torch.allclose(change(x, by), wanted.clamp(0, 1), atol=1e-5)
    turned = augment.hue_shifted(x, by)
    for n in range(4):
        for i in range(x.shape[2]):
            for j in range(x.shape[3]):
                h, s, v = colorsys.rgb_to_hsv(*x[n, :, i, j].tolist())
                moved = (h + 0.2 * float(by[n])) % 1.0
                wanted_pixel = colorsys.hsv_to_rgb(moved, s, v)
                assert turned[n, :, i, j].tolist() == pytest.approx(wanted_pixel, abs=1e-4)
    plain = torch.full((1, 3, 2, 2), 0.5)  # grey has no hue
    assert torch.equal(augment.hue_shifted(plain, by[:1]), plain)


def test_as_many_images_change_their_colours_as_are_meant_to() -> None:
    x, key = pictures(1).expand(4000, -1, -1, -1), random.key(1).view(1, 1)
    same = (augment.jittered(x, key, 4000) == x).flatten(1).all(1)
    assert float(same.float().mean()) == pytest.approx(0.2, abs=0.03)
    out = augment.grey_images(x, key, 4000)
    grey = (out[:, 0] == out[:, 1]).flatten(1).all(1)
    assert float(grey.float().mean()) == pytest.approx(0.2, abs=0.03)


def test_the_changes_come_in_an_order_of_each_images_own() -> None:
    x, key = pictures(60), random.key(1).view(1, 1)
    draws = {
        what: random.uniform(random.fold(key.unsqueeze(-1), what), (60, 4))[0]
        for what in ("order", "factor")
    }
    orders = draws["order"].argsort(-1).tolist()
    chosen = random.uniform(random.fold(key, "chosen"), (60,))[0] < 0.8
    out = augment.jittered(x, key, 60)
    for i in range(60):
        image = x[i : i + 1]
        for number in orders[i] if chosen[i] else ():
            by = (2 * draws["factor"][i, number] - 1).view(1, 1, 1, 1)
            image = augment.CHANGES[number](image, by)
        assert torch.allclose(out[i], image[0], atol=1e-6)
    assert len({tuple(order) for order in orders}) > 15  # of 24


def test_a_clients_views_depend_on_its_own_key_alone() -> None:
    x = images(torch.uint8, 3, 6, 3, 8, 8)
    together = augmented(x, KEYS, VIEW, 255.0)
    for client in range(3):
        alone = augmented(x[client : client + 1], KEYS[client : client + 1], VIEW, 255.0)
        assert torch.equal(alone[0], together[client])
    assert together.dtype == torch.float32
    assert float(together.min()) >= 0
    assert float(together.max()) <= 255.001
    assert not torch.equal(augmented(x, KEYS + 1, VIEW, 255.0), together)
