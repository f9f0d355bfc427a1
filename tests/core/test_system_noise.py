"""Noise of the system: its distribution, where its bits come from, and what its last bits tell."""

from __future__ import annotations

import math
import os
import sys

import numpy as np
import pytest
import torch
from scipy import special, stats

from fedgist.core import random, system_noise
from fedgist.core.privacy import Privacy, bounded, clipped_message, grid_of, noised
from fedgist.core.replies import Count
from fedgist.core.tree import named
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Weights

GRID = 2.0**-12


def probabilities(sigma: float, most: int) -> np.ndarray:
    """The chance of -most to most, by the definition."""
    x = np.arange(-most, most + 1)
    weight = np.exp(-(x**2) / (2 * sigma**2))
    everything = np.arange(-40 * most, 40 * most + 1)
    return weight / np.exp(-(everything**2) / (2 * sigma**2)).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.7, 21.3, 97.0])
def test_each_number_has_the_chance_of_the_discrete_gaussian(sigma: float) -> None:
    # slices of one number, and of several; a zero with two signs would be seen for small sigmas
    draws, most = system_noise.discrete_gaussian(sigma, (200_000,)), math.ceil(2 * sigma)
    inside = draws[draws.abs() <= most] + most
    found = torch.bincount(inside, minlength=2 * most + 1).numpy()
    chance = probabilities(sigma, most)
    expected = np.append(chance, 1 - chance.sum()) * len(draws)
    assert stats.chisquare(np.append(found, len(draws) - len(inside)), expected).pvalue > 1e-6


@pytest.mark.parametrize("sigma", [5e3, 2.0**40])
def test_wide_noise_is_normal_and_reaches_every_number(sigma: float) -> None:
    draws = system_noise.discrete_gaussian(sigma, (50, 1000)).flatten()
    assert stats.kstest((draws.double() / sigma).numpy(), "norm").pvalue > 1e-6
    assert stats.binomtest(int((draws % 2).sum()), len(draws)).pvalue > 1e-6


def test_within_a_slice_numbers_further_out_are_rarer() -> None:
    # rejects a chance of being kept that falls half as fast; as a whole such noise looks normal
    sigma, width = 1024.0, 64
    draws = system_noise.discrete_gaussian(sigma, (2_000_000,)).abs() % width
    number = np.arange(round(12 * sigma))
    chance = np.exp(-((number / sigma) ** 2) / 2) * np.where(number == 0, 1, 2)
    place = number % width
    mean = np.average(place, weights=chance)
    spread = math.sqrt(np.average((place - mean) ** 2, weights=chance) / len(draws))
    assert abs(float(draws.double().mean()) - mean) < 5 * spread


def test_no_numbers_are_asked_for() -> None:
    assert system_noise.discrete_gaussian(3.0, (0, 4)).shape == (0, 4)
    assert system_noise.uniform((2, 0)).shape == (2, 0)


def test_uniform_numbers_are_below_one_and_even() -> None:
    draws = system_noise.uniform((300, 100))
    assert float(draws.max()) < 1.0
    assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > 1e-6


def test_every_draw_has_a_new_key_of_256_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def one_key(count: int) -> bytes:
        asked.append(count)
        return bytes(count)

    monkeypatch.setattr(os, "urandom", one_key)
    first, second = system_noise.bits((64,)), system_noise.bits((64,))
    assert asked == [32, 32]
    assert torch.equal(first, second), "nothing else is in it"


def test_a_forked_process_has_noise_of_its_own() -> None:
    system_noise.bits((4,))  # whatever is remembered is there before the fork
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, system_noise.bits((4,)).numpy().tobytes())
        os._exit(0)
    mine = system_noise.bits((4,)).numpy().tobytes()
    os.waitpid(child, 0)
    assert len(mine) == 32
    assert os.read(ours, 32) != mine
    os.close(ours)
    os.close(theirs)


def test_one_key_of_the_run_does_not_give_one_noise() -> None:
    message, key = Count(torch.zeros(100)), random.key(0)
    assert torch.equal(noised(message, 1.0, key).rows, noised(message, 1.0, key).rows)
    assert not torch.equal(
        noised(message, 1.0, key, GRID).rows, noised(message, 1.0, key, GRID).rows
    )


def test_stacked_clients_and_arrays_have_noise_of_their_own() -> None:
    message = Weights({"a": torch.zeros(2, 3000), "b": torch.zeros(2, 3000)})
    found = named(noised(message, 5.0, random.key(0), GRID)).values()
    draws = torch.cat(list(found)).double() / 5
    assert all(stats.kstest(draw.numpy(), "norm").pvalue > 1e-6 for draw in draws)
    assert float((torch.corrcoef(draws) - torch.eye(4)).abs().max()) < 0.1


@pytest.mark.parametrize("value", [0.0, 1.0 / 3.0, 1e-9, -2.7])
def test_what_is_released_is_on_the_grid_whatever_went_in(value: float) -> None:
    # noise in floating point leaves numbers that only some values can reach (Mironov 2012)
    sent = noised(Count(torch.full((2000,), value)), 0.5, random.key(0), GRID).rows
    assert torch.equal(sent, (sent / GRID).round() * GRID)
    odd = int(((sent / GRID).round().long() % 2).sum())
    assert stats.binomtest(odd, len(sent)).pvalue > 1e-6, "the lowest bit is a coin"
    seeded = noised(Count(torch.full((2000,), value)), 0.5, random.key(0)).rows
    assert not torch.equal(seeded, (seeded / GRID).round() * GRID)


def test_a_number_that_is_not_finite_stays_one() -> None:
    sent = noised(Count(torch.tensor([torch.nan, torch.inf])), 0.5, random.key(0), GRID).rows
    assert not sent.isfinite().any()


def exact(values: torch.Tensor, grid: float) -> list[int]:
    """Numbers as whole numbers of the grid, exactly."""
    parts = [(float(v) / grid).as_integer_ratio() for v in values.flatten()]
    assert all(under == 1 for _, under in parts), "each is on the grid"
    return [over for over, _ in parts]


def test_bounded_rows_lie_on_the_grid_and_their_sums_are_exact_in_any_order() -> None:
    rows, clip = 4096, 1.5
    grid = grid_of(clip * rows, 24)
    privacy = Privacy("record", "central", clip, 1.0, grid=grid)
    z = bounded(torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)), privacy)
    whole = np.array(exact(z, grid)).reshape(rows, 8)
    assert z.dtype == torch.float32
    assert max(sum(int(v) ** 2 for v in row) for row in whole) <= (clip / grid) ** 2
    assert z.norm(dim=1).max() > 0.999 * clip
    for order in (torch.arange(rows), torch.arange(rows).flip(0), z[:, 0].argsort()):
        assert exact(z[order].sum(0), grid) == whole.sum(0).tolist()
        assert exact(torch.ones(rows) @ z[order], grid) == whole.sum(0).tolist()


def test_clipped_messages_lie_on_the_grid_below_their_bound() -> None:
    clients, clip = 100, 0.7
    grid = grid_of(clip * clients, 24)
    privacy = Privacy("client", "central", clip, 1.0, grid=grid)
    generator, sums = torch.Generator().manual_seed(0), torch.zeros(500)
    whole = [0] * 500
    for size in torch.linspace(0.001, 1.0, clients):
        sent = clipped_message(Count(size * torch.randn(500, generator=generator)), privacy).rows
        units = exact(sent, grid)
        assert sum(v**2 for v in units) <= (clip / grid) ** 2
        sums, whole = sums + sent, [a + b for a, b in zip(whole, units, strict=True)]
    assert exact(sums, grid) == whole
    # rounding up would carry some of the large ones above the bound
    assert float(clipped_message(Count(torch.ones(4)), privacy).rows.norm()) == pytest.approx(
        clip, rel=1e-4
    )


@pytest.mark.parametrize("sigma", [64, 1000])
def test_the_discrete_gaussian_is_the_rounded_one_nearly(sigma: int) -> None:
    # decision 0038: the mean of |ln ratio| is below 1 / (24 sigma^2), so accounts of the
    # continuous mechanism, of which the rounded one is a function, hold
    x = np.arange(0, 6 * sigma)
    ends = special.log_ndtr(-(x - 0.5) / sigma), special.log_ndtr(-(x + 0.5) / sigma)
    rounded = ends[0] + np.log1p(-np.exp(ends[1] - ends[0]))
    discrete = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    ratio, chance = np.abs(discrete - rounded), np.exp(rounded)
    weight = np.where(x == 0, 1, 2)
    assert (weight * chance * ratio).sum() < 1 / (24 * sigma**2)
    assert (ratio < (1 + (x / sigma) ** 2) / (20 * sigma**2) + 1e-9).all()


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "cryptography.hazmat.primitives.ciphers"
    monkeypatch.setitem(sys.modules, name, None)
    system_noise._ciphers.cache_clear()
    with pytest.raises(MethodError, match=r"needs cryptography: pip install 'fedgist\[privacy\]'"):
        system_noise.bits((1,))
