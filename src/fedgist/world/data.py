"""The examples of a run, and the rows and the name of each client."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.far_numbers import in_float32
from fedgist.core.objectives.target import Target
from fedgist.core.peer_method import PeerMethod
from fedgist.data import Augmentation
from fedgist.data.client_rows import Rows
from fedgist.data.content_draws import fates, shares
from fedgist.data.dataset import Dataset, check, with_classes
from fedgist.data.examples import Examples
from fedgist.data.facts import column_text
from fedgist.data.normalization import own_moments, with_moments
from fedgist.data.partition import Draw, Partition, hold_out, owner_of_rows, partition
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.text_rows import Reading
from fedgist.data.usable_rows import Unlisted
from fedgist.data.usual_values import with_stated_ranges
from fedgist.errors import RecipeError, listed, nearest
from fedgist.recipe.data_loading import data_source
from fedgist.recipe.data_section import Data
from fedgist.recipe.own_code import modules_from
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import Recipe, check_named
from fedgist.world.client_lists import own_rows

IMAGE, RGB = 3, 3  # dimensions of an image: channels, height, width; and channels that are colours
COLORS = ("color_jitter", "grayscale")


def read_data(
    section: Data,
    seed: int,
    own: Dataset | None = None,
    root: Path | None = None,
    target: Target | None = None,
    code: str | None = None,
    secret: int | None = None,
    unlisted: Unlisted = "refuse",
    *,
    private: bool = False,
) -> Dataset:
    """Return the user's ``own`` data, or the data source of ``[data]`` read below ``root``.

    ``target`` is the form of the labels that the recipe's objective reads. A user's own source is
    looked for in the folder ``code`` first. With a ``secret``, test rows are drawn by content.
    ``unlisted`` is that of :func:`.load_data`. If ``private``, rows do not decide on their own
    precision: it is float32.
    """
    if own is not None:
        if section.words is not None:
            raise RecipeError(
                "data.words says how files of texts are read, and data= is given: leave it out"
            )
        data = with_classes(check(own, section.missing_labels), section.classes)
    else:
        data = _of_source(section, seed, root, target, code, secret, unlisted)
    data = _in_float32(data) if private else data
    data = with_moments(data, section.normalize, section.mean, section.std)
    data = replace(data, notes=(*data.notes, *notes_on_names(data, section.classes)))
    data = _long_tailed(section.long_tail, seed, _some(section, seed, data))
    check_augment(section.augment, data, "data.augment")
    if section.ranges:
        with_stated_ranges(data.columns, section.ranges, data.name)
    return data


def _of_source(
    section: Data,
    seed: int,
    root: Path | None,
    target: Target | None,
    code: str | None,
    secret: int | None,
    unlisted: Unlisted,
) -> Dataset:
    """Return the data source of ``[data]``, as :func:`read_data` does."""
    check_named("data", section.name, "data=")
    with modules_from(code):
        source = data_source(section.name)
    return load_data(
        section.name,
        root=root,
        classes=section.classes,
        seed=seed,
        read=section.read,
        source=source,
        words=None if section.words is None else Reading(**section.words.model_dump()),
        target=target,
        missing_labels=section.missing_labels,
        missing_clients=section.missing_clients,
        secret=secret,
        unlisted="none" if section.unlisted == "drop" else unlisted,
        division=section.test_rows,
        **section.options,
    )


def _in_float32(data: Dataset) -> Dataset:
    """Return the data in float32, whatever the rows are."""
    names = ("x", "x_test", "y", "y_test")
    x, x_test, y, y_test = (in_float32(getattr(data, name)) for name in names)
    return replace(data, x=x, x_test=x_test, y=y, y_test=y_test)


def check_augment(kinds: Sequence[Augmentation], data: Dataset, key: str) -> None:
    """Raise RecipeError, naming ``key``, if the augmentations do not fit the examples."""
    if kinds and len(data.input_shape) != IMAGE:
        shape = list(data.input_shape)
        raise RecipeError(f"{key} needs images; {data.name} has examples of shape {shape}")
    if data.target == "pixels" and (moving := [kind for kind in kinds if kind not in COLORS]):
        raise RecipeError(f"{key}: {moving[0]} moves pixels, and their classes would stay")
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


def _some(section: Data, seed: int, data: Dataset) -> Dataset:
    """Return the data with the requested number of training rows: the first, or drawn."""
    wanted, count = section.train_rows, len(data.y)
    if wanted is None or wanted >= count:
        return data
    if section.draw == "first":
        return data.only(slice(wanted))
    key = random.key(seed, "training rows")
    return data.only(torch.tensor(random.choice(key, count, wanted)))


def _long_tailed(rarest: float, seed: int, data: Dataset) -> Dataset:
    """Return the data with fewer training rows of later classes, in an order drawn from the seed.

    Each class keeps one row at least.
    """
    if rarest == 1.0:
        return data
    if data.target != "class":
        raise RecipeError(f"data.long_tail = {rarest:g} needs classes; {data.name} has none")
    key, count = random.key(seed, "long tail"), data.num_classes
    order, kept = random.permutation(key, count).tolist(), list[Tensor]()
    for place, label in enumerate(order):
        rows = (data.y == label).nonzero()[:, 0]
        most = math.ceil(len(rows) * rarest ** (place / max(1, count - 1)))
        kept.append(rows[random.choice(random.fold(key, label), len(rows), most)])
    return data.only(torch.cat(kept).sort().values)


def check_moments(recipe: Recipe, *, named_sets: bool) -> None:
    """Raise RecipeError if the server scores rows that it cannot normalize.

    With ``data.normalize = "client"`` and without ``data.mean``, only rows of clients have a mean
    and a standard deviation. ``named_sets`` says whether the server has further test sets.
    """
    on, section = recipe.evaluate.on, recipe.data
    if section.normalize != "client" or section.mean or (on == "client" and not named_sets):
        return
    key = "evaluate.sets" if on == "client" else f"evaluate.on = {on!r}"
    raise RecipeError(
        f"{key} scores rows that belong to no client, and data.normalize = 'client' has moments "
        "of clients only: state data.mean and data.std for the others"
    )


def data_of_client(normalize: str, data: Dataset, parts: Partition, client: int) -> Dataset:
    """Return the data with the mean and standard deviation that normalize this client's inputs.

    ``normalize`` is the recipe's ``data.normalize``.
    """
    if normalize != "client":
        return data
    mean, std = own_moments(data, parts.train[client])
    return replace(data, mean=mean, std=std)


def divide(setup: Setup, data: Dataset) -> Partition:
    """Return the rows of each client, by the recipe's partition or from the user's own lists."""
    recipe = setup.recipe
    clients, clients_test = setup.given.clients, setup.given.clients_test
    if clients is None and clients_test is not None:
        raise RecipeError(
            "clients_test is given without clients: give each client's training rows as well"
        )
    key = random.key(recipe.seed, "partition")
    draw = validation_draw(data, recipe.seed) if recipe.privacy.unit == "record" else None
    if clients is None:
        p = recipe.partition
        check_named("partition", p.name, "clients=")
        if p.name == "natural":
            _check_none_is_left_out(recipe.data, data)
        return partition(
            data,
            p.name,
            _num_clients(setup, data),
            key,
            validation=recipe.data.validation,
            draw=draw,
            **p.options,
        )
    train, tests, names = own_rows(clients, clients_test, len(data.y), len(data.y_test))
    kept, held = hold_out(train, recipe.data.validation, key, draw, data.groups)
    return Partition(kept, held, Rows.of(tests), names)


def validation_draw(data: Dataset, secret: int) -> Draw:
    """Return the draw of validation rows under privacy of records: by each row's content."""

    def draw(train: Sequence[Tensor]) -> Tensor:
        return shares(fates(data, secret, "validation", owner_of_rows(train, len(data.y))))

    return draw


def with_fates(
    setup: Setup, data: Dataset, on_train: Examples, rows: Rows, secret: int
) -> Examples:
    """Return the training examples with fates, if a method draws among rows that are protected.

    ``rows`` are those of each client.
    """
    method = setup.method
    draws = isinstance(method, PeerMethod) and type(method).pick is not PeerMethod.pick
    if setup.recipe.privacy.unit != "record" or not draws:
        return on_train
    owner = owner_of_rows((rows[client] for client in range(len(rows))), len(data.y))
    numbers = fates(data, secret, "picks", owner)
    return replace(on_train, fates=numbers.to(on_train.y.device))


def _check_none_is_left_out(section: Data, data: Dataset) -> None:
    """Raise RecipeError if ``data.train_rows`` took all training rows of a natural client."""
    if section.train_rows is None or data.clients is None:
        return
    present = set(data.clients.tolist())
    count = len(data.client_names) or max(present) + 1
    if absent := [client for client in range(count) if client not in present]:
        name = data.client_names[absent[0]] if data.client_names else str(absent[0])
        random_rows = " or set data.draw = 'random'" if section.draw == "first" else ""
        raise RecipeError(
            f"data.train_rows = {section.train_rows} leaves client {name!r:.80} without training "
            f"rows: raise it{random_rows}"
        )


def _num_clients(setup: Setup, data: Dataset) -> int:
    """Return the number of clients, which a natural partition takes from the data."""
    if setup.num_clients is None and data.clients is not None:
        return int(data.clients.max()) + 1
    return setup.num_clients or setup.recipe.clients.num_clients


def client_number(parts: Partition, client: int | str) -> int:
    """Return the number of a client given by its number, or by its name or number as a text.

    A name takes precedence over a number: a hospital called 3 need not be client 3.
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
    """Return the names of classes and clients, and each client's training row count per class.

    If the data do not name clients, ``clients`` is empty. If rows have no class, all rows count as
    one class. Of a table, ``inputs`` are its columns.
    """
    names, train = data.names, parts.train
    inputs = {"inputs": [column_text(column) for column in data.columns]} if data.columns else {}
    if data.target != "class":
        sizes = [[count] for count in train.counts.tolist()]
        return {"classes": ["rows"], "clients": list(parts.names), "train": sizes, **inputs}
    counts = [
        data.y[train[i]].bincount(minlength=data.num_classes).tolist() for i in range(len(train))
    ]
    return {"classes": list(names), "clients": list(parts.names), "train": counts, **inputs}


def notes_on_names(data: Dataset, stated: Sequence[str] = ()) -> list[str]:
    """Return notes on classes and clients that look like others, or like no name.

    Named are names that differ by white space or case only, classes that no row has, and classes
    whose name is a sign of a missing value. ``stated`` are the classes that a recipe lists.
    """
    notes = [] if stated else _similar("labels", data.classes)
    notes += _similar("clients", data.client_names)
    if data.target != "class":
        return notes
    counts = torch.bincount(torch.cat([data.y, data.y_test]), minlength=data.num_classes).tolist()
    for name, count in zip(data.classes, counts, strict=False):
        if count and name.strip().lower() in data.form.signs:
            notes.append(f"rows with the label {name!r}, which is a class here: {count}")
    if empty := [name for name, count in zip(data.names, counts, strict=True) if not count]:
        notes.append(f"classes that no row has: {listed(map(repr, empty))}")
    return notes


def _similar(kind: str, names: Sequence[str]) -> list[str]:
    groups = defaultdict(list)
    for name in names:
        groups[" ".join(name.split()).casefold()].append(name)
    return [
        f"{kind} that differ by white space or case only are different {kind} here: "
        f"{listed(map(repr, group))}"
        for group in groups.values()
        if len(group) > 1
    ]
