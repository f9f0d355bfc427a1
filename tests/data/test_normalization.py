"""Whose rows normalize whose inputs: all training rows, each client's own, stated moments, none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.examples import Examples, by_client, examples
from fedgist.data.normalization import client_moments, with_moments
from fedgist.data.partition import Partition
from fedgist.data.table_columns import Column
from fedgist.errors import DataError

RNG = np.random.default_rng(0)


def images(rows: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(0, 256, (rows, 3, 2, 2), dtype=np.uint8))


def numbers(rows: int) -> torch.Tensor:
    return torch.from_numpy(RNG.normal(5, 3, (rows, 4)).astype(np.float32))


def made(x: torch.Tensor, x_test: torch.Tensor) -> Dataset:
    y, y_test = (torch.zeros(len(rows), dtype=torch.int64) for rows in (x, x_test))
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    return Dataset("d", x, y, x_test, y_test, 1, scale=scale)


IMAGES, NUMBERS = made(images(12), images(6)), made(numbers(12), numbers(6))
PARTS = Partition(
    Rows.of([torch.tensor([7, 1, 3]), torch.tensor([0, 2, 4, 6])]),
    Rows.of([torch.tensor([5]), torch.tensor([8, 9])]),
    Rows.of([torch.tensor([0, 5]), torch.tensor([2, 1, 3])]),
)


def by_hand(data: Dataset, x: torch.Tensor, client: int) -> np.ndarray:
    """Rows as client ``client`` sees them, by NumPy."""
    axes = (0, *range(2, data.x.dim()))
    own = data.x[PARTS.train[client]].double().numpy() / data.scale
    mean, std = own.mean(axes, keepdims=True), own.std(axes, keepdims=True)
    return np.asarray((x.double().numpy() / data.scale - mean) / std)


@pytest.mark.parametrize("data", [IMAGES, NUMBERS], ids=["images", "numbers"])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_each_client_sees_its_rows_by_its_own_training_rows(data: Dataset, split: str) -> None:
    train, test = by_client(data, PARTS, *examples(data))
    source, rows = (test, PARTS.test) if split == "test" else (train, getattr(PARTS, split))
    x = data.x_test if split == "test" else data.x
    together = source.batch(rows.table([0, 1]))
    for client in range(2):
        own = rows[client]
        wanted = by_hand(data, x[own], client)
        assert together.x[client, : len(own)].numpy() == pytest.approx(wanted, abs=1e-5)
        alone = source.batch(own.unsqueeze(0))
        assert torch.equal(alone.x[0], together.x[client, : len(own)])
    merged = source.batch(rows.merged().rows.unsqueeze(0))  # one client with everybody's rows
    wanted = np.concatenate([by_hand(data, x[rows[client]], client) for client in range(2)])
    assert merged.x[0].numpy() == pytest.approx(wanted, abs=1e-5)


def test_what_a_site_gets_holds_no_others_moments() -> None:
    train, _ = by_client(NUMBERS, PARTS, *examples(NUMBERS))
    own = train.only(PARTS.train[1])
    assert len(own.factor) == 1
    assert torch.equal(
        own.batch(torch.arange(4).unsqueeze(0)).x, train.batch(PARTS.train[1].unsqueeze(0)).x
    )


def test_rows_of_nobody_are_known() -> None:
    train, test = by_client(NUMBERS, PARTS, *examples(NUMBERS))
    assert (train.complete, test.complete) == (False, False)  # rows 10, 11 and test row 4
    everybody = replace(PARTS, test=Rows.of([torch.tensor([0, 5, 4]), torch.tensor([2, 1, 3])]))
    assert by_client(NUMBERS, everybody, *examples(NUMBERS))[1].complete
    assert examples(NUMBERS)[0].complete


@pytest.mark.parametrize(("split", "row"), [("train", 7), ("test", 5)])
def test_a_row_of_two_clients_is_refused(split: str, row: int) -> None:
    rows = getattr(PARTS, split)
    shared = Rows.of([rows[0], torch.cat([rows[1], torch.tensor([row])])])
    word = "training" if split == "train" else "test"
    parts = replace(PARTS, train=shared) if split == "train" else replace(PARTS, test=shared)
    with pytest.raises(DataError, match=f"and {word} row {row} belongs to several"):
        by_client(NUMBERS, parts, *examples(NUMBERS))


def test_without_owners_nothing_changes() -> None:
    plain = examples(NUMBERS)[0]
    assert isinstance(plain, Examples)
    assert (plain.owner, plain.factor.shape) == (None, (1,))


MIXED = replace(
    NUMBERS,
    columns=(Column("a"), Column("town", ("Bonn", "Ulm")), Column("b")),
    mean=(1.0, 0.0, 0.0, 2.0),
    std=(3.0, 1.0, 1.0, 4.0),
)


def test_moments_that_a_recipe_states() -> None:
    def moments(data: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return data.mean, data.std

    assert moments(with_moments(IMAGES, "pooled", [0.5], [0.2])) == ((0.5,) * 3, (0.2,) * 3)
    assert moments(with_moments(IMAGES, "client", [1, 2, 3], [0.2])) == ((1, 2, 3), (0.2,) * 3)
    assert moments(with_moments(MIXED, "pooled", [5, 6], [7, 8])) == ((5, 0, 0, 6), (7, 1, 1, 8))
    assert with_moments(MIXED, "pooled") is MIXED
    assert moments(with_moments(MIXED, "none")) == ((0.0,), (1.0,))
    assert with_moments(IMAGES, "none").scale == 255  # images are still 0 to 1
    none = examples(with_moments(IMAGES, "none"))[0].batch(torch.arange(12).unsqueeze(0))
    assert none.x[0].numpy() == pytest.approx(IMAGES.x.numpy() / 255)


@pytest.mark.parametrize(
    ("normalize", "mean", "std", "message"),
    [
        ("none", [1.0], [1.0], "data.normalize = 'none' leaves inputs as they are: leave out"),
        ("pooled", [1.0], [], "data.std has 0 numbers; d needs 2, or 1 for all"),
        ("client", [], [1.0], "data.mean has 0 numbers"),
        ("pooled", [1.0, 2.0, 3.0, 4.0], [1.0], "data.mean has 4 numbers; d needs 2"),
    ],
)
def test_moments_that_do_not_fit(
    normalize: str, mean: list[float], std: list[float], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        with_moments(MIXED, normalize, mean, std)  # type: ignore[arg-type]


def test_columns_of_categories_stay_as_they_are() -> None:
    mean, std = client_moments(MIXED, PARTS.train)
    assert mean[:, 1:3].tolist() == [[0, 0], [0, 0]]
    assert std[:, 1:3].tolist() == [[1, 1], [1, 1]]
    assert mean[:, 0].numpy() == pytest.approx(
        [MIXED.x[PARTS.train[i], 0].double().mean().item() for i in range(2)]
    )


@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.integers(0, 2**31))
def test_normalized_rows_of_each_client_have_mean_0_and_deviation_1(
    owners: list[int], seed: int
) -> None:
    x = np.random.default_rng(seed).normal(3, 5, (len(owners), 2)).astype(np.float32)
    data = made(torch.from_numpy(x), torch.zeros(0, 2))
    who = sorted(set(owners))
    rows = Rows.of([(torch.tensor(owners) == client).nonzero()[:, 0] for client in who])
    none = Rows.of([torch.zeros(0, dtype=torch.int64)] * len(who))
    train, _ = by_client(data, Partition(rows, none, none), *examples(data))
    for client in range(len(who)):
        seen = train.batch(rows[client].unsqueeze(0)).x[0].double().numpy()
        assert seen.mean(0) == pytest.approx([0, 0], abs=1e-4)
        alone = len(rows[client]) == 1  # one row: only centred
        assert seen.std(0) == pytest.approx([0, 0] if alone else [1, 1], abs=1e-3)
