"""Batches against normalization by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgist.core import random
from fedgist.data.augment import crop_and_flip
from fedgist.data.dataset import Dataset
from fedgist.data.examples import examples

G = torch.Generator().manual_seed(0)
IMAGES = Dataset(
    "images",
    torch.randint(0, 256, (9, 3, 8, 8), generator=G).to(torch.uint8),
    torch.arange(9) % 4,
    torch.randint(0, 256, (5, 3, 8, 8), generator=G).to(torch.uint8),
    torch.arange(5) % 4,
    4,
    scale=255.0,
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
)
COLUMNS = Dataset(
    "columns",
    torch.randn(9, 2, generator=G),
    torch.arange(9) % 4,
    torch.randn(5, 2, generator=G),
    torch.arange(5) % 4,
    4,
    mean=(1.0, -2.0),
    std=(0.5, 3.0),
)
ROWS = torch.tensor([[0, 8, 3], [4, -1, -1], [-1, -1, -1]])


@pytest.mark.parametrize("data", [IMAGES, COLUMNS], ids=lambda d: d.name)
@pytest.mark.parametrize("split", [0, 1], ids=["train", "test"])
def test_a_batch_is_its_rows_normalized_by_channel_or_column(data: Dataset, split: int) -> None:
    # rejects a mean that is not divided by the scale, and one for all channels
    rows = ROWS.clamp(max=4)
    x, y = ((data.x, data.y), (data.x_test, data.y_test))[split]
    batch = examples(data)[split].batch(rows)
    shape = (-1,) + (1,) * (x.dim() - 2)
    mean, std = (np.array(v).reshape(shape) for v in (data.mean, data.std))
    assert (batch.x.dtype, batch.x.shape) == (torch.float32, (3, 3, *x.shape[1:]))
    for k, line in enumerate(rows.tolist()):
        for b, row in enumerate(line):
            assert bool(batch.mask[k, b]) == (row >= 0)
            if (
                shown := row if row >= 0 else line[0]
            ) >= 0:  # an absent row looks like the client's first
                expected = (x[shown].double().numpy() / data.scale - mean) / std
                np.testing.assert_allclose(batch.x[k, b].numpy(), expected, rtol=1e-5, atol=1e-5)
            else:
                assert not batch.x[k, b].any()
            assert int(batch.y[k, b]) == (int(y[row]) if row >= 0 else 0)


def test_absent_rows_never_show_another_clients_numbers_even_where_row_0_holds_nan() -> None:
    x = COLUMNS.x.clone()
    x[0] = float("nan")
    batch = examples(replace(COLUMNS, x=x))[0].batch(ROWS)
    assert bool(batch.x[0, 0].isnan().all())
    assert bool(torch.isfinite(batch.x[1:]).all())
    assert torch.equal(batch.x[1, 1], batch.x[1, 0])
    assert not batch.x[2].any()


@pytest.mark.parametrize("data", [IMAGES, COLUMNS], ids=lambda d: d.name)
def test_making_a_batch_leaves_the_data_alone(data: Dataset) -> None:
    x, y, rows = data.x.clone(), data.y.clone(), ROWS.clone()
    examples(data, ("flip",) if data is IMAGES else ())[0].batch(
        rows, random.fold(random.key(0), torch.arange(3))
    )
    assert (torch.equal(data.x, x), torch.equal(data.y, y), torch.equal(rows, ROWS)) == (
        True,
        True,
        True,
    )


def test_training_rows_are_augmented_with_keys_and_only_then_and_test_rows_never() -> None:
    train, test = examples(IMAGES, ("crop", "flip"))
    plain, _ = examples(IMAGES)
    keys = random.fold(random.key(0), torch.arange(3))
    assert torch.equal(train.batch(ROWS).x, plain.batch(ROWS).x)
    assert torch.equal(test.batch(ROWS.clamp(max=4), keys).x, test.batch(ROWS.clamp(max=4)).x)
    by_hand = replace(
        plain, x=crop_and_flip(IMAGES.x[ROWS.clamp(min=0)], keys, ("crop", "flip")).flatten(0, 1)
    )
    places = torch.where(ROWS >= 0, torch.arange(9).view(3, 3), -1)
    present = ROWS >= 0
    assert torch.equal(train.batch(ROWS, keys).x[present], by_hand.batch(places).x[present])
    assert torch.equal(train.batch(ROWS, keys).y, plain.batch(ROWS).y)


def test_a_clients_batch_is_the_same_alone_and_beside_others() -> None:
    train, _ = examples(IMAGES, ("crop", "flip"))
    keys = random.fold(random.key(0), torch.arange(3))
    together = train.batch(ROWS, keys)
    for k in range(3):
        alone = train.batch(ROWS[k : k + 1], keys[k : k + 1])
        assert torch.equal(together.x[k], alone.x[0])
        assert torch.equal(together.mask[k], alone.mask[0])
