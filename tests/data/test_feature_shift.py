"""Feature shift: turned, coloured and noisy images of each client, and what cannot be shifted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.feature_shift import shifted
from fedgist.data.partition import Partition
from fedgist.errors import DataError, RecipeError
from fedgist.federation.agreement.recipe_check import check_setup
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.testing.small_worlds import blobs, world, world_of
from three_sites import SAME, parsed, recipe

KEY = random.key(3)
COUNT, CLIENTS = 12, 3


def images(*, channels: int = 3, side: int = 6, bytes_: bool = True) -> Dataset:
    draw = np.random.default_rng(2)
    x = torch.from_numpy(draw.integers(0, 256, (COUNT, channels, side, side)))
    x = x.to(torch.uint8) if bytes_ else x.float() / 255
    y = torch.arange(COUNT) % 2
    return Dataset("images", x, y, x.clone(), y, 2, scale=255.0 if bytes_ else 1.0)


def thirds() -> Partition:
    rows = Rows.of(list(torch.split(torch.arange(COUNT), COUNT // CLIENTS)))
    return Partition(rows, Rows.of([torch.zeros(0, dtype=torch.int64)] * CLIENTS), rows)


def changed(data: Dataset, **amounts: float) -> Tensor:
    found = shifted(data, thirds(), KEY, **{"rotate": 0.0, "color": 0.0, "noise": 0.0} | amounts)
    assert found.x.dtype == data.x.dtype
    return found.x.double()


def of(x: Tensor, client: int) -> Tensor:
    return x[client * 4 : client * 4 + 4]


@pytest.mark.parametrize("bytes_", [True, False])
def test_images_of_the_last_client_are_turned_and_those_of_the_first_are_not(
    *, bytes_: bool
) -> None:
    # rejects turns to the right, and one angle for all
    data = images(bytes_=bytes_)
    x = changed(data, rotate=180.0)
    plain = data.x.double()
    torch.testing.assert_close(of(x, 0), of(plain, 0), atol=1e-3, rtol=0)
    for client, quarters in ((1, 1), (2, 2)):
        expected = torch.rot90(of(plain, client), quarters, (2, 3))
        torch.testing.assert_close(of(x, client), expected, atol=1e-3, rtol=0)


def test_images_that_are_no_squares_are_turned_without_a_stretch() -> None:
    x = torch.zeros(1, 1, 9, 21)
    x[0, 0, 4, 10] = 1.0
    x[0, 0, 4, 13] = 1.0  # three to the right of the middle
    data = Dataset(
        "wide", x, torch.zeros(1, dtype=torch.int64), x.clone(), torch.zeros(1).long(), 2
    )
    rows = Rows.of([torch.zeros(0, dtype=torch.int64), torch.tensor([0])])
    parts = Partition(rows, Rows.of([torch.zeros(0, dtype=torch.int64)] * 2), rows)
    turned = shifted(data, parts, KEY, rotate=90.0, color=0.0, noise=0.0).x[0, 0]
    assert turned[4, 10] == pytest.approx(1.0, abs=1e-4)
    assert turned[1, 10] == pytest.approx(1.0, abs=1e-4)  # three above it


def test_each_client_has_one_factor_for_each_channel() -> None:
    data = images(bytes_=False)
    dark = replace(data, x=data.x / 3, x_test=data.x_test / 3)
    ratio = changed(dark, color=0.5) / dark.x.double()
    factors = []
    for client in range(CLIENTS):
        own = of(ratio, client).permute(1, 0, 2, 3).flatten(1)
        assert float((own - own[:, :1])[own.isfinite()].abs().max()) < 1e-4
        factors.append(own[:, 0])
    all_of_them = torch.stack(factors)
    assert (all_of_them - 1).abs().max() <= 0.5
    assert len(set(all_of_them.flatten().tolist())) == CLIENTS * 3


def test_noise_grows_with_the_client() -> None:
    grey = images(channels=1, side=40, bytes_=False)
    grey = replace(grey, x=torch.full_like(grey.x, 0.5), x_test=torch.full_like(grey.x_test, 0.5))
    x = changed(grey, noise=0.12)
    for client in range(CLIENTS):
        own = of(x, client)
        assert float(own.std()) == pytest.approx(0.12 * (client + 1) / CLIENTS, rel=0.05)
        assert float(own.mean()) == pytest.approx(0.5, abs=0.01)
        assert not torch.equal(own[0], own[1])


def test_bytes_stay_in_their_range() -> None:
    x = changed(images(), noise=2.0, color=1.0, rotate=33.0)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 255


def small(**shift: Any) -> Any:
    raw = {
        "data": {"name": "digits", "train_rows": 200, "shift": shift},
        "clients": {"num_clients": 4},
        "partition": {"name": "iid"},
    }
    return world_of(make(raw), Overrides())


def test_a_recipe_shifts_training_and_test_images_alike() -> None:
    made, plain = (
        small(rotate=90.0),
        world_of(
            make(
                {
                    "data": {"name": "digits", "train_rows": 200},
                    "clients": {"num_clients": 4},
                    "partition": {"name": "iid"},
                }
            )
        ),
    )
    last = made.partition.train[3]
    turned = torch.rot90(plain.data.x[last], 1, (2, 3))
    assert (made.data.x[last].int() - turned.int()).abs().max() <= 1
    first = made.partition.test[0]
    assert torch.equal(made.data.x_test[first], plain.data.x_test[first])
    again = small(rotate=90.0)
    assert torch.equal(made.data.x, again.data.x)


def test_what_cannot_be_shifted_is_said() -> None:
    with pytest.raises(DataError, match=r"data.shift is for images in memory; blobs has other"):
        shifted(blobs(), thirds(), KEY, rotate=1.0, color=0.0, noise=0.0)
    every = Rows.of([torch.arange(COUNT)] * CLIENTS)
    shared = replace(thirds(), test=every)
    with pytest.raises(DataError, match=r"data.shift needs rows of one client each, and te"):
        shifted(images(), shared, KEY, rotate=1.0, color=0.0, noise=0.0)
    with pytest.raises(RecipeError, match=r"give rotate, color or noise"):
        small()
    with pytest.raises(RecipeError, match=r"data.shift.rotate"):
        small(rotate=-1.0)
    with pytest.raises(DataError, match=r"data.shift is for images"):
        world("fedavg", data={"shift": {"noise": 0.1}})
    federated = parsed(recipe("fedavg", **SAME, data={"shift": {"noise": 0.1}}))
    with pytest.raises(RecipeError, match=r"sites have images of their own"):
        check_setup(resolve(federated))
