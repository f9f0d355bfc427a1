"""Counter-based randomness against splitmix64 in Python's integers, and against theory."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.core import random

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MANY = 40_000

words = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=5))


def splitmix64(x: int) -> int:
    """Return the paper's finalizer of ``x``, computed in integers without bounds."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unsigned(x: Tensor) -> list[int]:
    return [int(v) & MASK for v in x.flatten()]


@given(st.integers(-(2**63), 2**63 - 1))
def test_the_mixer_is_splitmix64_in_pythons_integers(x: int) -> None:
    # rejects torch's arithmetic shift, which fills with the sign
    assert unsigned(random._mix(torch.tensor([x]))) == [splitmix64(x)]


@settings(max_examples=30)
@given(st.integers(-(2**63), 2**63 - 1))
def test_draws_are_the_stream_of_splitmix64_seeded_with_the_key(seed: int) -> None:
    key = random.key(seed)
    assert unsigned(key) == [splitmix64(seed + GOLDEN)]
    stream = [splitmix64(unsigned(key)[0] + i * GOLDEN) for i in range(1, 7)]
    assert random.uniform(key, (2, 3)).flatten().tolist() == [(b >> 40) / 2**24 for b in stream]
    assert random.integers(key, (6,), 1000).tolist() == [(b >> 32) * 1000 >> 32 for b in stream]


DRAWS: list[Callable[[Tensor], Tensor]] = [
    lambda key: random.uniform(key, (7, 3)),
    lambda key: random.integers(key, (5,), 10),
    lambda key: random.normal(key, (9, 5)),
    lambda key: random.permutation(key, 11),
    lambda key: random.fold(key, "purpose", 3),
]


@pytest.mark.parametrize(
    "draw", DRAWS, ids=["uniform", "integers", "normal", "permutation", "fold"]
)
def test_the_same_key_gives_the_same_numbers_stacked_or_alone_bit_for_bit(
    draw: Callable[[Tensor], Tensor],
) -> None:
    keys = random.fold(random.key(3, "clients"), torch.arange(6))
    stacked = torch.func.vmap(draw)(keys)
    assert all(torch.equal(stacked[i], draw(key)) for i, key in enumerate(keys))
    assert torch.equal(draw(keys[0]), draw(keys[0]))
    assert not torch.equal(draw(keys[0]), draw(keys[1]))


def test_a_draw_moves_no_global_generator() -> None:
    before = torch.get_rng_state()
    random.normal(random.key(0), (5,))
    assert torch.equal(before, torch.get_rng_state())


def test_torchs_own_draws_begin_at_a_seed_and_leave_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    with random.torch_draws(7):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    with pytest.raises(RuntimeError), random.torch_draws(8):
        torch.rand(-1)
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_with_leading_dimensions_broadcast() -> None:
    keys = random.fold(random.key(0), torch.arange(4))
    together = random.uniform(keys.unsqueeze(1), (6,))
    assert torch.equal(together, torch.stack([random.uniform(k, (6,)) for k in keys]))


@given(st.lists(words, max_size=3).map(tuple), st.lists(words, max_size=3).map(tuple))
def test_other_words_give_another_key(a: tuple[int | str, ...], b: tuple[int | str, ...]) -> None:
    key = random.key(7)
    assert (int(random.fold(key, *a)) == int(random.fold(key, *b))) == (a == b)


@pytest.mark.parametrize("word", ["", "client", "größe"])
def test_a_word_gives_the_same_key_in_every_process(word: str) -> None:
    # rejects Python's hash of a text, which differs from process to process
    key, number = random.key(7), zlib.crc32(word.encode()) + (1 << 32)
    (before,) = unsigned(key)
    assert unsigned(random.fold(key, word)) == [splitmix64((before ^ number) * 3 + GOLDEN)]


def test_a_key_folded_word_by_word_is_the_key_of_all_words() -> None:
    folded = random.fold(random.fold(random.key(5), "a"), 2)
    assert int(folded) == int(random.fold(random.key(5), "a", 2)) == int(random.key(5, "a", 2))


def test_fold_does_not_collide() -> None:
    # rejects a fold that adds or xors its words: (i, j) and (j, i) would collide
    i = torch.arange(-200, 200)
    pairs = random.fold(random.key(0), i.unsqueeze(1), i.unsqueeze(0))
    alone = random.fold(random.key(0), torch.arange(-MANY, MANY))
    names = torch.stack([random.key(0, f"client-{n}") for n in range(1000)])
    seeds = torch.stack([random.key(n) for n in range(1000)])
    everything = torch.cat([pairs.flatten(), alone, names, seeds])
    assert len(set(everything.tolist())) == len(everything)


def test_derived_keys_are_no_draws_of_their_parent() -> None:
    # rejects a fold whose mixing is that of a draw: fold(key, 0) would be the key's first number
    key, words = random.key(0), torch.arange(-MANY, MANY)
    assert not set(random.fold(key, words).tolist()) & set(random._bits(key, (MANY,)).tolist())


def test_uniform_numbers_are_uniform_on_a_grid_below_one() -> None:
    u = random.uniform(random.key(0, "u"), (MANY,))
    assert u.dtype == torch.float32
    assert torch.equal(u.double() * 2**24, (u.double() * 2**24).round())
    assert 0 <= float(u.min()) < float(u.max()) < 1
    assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > 0.01
    assert float(u.mean()) == pytest.approx(1 / 2, abs=4 / math.sqrt(12 * MANY))
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.03)


def test_normal_numbers_are_normal_and_their_keys_independent() -> None:
    # rejects one draw for both radius and angle
    z = random.normal(random.key(0, "z"), (2, MANY // 2)).numpy().astype(np.float64)
    assert scipy.stats.kstest(z.ravel(), "norm").pvalue > 0.01
    assert z.mean() == pytest.approx(0.0, abs=4 / math.sqrt(MANY))
    assert z.var() == pytest.approx(1.0, rel=0.03)
    assert scipy.stats.kurtosis(z.ravel()) == pytest.approx(0.0, abs=0.15)
    other = random.normal(random.key(1, "z"), (MANY // 2,)).numpy()
    assert abs(np.corrcoef([*z, other]) - np.eye(3)).max() < 4 / math.sqrt(MANY // 2)


def test_keys_that_follow_each_other_draw_independently() -> None:
    keys = random.fold(random.key(0), torch.arange(MANY)).unsqueeze(1)
    first = random.uniform(keys, (2,)).numpy()
    assert scipy.stats.kstest(first[:, 0], "uniform").pvalue > 0.01
    assert abs(np.corrcoef(first[:-1, 0], first[1:, 0])[0, 1]) < 4 / math.sqrt(MANY)
    assert abs(np.corrcoef(first.T)[0, 1]) < 4 / math.sqrt(MANY)


@pytest.mark.parametrize("high", [1, 2, 7, 1000])
def test_integers_are_uniform_below_high(high: int) -> None:
    n = random.integers(random.key(0, "n"), (MANY,), high).numpy()
    assert n.min() >= 0
    counts = np.bincount(n, minlength=high)
    assert len(counts) == high
    assert high == 1 or scipy.stats.chisquare(counts).pvalue > 0.01


def test_integers_stay_in_range_for_the_largest_high() -> None:
    n = random.integers(random.key(0), (MANY,), 2**31 - 1)
    assert 0 <= int(n.min()) < 2**20
    assert 2**31 - 2**20 < int(n.max()) < 2**31 - 1


@given(st.integers(0, 200), st.integers(0, 1000))
def test_a_permutation_is_one_and_a_choice_is_its_sorted_beginning(length: int, seed: int) -> None:
    key = random.key(seed)
    assert sorted(random.permutation(key, length).tolist()) == list(range(length))
    chosen = random.choice(key, length, 3)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(3, length)
    assert chosen == sorted(random.permutation(key, length)[:3].tolist())


def test_every_order_of_three_is_as_likely() -> None:
    keys = random.fold(random.key(0), torch.arange(6000))
    orders = torch.func.vmap(lambda k: random.permutation(k, 3))(keys) @ torch.tensor([9, 3, 1])
    counts = np.unique(orders.numpy(), return_counts=True)[1]
    assert len(counts) == 6
    assert scipy.stats.chisquare(counts).pvalue > 0.01


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 99))
def test_an_order_puts_absent_places_last_and_does_not_feel_the_padding(
    counts: list[int], padding: int, seed: int
) -> None:
    keys = random.fold(random.key(seed), torch.arange(len(counts))).unsqueeze(1)
    width = max(counts)

    def present(width: int) -> Tensor:
        return torch.arange(width) < torch.tensor(counts).unsqueeze(1)

    tight, padded = (random.order(keys, present(w)) for w in (width, width + padding))
    for line, wide, count in zip(tight, padded, counts, strict=True):
        assert sorted(line[:count].tolist()) == list(range(count))
        assert line[:count].tolist() == wide[:count].tolist()
        assert sorted(wide.tolist()) == list(range(width + padding))
