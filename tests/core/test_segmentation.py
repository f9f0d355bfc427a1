"""Segmentation's loss and metrics, beside torch's and scikit-learn's."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score, jaccard_score
from torch.nn import functional

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.objectives.segmentation import Segmentation
from fedgist.core.tree import map_leaves

ROWS, PRESENT, SIDE, CLASSES = 5, 4, 6, 3
KEY = random.key(9)
LOGITS = 2 * random.normal(random.fold(KEY, "logits"), (ROWS, SIDE, SIDE, CLASSES))


def batch() -> Batch:
    y = random.integers(KEY, (ROWS, SIDE, SIDE), CLASSES)
    y[0, :2] = -1  # pixels that are not scored
    return Batch(torch.zeros(ROWS, 1, SIDE, SIDE), y, torch.arange(ROWS) < PRESENT)


def test_the_loss_is_the_mean_over_images_of_the_mean_over_their_pixels() -> None:
    rows = batch()
    of_image = [
        functional.cross_entropy(LOGITS[i].flatten(0, 1), rows.y[i].flatten(), ignore_index=-1)
        for i in range(PRESENT)
    ]
    loss = Segmentation(CLASSES).loss(LOGITS, rows)
    torch.testing.assert_close(loss, torch.stack(of_image).mean())


@pytest.mark.parametrize("background", ["left_out", "counted"])
def test_metrics_are_scikit_learns(background: Literal["left_out", "counted"]) -> None:
    objective, rows = Segmentation(CLASSES, background=background), batch()
    predictions = map_leaves(lambda leaf: leaf.unsqueeze(0), objective.predict_rows(LOGITS, rows))
    mask = rows.mask.unsqueeze(0)
    values = objective.measure(predictions, rows.y.unsqueeze(0), mask)
    truth = rows.y[:PRESENT].flatten().numpy()
    guess = LOGITS[:PRESENT].argmax(-1).flatten().numpy()[truth >= 0]
    truth = truth[truth >= 0]
    names = [1, 2] if background == "left_out" else [0, 1, 2]
    dice = f1_score(truth, guess, average=None, labels=names)
    iou = jaccard_score(truth, guess, average=None, labels=names)
    assert float(values["dice"]) == pytest.approx(np.mean(dice))
    assert float(values["iou"]) == pytest.approx(np.mean(iou))
    assert float(values["accuracy"]) == pytest.approx(np.mean(truth == guess))
    counts = objective.confusion(predictions, rows.y.unsqueeze(0), mask)
    assert counts.tolist() == confusion_matrix(truth, guess).tolist()


def test_absent_images_and_unscored_pixels_have_no_gradient() -> None:
    rows, logits = batch(), LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Segmentation(CLASSES).loss(logits, rows), logits)
    assert not gradient[rows.y < 0].any()
    assert not gradient[PRESENT:].any()
    assert gradient[1].any()


def test_a_client_without_images_is_nan_and_its_empty_classes_are_left_out() -> None:
    objective, rows = Segmentation(CLASSES), batch()
    y = torch.ones_like(rows.y)  # only class 1, and it is predicted everywhere
    sure = torch.zeros_like(LOGITS).index_fill(-1, torch.tensor([1]), 9.0)
    predictions = objective.predict_rows(sure, Batch(rows.x, y, rows.mask))
    both = map_leaves(lambda leaf: torch.stack([leaf, leaf]), predictions)
    mask = torch.stack([rows.mask, torch.zeros_like(rows.mask)])
    values = objective.measure(both, torch.stack([y, y]), mask)
    assert values["dice"][0] == values["iou"][0] == 1.0
    assert all(bool(value[1].isnan()) for value in values.values())
