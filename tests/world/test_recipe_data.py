"""Which training rows of a data set are used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.errors import RecipeError
from fedgist.recipe.reading import make
from fedgist.world.data import read_data


def rows_of(**settings: object) -> torch.Tensor:
    seed = settings.pop("seed", 0)
    recipe = make({"seed": seed, "data": {"name": "digits", **settings}})
    return read_data(recipe.data, recipe.seed).x


def test_the_first_rows_or_random_ones() -> None:
    everything = rows_of().flatten(1)
    first = rows_of(train_rows=50).flatten(1)
    assert torch.equal(first, everything[:50])
    drawn = rows_of(train_rows=50, draw="random").flatten(1)
    places = (drawn.unsqueeze(1) == everything).all(2).nonzero()[:, 1]
    assert len(set(places.tolist())) == 50  # each one at most once; digits has no row twice
    assert places.max() > 500
    assert torch.equal(rows_of(train_rows=50, draw="random").flatten(1), drawn)
    other = rows_of(train_rows=50, draw="random", seed=1).flatten(1)
    assert not torch.equal(other, drawn)


@pytest.mark.parametrize("draw", ["first", "random"])
def test_as_many_rows_as_there_are(draw: str) -> None:
    everything = rows_of()
    assert torch.equal(rows_of(train_rows=10**6, draw=draw), everything)


def test_a_draw_of_no_number_of_rows_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"draw = 'random' needs data\.train_rows"):
        make({"data": {"draw": "random"}})
    with pytest.raises(RecipeError, match=r"data\.draw"):
        make({"data": {"draw": "last", "train_rows": 5}})


@given(st.integers(0, 9), st.sampled_from([0.01, 0.1, 0.5]), st.sampled_from([None, 700]))
def test_a_long_tail_keeps_a_falling_share_of_each_class(
    seed: int, rarest: float, rows: int | None
) -> None:
    def counts_of(**settings: object) -> list[int]:
        recipe = make({"seed": seed, "data": {"name": "digits", "train_rows": rows, **settings}})
        data = read_data(recipe.data, recipe.seed)
        return data.y.bincount(minlength=10).tolist()

    before, after = counts_of(), counts_of(long_tail=rarest)
    assert after == counts_of(long_tail=rarest)
    shares = sorted((n / whole for n, whole in zip(after, before, strict=True)), reverse=True)
    for j, share in enumerate(shares):
        assert share == pytest.approx(rarest ** (j / 9), abs=1 / min(before))
    assert min(after) >= 1


def test_a_long_tail_needs_classes() -> None:
    recipe = make(
        {"data": {"name": "diabetes", "long_tail": 0.1}, "objective": {"name": "regression"}}
    )
    with pytest.raises(RecipeError, match=r"data.long_tail = 0.1 needs classes; diabetes"):
        read_data(recipe.data, 0, target="numbers")
