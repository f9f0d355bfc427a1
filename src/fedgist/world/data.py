"""The examples of a run, and the rows and the name of each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedgist.core import random
from fedgist.data import Augmentation
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset, check, with_classes
from fedgist.data.normalization import own_moments, with_moments
from fedgist.data.partition import Partition, hold_out, partition
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.text_rows import Reading
from fedgist.errors import RecipeError, listed, nearest
from fedgist.recipe.reading import Recipe
from fedgist.recipe.schema import check_named
from fedgist.world.client_lists import RowsOfClients, own_rows

IMAGE, RGB = 3, 3  # dimensions of an image: channels, height, width; and channels that are colours
COLORS = ("color_jitter", "grayscale")


def read_data(recipe: Recipe, own: Dataset | None = None, root: Path | None = None) -> Dataset:
    """Return the examples that a recipe names, below ``root``, or the user's own."""
    if own is not None:
        if recipe.data.words is not None:
            raise RecipeError(
                "data.words says how files of texts are read, and data= is given: leave it out"
            )
        data = with_classes(check(own), recipe.data.classes)
    else:
        section = recipe.data
        check_named("data", section.name, "data=")
        data = load_data(
            section.name,
            root=root,
            classes=section.classes,
            seed=recipe.seed,
            words=None if section.words is None else Reading(**section.words.model_dump()),
            **section.options,
        )
    data = with_moments(data, recipe.data.normalize, recipe.data.mean, recipe.data.std)
    data = _some(recipe, data)
    check_augment(recipe.data.augment, data, "data.augment")
    return data


def check_augment(kinds: Sequence[Augmentation], data: Dataset, key: str) -> None:
    """Raise RecipeError, which names ``key``, if these augmentations do not fit the examples."""
    if kinds and len(data.input_shape) != IMAGE:
        shape = list(data.input_shape)
        raise RecipeError(f"{key} needs images; {data.name} has examples of shape {shape}")
    for kind in kinds:
        if f"batch_{kind}" in kinds:
            raise RecipeError(
                f"{key}: {kind} draws for each image, batch_{kind} once for a batch: give one"
            )
    colors = [kind for kind in kinds if kind in COLORS]
    if colors and not (data.input_shape[0] == RGB and data.x.dtype == torch.uint8):
        raise RecipeError(
            f"{key}: {colors[0]} needs images of three channels, whole numbers from 0 to 255"
        )


def _some(recipe: Recipe, data: Dataset) -> Dataset:
    """Return the data with as many training rows as the recipe wants: the first, or drawn."""
    wanted, count = recipe.data.train_rows, len(data.y)
    if wanted is None or wanted >= count:
        return data
    if recipe.data.draw == "first":
        return data.only(slice(wanted))
    key = random.key(recipe.seed, "training rows")
    return data.only(torch.tensor(random.choice(key, count, wanted)))


def check_moments(recipe: Recipe, *, named_sets: bool) -> None:
    """Raise RecipeError if the server scores rows for which there are no moments to normalize with.

    ``named_sets`` says whether it has test sets of its own.
    """
    on = recipe.evaluate.on
    if recipe.data.normalize != "client" or recipe.data.mean or (on == "client" and not named_sets):
        return
    key = "evaluate.sets" if on == "client" else f"evaluate.on = {on!r}"
    raise RecipeError(
        f"{key} scores rows that belong to no client, and data.normalize = 'client' has moments "
        "of clients only: state data.mean and data.std for the others"
    )


def data_of_client(recipe: Recipe, data: Dataset, parts: Partition, client: int) -> Dataset:
    """Return the data with the moments by which this client's inputs are normalized."""
    if recipe.data.normalize != "client":
        return data
    mean, std = own_moments(data, parts.train[client])
    return replace(data, mean=mean, std=std)


def divide(
    recipe: Recipe,
    data: Dataset,
    clients: RowsOfClients | None,
    clients_test: RowsOfClients | None,
) -> Partition:
    """Return which client has which rows: by the recipe's partition, or the user's own lists."""
    if clients is None and clients_test is not None:
        raise RecipeError(
            "clients_test is given without clients: give each client's training rows as well"
        )
    key = random.key(recipe.seed, "partition")
    independent = recipe.privacy.unit == "record"  # how many rows there are decides nothing
    if clients is None:
        p = recipe.partition
        check_named("partition", p.name, "clients=")
        return partition(
            data,
            p.name,
            recipe.clients.num_clients,
            key,
            validation=recipe.data.validation,
            independent=independent,
            **p.options,
        )
    train, tests, names = own_rows(clients, clients_test, len(data.y), len(data.y_test))
    kept, held = hold_out(train, recipe.data.validation, key, independent=independent)
    return Partition(kept, held, Rows.of(tests), names)


def client_number(parts: Partition, client: int | str) -> int:
    """Return the number of a client given by its number, or by its name or number as a text.

    A name goes first: a hospital called 3 need not be client 3.
    """
    names, count = parts.names, len(parts.test)
    if isinstance(client, str) and client in names:
        return names.index(client)
    if str(client) in map(str, range(count)):
        return int(client)
    msg = f"there is no client {client!s:.80}; this run has clients 0..{count - 1}"
    if names:
        near = nearest(str(client), names)
        hint = f"; did you mean {near!r}?" if near else ""
        msg += f", called {listed(names)}{hint}"
    raise RecipeError(msg)


def class_counts(data: Dataset, parts: Partition) -> dict[str, Any]:
    """Return the names of classes and clients, and each client's training rows of every class.

    Where the data name no clients, ``clients`` is empty. Texts have no classes: all are of one.
    """
    names, train = data.names, parts.train
    if data.text:
        sizes = [[count] for count in train.counts.tolist()]
        return {"classes": ["rows"], "clients": list(parts.names), "train": sizes}
    counts = [
        data.y[train[i]].bincount(minlength=data.num_classes).tolist() for i in range(len(train))
    ]
    return {"classes": list(names), "clients": list(parts.names), "train": counts}
