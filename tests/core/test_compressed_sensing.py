"""The random measurements against their matrix, and reconstructions against the true vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.hadamard import hadamard
from fedgist.core.nets.compiled.kernel_library import library
from fedgist.methods.cs_fl import (
    Measurement,
    binary_hard_thresholding,
    hard_thresholding,
    sparse,
)

Floats = npt.NDArray[np.float64]


def dense(measure: Measurement) -> Floats:
    """The matrix of a measurement, (m, n)."""
    n, m = len(measure.flips), len(measure.places)
    length = 2 ** int(np.ceil(np.log2(n)))
    whole = scipy.linalg.hadamard(length)[measure.places.numpy()][:, :n]
    return np.asarray(whole * measure.flips.numpy() / np.sqrt(m))


def example(n: int, m: int, count: int, seed: int = 0) -> tuple[Measurement, Tensor]:
    """A measurement, and a vector with ``count`` entries that are not 0."""
    key = random.key(seed)
    places = random.permutation(random.fold(key, 1), n)[:count]
    values = random.normal(random.fold(key, 2), (count,))
    x = torch.zeros(n).index_put((places,), values + values.sign() / 2)
    return Measurement.draw(key, n, m), x


@pytest.mark.parametrize("length", [1, 2, 8, 64, 128, 1024])
def test_the_transform_is_hadamards_matrix(length: int) -> None:
    x = torch.arange(1.0, length + 1) ** 0.5
    expected = scipy.linalg.hadamard(length) @ x.numpy().astype(np.float64)
    # each level of the transform may round once, by the sum of what is added up
    roundings = int(np.log2(length)) * torch.finfo(x.dtype).eps * float(x.double().sum())
    np.testing.assert_allclose(hadamard(x).numpy(), expected, rtol=0, atol=roundings)


LENGTHS = pytest.mark.parametrize("length", [1, 2, 8, 16, 64, 128, 256, 4096, 8192, 32768])


def check_sums(length: int) -> None:
    x = random.normal(random.key(length), (3, length))
    y, half = x.numpy().copy(), 1
    while half < length:
        a, b = np.moveaxis(y.reshape(3, -1, 2, half), 2, 0)
        y, half = np.stack([a + b, a - b], 2).reshape(3, length), 2 * half
    alone = torch.stack([hadamard(line) for line in x])
    assert (alone.numpy() == y).all()  # to the bit: old runs go on with the same numbers
    assert torch.equal(torch.vmap(hadamard)(x), alone)
    assert torch.equal(torch.vmap(hadamard, in_dims=1)(x.T), alone)


@LENGTHS
def test_the_transform_adds_numbers_in_the_order_of_their_distance(length: int) -> None:
    check_sums(length)


@LENGTHS
@pytest.mark.usefixtures("compiled")
def test_the_compiled_transform_does_the_same(length: int) -> None:
    # rejects a block of the cache that is left out, and rows of a stack that are not contiguous
    assert library() is not None
    check_sums(length)
    x = random.normal(random.key(0), (length,)).requires_grad_()
    (gradient,) = torch.autograd.grad(hadamard(x)[0], x)
    assert torch.equal(gradient, torch.ones(length))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (16, 16), (100, 30), (128, 1), (90, 128)])
def test_a_measurement_and_its_adjoint_are_a_matrix_and_its_transpose(n: int, m: int) -> None:
    # rejects a scale of 1/m, which makes columns shorter, and an adjoint without the flips
    measure = Measurement.draw(random.key(1), n, m)
    matrix = dense(measure)
    x, y = random.normal(random.key(2), (n,)), random.normal(random.key(3), (m,))
    np.testing.assert_allclose(measure(x).numpy(), matrix @ x.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        measure.adjoint(y).numpy(), matrix.T @ y.numpy(), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose((matrix**2).sum(0), 1.0)
    assert len(set(measure.places.tolist())) == m


def test_measurements_are_the_same_bits_stacked_and_alone() -> None:
    measure = Measurement.draw(random.key(1), 1000, 100)
    x = random.normal(random.key(2), (7, 1000))
    stacked = torch.func.vmap(measure)(x)
    assert all(torch.equal(stacked[k], measure(x[k])) for k in range(7))


def test_another_key_measures_otherwise() -> None:
    first, other = (Measurement.draw(random.key(seed), 64, 16) for seed in (1, 2))
    assert not torch.equal(first.flips, other.flips)
    assert not torch.equal(first.places, other.places)


@pytest.mark.parametrize("seed", range(5))
def test_a_sparse_vector_is_found_again(seed: int) -> None:
    # rejects thresholding without iterations, which is far off
    measure, x = example(1000, 200, 12, seed)
    found = hard_thresholding(measure, measure(x), 12, 50)
    torch.testing.assert_close(found, x, rtol=1e-3, atol=1e-4)
    once = sparse(measure.adjoint(measure(x)), 12)
    assert float((once - x).norm()) > 100 * float((found - x).norm())


def test_with_noise_it_is_the_least_squares_solution_on_its_places() -> None:
    measure, x = example(500, 150, 8)
    y = measure(x) + 0.01 * random.normal(random.key(9), (150,))
    found = hard_thresholding(measure, y, 8, 200)
    places = found.nonzero().squeeze(1).numpy()
    assert set(places) == set(x.nonzero().squeeze(1).tolist())
    expected = np.linalg.lstsq(dense(measure)[:, places], y.numpy(), rcond=None)[0]
    np.testing.assert_allclose(found.numpy()[places], expected, atol=1e-3)


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_no_step_leads_away(steps: int) -> None:
    measure = Measurement.draw(random.key(0), 400, 60)
    y = random.normal(random.key(1), (60,))  # of no sparse vector
    found = hard_thresholding(measure, y, 30, steps)
    before = hard_thresholding(measure, y, 30, steps - 1)
    assert (y - measure(found)).norm() <= (y - measure(before)).norm() <= y.norm()
    assert int((found != 0).sum()) <= 30


@pytest.mark.parametrize("seed", range(3))
def test_the_direction_of_a_sparse_vector_is_found_from_signs(seed: int) -> None:
    measure, x = example(1000, 400, 8, seed)
    found = binary_hard_thresholding(measure, measure(x).sign(), 8, 50)
    assert float(found @ x / (found.norm() * x.norm())) > 0.9
    assert float(found.square().sum()) == pytest.approx(8.0)  # the mean square of 8 entries is 1
    assert int((found != 0).sum()) == 8


def test_signs_that_nobody_knows_do_not_pull() -> None:
    measure, x = example(1000, 400, 8)
    known = torch.arange(400) % 2 == 0
    half = torch.where(known, measure(x).sign(), 0.0)
    found = binary_hard_thresholding(measure, half, 8, 50)
    right = measure(found).sign() == measure(x).sign()
    assert float(right[known].float().mean()) > 0.97  # of 200 signs
    towards = binary_hard_thresholding(measure, torch.where(known, measure(x).sign(), 1.0), 8, 50)
    assert found @ x / found.norm() > towards @ x / towards.norm()


def test_nothing_measured_is_nothing_found() -> None:
    measure = Measurement.draw(random.key(0), 50, 20)
    assert not hard_thresholding(measure, torch.zeros(20), 5, 10).any()
    assert not binary_hard_thresholding(measure, torch.zeros(20), 5, 10).any()
