"""Bundled data sets: diabetes against scikit-learn's own loader, shapes by their images."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

from fedgist.data.sources.diabetes import COLUMNS, diabetes
from fedgist.data.sources.shapes import CLASSES, shapes
from fedgist.errors import DataError


def test_diabetes_has_the_patients_of_scikit_learn_by_age() -> None:
    given = load_diabetes(scaled=False)
    data, test = diabetes(), np.arange(442) % 5 == 0
    np.testing.assert_allclose(data.x.numpy(), given.data[~test], rtol=1e-6)
    np.testing.assert_allclose(data.x_test.numpy(), given.data[test], rtol=1e-6)
    assert np.array_equal(data.y.flatten().numpy(), given.target[~test])
    assert np.array_equal(data.y_test.flatten().numpy(), given.target[test])
    assert tuple(given.feature_names) == COLUMNS
    np.testing.assert_allclose(data.mean, given.data[~test].mean(0), rtol=1e-4)
    assert data.clients is not None
    ages = [data.x[data.clients == client, 0] for client in range(5)]
    # rejects groups in the order of the file: patients of a client are younger than the next one's
    assert all(a.max() <= b.min() for a, b in itertools.pairwise(ages))
    assert all(50 < len(group) < 90 for group in ages)


def test_shapes_are_seen_where_their_labels_say() -> None:
    data = shapes(clients=3, rows=30, noise=0.0)
    assert data.x.shape == (90, 1, 32, 32)
    assert data.y.shape == (90, 32, 32)
    assert set(data.y.flatten().tolist()) == set(range(len(CLASSES)))
    assert data.clients is not None
    for image, label, client in zip(data.x[:, 0], data.y, data.clients.tolist(), strict=True):
        ground, ink = {*image[label == 0].tolist()}, {*image[label > 0].tolist()}
        assert len(ground) == 1
        assert len(ink) <= 1  # without noise, a shape is one shade, of whatever class
        if ink:  # every second client draws dark shapes
            assert (min(ink) < min(ground)) == bool(client % 2)
    for client in range(3):  # each favours its own class
        counts = data.y[data.clients == client].flatten().bincount(minlength=4)[1:]
        assert counts.argmax() == client % 3


def test_shapes_are_drawn_from_the_seed() -> None:
    assert torch.equal(shapes(rows=2, seed=3).x, shapes(rows=2, seed=3).x)
    assert not torch.equal(shapes(rows=2, seed=3).x, shapes(rows=2, seed=4).x)
    few, many = shapes(clients=2, rows=2), shapes(clients=3, rows=2)
    assert torch.equal(few.x, many.x[:4])  # another client changes no images of the others


@pytest.mark.parametrize("source", [diabetes, shapes])
def test_another_target_is_refused(source: object) -> None:
    with pytest.raises(DataError, match=r"use objective\.name = '"):
        source(target="class")  # type: ignore[operator]
