"""Models that are not finite have no score, and metrics stay in their range, for any numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.finite_scores import LOST, of_finite, scored
from fedgist.core.objectives.class_metrics import MEASURES
from fedgist.core.objectives.classes import Classes
from fedgist.core.objectives.multilabel import Multilabel
from fedgist.core.objectives.rank_metrics import mean_precision, roc_area
from fedgist.core.objectives.regression import Regression

few = settings(max_examples=60)
NUMBERS = st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0, math.nan, math.inf, -math.inf])
ROW = st.tuples(NUMBERS, st.booleans(), st.booleans())  # score, positive, present


def area(rows: list[tuple[float, bool, bool]]) -> float:
    """Return the fraction of pairs in the right order, ties one half, by counting them."""
    there = [(score, positive) for score, positive, present in rows if present]
    pairs = list(itertools.product([s for s, p in there if p], [s for s, p in there if not p]))
    if not pairs or any(math.isnan(score) for score, _ in there):
        return math.nan
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def precision(rows: list[tuple[float, bool, bool]]) -> float:
    there = [(score, positive) for score, positive, present in rows if present]
    hits = [score for score, positive in there if positive]
    if not hits or any(math.isnan(score) for score, _ in there):
        return math.nan
    of_hit = [sum(s >= h for s in hits) / sum(s >= h for s, _ in there) for h in hits]
    return sum(of_hit) / len(hits)


@few
@given(st.lists(ROW, min_size=1, max_size=7))
def test_rank_metrics_of_any_scores_are_those_of_pairs(
    rows: list[tuple[float, bool, bool]],
) -> None:
    # rejects absent rows that rank with infinite scores, and NaN that ranks above all
    scores, positive, present = (torch.tensor(column) for column in zip(*rows, strict=True))
    for measure, oracle in ((roc_area, area), (mean_precision, precision)):
        value, expected = float(measure(scores, positive, present)), oracle(rows)
        assert value == pytest.approx(expected, nan_ok=True)
        assert math.isnan(value) or 0.0 <= value <= 1.0


OBJECTIVES: dict[str, Any] = {
    "classes": Classes(3, tuple(MEASURES)),
    "two classes": Classes(2, ("accuracy", "auroc", "calibration_error", "average_precision")),
    "labels only": Classes(3, ("accuracy",)),
    "numbers": Regression(2),
    "labels": Multilabel(2),
}
CLIENTS, ROWS = 4, 5


def labels(objective: Any, seed: int) -> Tensor:
    torch.manual_seed(seed)
    if objective.labels == "class":
        return torch.randint(0, objective.outputs, (CLIENTS, ROWS))
    numbers = torch.randn(CLIENTS, ROWS, objective.outputs)
    return (numbers > 0).float() if objective.labels == "labels" else numbers


@few
@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.dictionaries(
        st.integers(0, CLIENTS - 1),
        st.tuples(st.integers(0, ROWS - 1), st.sampled_from([math.nan, math.inf])),
    ),
    st.lists(st.integers(1, ROWS), min_size=CLIENTS, max_size=CLIENTS),
    st.integers(0, 99),
)
def test_lost_models_have_no_score_and_the_others_keep_theirs(
    kind: str, spoilt: dict[int, tuple[int, float]], counts: list[int], seed: int
) -> None:
    objective = OBJECTIVES[kind]
    y, logits = labels(objective, seed), torch.randn(CLIENTS, ROWS, objective.outputs)
    mask = torch.arange(ROWS) < torch.tensor(counts).unsqueeze(1)
    plain = [predicted(objective, logits, y, mask)]
    for client, (row, number) in spoilt.items():
        logits[client, row, :] = number
    predictions = predicted(objective, logits, y, mask)
    values, confusion = scored(objective, predictions, y, mask, confusion=True)
    # an absent row does not make a model lost
    lost = {client for client, (row, _) in spoilt.items() if row < counts[client]}
    expected = objective.measure(plain[0], y, mask)
    metrics = {m.name: m for m in (*objective.metrics, objective.loss_metric)}
    for name, column in values.items():
        for client, value in enumerate(column.tolist()):
            if client in lost:  # rejects the likeliest class of NaN, which is class 0
                assert value == LOST if name == "loss" else math.isnan(value)
                continue
            assert torch.equal(column[client], expected[name][client]) or math.isnan(value)
            assert math.isnan(value) == bool(expected[name][client].isnan())
            assert math.isnan(value) or metrics[name].allows(value)
    if confusion is not None and confusion.dim() == 2:
        assert int(confusion.sum()) == sum(c for i, c in enumerate(counts) if i not in lost)


def predicted(objective: Any, logits: Tensor, y: Tensor, mask: Tensor) -> Any:
    """Return the per-row results of all clients, (CLIENTS, ROWS, ...)."""

    def of_client(z: Tensor, label: Tensor, there: Tensor) -> Any:
        return objective.predict_rows(z, Batch(z, label, there))

    return torch.func.vmap(of_client)(logits, y, mask)


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.integers(1, 3))
def test_losses_of_models_that_are_not_finite_are_nan(numbers: list[float], width: int) -> None:
    first = torch.ones(len(numbers), width, 2)
    first[:, -1, 0] = torch.tensor(numbers)
    losses = of_finite(torch.ones(len(numbers)), {"w": first, "b": torch.zeros(len(numbers))})
    assert losses.isnan().tolist() == [not math.isfinite(number) for number in numbers]
    huge = {"w": torch.full((2, 9), 3e38)}  # rejects a sum in single precision
    assert of_finite(torch.ones(2), huge).tolist() == [1.0, 1.0]


@few
@given(
    st.lists(NUMBERS, min_size=ROWS, max_size=ROWS), st.integers(0, ROWS - 1), st.integers(0, 99)
)
def test_by_row_a_row_changes_only_its_own_result(
    numbers: list[float], row: int, seed: int
) -> None:
    objective = OBJECTIVES["classes"]
    torch.manual_seed(seed)
    y, logits = torch.randint(0, 3, (1, ROWS)), torch.randn(1, ROWS, 3)
    logits[0, :, 0] = torch.tensor(numbers)
    counts = []
    for present in (True, False):
        mask = torch.ones(1, ROWS, dtype=torch.bool)
        mask[0, row] = present
        rows = predicted(objective, logits, y, mask)
        values, _ = scored(objective, rows, y, mask, confusion=False, by_row=True)
        assert bool(values["loss"].isfinite())
        counts.append(round(float(values["accuracy"]) * int(mask.sum())))
    # rejects a count that falls to 0 by one row: noisy max promises a change of at most 1
    assert 0 <= counts[0] - counts[1] <= 1
