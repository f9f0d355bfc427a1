"""Regression's losses and metrics, beside torch's and scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from torch.nn import functional

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.objectives.regression import NumberPredictions, Regression
from fedgist.errors import InputError

KEY = random.key(3)
ROWS, PRESENT, NUMBERS = 11, 8, 2


def batch(*, missing: bool = False) -> Batch:
    y = 3 * random.normal(KEY, (ROWS, NUMBERS)) + 7
    if missing:
        y[0, 1] = y[4, 0] = math.nan
    return Batch(torch.zeros(ROWS, 1), y, torch.arange(ROWS) < PRESENT)


OUTPUTS = random.normal(random.fold(KEY, "outputs"), (ROWS, NUMBERS))


@pytest.mark.parametrize(
    ("error", "theirs"),
    [
        ("squared", functional.mse_loss),
        ("absolute", functional.l1_loss),
        ("huber", lambda a, b: functional.huber_loss(a, b, delta=0.7)),
    ],
)
def test_losses_are_torchs_on_standardized_numbers(error: str, theirs: object) -> None:
    mean, std = (6.5, 7.5), (2.0, 4.0)
    objective = Regression(NUMBERS, error=error, delta=0.7, mean=mean, std=std)  # type: ignore[arg-type]
    rows = batch()
    y = (rows.y - torch.tensor(mean)) / torch.tensor(std)
    expected = theirs(OUTPUTS[:PRESENT], y[:PRESENT])  # type: ignore[operator]
    torch.testing.assert_close(objective.loss(OUTPUTS, rows), expected)


def test_a_missing_number_counts_nowhere() -> None:
    objective, rows = Regression(NUMBERS), batch(missing=True)
    outputs = OUTPUTS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective.loss(outputs, rows), outputs)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == gradient[4, 0] == 0
    alone = (OUTPUTS[0, 0] - rows.y[0, 0]) ** 2  # row 0 has one number
    others = torch.stack(
        [((OUTPUTS[i] - rows.y[i]) ** 2)[~rows.y[i].isnan()].mean() for i in range(1, PRESENT)]
    )
    expected = torch.cat([alone.view(1), others]).mean()
    torch.testing.assert_close(objective.loss(OUTPUTS, rows), expected)


def test_weights_multiply_the_rows() -> None:
    objective, rows = Regression(NUMBERS), batch()
    weight = torch.arange(float(ROWS))
    weighted = Batch(rows.x, rows.y, rows.mask, weight=weight)
    of_row = (OUTPUTS - rows.y).square().mean(1)
    expected = (of_row * weight)[:PRESENT].mean()
    torch.testing.assert_close(objective.loss(OUTPUTS, weighted), expected)


@pytest.mark.parametrize("missing", [False, True])
def test_metrics_are_scikit_learns(missing: bool) -> None:  # noqa: FBT001
    objective = Regression(NUMBERS, mean=(6.0,), std=(3.0,))
    rows = batch(missing=missing)
    predictions = objective.predict_rows(OUTPUTS, rows)
    both = torch.stack([rows.mask, torch.ones(ROWS, dtype=torch.bool)])
    stacked = type(predictions)(
        *(torch.stack([leaf, leaf]) for leaf in (predictions.loss, predictions.value))
    )
    values = objective.measure(stacked, torch.stack([rows.y, rows.y]), both)
    guess = objective.answers(OUTPUTS)[:PRESENT].double().numpy()
    truth = rows.y[:PRESENT].double().numpy()
    expected: dict[str, list[float]] = {"r2": [], "mae": [], "rmse": []}
    for column in range(NUMBERS):
        there = ~np.isnan(truth[:, column])
        pair = truth[there, column], guess[there, column]
        expected["r2"].append(r2_score(*pair))
        expected["mae"].append(mean_absolute_error(*pair))
        expected["rmse"].append(math.sqrt(mean_squared_error(*pair)))
    for name, of_number in expected.items():
        assert float(values[name][0]) == pytest.approx(np.mean(of_number), rel=1e-6)
    assert float(values["loss"][0]) == pytest.approx(float(objective.loss(OUTPUTS, rows)), rel=1e-6)


def test_a_client_without_rows_or_with_equal_numbers_is_nan() -> None:
    objective = Regression(1)
    y = torch.ones(2, 3, 1)
    mask = torch.tensor([[True] * 3, [False] * 3])
    rows = Batch(torch.zeros(3, 1), y[0], mask[0])
    predictions = objective.predict_rows(torch.zeros(3, 1), rows)
    stacked = type(predictions)(
        *(torch.stack([leaf, leaf]) for leaf in (predictions.loss, predictions.value))
    )
    values = objective.measure(stacked, y, mask)
    assert values["r2"].isnan().all()
    assert values["mae"].tolist()[0] == 1.0
    assert all(bool(v[1].isnan()) for v in values.values())


@given(st.floats(-1e12, 1e12), st.integers(1, 12))
def test_equal_numbers_have_no_r2_whatever_their_mean_is(value: float, rows: int) -> None:
    # seen: of six times of 1700000000.1 the mean was another number, and R2 was -1e18
    y = torch.full((1, rows, 1), value, dtype=torch.float64)
    said = NumberPredictions(torch.zeros(1, rows), y + 0.5)
    assert Regression(1).measure(said, y, torch.ones(1, rows, dtype=torch.bool))["r2"].isnan()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mean": (1.0, 2.0, 3.0)}, "objective.mean has 3 numbers; the data have 2"),
        ({"std": (1.0, 2.0, 3.0)}, "objective.std has 3"),
        ({"smoothing": 0.1}, "label_smoothing smooths classes"),
        ({"chosen": ("auroc",)}, "auroc"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises((ValueError, InputError), match=says):
        Regression(NUMBERS, **options)  # type: ignore[arg-type]
