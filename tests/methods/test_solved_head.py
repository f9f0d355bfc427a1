"""FedLog's heads of numbers and labels, beside closed forms on all rows together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

import fedgist
from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.objectives.multilabel import Multilabel
from fedgist.errors import InputError
from fedgist.methods.common.conjugate_head import map_head
from fedgist.methods.common.gaussian_head import gaussian_sums, ridge_head
from fedgist.methods.common.linear_head import with_constant
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of
from small_tasks import labels, numbers, recipe_of

LINEAR = {"name": "logistic"}  # a body without parameters: features are the normalized inputs
PLANS = {"workers": 1, "plans": {"logistic": {"cohort_size": 3}}}


def head_of(run: Any) -> Any:
    """The head that the server of a run solved for, (outputs, m + 1)."""
    return run.server_run.server.eta.double()


def fedlog(objective: str, rows: Any, **sections: Any) -> Any:
    asked = recipe_of(objective, model=LINEAR, engine=PLANS, train={"num_rounds": 1})
    asked["method"] = {"name": "fedlog", **sections.pop("method", {})}
    return fedgist.run(asked | sections, data=rows)


@pytest.mark.parametrize(("wire", "close"), [("float64", 1e-6), ("float32", 1e-4)])
@pytest.mark.parametrize("nu", [1.0, 25.0])
def test_one_exchange_equals_ridge_regression_of_all_rows(
    wire: str, close: float, nu: float
) -> None:
    data = numbers()
    run = fedlog("regression", data, method={"nu": nu, "wire": wire})
    x = ((data.x - torch.tensor(data.mean)) / torch.tensor(data.std)).double().numpy()
    y = data.y.double().numpy()
    y = (y - y.mean(0)) / y.std(0)
    expected = Ridge(alpha=nu, solver="svd").fit(x, y)
    eta = head_of(run).numpy()
    assert np.abs(eta[:, 1:] - expected.coef_).max() <= close
    assert np.abs(eta[:, 0] - expected.intercept_).max() <= close


def test_the_number_of_clients_changes_nothing_but_rounding() -> None:
    etas = [
        head_of(
            fedlog(
                "regression",
                numbers(),
                method={"wire": "float64"},
                partition={"name": "iid"},
                clients={"num_clients": count},
            )
        )
        for count in (1, 5)
    ]
    torch.testing.assert_close(*etas, rtol=1e-6, atol=1e-6)


def test_missing_numbers_are_left_out_of_their_own_regression_alone() -> None:
    data = numbers()
    y = data.y.clone()
    y[::3, 1] = math.nan
    masked = {"missing_labels": "mask"}
    run = fedlog("regression", replace(data, y=y), data=masked, method={"wire": "float64"})
    x = ((data.x - torch.tensor(data.mean)) / torch.tensor(data.std)).double().numpy()
    eta = head_of(run).numpy()
    for column in range(3):
        there = ~y[:, column].isnan().numpy()
        values = y[:, column].double().numpy()[there]
        values = (values - values.mean()) / values.std()
        expected = Ridge(alpha=1.0, solver="svd").fit(x[there], values)
        assert np.abs(eta[column, 1:] - expected.coef_).max() <= 1e-6
        assert abs(eta[column, 0] - expected.intercept_) <= 1e-6


def test_sample_weights_weigh_the_regression() -> None:
    weight = torch.linspace(0, 2, len(numbers().y))
    data = replace(numbers(), annotations={"w": weight})
    train = {"num_rounds": 1, "sample_weights": "w"}
    run = fedlog("regression", data, method={"wire": "float64"}, train=train)
    x = ((data.x - torch.tensor(data.mean)) / torch.tensor(data.std)).double().numpy()
    y = data.y.double().numpy()
    y = (y - y.mean(0)) / y.std(0)
    expected = Ridge(alpha=1.0, solver="svd").fit(x, y, sample_weight=weight.double().numpy())
    assert np.abs(head_of(run).numpy()[:, 1:] - expected.coef_).max() <= 1e-6


def test_labels_have_the_heads_of_two_classes_of_all_rows() -> None:
    data = labels()
    eta = head_of(fedlog("multilabel", data, method={"wire": "float64"}))
    x = (data.x - torch.tensor(data.mean)) / torch.tensor(data.std)
    phi = with_constant(x).double()
    for label in range(3):
        has = data.y[:, label] > 0
        both = map_head(torch.stack([phi[has].sum(0), phi[~has].sum(0)]), 1.0)
        torch.testing.assert_close(eta[label], both[0] - both[1], rtol=1e-4, atol=1e-5)


def test_missing_labels_are_rows_of_neither_class() -> None:
    data = labels()
    y = data.y.clone()
    y[::4, 2] = math.nan
    masked = {"missing_labels": "mask"}
    eta = head_of(fedlog("multilabel", replace(data, y=y), data=masked))
    x = (data.x - torch.tensor(data.mean)) / torch.tensor(data.std)
    phi = with_constant(x).double()
    sums = [phi[y[:, 2] == value].sum(0) for value in (1, 0)]
    both = map_head(torch.stack(sums), 1.0)
    torch.testing.assert_close(eta[2], both[0] - both[1], rtol=1e-4, atol=1e-5)


@given(st.integers(0, 2**31), st.integers(1, 9), st.booleans())
def test_statistics_add_up_over_parts_and_ignore_absent_rows(
    seed: int,
    cut: int,
    apart: bool,  # noqa: FBT001
) -> None:
    key = random.key(seed)
    phi = with_constant(random.normal(random.fold(key, 0), (10, 3))).double()
    y = random.normal(random.fold(key, 1), (10, 2)).double()
    weight = torch.ones(10, dtype=torch.float64)
    whole = gaussian_sums(phi, y, weight, apart=apart)
    parts = [
        gaussian_sums(phi[part], y[part], weight[part], apart=apart)
        for part in (slice(cut), slice(cut, None))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    weight[0] = 0.0
    rest = gaussian_sums(phi[1:], y[1:], weight[1:], apart=apart)
    torch.testing.assert_close(gaussian_sums(phi, y, weight, apart=apart), rest)


@given(st.integers(0, 2**31), st.integers(1, 6), st.booleans())
def test_statistics_are_the_products_of_each_row_and_stacked_as_alone(
    seed: int,
    m: int,
    apart: bool,  # noqa: FBT001
) -> None:
    # rejects squared weights, missing numbers that count as 0, and the lower triangle
    draw = np.random.default_rng(seed)
    phi, y = draw.normal(size=(3, 7, m)), draw.normal(size=(3, 7, 2))
    weight = draw.choice([0.0, 1.0, 2.5], size=(3, 7))
    if apart:
        y[draw.random(y.shape) < 0.3] = np.nan
    arrays = [torch.from_numpy(array) for array in (phi, y, weight)]
    stacked = torch.func.vmap(lambda *one: gaussian_sums(*one, apart=apart))(*arrays)
    upper = np.triu_indices(m)
    for client in range(3):
        numbers_of = [[0], [1]] if apart else [[0, 1]]
        for packed, columns in zip(stacked[client], numbers_of, strict=True):
            gram, cross = np.zeros((m, m)), np.zeros((len(columns), m))
            for row, values, w in zip(
                phi[client], y[client][:, columns], weight[client], strict=True
            ):
                if not np.isnan(values).any():
                    gram += w * np.outer(row, row)
                    cross += w * np.outer(values, row)
            np.testing.assert_allclose(packed, [*gram[upper], *cross.flatten()], atol=1e-12)
        alone = gaussian_sums(*(array[client] for array in arrays), apart=apart)
        torch.testing.assert_close(stacked[client], alone)


def test_without_rows_the_head_is_0_and_a_flat_prior_takes_the_shortest_solution() -> None:
    phi = with_constant(torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])).double()
    y = torch.tensor([[1.0], [2.0], [4.0]]).double()
    sums = gaussian_sums(phi, y, torch.ones(3).double(), apart=False)
    torch.testing.assert_close(
        ridge_head(sums, 2, 0.0), torch.tensor([[0.0, 0.5, 0.5]]).double(), rtol=1e-5, atol=1e-5
    )
    for nu in (0.0, 1.0):
        assert not ridge_head(torch.zeros_like(sums), 2, nu).any()


@pytest.mark.parametrize(
    ("objective", "sections", "says"),
    [
        ("regression", {"objective": {"name": "regression", "error": "huber"}}, "squared errors"),
        (
            "regression",
            {"privacy": {"unit": "record", "epsilon": 1.0, "clip": 1.0, "delta": 1e-5}},
            "sensitivity",
        ),
        (
            "multilabel",
            {"privacy": {"unit": "record", "epsilon": 1.0, "clip": 1.0, "delta": 1e-5}},
            "sensitivity",
        ),
        (
            "multilabel",
            {"method": {"name": "fedproto"}},
            "a row may have several labels; use 'logits'",
        ),
    ],
)
def test_heads_that_are_not_exact_or_not_private_are_refused(
    objective: str, sections: dict[str, Any], says: str
) -> None:
    data = replace(labels() if objective == "multilabel" else numbers(), measured=frozenset())
    asked = recipe_of(objective, model=LINEAR, engine=PLANS) | {"method": {"name": "fedlog"}}
    with pytest.raises(InputError, match=says):
        world_of(make(asked | sections), Overrides(data=data))


def test_one_label_is_no_special_case() -> None:
    data = labels()
    single = replace(
        data, y=data.y[:, :1], y_test=data.y_test[:, :1], num_classes=1, classes=("p",)
    )
    whole = head_of(fedlog("multilabel", data))
    torch.testing.assert_close(head_of(fedlog("multilabel", single))[0], whole[0])
    ones = torch.ones(2, 1)
    assert Multilabel(1).loss(torch.zeros(2, 1), Batch(ones, ones, ones[:, 0] > 0)) > 0
