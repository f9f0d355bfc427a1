"""Metrics of classes against scikit-learn's, client by client, with padding and missing classes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.metrics import CLASS_METRICS, LOSS, METRICS, OBJECTIVES
from fedgist.core.objective import Classes, ClassPredictions
from fedgist.errors import InputError

CLASSES = 4
EVERY = Classes(CLASSES)


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
            "loss": sklearn.metrics.log_loss(y, scores, labels=range(CLASSES)),
        }


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
        oracle = expected(truth, label, predictions.scores[k, :size].double().numpy())
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
    assert predictions.scores.shape == (5, 0)
    values = few.measure(
        ClassPredictions(
            *(
                leaf.unsqueeze(0)
                for leaf in (predictions.loss, predictions.label, predictions.scores)
            )
        ),
        y.unsqueeze(0),
        torch.ones(1, 5, dtype=torch.bool),
    )
    assert set(values) == {"macro_f1", "loss"}
    with pytest.raises(InputError, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        Classes(CLASSES, ("acuracy",))


def test_every_metric_says_its_unit_and_which_end_is_better() -> None:
    assert METRICS["loss"].better == "lower"
    assert all(METRICS[m.name].better == "higher" for m in EVERY.metrics)
    assert {m.unit for m in EVERY.metrics} == {"fraction"}
