"""CelebA in LEAF's format, in miniature: people, their images, and files that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of

PEOPLE = {"12": [1, 0, 1, 1, 0], "7": [0, 1], "101": [1, 1, 0]}


def leaf(people: dict[str, tuple[list[str], list[int]]]) -> dict[str, Any]:
    """What LEAF writes for some people: names of images, and whether each smiles."""
    return {
        "users": list(people),
        "num_samples": [len(labels) for _, labels in people.values()],
        "user_data": {user: {"x": xs, "y": ys} for user, (xs, ys) in people.items()},
    }


def numbered(
    people: dict[str, list[int]], start: int = 1
) -> dict[str, tuple[list[str], list[int]]]:
    out, number = {}, start
    for user, labels in people.items():
        out[user] = ([f"{number + i:06}.jpg" for i in range(len(labels))], labels)
        number += len(labels)
    return out


def write(root: Path, folder: str, document: object) -> None:
    path = root / "celeba" / folder / f"{folder}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The images 000001.jpg to 000010.jpg, each of one grey level, 20 times its number."""
    images = tmp_path / "celeba" / "raw" / "img_align_celeba"
    images.mkdir(parents=True)
    for number in range(1, 11):
        pixels = np.full((218, 178, 3), 20 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number:06}.jpg")
    write(tmp_path, "all_data", leaf(numbered(PEOPLE)))
    return tmp_path


def levels(x: torch.Tensor) -> list[int]:
    return (x.double().mean((1, 2, 3)) / 20).round().int().tolist()


def test_of_all_data_the_last_fifth_of_each_person_is_held_out(place: Path) -> None:
    data = load_data("celeba", root=place)
    assert data.x.shape == (8, 3, 84, 84)
    assert data.x.dtype == torch.uint8
    # person 12 has images 1-5, 7 has 6 and 7, 101 has 8-10: of 2 images a fifth is none
    assert levels(data.x_test) == [5, 10]
    assert levels(data.x) == [1, 2, 3, 4, 6, 7, 8, 9]
    assert data.y.tolist() == [1, 0, 1, 1, 0, 1, 1, 1]
    assert data.y_test.tolist() == [0, 0]
    assert data.classes == ("not smiling", "smiling")
    assert data.client_names == ("7", "12", "101")
    assert data.clients is not None
    assert data.clients.tolist() == [1, 1, 1, 1, 0, 0, 2, 2]


def test_leafs_own_division_is_taken_where_it_is(place: Path) -> None:
    images = numbered(PEOPLE)
    write(place, "train", leaf({user: (xs[:1], ys[:1]) for user, (xs, ys) in images.items()}))
    write(place, "test", leaf({user: (xs[1:2], ys[1:2]) for user, (xs, ys) in images.items()}))
    data = load_data("celeba", root=place, image_size=[10, 8])
    assert levels(data.x) == [1, 6, 8]
    assert levels(data.x_test) == [2, 7, 9]
    assert data.x.shape == (3, 3, 10, 8)


def test_people_are_the_clients(place: Path) -> None:
    raw = {"data": {"name": "celeba", "image_size": 8}, "partition": {"name": "natural"}}
    world = world_of(make(raw), Overrides(root=place))
    assert world.partition.names == ("7", "12", "101")
    assert [len(world.partition.train[i]) for i in range(3)] == [2, 4, 2]
    assert [len(world.partition.test[i]) for i in range(3)] == [0, 1, 1]


GOOD = leaf(numbered(PEOPLE))
ONE = {"users": ["1"], "num_samples": [1]}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ([], "is not in LEAF's format: it needs users, a list"),
        ({**GOOD, "user_data": 3}, "it needs user_data, a table"),
        ({**GOOD, "num_samples": [1]}, "has 3 users, and num_samples of 1"),
        ({**GOOD, "num_samples": [4, 2, 3]}, "'12' has 5 inputs and 5 labels; num_samples says 4"),
        ({**ONE, "user_data": {}}, "user '1' is not in LEAF's format: it needs x, a list"),
        (
            {**ONE, "user_data": {"1": {"x": ["../../000001.jpg"], "y": [1]}}},
            r"x must hold names of image files, not '\.\./\.\./0",
        ),
        ({**ONE, "user_data": {"1": {"x": [3], "y": [1]}}}, "names of image files, not 3"),
        ({**ONE, "user_data": {"1": {"x": ["000001.jpg"], "y": [2]}}}, "y must be 0 or 1, not 2"),
        ({**ONE, "user_data": {"1": {"x": ["999.jpg"], "y": [1]}}}, "999.jpg does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(place: Path, document: object, says: str) -> None:
    write(place, "all_data", document)
    with pytest.raises(DataError, match=says) as error:
        load_data("celeba", root=place)
    assert "\n" not in str(error.value)


def test_images_that_are_not_there_are_told(tmp_path: Path) -> None:
    write(tmp_path, "all_data", GOOD)
    with pytest.raises(DataError, match=r"looked for celeba/raw/img_align_celeba in .*leaf"):
        load_data("celeba", root=tmp_path)
