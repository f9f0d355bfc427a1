"""Several labels per row: the loss and the metrics, beside torch's and scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch.nn import functional

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.objectives.multilabel import Multilabel
from fedgist.core.objectives.rank_metrics import mean_precision, roc_area

ROWS, PRESENT, LABELS = 30, 24, 3
KEY = random.key(5)
NAMES = ("heart failure", "ABS-1", "c")
LOGITS = random.normal(random.fold(KEY, "logits"), (ROWS, LABELS))


def batch(*, missing: bool = False) -> Batch:
    y = random.integers(KEY, (ROWS, LABELS), 2).float()
    if missing:
        y[::5, 1] = math.nan
    return Batch(torch.zeros(ROWS, 1), y, torch.arange(ROWS) < PRESENT)


def measured(objective: Multilabel, rows: Batch) -> dict[str, float]:
    predictions = objective.predict_rows(LOGITS, rows)
    stacked = type(predictions)(predictions.loss.unsqueeze(0), predictions.logits.unsqueeze(0))
    values = objective.measure(stacked, rows.y.unsqueeze(0), rows.mask.unsqueeze(0))
    return {name: float(value) for name, value in values.items()}


def test_the_loss_is_torchs_with_positive_weights() -> None:
    weights = (1.0, 2.0, 5.0)
    rows = batch()
    expected = functional.binary_cross_entropy_with_logits(
        LOGITS[:PRESENT], rows.y[:PRESENT], pos_weight=torch.tensor(weights)
    )
    objective = Multilabel(LABELS, positive_weights=weights)
    torch.testing.assert_close(objective.loss(LOGITS, rows), expected)


@pytest.mark.parametrize("missing", [False, True])
def test_metrics_are_scikit_learns(missing: bool) -> None:  # noqa: FBT001
    rows = batch(missing=missing)
    values = measured(Multilabel(LABELS, names=NAMES), rows)
    p, y = LOGITS[:PRESENT].sigmoid().double().numpy(), rows.y[:PRESENT].numpy()
    there = ~np.isnan(y)
    of_label: dict[str, list[float]] = {"auroc": [], "average_precision": [], "macro_f1": []}
    for k in range(LABELS):
        truth, score = y[there[:, k], k], p[there[:, k], k]
        of_label["auroc"].append(roc_auc_score(truth, score))
        of_label["average_precision"].append(average_precision_score(truth, score))
        of_label["macro_f1"].append(f1_score(truth, score > 0.5))
    for name, each in of_label.items():
        assert values[name] == pytest.approx(np.mean(each), rel=1e-6)
    assert values["micro_f1"] == pytest.approx(f1_score(y[there], p[there] > 0.5), rel=1e-6)
    columns = ("heart_failure", "abs_1", "c")
    for name in ("auroc", "average_precision"):
        each = [values[f"{name}_{column}"] for column in columns]
        assert each == pytest.approx(of_label[name], rel=1e-6)


def test_metrics_of_labels_have_titles_and_can_be_left_out() -> None:
    objective = Multilabel(LABELS, chosen=("auroc",), names=NAMES)
    assert [m.name for m in objective.metrics] == [
        "auroc",
        "auroc_heart_failure",
        "auroc_abs_1",
        "auroc_c",
    ]
    assert objective.metrics[1].title == "AUROC of heart failure"
    assert set(measured(objective, batch())) == {m.name for m in objective.metrics} | {"loss"}
    assert len(Multilabel(LABELS, chosen=("auroc",), per_label=False).metrics) == 1


def test_a_missing_label_has_no_gradient() -> None:
    rows, logits = batch(missing=True), LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Multilabel(LABELS).loss(logits, rows), logits)
    assert gradient.isfinite().all()
    assert not gradient[rows.y.isnan()].any()
    assert not gradient[~rows.mask].any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"positive_weights": (1.0, 2.0)}, "has 2 numbers; the data have 3 labels"),
        ({"smoothing": 0.1}, "label_smoothing"),
        ({"chosen": ("r2",)}, "r2"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Multilabel(LABELS, **options)  # type: ignore[arg-type]


@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=12),
    data=st.data(),
)
def test_metrics_of_ranks_equal_scikit_learns_with_ties_and_absent_rows(
    scores: list[float], data: st.DataObject
) -> None:
    flags = st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))
    truth, there = np.array(data.draw(flags)), np.array(data.draw(flags))
    score = torch.tensor(scores)
    args = score, torch.tensor(truth), torch.tensor(there)
    precision, area = float(mean_precision(*args)), float(roc_area(*args))
    kept, kept_score = truth[there], score.numpy()[there]
    if kept.any():
        assert precision == pytest.approx(average_precision_score(kept, kept_score))
    else:
        assert math.isnan(precision)
    if kept.any() and not kept.all():
        assert area == pytest.approx(roc_auc_score(kept, kept_score))
    else:
        assert math.isnan(area)


def test_sure_rows_of_a_label_are_told_apart() -> None:
    # rejects ranks of probabilities, which are all 1 in float32
    logits = torch.tensor([[20.0], [40.0], [30.0], [50.0]])
    y = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    rows = Batch(torch.zeros(4, 1), y, torch.ones(4, dtype=torch.bool))
    objective = Multilabel(1, chosen=("auroc", "average_precision"), per_label=False)
    said = objective.predict_rows(logits, rows)
    one = type(said)(said.loss.unsqueeze(0), said.logits.unsqueeze(0))
    values = objective.measure(one, y.unsqueeze(0), rows.mask.unsqueeze(0))
    assert float(values["auroc"]) == float(values["average_precision"]) == 1.0
