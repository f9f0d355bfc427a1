"""Heads of one exchange against scikit-learn's on all rows together, whoever has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge

import fedgist
from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.message import Nothing
from fedgist.core.privacy import Privacy, sensitivity
from fedgist.core.tree import leaves
from fedgist.errors import InputError, MethodError
from fedgist.methods.common.conjugate_head import map_head
from fedgist.methods.common.left_out_rows import losses_without, spread_of
from fedgist.methods.common.moment_heads import (
    ABSENT,
    SCALES,
    Moments,
    cross_validated,
    from_means,
    lda,
    precision_of,
    qda,
    ridge,
    whitened,
)
from fedgist.methods.common.moment_steps import whole_head
from fedgist.methods.common.moment_sums import widened
from fedgist.methods.common.triangles import symmetric, triangle
from fedgist.runs.files import checkpoint
from fedgist.runs.forgetting import forget
from small_tasks import labels, numbers, recipe_of

CLASSES, WIDTH, ROWS = 4, 6, 300
PRIVATE = {"unit": "record", "epsilon": 3.0, "delta": 1e-5, "clip": 1.0}
LINEAR = {"name": "logistic"}  # no body: features are the normalized inputs


def table(seed: int = 0, rows: int = ROWS) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return rows of correlated columns of unlike scale, and their classes, which are not alike."""
    rng = np.random.default_rng(seed)
    y = rng.choice(CLASSES, rows, p=[0.4, 0.3, 0.2, 0.1])
    mixing = rng.normal(size=(WIDTH, WIDTH)) * np.array([1, 10, 0.1, 1, 3, 1])
    x = (rng.normal(size=(rows, WIDTH)) + 1.5 * np.eye(CLASSES, WIDTH)[y]) @ mixing + 5
    return x.astype(np.float32), y


def plain(seed: int, rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return rows of independent columns of like scale, and their classes."""
    rng = np.random.default_rng(seed)
    y = rng.choice(CLASSES, rows, p=[0.4, 0.3, 0.2, 0.1])
    x = rng.normal(size=(rows, WIDTH)) + 2 * np.eye(CLASSES, WIDTH)[y]
    return x.astype(np.float32), y


def notes_of(warned: Any) -> list[str]:
    return [str(note.message) for note in warned]


def moments_of(x: Any, y: Any, *, by_class: bool = False) -> Moments:
    z, of = torch.as_tensor(x).double(), torch.as_tensor(np.eye(CLASSES)[y])
    gram = torch.einsum("nk,ni,nj->kij", of, z, z) if by_class else z.mT @ z
    counts = of.sum(0)
    rows = torch.tensor(float(len(z)), dtype=torch.float64)
    return Moments(counts, of.mT @ z, rows, z.sum(0), gram, counts)


def weighted_moments(x: Any, y: Any, weight: Any) -> Moments:
    z = torch.as_tensor(x).double()
    of = torch.as_tensor(np.eye(CLASSES)[y] * weight[:, None])
    sums, gram = of.mT @ z, (z * torch.as_tensor(weight).unsqueeze(1)).mT @ z
    counts = of.sum(0)
    return Moments(counts, sums, counts.sum(), sums.sum(0), gram, counts)


def run(rows: Any, count: int = 5, **sections: Any) -> Any:
    """Train and test on all rows, divided over ``count`` clients."""
    method = {"name": "analytic", "wire": "float64", "expand": 0, **sections.pop("method", {})}
    aside = {key: sections.pop(key) for key in ("out", "resume", "rounds") if key in sections}
    recipe = {
        "data": {"normalize": "none"} | sections.pop("data", {}),
        "model": LINEAR,
        "method": method,
        "partition": {"name": "dirichlet", "alpha": 1.0} if count < 50 else {"name": "iid"},
        "clients": {"num_clients": count} | sections.pop("clients", {}),
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": min(count, 7)},
    }
    if isinstance(rows, Path):
        recipe["data"] |= {"name": "npz", "path": str(rows)}
        return fedgist.run(recipe | sections, **aside)
    return fedgist.run(recipe | sections, data=(*rows, *rows), **aside)


def written(folder: Path, rows: Any) -> Path:
    """Write rows into a file, from which another process could read them again."""
    x, y = rows
    np.savez(folder / "rows.npz", x=x, y=y, x_test=x, y_test=y)
    return folder / "rows.npz"


def eta_of(result: Any) -> Any:
    return whole_head(result.server_run.server.known["logistic"].head).double().numpy()


def test_ridge_is_scikit_learns() -> None:
    x, y = table()
    for penalty in (0.5, 40.0):
        head = ridge(moments_of(x, y), torch.tensor(penalty).double())
        expected = Ridge(alpha=penalty, solver="svd").fit(x.astype(float), np.eye(CLASSES)[y])
        np.testing.assert_allclose(head.weight, expected.coef_, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(head.bias, expected.intercept_, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shrinkage", [0.05, 0.5])
def test_lda_is_scikit_learns(shrinkage: float) -> None:
    """Its covariance is W / n, shrunk to its mean diagonal: another scale, and one penalty."""
    x, y = table()
    moments = moments_of(x, y)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(x.astype(float), y)
    head = lda(moments, shrinkage / (1 - shrinkage) * moments.within.trace() / WIDTH)
    found = scores_of(head, x) * ROWS / (ROWS - CLASSES) / (1 - shrinkage)
    expected = oracle.decision_function(x.astype(float)) - np.log(oracle.priors_)
    same_but_for_a_constant(found, expected)


def test_qda_without_a_shared_covariance_is_the_density_of_each_class() -> None:
    x, y = table()
    curves = qda(moments_of(x, y, by_class=True), torch.tensor(0.0).double(), own=1.0)
    u = torch.as_tensor(x).double() - curves.center
    found = u @ curves.weight.mT + curves.bias
    found = found - torch.einsum("ni,kij,nj->nk", u, curves.bend, u) / 2
    each = [x[y == k].astype(float) for k in range(CLASSES)]
    expected = [multivariate_normal(own.mean(0), np.cov(own.T)).logpdf(x) for own in each]
    same_but_for_a_constant(found.numpy(), np.stack(expected, 1))


def test_qda_of_the_shared_covariance_alone_is_lda() -> None:
    x, y = table()
    penalty = torch.tensor(3.0).double()
    curves = qda(moments_of(x, y, by_class=True), penalty, own=0.0)
    u = torch.as_tensor(x).double() - curves.center
    found = u @ curves.weight.mT + curves.bias
    found = found - torch.einsum("ni,kij,nj->nk", u, curves.bend, u) / 2
    same_but_for_a_constant(found.numpy(), scores_of(lda(moments_of(x, y), penalty), x))


def scores_of(head: Any, x: Any) -> Any:
    return x.astype(float) @ head.weight.numpy().T + head.bias.numpy()


def same_but_for_a_constant(found: Any, expected: Any) -> None:
    """Scores of each row, (rows, classes), may have a constant of their own."""
    found, expected = (s - s.mean(1, keepdims=True) for s in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


def test_whitened_is_fedlogs_head_of_rows_that_were_whitened() -> None:
    x, y = table()
    head = whitened(moments_of(x, y), torch.tensor(7.0).double())
    z = x.astype(float) - x.astype(float).mean(0)
    within = sum(np.cov(z[y == k].T) * ((y == k).sum() - 1) for k in range(CLASSES))
    values, vectors = np.linalg.eigh((within + 7.0 * np.eye(WIDTH)) / (ROWS - CLASSES))
    white = z @ (vectors / np.sqrt(values)) @ vectors.T
    sums = np.stack([[(y == k).sum(), *white[y == k].sum(0)] for k in range(CLASSES)])
    eta = map_head(torch.as_tensor(sums), 1.0).numpy()
    np.testing.assert_allclose(scores_of(head, x), white @ eta[:, 1:].T + eta[:, 0], atol=1e-8)


@given(st.integers(0, 2**31), st.integers(12, 80))
def test_the_penalty_minimizes_cross_validation_of_the_rows(seed: int, rows: int) -> None:
    """Generalized cross-validation by the hat matrix of all rows, on the same penalties."""
    x, y = table(seed, rows)
    found = float(cross_validated(moments_of(x, y)))
    z, t = x.astype(float) - x.astype(float).mean(0), np.eye(CLASSES)[y]
    t = t - t.mean(0)

    def score(penalty: float) -> float:
        hat = z @ np.linalg.solve(z.T @ z + penalty * np.eye(WIDTH), z.T)
        residual = ((t - hat @ t) ** 2).sum()
        return float(rows * residual / (rows - 1 - np.trace(hat)) ** 2)

    mean = np.trace(z.T @ z) / WIDTH
    best = min(score(mean * step) for step in np.logspace(-8, 3, 67))
    assert score(found) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("head", ["whitened", "lda", "ridge", "qda"])
@pytest.mark.parametrize(("expand", "roots"), [(0, False), (9, False), (0, True), (9, True)])
def test_the_partition_changes_nothing(head: str, expand: int, *, roots: bool) -> None:
    """One client or two hundred: to 1e-6 with float64, to 3e-4 with float32."""
    rows = table(1)
    method = {"head": head, "expand": expand, "roots": roots}
    one, five, many = (eta_of(run(rows, k, method=method)) for k in (1, 5, 200))
    size = np.abs(one[:, 1:]).max()
    for other in (five, many):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6 * size)
    normal = {"normalize": "pooled"}  # a mean far above the deviation costs digits of float32
    exact, rounded = (
        eta_of(run(rows, 5, method=method | {"wire": wire}, data=normal))
        for wire in ("float64", "float32")
    )
    close = 1e-3 if expand or roots else 3e-4  # roots and random features are nearly collinear
    assert np.abs(rounded - exact).max() <= close * np.abs(exact).max()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 99), st.data())
def test_features_of_a_kind_share_the_root_mean_square_of_their_deviations(
    kinds: list[int], seed: int, data: st.DataObject
) -> None:
    rng, m = np.random.default_rng(seed), sum(kinds)
    x, y = rng.normal(size=(30, m)) * rng.exponential(size=m), rng.integers(CLASSES, size=30)
    x[:, list(data.draw(st.sets(st.integers(0, m - 1))))] = 3.0
    found, ends = moments_of(x, y).deviations(kinds).numpy(), np.cumsum(kinds)[:-1]
    for own, some in zip(np.split(found, ends), np.split(x, ends, 1), strict=True):
        size = np.sqrt(some.var(0).mean()) if np.ptp(some, axis=0).any() else 1.0
        np.testing.assert_allclose(own, size, rtol=1e-6)


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize(("expand", "roots"), [(0, False), (0, True), (9, False), (9, True)])
def test_the_head_of_a_run_is_that_of_all_rows_standardized(
    expand: int, *, roots: bool, encoder: bool
) -> None:
    """Columns that no body encodes have a scale each; features, roots and random ones share one."""
    x, y = table(2)
    model = {"name": "mlp", "hidden": [WIDTH]} if encoder else LINEAR
    result = run((x, y), 1, method={"roots": roots, "expand": expand}, model=model)
    (start,) = result.server_run.task.starts.values()
    (known,) = result.server_run.server.known.values()
    with torch.no_grad():
        rows = start.features(torch.as_tensor(x)).double()
    random_ones = widened(rows, known.head.key, 0, expand, roots=False)[:, WIDTH:].numpy()
    z = rows.numpy()
    z = np.concatenate([z, *([np.sign(z) * np.sqrt(np.abs(z))] if roots else []), random_ones], 1)
    deviation, encoded = z.std(0), WIDTH * (2 if roots else 1)
    one = slice(0, WIDTH), slice(WIDTH, encoded)
    for kind in [*(one if encoder else ()), slice(encoded, None)]:
        deviation[kind] = np.sqrt(np.square(deviation[kind]).mean()) if z[:, kind].size else 1.0
    deviation = deviation if roots or expand or not encoder else np.ones(WIDTH)
    moments = moments_of(z / deviation, y)
    expected = whitened(moments, cross_validated(moments))
    counts = np.bincount(y, minlength=CLASSES)
    prior = np.log((counts + 1) / (len(y) + CLASSES))
    eta, scale = whole_head(known.head).double().numpy(), SCALES["whitened"]
    right = (scale * scores_of(expected, z / deviation) + prior).argmax(1) == y
    assert result.rounds[-1]["eval/client/accuracy_mean"] == pytest.approx(right.mean())
    weight = scale * expected.weight.numpy()
    near = {"rtol": 1e-5, "atol": 1e-5 * np.abs(weight).max()}
    np.testing.assert_allclose(eta[:, 1:] * deviation, weight, **near)
    np.testing.assert_allclose(eta[:, 0], scale * expected.bias.numpy() + prior, rtol=1e-4)


def test_a_client_sends_once_and_late_ones_are_added() -> None:
    rows, whole = table(3), eta_of(run(table(3), 8))
    train = {"num_rounds": 12, "fraction_train": 0.4}
    result = run(rows, 8, train=train, method={"refine": False})
    asked = [line["clients/asked"] for line in result.rounds]
    assert sum(asked) == 8 == int((result.server_run.server.heard > 0).sum())
    assert asked[0] == 3
    np.testing.assert_allclose(eta_of(result), whole, rtol=1e-6, atol=1e-9)
    once = CLASSES * (WIDTH + 1) + WIDTH * (WIDTH + 1) // 2
    assert sum(line["comm/up_bytes"] for line in result.rounds) == 8 * 8 * once


def test_class_means_of_single_rows_are_the_rows() -> None:
    """FedCOF with a row for each client has the covariance of all rows."""
    x, y = table(4, 60)
    each = np.zeros((60, CLASSES, WIDTH + 1))
    each[np.arange(60), y] = np.concatenate([np.ones((60, 1)), x.astype(float)], 1)
    head, moments = from_means(torch.as_tensor(each), 2.0)
    expected = lda(moments_of(x, y), torch.tensor(2.0).double())
    np.testing.assert_allclose(head.weight, expected.weight, rtol=1e-6)
    np.testing.assert_allclose(head.bias, expected.bias, rtol=1e-6)
    assert moments.counts.tolist() == np.bincount(y, minlength=CLASSES).tolist()


@pytest.mark.parametrize("factor", [0.3, 1e-3, 1e-7])
def test_weights_with_a_common_factor_give_the_same_means(factor: float) -> None:
    # rejects divisions by one row at least, which are for counts with noise
    x, y = table(7, 60)
    weight = np.random.default_rng(1).uniform(0.2, 1, 60)
    whole, small = (weighted_moments(x, y, weight * by) for by in (1.0, factor))
    for name in ("mean", "means"):
        np.testing.assert_allclose(getattr(small, name), getattr(whole, name), rtol=1e-9)
    np.testing.assert_allclose(small.deviations([WIDTH]), whole.deviations([WIDTH]), rtol=1e-9)
    pairs = (whole, 1.0), (small, factor)
    one, other = (ridge(m, torch.tensor(2 * by, dtype=torch.float64)) for m, by in pairs)
    np.testing.assert_allclose(other.weight, one.weight, rtol=1e-7)
    np.testing.assert_allclose(other.bias, one.bias, rtol=1e-7)
    each = np.zeros((60, CLASSES, WIDTH + 1))
    each[np.arange(60), y] = np.concatenate([np.ones((60, 1)), x], 1) * weight[:, None]
    (one, _), (other, _) = (from_means(torch.tensor(each * by), 2.0 * by) for by in (1.0, factor))
    np.testing.assert_allclose(factor * other.weight, one.weight, rtol=1e-7)


def test_means_forget_a_client_exactly() -> None:
    rows = table(5)
    result = run(rows, 9, method={"head": "means"})
    side = result.server_run
    ctx = side.context("exchange", 1)
    without = side.method.forget(side.server, 4, ctx)
    each = side.server.known["logistic"].newest.arrays["total"].clone()
    each[4] = 0
    head, _ = from_means(each.double(), None)
    found = without.known["logistic"].head.eta[:, 1:]
    np.testing.assert_allclose(found, SCALES["means"] * head.weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "more", "count"),
    [
        ({}, {}, 512),
        ({"head": "lda"}, {}, 512),
        ({"expand": 7}, {}, 7),
        ({"expand": 0}, {}, 0),
        ({"expand": 0, "roots": True}, {}, WIDTH),
        ({"expand": 7, "roots": True, "project": 4}, {}, 2 * 4 + 7 - WIDTH),
        ({"head": "qda"}, {}, 0),
        ({"project": 4}, {}, -2),
        ({"wire": "float32", "head": "cosine"}, {}, None),
        ({}, {"privacy": PRIVATE}, 0),
        ({}, {"model": {"name": "mlp", "hidden": [WIDTH]}}, 0),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_rows_that_no_body_encodes_get_random_features(
    method: dict[str, object], more: dict[str, Any], count: int | None
) -> None:
    given = {"expand": "raw_rows"} | method
    result = run(table(3), 2, method=given, **more)
    (known,) = result.server_run.server.known.values()
    sums = known.sums
    width = sums.counted.shape[1] - 1
    assert width == WIDTH + (count or 0)
    told = any("random features" in note for note in result.summary["notes"])
    assert told == (count == 512)
    if count == 512:
        same = run(table(3), 2, method=method | {"expand": 512})
        assert torch.equal(known_of(same).head.eta, known_of(result).head.eta)


@pytest.mark.parametrize(
    "about", [{}, {"head": "qda"}, {"expand": 5}, {"roots": True}, {"wire": "int8"}]
)
def test_a_client_is_taken_out_of_the_totals(about: dict[str, Any], tmp_path: Path) -> None:
    """The head is that of the others, who go on alone; exactly, but for codes of 8 bits."""
    rows, folder = plain(19, 300), tmp_path / "run"
    train = {"num_rounds": 2, "fraction_train": 0.6}
    given = {"method": {"refine": False, "penalty": 2.0} | about, "train": train}
    file = written(tmp_path, rows)
    result = run(file, 6, out=folder, **given)
    heard = result.server_run.server.heard.tolist()
    gone = next(client for client, number in enumerate(heard) if number > 0)
    assert forget(folder, gone) == gone
    partition = result.world.partition.train
    others = [c for c, number in enumerate(heard) if number > 0 and c != gone]
    kept = torch.cat([partition[client] for client in others]).numpy()
    after = run(file, 6, out=folder, resume=True, rounds=3, **given)
    known = after.server_run.server.heard.tolist()
    assert known[gone] == -1.0
    late = [c for c, number in enumerate(known) if number == 3]
    kept = np.concatenate([kept, *(partition[c].numpy() for c in late)])
    if about == {}:
        x, y = rows
        deviation = x[kept].astype(float).std(0)
        expected = whitened(moments_of(x[kept] / deviation, y[kept]), torch.tensor(2.0).double())
        found = eta_of(after)[:, 1:] * deviation / SCALES["whitened"]
        np.testing.assert_allclose(found, expected.weight.numpy(), rtol=1e-5, atol=1e-6)
    sums = known_of(after).sums
    counts = np.bincount(rows[1][kept], minlength=CLASSES)
    np.testing.assert_allclose(sums.counted[:, 0], counts, atol=1e-9)
    limit = 2.0 if about == {"wire": "int8"} else 1e-8
    np.testing.assert_allclose(
        sums.counted[:, 1 : WIDTH + 1].sum(0), rows[0][kept].astype(float).sum(0), atol=limit
    )


def test_what_noise_hid_is_taken_out_with_its_noise(tmp_path: Path) -> None:
    """Noise of the seed is drawn again; that of the system cannot be."""
    rows = plain(20, 300)
    for noise in ("seed", "system"):
        folder, privacy = tmp_path / noise, PRIVATE | {"where": "local", "noise": noise}
        with pytest.warns(UserWarning, match=r"\w"):
            result = run(written(tmp_path, rows), 4, out=folder, privacy=privacy)
        before = known_of(result)
        if noise == "system":
            with pytest.raises(
                MethodError, match="cannot be had again: its noise was the system's"
            ):
                forget(folder, 1)
            continue
        forget(folder, 1)
        saved = checkpoint.load(folder)
        assert saved is not None
        assert float(saved.server["known/logistic/noises"]) == 3 == float(before.noises) - 1
        others = torch.cat([result.world.partition.train[c] for c in (0, 2, 3)])
        noisy = saved.server["known/logistic/sums/counted"][:, 0].sum()
        deviation = result.world.server.task.privacy.deviation * 64 / 20 * (3 * CLASSES) ** 0.5
        assert abs(float(noisy) - len(others)) < 5 * deviation


@pytest.mark.parametrize("head", ["whitened", "lda", "ridge", "qda"])
def test_constant_and_collinear_features_are_borne(head: str) -> None:
    x, y = table(6)
    more = np.concatenate([x, x[:, :2] @ np.ones((2, 1)), np.full((ROWS, 2), 3.0)], 1)
    result = run((more.astype(np.float32), y), method={"head": head})
    assert np.isfinite(eta_of(result)).all()
    plain = run((x, y), method={"head": head})
    found, expected = (r.rounds[-1]["eval/client/accuracy_mean"] for r in (result, plain))
    assert found == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("head", ["whitened", "lda", "ridge", "qda"])
@pytest.mark.parametrize("rows", [5, 12])
def test_few_rows_and_a_class_without_any_are_borne(head: str, rows: int) -> None:
    x, y = table(7, rows)
    y = np.minimum(y, 2)
    with pytest.warns(UserWarning, match="classes that no row has: '3'"):
        result = run((x, y), 2, method={"head": head}, data={"classes": ["0", "1", "2", "3"]})
    eta = eta_of(result)
    assert np.isfinite(eta).all()
    assert eta[3, 0] == ABSENT
    assert not eta[3, 1:].any()


def test_own_shares_are_added_and_never_sent() -> None:
    rows = table(8)
    result = run(rows, 4, method={"prior": "own"})
    even = run(rows, 4, method={"prior": "uniform"})
    np.testing.assert_array_equal(eta_of(result), eta_of(even))
    sent = [[line["comm/up_bytes"] for line in r.rounds] for r in (result, even)]
    assert sent[0] == sent[1]
    x = torch.as_tensor(rows[0][:20])
    for client in range(4):
        apart = result.model(client)(x) - even.model(client)(x)
        own = result.world.data.y[result.world.partition.train[client]]
        counts = own.bincount(minlength=CLASSES)
        expected = ((counts + 1) / (len(own) + CLASSES)).log()
        torch.testing.assert_close(apart, expected.expand_as(apart), rtol=1e-4, atol=1e-4)


def test_sample_weights_weigh_the_sums() -> None:
    data = numbers()
    weight = torch.linspace(0, 2, len(data.y))
    recipe = recipe_of("regression", model=LINEAR)
    recipe["method"] = {"name": "analytic", "expand": 0, "wire": "float64", "penalty": 2.0}
    recipe["train"] = {"num_rounds": 1, "sample_weights": "w"}
    eta = eta_of(fedgist.run(recipe, data=replace(data, annotations={"w": weight})))
    x = ((data.x - torch.tensor(data.mean)) / torch.tensor(data.std)).double().numpy()
    mean = np.average(x, axis=0, weights=weight)
    scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weight))
    y = data.y.double().numpy()
    y = (y - y.mean(0)) / y.std(0)
    expected = Ridge(alpha=2.0, solver="svd").fit(x / scale, y, sample_weight=weight.numpy())
    np.testing.assert_allclose(eta[:, 1:] * scale, expected.coef_, atol=1e-6)


def known_of(result: Any) -> Any:
    return result.server_run.server.known["logistic"]


@pytest.mark.parametrize(("head", "encoder"), [("whitened", 0), ("lda", 0), ("lda", WIDTH)])
def test_further_rounds_end_at_logistic_regression(head: str, encoder: int) -> None:
    """Its penalty is of standardized weights, by the size of the first ones."""
    rows, options = table(9), {"name": "mlp", "hidden": [encoder]} if encoder else LINEAR
    results = [
        run(rows, 5, method={"head": head}, train={"num_rounds": rounds}, model=options)
        for rounds in (1, 400)
    ]
    known = [next(iter(result.server_run.server.known.values())) for result in results]
    first, eta = (whole_head(one.head).double().numpy() for one in known)
    (start,) = results[0].server_run.task.starts.values()
    with torch.no_grad():
        x, y = start.features(torch.as_tensor(rows[0])).double().numpy(), rows[1]
    deviation = np.sqrt(x.var(0).mean()) if encoder else x.std(0)
    z = (x - x.mean(0)) / deviation
    penalty = WIDTH * (CLASSES - 1) / np.square(first[:, 1:] * deviation).sum()
    assert float(known[1].ridge) == pytest.approx(penalty, rel=1e-5)
    oracle = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000).fit(z, y)
    found = x @ eta[:, 1:].T + eta[:, 0]
    expected = z @ oracle.coef_.T + oracle.intercept_
    found, expected = (s - s.mean(1, keepdims=True) for s in (found, expected))
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_further_rounds_of_some_clients_lower_the_loss() -> None:
    rows, train = table(10, 600), {"num_rounds": 25, "fraction_train": 0.5}
    result = run(rows, 6, train=train)
    losses = [line["eval/client/loss_mean"] for line in result.rounds]
    assert losses[-1] < losses[0]


def test_few_rows_are_not_refined_unless_asked() -> None:
    rows, many = table(11, 50), {"num_rounds": 3}
    first = eta_of(run(rows))
    np.testing.assert_array_equal(eta_of(run(rows, train=many)), first)
    result = run(rows, train=many)
    assert [line["clients/asked"] for line in result.rounds] == [5, 0, 0]
    asked = run(rows, train=many, method={"refine": True})
    assert np.abs(eta_of(asked) - first).max() > 1e-3


@pytest.mark.parametrize("prior", ["counts", "own"])
def test_calibration_finds_the_factor_of_the_least_loss(prior: str) -> None:
    """Of all clients' training rows, with the priors that they predict by."""
    rows = table(12)
    both = [run(rows, 4, method={"prior": prior, "calibrate": c}) for c in (False, True)]
    plain, found = (known_of(result).head.eta.double() for result in both)
    factor = float((found[:, 1:] / plain[:, 1:]).median())
    torch.testing.assert_close(found, factor * plain, rtol=1e-5, atol=1e-6)
    partition = both[0].world.partition.train
    head, x, y = known_of(both[0]).head, torch.as_tensor(rows[0]).double(), torch.as_tensor(rows[1])

    def loss(factor: float) -> float:
        total = 0.0
        for own in partition:
            counts = y[own].bincount(minlength=CLASSES)
            log_share = ((counts + 1) / (len(own) + CLASSES)).log() if prior == "own" else 0.0
            scores = factor * (x[own] @ plain[:, 1:].mT + plain[:, 0]) + head.prior + log_share
            total += float(torch.nn.functional.cross_entropy(scores, y[own], reduction="sum"))
        return total

    best = min(np.logspace(-np.log10(20), np.log10(20), 41), key=loss)
    assert factor == pytest.approx(best, rel=1e-5)


@given(st.integers(0, 99), st.sampled_from(["counts", "own", "uniform"]), st.sampled_from([1, 10]))
def test_left_out_rows_are_scored_as_by_a_head_without_them(
    seed: int, prior: str, heaviest: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = table(seed, 40)
    y[0] = 3  # a class of few rows, or of one
    weight = rng.uniform(1, heaviest, 40)
    moments, penalty = weighted_moments(x, y, weight), torch.tensor(2.0, dtype=torch.float64)
    spread = spread_of(moments, precision_of(moments, penalty), 0.5, torch.zeros(0))
    mine = slice(0, 15)  # this client's rows
    own = weighted_moments(x[mine], y[mine], weight[mine]).counts
    shares = {"counts": moments.counts, "own": own, "uniform": torch.zeros(0)}[prior]
    expected, count = np.zeros(2), 0.0
    for row in range(15):
        less = weight.copy()
        less[row] = 0.0
        rest = weighted_moments(x, y, less)
        there = rest.counts > 1e-9
        if not there[y[row]]:
            continue
        scores = lda(rest, penalty)
        own_rest = weighted_moments(x[mine], y[mine], less[mine]).counts
        logs = {"counts": rest.counts + 1, "own": own_rest + 1}.get(prior, torch.ones(CLASSES))
        of_row = torch.as_tensor(x[row]).double() @ scores.weight.mT + scores.bias
        for i, factor in enumerate((0.5, 3.0)):
            logits = torch.where(there, 0.5 * factor * of_row + logs.log(), -torch.inf)
            expected[i] += weight[row] * float(logits.logsumexp(0) - logits[y[row]])
        count += weight[row]
    z, of = torch.as_tensor(x[mine]).double(), torch.as_tensor(y[mine])
    batch = Batch(z, of, torch.ones(15, dtype=torch.bool))
    weights = torch.as_tensor(weight[mine])
    found, rows = losses_without(z, batch, weights, spread, shares, [0.5, 3.0])
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    assert float(rows) == pytest.approx(count, rel=1e-6)


def test_left_out_rows_say_how_sure_a_head_of_few_rows_may_be() -> None:
    rows = table(12, 60)  # ten for each feature and fewer, at which others do not ask
    results = [run(rows, 4, method={"head": "lda", "calibrate": c}) for c in (False, True)]
    plain, found = (known_of(result).head.eta.double() for result in results)
    factor = float((found[:, 1:] / plain[:, 1:]).median())
    torch.testing.assert_close(found, factor * plain, rtol=1e-5, atol=1e-6)
    assert factor != pytest.approx(1.0, rel=1e-3)
    twice = {"head": "lda", "calibrate": True, "refine": False}
    again = run(rows, 4, method=twice, train={"num_rounds": 2})
    torch.testing.assert_close(known_of(again).head.eta.double(), found)


@pytest.mark.parametrize("penalty", [1.0, 30.0])
def test_numbers_have_ridge_regression(penalty: float) -> None:
    data = numbers()
    recipe = recipe_of("regression", model=LINEAR, train={"num_rounds": 1})
    recipe["method"] = {"name": "analytic", "expand": 0, "wire": "float64", "penalty": penalty}
    eta = eta_of(fedgist.run(recipe, data=data))
    x = ((data.x - torch.tensor(data.mean)) / torch.tensor(data.std)).double().numpy()
    scale = x.std(0)
    y = data.y.double().numpy()
    y = (y - y.mean(0)) / y.std(0)
    expected = Ridge(alpha=penalty, solver="svd").fit(x / scale, y)
    np.testing.assert_allclose(eta[:, 1:] * scale, expected.coef_, atol=1e-6)
    np.testing.assert_allclose(eta[:, 0], expected.intercept_, atol=1e-6)


@pytest.mark.parametrize("head", ["whitened", "lda", "ridge"])
def test_several_labels_have_a_head_each(head: str) -> None:
    """Of LDA and ridge by the same sums of each label alone, as two classes of one covariance."""
    data = labels()
    recipe = recipe_of("multilabel", model=LINEAR, train={"num_rounds": 1})
    recipe["method"] = {
        "name": "analytic",
        "expand": 0,
        "wire": "float64",
        "head": head,
        "penalty": 2.0,
    }
    eta = eta_of(fedgist.run(recipe, data=data))
    x = ((data.x - torch.tensor(data.mean)) / torch.tensor(data.std)).double().numpy()
    z = (x - x.mean(0)) / x.std(0)
    y = data.y.numpy()
    covariance = (z.T @ z + 2.0 * np.eye(z.shape[1])) / (len(z) - 1)
    for label in range(y.shape[1]):
        has = y[:, label] > 0
        if head == "lda":
            apart = np.linalg.solve(covariance, z[has].mean(0) - z[~has].mean(0)) / 3
        elif head == "ridge":
            apart = 10 * Ridge(alpha=2.0, solver="svd").fit(z, has.astype(float)).coef_
        else:
            values, vectors = np.linalg.eigh(covariance)
            white = z @ (vectors / np.sqrt(values)) @ vectors.T
            both = [[s.sum(), *white[s].sum(0)] for s in (has, ~has)]
            two = map_head(torch.as_tensor(np.array(both)), 1.0).numpy()
            apart = 0.2 * (two[0] - two[1])[1:] @ (vectors / np.sqrt(values)) @ vectors.T
        np.testing.assert_allclose(eta[label, 1:] * x.std(0), apart, atol=1e-5)


@pytest.mark.parametrize("wire", ["float16", "bfloat16", "int8"])
def test_codes_say_what_numbers_do_in_fewer_bytes(wire: str) -> None:
    """Sums of 8 clients that round their own; a row of 16 bits is half as long, but for scales."""
    rows = plain(13, 600)
    exact, rounded = (run(rows, 8, method={"wire": w}) for w in ("float32", wire))
    far = np.abs(eta_of(exact) - eta_of(rounded)).max() / np.abs(eta_of(exact)).max()
    assert 0 < far < {"float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2}[wire]
    size = 1 if wire == "int8" else 2
    of_rows = CLASSES * (8 + WIDTH * size)
    second = WIDTH * 4 + WIDTH * (WIDTH - 1) // 2 * size
    assert rounded.rounds[-1]["comm/up_bytes"] == 8 * (of_rows + second)


def test_projected_features_are_random_sums_of_the_features() -> None:
    """The head is that of P z / sqrt(3), with P from the key that clients get."""
    x, y = table(14)
    result = run((x, y), method={"project": 3, "penalty": 2.0})
    key = known_of(result).head.key.view(())
    matrix = random.normal(random.fold(key, 2), (WIDTH, 3)).double().numpy()
    z = x.astype(float) @ matrix / np.sqrt(3)
    scale = z.std(0)
    expected = whitened(moments_of(z / scale, y), torch.tensor(2.0).double())
    eta = eta_of(result)
    np.testing.assert_allclose(eta[:, 1:] * scale, 0.2 * expected.weight.numpy(), rtol=1e-5)
    found = result.model(0)(torch.as_tensor(x)).double().numpy()
    np.testing.assert_allclose(found, z @ eta[:, 1:].T + eta[:, 0], rtol=1e-4, atol=1e-4)


def upload_of(x: Any, y: Any, grid: float, head: str) -> torch.Tensor:
    """Return all numbers that a private client with these rows sends, before noise."""
    privacy = Privacy("record", "central", 1.0, 1.0, grid=grid)
    result = run(table(), method={"head": head})
    side = result.server_run
    task = replace(side.task, privacy=privacy)
    ctx = replace(side.context("exchange", 1), task=task, architecture="logistic")
    mask = torch.ones(len(y), dtype=torch.bool)
    batch = Batch(torch.as_tensor(x), torch.as_tensor(y), mask)
    net = task.starts["logistic"]
    sums = side.method.summarize(net, batch, Nothing(), Nothing(), ctx)
    sent = side.method.upload(net, Nothing(), sums, Nothing(), ctx)[0]
    return torch.cat([leaf.flatten() for leaf in leaves(sent)])


@pytest.mark.parametrize("head", ["whitened", "cosine"])
@pytest.mark.parametrize("grid", [0.0, 2.0**-38, 2.0**-33])
def test_a_row_more_changes_a_release_by_less_than_the_sensitivity(head: str, grid: float) -> None:
    """By brute force: rows of any length and direction, along axes and beside them."""
    rng = np.random.default_rng(15)
    x, y = table(15, 40)
    rows = [rng.normal(size=WIDTH) * 10.0 ** rng.integers(-6, 7) for _ in range(60)]
    rows += [*np.eye(WIDTH), np.ones(WIDTH), np.zeros(WIDTH), np.full(WIDTH, np.inf)]
    before, far = upload_of(x, y, grid, head), []
    for row in rows:
        more = np.concatenate([x, row[None].astype(np.float32)])
        after = upload_of(more, np.append(y, rng.integers(CLASSES)), grid, head)
        far.append(float((after - before).norm()))
        if grid:
            assert torch.equal(torch.round(after / grid) * grid, after)
    assert max(far) <= sensitivity("record", 1.0)
    assert max(far[:60]) > 0.97 * sensitivity("record", 1.0)
    assert far[-1] == 0.0


@given(st.integers(1, 12), st.floats(0.01, 30.0), st.integers(0, 2**31))
def test_the_norm_of_a_plain_term_is_the_formula(m: int, b: float, seed: int) -> None:
    """Of count, sums and triangle with beside-diagonals times sqrt 2: sqrt(1 + b^2 + b^4)."""
    z = np.random.default_rng(seed).normal(size=m)
    z *= b / np.linalg.norm(z)
    row, column = np.triu_indices(m)
    second = np.where(row == column, 1.0, np.sqrt(2)) * z[row] * z[column]
    term = np.concatenate([[1.0], z, second])
    assert np.linalg.norm(term) == pytest.approx(np.sqrt(1 + b**2 + b**4), rel=1e-9)


@pytest.mark.parametrize("where", ["central", "local"])
@pytest.mark.parametrize("noise", ["seed", "system"])
def test_private_rows_have_a_head_near_that_of_unit_rows(where: str, noise: str) -> None:
    """With much budget; the noise of each client adds up to more than that of the server."""
    x, y = plain(16, 3000)
    privacy = PRIVATE | {"epsilon": 50.0, "where": where, "noise": noise}
    with pytest.warns(UserWarning, match=r"\w") as warned:
        result = run((x, y), 4, privacy=privacy)
    assert any("second moments are released" in note for note in notes_of(warned))
    assert any("if the frozen bodies do not depend" in note for note in notes_of(warned))
    noises = float(known_of(result).noises)
    assert noises == (1 if where == "central" else 4)
    unit = x.astype(float) / np.linalg.norm(x.astype(float), axis=1, keepdims=True)
    deviation = result.world.server.task.privacy.deviation
    penalty = 0.5 * 2 * deviation * 64 / 81 * np.sqrt(WIDTH * noises)
    expected = whitened(moments_of(unit, y), torch.tensor(penalty).double())
    prior = np.log((np.bincount(y) + 1) / (len(y) + CLASSES))
    scores = SCALES["whitened"] * scores_of(expected, unit) + prior
    found = unit @ eta_of(result)[:, 1:].T + eta_of(result)[:, 0]
    assert (found.argmax(1) == scores.argmax(1)).mean() > 0.97


@pytest.mark.parametrize(
    ("rows", "says"),
    [(0, "is not stated"), (700, ""), (600, "declared_rows = 600 at epsilon 3 are few")],
)
def test_few_declared_rows_release_class_sums_alone(rows: int, says: str) -> None:
    """At epsilon 3 below 2,000 / 3 rows, whatever the clients have."""
    with pytest.warns(UserWarning, match=r"\w") as warned:
        result = run(table(17), privacy=PRIVATE, method={"declared_rows": rows})
    said = [note for note in notes_of(warned) if "declared_rows" in note]
    assert [says in text for text in said] == [True] * bool(says)
    second = WIDTH * (WIDTH + 1) // 2 if rows != 600 else 0
    numbers = CLASSES * (WIDTH + 1) + second
    assert result.rounds[-1]["comm/up_bytes"] == 5 * 8 * numbers


def test_cosine_is_the_direction_of_class_sums() -> None:
    x, y = table(18)
    unit = x.astype(float) / np.linalg.norm(x.astype(float), axis=1, keepdims=True)
    sums = np.stack([unit[y == k].sum(0) for k in range(CLASSES)])
    expected = 10 * sums / np.linalg.norm(sums, axis=1, keepdims=True)
    result = run((x, y), method={"head": "cosine", "prior": "uniform"})
    np.testing.assert_allclose(eta_of(result)[:, 1:], expected, rtol=1e-5)
    found = result.model(0)(torch.as_tensor(x)).double().numpy()
    np.testing.assert_allclose(found, unit @ expected.T, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 9), st.integers(0, 2**31))
def test_a_triangle_is_the_matrix(m: int, seed: int) -> None:
    a = random.normal(random.key(seed), (2, m, m))
    both = a + a.mT
    assert torch.equal(symmetric(triangle(both), m), both)
    assert triangle(both).shape == (2, m * (m + 1) // 2)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"method": {"head": "means"}, "clients": {"num_clients": 2}}, "have at most 4 class"),
        ({"method": {"head": "means", "wire": "int8"}}, "sends 'float32' or 'float64'"),
        ({"method": {"project": WIDTH}}, "logistic has 6 features; project to fewer"),
        ({"privacy": PRIVATE | {"clip": 2.0}}, "rows to length 1: state 1"),
        ({"privacy": PRIVATE, "method": {"head": "qda"}}, "has no form for private rows"),
        ({"privacy": PRIVATE, "method": {"expand": 4}}, "columns of like scale"),
        ({"privacy": PRIVATE, "method": {"roots": True}}, "columns of like scale"),
        ({"privacy": PRIVATE, "method": {"calibrate": True}}, "unknown sensitivity"),
        ({"privacy": PRIVATE, "method": {"wire": "int8"}}, "noise takes numbers off the codes"),
        (
            {"privacy": PRIVATE | {"noise": "system"}, "method": {"wire": "float32"}},
            "needs method.wire = 'float64'",
        ),
        ({"model": {"name": "mlp", "hidden": [5]}, "clients": {"init": "own"}}, "one body"),
    ],
)
def test_what_cannot_be_added_up_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        run(table(), **sections)


@pytest.mark.parametrize("head", ["whitened", "lda", "ridge"])
def test_several_labels_of_private_records_are_refused(head: str) -> None:
    # seen: a row is in the sums of each of its labels, and one class was accounted for
    recipe = recipe_of("multilabel", model=LINEAR, train={"num_rounds": 1}, privacy=PRIVATE)
    recipe["method"] = {"name": "analytic", "head": head}
    with pytest.raises(InputError, match="the sensitivity of its sums is not known"):
        fedgist.run(recipe, data=labels())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_noisy_counts_of_whole_clients_give_a_head(seed: int) -> None:
    # seen: noise made a count negative, and the budget was spent for no model
    private = {"unit": "client", "epsilon": 0.5, "delta": 1e-3, "clip": 1.0}
    result = run(table(), privacy=private, seed=seed)
    assert not any("events" in line for line in result.rounds)
    assert np.isfinite(eta_of(result)).all()


def test_rounded_sums_of_collinear_features_are_borne() -> None:
    """Rounding makes eigenvalues of what is nearly 0, and cross-validation must not fit them."""
    rng = np.random.default_rng(21)
    y = rng.choice(CLASSES, 1500)
    few = rng.normal(size=(1500, 6)) + 2 * np.eye(CLASSES, 6)[y]
    x = (few @ rng.normal(size=(6, 80)) + 0.02 * rng.normal(size=(1500, 80)) + 10).astype(
        np.float32
    )
    accuracy = {
        wire: run((x, y), 20, method={"wire": wire}).rounds[-1]["eval/client/accuracy_mean"]
        for wire in ("float32", "float16", "int8")
    }
    assert accuracy["float16"] > accuracy["float32"] - 0.02
    assert accuracy["int8"] > accuracy["float32"] - 0.1
