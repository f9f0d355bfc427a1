"""Metrics of classes against scikit-learn's, client by client, with padding and missing classes."""

from __future__ import annotations

import decimal
import math
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.objectives import class_metrics
from fedgist.core.objectives.class_metrics import ClassPredictions, LabelledPredictions
from fedgist.core.objectives.classes import Classes
from fedgist.core.objectives.metrics import CLASS_METRICS, LOSS, METRICS, OBJECTIVES
from fedgist.errors import InputError

CLASSES = 4
EVERY = Classes(CLASSES, tuple(CLASS_METRICS))


def marked(
    seed: int, sizes: list[int], *, ties: bool
) -> tuple[ClassPredictions, torch.Tensor, torch.Tensor]:
    """Return predictions, labels and masks of padded clients; ``ties`` rounds the logits."""
    key, longest = random.key(seed), max([1, *sizes])
    shape = (len(sizes), longest)
    logits = random.normal(random.fold(key, 0), (*shape, CLASSES))
    logits = logits.round() if ties else logits
    y = random.integers(random.fold(key, 1), shape, CLASSES)
    mask = torch.arange(longest) < torch.tensor(sizes).unsqueeze(1)
    predictions = torch.func.vmap(EVERY.predict_rows)(logits, Batch(logits, y, mask))
    return predictions, y, mask


def in_full(logits: torch.Tensor) -> Any:
    """Return probabilities in which rounding makes no ties, and breaks none, (rows, classes)."""
    return torch.softmax(logits.double(), -1).numpy().round(14)


def expected(y: Any, label: Any, scores: Any) -> dict[str, float]:
    """Return scikit-learn's metrics of one client."""
    if not len(y):
        return dict.fromkeys([*CLASS_METRICS, LOSS.name], math.nan)
    areas = [
        sklearn.metrics.roc_auc_score(y == c, scores[:, c])
        for c in range(CLASSES)
        if 0 < (y == c).sum() < len(y)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that is predicted and not there
        return {
            "accuracy": sklearn.metrics.accuracy_score(y, label),
            "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(y, label),
            "macro_f1": sklearn.metrics.f1_score(y, label, average="macro", zero_division=0),
            "auroc": float(np.mean(areas)) if areas else math.nan,
            "average_precision": mean_over_classes(average_precision, y, scores),
            "brier": sklearn.metrics.brier_score_loss(y, scores, labels=range(CLASSES)),
            "calibration_error": calibration_error(y, scores),
            "loss": sklearn.metrics.log_loss(y, scores, labels=range(CLASSES)),
        }


def mean_over_classes(score: Any, y: Any, scores: Any) -> float:
    """Return the mean of a score of one class against the rest, where it is defined."""
    values = [score(y == c, scores[:, c]) for c in range(CLASSES)]
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else math.nan


def average_precision(y: Any, score: Any) -> float | None:
    """Sum over thresholds of precision times the step in recall, threshold by threshold."""
    if not y.any():
        return None
    total, recall = 0.0, 0.0
    for threshold in sorted(set(score.tolist()), reverse=True):
        chosen = score >= threshold
        step = y[chosen].sum() / y.sum() - recall
        total += step * y[chosen].mean()
        recall += step
    return float(total)


def calibration_error(y: Any, scores: Any) -> float:
    confidence, right = scores.max(1).astype(np.float32), scores.argmax(1) == y
    total = 0.0
    for k in range(15):
        low, high = np.float32(k) / np.float32(15), np.float32(k + 1) / np.float32(15)
        inside = (confidence * np.float32(15) > k) & (confidence * np.float32(15) <= k + 1)
        assert not inside.any() or (low <= confidence[inside].min() <= high + 1e-6)
        if inside.any():
            total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    return float(total / len(y))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    ties=st.booleans(),
)
def test_every_metric_is_scikit_learns(*, seed: int, sizes: list[int], ties: bool) -> None:
    # rejects an area that is pooled over clients, and one that counts ties as wins
    predictions, y, mask = marked(seed, sizes, ties=ties)
    values = EVERY.measure(predictions, y, mask)
    assert set(values) == {*CLASS_METRICS, LOSS.name}
    total = np.zeros((CLASSES, CLASSES), dtype=int)
    for k, size in enumerate(sizes):
        truth, label = y[k, :size].numpy(), predictions.label[k, :size].numpy()
        oracle = expected(truth, label, in_full(predictions.logits[k, :size]))
        for name, value in values.items():
            assert float(value[k]) == pytest.approx(oracle[name], abs=2e-6, nan_ok=True), name
        if size:
            labels = range(CLASSES)
            total += sklearn.metrics.confusion_matrix(truth, label, labels=labels)
    assert EVERY.confusion(predictions, y, mask).tolist() == total.tolist()


def test_only_the_metrics_chosen_are_measured_and_scores_kept_for_them() -> None:
    few = OBJECTIVES["classes"](CLASSES, ("macro_f1",))
    logits, y = random.normal(random.key(0), (5, CLASSES)), torch.zeros(5, dtype=torch.int64)
    predictions = few.predict_rows(logits, Batch(logits, y, torch.ones(5, dtype=torch.bool)))
    assert predictions.logits.shape == predictions.log_odds.shape == (5, 0)
    values = few.measure(
        ClassPredictions(
            *(
                leaf.unsqueeze(0)
                for leaf in (predictions.loss, predictions.label, predictions.logits)
            )
        ),
        y.unsqueeze(0),
        torch.ones(1, 5, dtype=torch.bool),
    )
    assert set(values) == {"macro_f1", "loss"}
    with pytest.raises(InputError, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        Classes(CLASSES, ("acuracy",))


def test_a_confidence_on_the_edge_of_a_bin_is_in_the_bin_below() -> None:
    # 0.6 * 15 = 9: rejects bins that are open on the right, where both rows are in one bin
    scores = torch.tensor([[[0.6, 0.4], [0.62, 0.38]]], dtype=torch.float64)
    y, none = torch.tensor([[0, 1]]), torch.zeros(1, 2)
    rows = LabelledPredictions(
        ClassPredictions(none, torch.zeros(1, 2, dtype=torch.int64), scores.log()), y, y >= 0, 2
    )
    seen = float(class_metrics.calibration_error(rows))
    assert seen == pytest.approx((abs(1 - 0.6) + abs(0 - 0.62)) / 2)
    assert seen != pytest.approx(abs((1 - 0.6) + (0 - 0.62)) / 2)


@given(seed=st.integers(0, 10**6), classes=st.integers(2, 6), scale=st.floats(1, 3000))
def test_log_odds_tell_sure_rows_apart(*, seed: int, classes: int, scale: float) -> None:
    """Seen: of an overconfident model all rows whose probability rounds to 1 were one tie."""
    logits = scale * random.normal(random.key(seed), (40, classes))
    logits = torch.cat([logits, logits.flip(-1), logits + 0.0])  # equal rows, and others in reverse
    with decimal.localcontext(prec=60):
        exact = np.array([odds([Decimal(value).exp() for value in row]) for row in logits.tolist()])
    none = torch.zeros(len(logits))
    found = ClassPredictions(none, none.long(), logits).log_odds.numpy()
    np.testing.assert_allclose(found, exact, rtol=3e-7, atol=1e-6)
    for expected, column in zip(exact.astype(np.float32).T, found.T, strict=True):
        assert (scipy.stats.rankdata(column) == scipy.stats.rankdata(expected)).all()


def odds(row: list[Decimal]) -> list[float]:
    """Return the log-odds of each class from numbers that its probability is proportional to."""
    others = [sum(row[:c] + row[c + 1 :], Decimal(0)) for c in range(len(row))]
    return [float((own / rest).ln()) for own, rest in zip(row, others, strict=True)]


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_area_of_a_sure_model_is_that_of_its_ranks(scale: float) -> None:
    # rejects ranks of probabilities in float32, which are 0 or 1 at the larger scale
    rows = random.normal(random.key(5), (1, 60, 2))
    y = (rows[..., 1] - rows[..., 0] + random.normal(random.key(6), (1, 60)) > 0).long()
    mask = torch.ones(1, 60, dtype=torch.bool)
    both = Classes(2, ("auroc", "average_precision"))
    said = torch.func.vmap(both.predict_rows)(scale * rows, Batch(rows, y, mask))
    score, truth = (rows[0, :, 1] - rows[0, :, 0]).numpy(), y[0].numpy()
    found = both.measure(said, y, mask)
    assert float(found["auroc"]) == pytest.approx(sklearn.metrics.roc_auc_score(truth, score))
    assert float(found["average_precision"]) == pytest.approx(
        sklearn.metrics.average_precision_score(truth, score)
    )


def test_every_metric_says_its_unit_and_which_end_is_better() -> None:
    lower = {"loss", "brier", "calibration_error"}
    assert all(METRICS[m.name].better == "higher" for m in EVERY.metrics if m.name not in lower)
    assert all(METRICS[name].better == "lower" for name in lower)
    assert {m.unit for m in EVERY.metrics if m.name != "brier"} == {"fraction"}


def binary(positive: int | None = None) -> dict[str, float]:
    """Return the metrics of eight rows of two classes; class 0 is the rare one."""
    objective = Classes(2, tuple(CLASS_METRICS), 0.0, positive)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9])
    y = torch.tensor([0, 0, 1, 0, 1, 1, 0, 1])
    logits = torch.stack([1 - p, p], 1).log()
    rows = objective.predict_rows(logits, Batch(logits, y, torch.ones(8, dtype=torch.bool)))
    one = ClassPredictions(*(leaf.unsqueeze(0) for leaf in (rows.loss, rows.label, rows.logits)))
    measured = objective.measure(one, y.unsqueeze(0), torch.ones(1, 8, dtype=torch.bool))
    return {name: float(value) for name, value in measured.items()}


def test_two_classes_have_one_positive_class() -> None:
    p, y = np.array([0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9]), np.array([0, 0, 1, 0, 1, 1, 0, 1])
    values = binary()
    expected = sklearn.metrics.average_precision_score(y, p)
    assert values["average_precision"] == pytest.approx(expected)
    assert values["brier"] == pytest.approx(sklearn.metrics.brier_score_loss(y, p))  # halved
    other = sklearn.metrics.average_precision_score(1 - y, 1 - p)
    assert binary(positive=0)["average_precision"] == pytest.approx(other)
