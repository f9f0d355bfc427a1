"""The grid of noise of the system: sums are exact on it, and what does not fit is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedgist.core.privacy import Privacy, PrivateSteps
from fedgist.errors import RecipeError
from fedgist.recipe.privacy_section import PrivacySection
from fedgist.testing.small_worlds import SIZES, blobs, world
from fedgist.world.privacy_budget import check_noise, grids

REAL: dict[str, Any] = {"epsilon": 1.0, "delta": 0.01, "noise": "system"}
STEPS: dict[str, Any] = {"bodies": "dp_sgd", "sampling_rate": 0.5, "gradient_clip": 0.3}


def section(**keys: Any) -> PrivacySection:
    return PrivacySection.model_validate(REAL | {"unit": "record", "clip": 3.0} | keys)


@pytest.mark.parametrize(
    ("keys", "largest"),
    [
        ({}, 3.0 * 1024),  # 700 rows in all
        ({"where": "local"}, 3.0 * 512),  # 400 at one client
        ({"clip": 0.25}, 1024),  # the constant of each row is larger
        ({"unit": "client"}, 3.0 * 3),
        ({"unit": "client", "where": "local"}, 3.0),
    ],
)
def test_a_sum_of_all_terms_has_24_digits_and_not_fewer(
    keys: dict[str, Any], largest: float
) -> None:
    grid, steps = grids(section(**keys), [400, 200, 100])
    assert math.log2(grid).is_integer()
    assert 2**23 < largest / grid <= 2**24
    assert steps == 0


def test_a_row_more_does_not_show_in_the_grid() -> None:
    assert grids(section(), [600, 99]) == grids(section(), [600, 100]) == grids(section(), [513])


def test_private_steps_have_a_grid_of_their_own() -> None:
    _, steps = grids(section(**STEPS), [400, 200])
    assert 2**39 < 0.3 * 512 / steps <= 2**40


def test_noise_of_the_seed_has_none() -> None:
    assert grids(section(noise="seed"), [10]) == (0.0, 0.0)
    privacy = world("fedlog", privacy=REAL | {"unit": "record", "clip": 3.0, "noise": "seed"})
    assert privacy.server.task.privacy is not None
    assert privacy.server.task.privacy.source == "seed"


def test_the_task_has_the_grid_of_its_rows() -> None:
    task = world("fedlog", privacy=REAL | {"unit": "record", "clip": 3.0}).server.task
    assert task.privacy is not None
    assert task.privacy.source == "system"
    assert task.privacy.grid == grids(section(), SIZES)[0]


def test_what_does_not_fit_the_grid_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"privacy\.clip = 5000: sums over 65536 rows"):
        grids(section(clip=5000.0), [60_000])
    with pytest.raises(RecipeError, match=r"deviation 0\.0001 is coarse beside .* steps of 0\.25"):
        check_noise(Privacy("client", "central", 1.0, 1e-4, grid=0.25))
    with pytest.raises(RecipeError, match="more digits than numbers"):
        check_noise(
            Privacy("record", "central", 1.0, 1.0, PrivateSteps(1.0, 1.0, 0.5, 2.0**-50), 2.0**-9)
        )
    check_noise(Privacy("client", "central", 1.0, 1.0))


def test_weights_of_rows_are_off_the_grid() -> None:
    weights = {"weight": torch.ones(32)}
    with pytest.raises(RecipeError, match=r"takes rows off the grid of privacy\.noise"):
        world(
            "repshare",
            options={"pick_rate": 0.5, "release_weight": "weight"},
            given={"data": replace(blobs(), annotations=weights)},
            privacy=REAL | {"unit": "record", "clip": 3.0, "where": "local"},
        )
