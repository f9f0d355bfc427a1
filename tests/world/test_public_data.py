"""Rows that all may see, and rows that the server holds out: taken out of the training rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import fedgist
from fedgist.errors import InputError, RecipeError
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.runs.evaluation import check_evaluation
from fedgist.runs.files.columns import VALIDATION_ACCURACY
from fedgist.studies.tune import Tuner
from fedgist.testing.small_worlds import blobs, rows, world_of
from fedgist.world.world import World

DIGITS = 1442  # training rows
SPACE = '["method.server.lr"]\nlow = 0.01\nhigh = 0.1\n'


def made(public: dict[str, Any] | None = None, **data: Any) -> World:
    section = {} if public is None else {"public": public}
    return world_of(make({"data": section | data, "method": {"name": "fedadam"}}))


def test_public_rows_and_rows_held_out_are_no_clients() -> None:
    world = made({"rows": 500}, held_out=100)
    task = world.server.task
    assert task.public is not None
    assert not task.public_labels
    assert (len(task.public), len(task.test_sets["validation"])) == (500, 100)
    assert len(world.data.y) == DIGITS - 600
    assert world.public is not None
    assert not bool(world.public.y.any())  # labels that nobody may see are not there
    held: Any = task.test_sets["validation"]
    whole = world_of(make({})).data.x.flatten(1).tolist()
    taken = [x.flatten(1).tolist() for x in (world.public.x, world.data.x, held.x)]
    assert sorted(itertools.chain(*taken)) == sorted(whole)  # each row is in one place


def test_labels_are_there_where_they_may_be_seen() -> None:
    world = made({"rows": 300, "labelled": True})
    assert world.server.task.public_labels
    assert world.public is not None
    assert len(set(world.public.y.tolist())) == 10


def test_another_source_is_normalized_like_the_training_rows() -> None:
    world = made({"name": "digits", "rows": 40}, mean=[0.5], std=[0.25])
    assert len(world.data.y) == DIGITS
    assert world.public is not None
    public: Any = world.server.task.public
    seen = public.batch(torch.arange(3).unsqueeze(0)).x[0]
    expected = (world.public.x[:3] / world.data.scale - 0.5) / 0.25
    torch.testing.assert_close(seen, expected)


def test_clients_hold_the_same_rows_whichever_source_is_public() -> None:
    # rejects out-of-domain runs whose clients have the images that are public in the domain
    inside = made({"rows": 500}, held_out=100, mean=[0.5], std=[0.25])
    outside = made(
        {"name": "digits", "rows": 40, "unused_rows": 500}, held_out=100, mean=[0.5], std=[0.25]
    )
    assert len(outside.data.y) == DIGITS - 600
    assert torch.equal(inside.data.x, outside.data.x)
    for client in range(10):
        assert torch.equal(inside.population.train[client], outside.population.train[client])
    with pytest.raises(RecipeError, match=r"unused_rows takes training rows out .* it needs name"):
        made({"rows": 40, "unused_rows": 500})


def test_one_clients_rows_may_be_public() -> None:
    world = made({"client": 3})
    own = world.partition.train[3]
    assert world.public is not None
    assert torch.equal(world.public.x, world.data.x[own])
    assert not bool(world.public.y.any())
    assert len(world.data.y) == DIGITS  # it keeps them
    seen: Any = made({"client": 3, "labelled": True}).public
    assert torch.equal(seen.y, world.data.y[own])
    for public, says in (
        ({"client": 99}, "there is no client 99"),
        ({"client": 3, "name": "digits"}, "give client or name"),
        ({"client": 3, "rows": 1442}, "rows = 1442: client 3 has"),
    ):
        with pytest.raises(InputError, match=says):
            made(public)


def test_so_many_rows_of_the_largest_client_may_be_public() -> None:
    # rejects public sets whose size depends on how rows are divided
    for seed in (0, 1):
        section = {"client": "largest", "rows": 150}
        recipe = {"data": {"public": section}, "seed": seed, "method": {"name": "fedavg"}}
        world = world_of(make(recipe))
        counts = world.population.train.counts.tolist()
        largest = counts.index(max(counts))
        assert world.server.task.public_client == largest
        assert world.public is not None
        assert len(world.public.x) == 150
        of_client = world.data.x[world.population.train[largest]].flatten(1).tolist()
        chosen = world.public.x.flatten(1).tolist()
        assert all(row in of_client for row in chosen)


def test_given_rows_take_the_place_of_the_recipes() -> None:
    given = Overrides(data=blobs(), clients=rows(), public=blobs(seed=1).x.numpy())
    recipe: dict[str, Any] = {"clients": {"num_clients": 5}}
    assert world_of(make(recipe), given).public is not None
    recipe["data"] = {"public": {"rows": 3}}
    with pytest.raises(RecipeError, match=r"data\.public names rows, and public= gives others"):
        world_of(make(recipe), given)
    listed = Overrides(data=blobs(), clients=rows())
    with pytest.raises(RecipeError, match=r"data\.public.rows are taken out of the training rows"):
        world_of(make(recipe), listed)
    recipe["data"] = {"held_out": 3}
    with pytest.raises(RecipeError, match=r"data\.held_out are taken out of the training rows"):
        world_of(make(recipe), listed)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"public": {}}, "data.public: say which rows"),
        ({"public": {"rows": 0}}, "data.public.rows = 0"),
        ({"public": {"rows": DIGITS}}, f"data.public.rows = {DIGITS}: there are {DIGITS}"),
        ({"public": {"name": "digit"}}, "unknown data set 'digit'.*digits"),
        ({"public": {"name": "digits", "labelled": True}}, "the labels of digits are not those"),
        ({"public": {"name": "digits", "rows": 9999}}, "digits has 1442 training rows"),
        ({"public": {"rows": 5, "images": 3}}, "data.public.images: unknown key"),
        ({"public": {"name": "circle"}}, "circle.* shape"),
        ({"public": {"rows": 5}, "normalize": "client"}, "state data.mean and data.std"),
        ({"public": {"rows": 5, "augment": ["flip"]}, "name": "circle"}, "augment needs images"),
        ({"held_out": -1}, "data.held_out = -1"),
        ({"held_out": DIGITS}, f"data.held_out = {DIGITS}: there are {DIGITS}"),
        ({"held_out": 5, "validation": 0.1}, "validation and held_out both hold rows out"),
    ],
)
def test_what_is_wrong_is_named(data: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        world_of(make({"data": data}))
    assert "\n" not in str(caught.value)


def two_models(**more: Any) -> dict[str, Any]:
    pools = {"a": {"model": "logistic"}, "b": {"model": "mlp", "hidden": [8]}}
    return {
        "data": {"held_out": 200, "train_rows": 600},
        "clients": {"num_clients": 4, "pools": pools},
        "train": {"num_rounds": 2},
        "evaluate": {"on": "global"},
        "method": {"name": "fedadam"},
        "engine": {"workers": 1, "plans": {name: {"cohort_size": 4} for name in "ab"}},
    } | more


def test_several_models_are_judged_by_their_mean() -> None:
    line = fedgist.run(two_models()).rounds[-1]
    for column, name in (("eval/global/", "all"), ("eval/validation/", "validation")):
        both = [line[f"eval/global/{pool}/{name}/accuracy"] for pool in "ab"]
        assert line[f"{column}accuracy_mean"] == pytest.approx(sum(both) / 2)
    assert "eval/global/accuracy" not in line


def test_rows_held_out_are_read_also_where_clients_are_judged() -> None:
    recipe = two_models(evaluate={"on": "client"})
    line = fedgist.run(recipe).rounds[-1]
    assert 0.0 < line["eval/validation/accuracy_mean"] < 1.0
    assert "eval/client/accuracy_mean" in line
    with pytest.raises(InputError, match=r"data\.held_out = 200: .*local"):
        check_evaluation(world_of(make(recipe | {"method": {"name": "local"}})).server)


@pytest.mark.slow
def test_a_search_takes_the_rows_that_the_server_holds_out(tmp_path: Path) -> None:
    recipe, space = tmp_path / "recipe.toml", tmp_path / "space.toml"
    recipe.write_text(make(two_models()).to_toml())
    space.write_text(SPACE)
    tuner = Tuner(recipe, [], space, tmp_path / "out", 1)
    assert not any("validation" in setting for setting in tuner.settings)
    assert VALIDATION_ACCURACY in fedgist.run(two_models()).rounds[-1]
