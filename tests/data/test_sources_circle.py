"""The circle in a square: the paper's points, drawn from the run's seed alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedgist.data.sources.loading import load_data
from fedgist.errors import InputError
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of


def test_classes_and_clients_are_those_of_the_paper() -> None:
    data = load_data("circle", seed=3)
    x, x_test = data.x.double().numpy(), data.x_test.double().numpy()
    assert x.shape == (80, 2)
    assert x_test.shape == (1000, 2)
    for points, labels in ((x, data.y), (x_test, data.y_test)):
        assert np.abs(points).max() <= 5
        inside = np.hypot(points[:, 0], points[:, 1]) < 26 / 7
        assert np.array_equal(inside, labels.numpy().astype(bool))
    assert data.clients is not None
    assert data.clients_test is not None
    left = data.clients.numpy() == 0
    assert left.sum() == 40
    assert x[left, 0].max() < np.median(x[:, 0]) < x[~left, 0].min()
    assert x_test[data.clients_test.numpy() == 0, 0].max() < x[~left, 0].min()
    assert x_test[data.clients_test.numpy() == 1, 0].min() >= x[~left, 0].min()


def test_points_are_uniform() -> None:
    x = torch.cat([load_data("circle", seed=seed).x_test for seed in range(20)]).double()
    assert float(x.mean()) == pytest.approx(0, abs=5 * 2.89 / math.sqrt(x.numel()))
    assert float(x.var()) == pytest.approx(100 / 12, rel=0.02)  # of a side of 10
    assert float((x[:, 0] * x[:, 1]).mean()) == pytest.approx(0, abs=0.3)
    share = torch.cat([load_data("circle", seed=seed).y_test for seed in range(20)]).double().mean()
    assert float(share) == pytest.approx(math.pi * (26 / 7) ** 2 / 100, abs=0.02)


def test_points_are_the_same_everywhere_and_others_for_another_seed() -> None:
    # bit for bit: the first numbers of a run of seed 0, written down
    first = [[2.4421095848083496, -1.4792430400848389], [3.4192352294921875, 3.7789864540100098]]
    assert load_data("circle").x[:2].tolist() == first
    assert not torch.equal(load_data("circle", seed=0).x, load_data("circle", seed=1).x)
    recipe = {"data": {"name": "circle"}, "partition": {"name": "natural"}}
    worlds = [world_of(make({**recipe, "seed": seed})) for seed in (0, 1)]
    for seed, world in enumerate(worlds):
        assert torch.equal(world.data.x, load_data("circle", seed=seed).x)
        assert world.partition.names == ("left", "right")
        assert [len(world.partition.train[i]) for i in (0, 1)] == [40, 40]


def test_its_seed_is_the_runs() -> None:
    with pytest.raises(InputError, match=r"data\.seed: unknown key of circle"):
        make({"data": {"name": "circle", "seed": 3}})
