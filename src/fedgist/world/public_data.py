"""Public data: rows that the server and all sites may see, mostly without labels.

Public rows are held out of the training set, come from another source, or are passed as an array.
They are normalized with the training set's mean and standard deviation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data.dataset import Dataset
from fedgist.data.examples import Examples
from fedgist.data.facts import DataFacts
from fedgist.data.lazy_rows import held
from fedgist.data.partition import Partition
from fedgist.data.sources.in_memory import examples_like
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.text_rows import Reading
from fedgist.data.sources.unlabelled import fitted_rows
from fedgist.errors import RecipeError
from fedgist.recipe.data_section import PublicSection
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import Recipe
from fedgist.world.data import check_augment, client_number

DIGESTED_AT_ONCE = 1024  # of which a digest is made
PUBLIC_ROWS = "data.public.rows"  # names the draw, and the key in messages
LARGEST = "largest"  # names the client with most training rows
NO_LABEL = 0  # stands where labels are not known; nothing reads it


@dataclass(frozen=True, eq=False)
class Public:
    """Public rows in the form of a data set: ``x`` ``(rows, *input)``, ``y`` (rows,).

    For texts, ``x`` and ``y`` are (rows, length).
    """

    x: Tensor
    y: Tensor
    labelled: bool = False

    def seen(self, examples: Examples, section: PublicSection | None) -> Examples:
        """Return the rows as model inputs, prepared like ``examples`` and on the same device."""
        return examples.others(self.x, self.y, section.augment if section else ())


def set_aside(setup: Setup, data: Dataset) -> tuple[Dataset, Public | None]:
    """Return the clients' data without public rows, and the public rows; None without public rows.

    Public rows of a client stay in the data: see :func:`rows_of_client`.
    """
    section = setup.recipe.data.public
    if section:
        check_augment(section.augment, data, "data.public.augment")
    if setup.given.public is not None:
        rows = examples_like(data, setup.given.public, "public")
        _check_given(section)
        return data, _unlabelled(rows)
    if section is None or section.client is not None:
        return data, None
    _check_moments(setup.recipe)
    if section.name is not None:
        # texts are read as the clients' are
        vocabulary = data.vocabulary
        words = Reading(data.input_shape[0], known=vocabulary) if vocabulary else None
        public = public_source(setup, section, data.facts, data.fill, words)
        if section.unused_rows is None:
            return data, public
        rest, _ = _taken_out(setup, data, section.unused_rows, PUBLIC_ROWS)
        return rest, public
    if section.rows is None:
        raise RecipeError(
            "data.public: say which rows, rows = 1000 of the training set, client = 3, or "
            "name = another data set"
        )
    rest, chosen = _taken_out(setup, data, section.rows, PUBLIC_ROWS)
    return rest, _seen(chosen, labelled=section.labelled)


def rows_of_client(recipe: Recipe, data: Dataset, parts: Partition) -> Public | None:
    """Return the training rows of the public client; None if the recipe names no such client.

    The client keeps these rows and takes part in the run like any other client.
    """
    section, client = recipe.data.public, client_of(recipe, parts)
    if section is None or client is None:
        return None
    _check_moments(recipe)
    numbers = parts.train[client]
    if section.rows is not None:
        if section.rows > len(numbers):
            raise RecipeError(
                f"data.public.rows = {section.rows}: client {section.client} has {len(numbers)}"
                " training rows"
            )
        key = random.key(recipe.seed, PUBLIC_ROWS)
        numbers = numbers[random.choice(key, len(numbers), section.rows)]
    return _seen(data.only(numbers), labelled=section.labelled)


def client_of(recipe: Recipe, parts: Partition) -> int | None:
    """Return the number of the public client; None if the recipe names no such client."""
    section = recipe.data.public
    if section is None or section.client is None:
        return None
    if section.client == LARGEST and LARGEST not in parts.names:
        return int(parts.train.counts.argmax())
    return client_number(parts, section.client)


def digest_of(rows: Examples) -> int:
    """Return a digest of the model inputs of all rows in order: a whole number of 63 bits."""
    seen = hashlib.sha256()
    for piece in torch.split(torch.arange(len(rows)), DIGESTED_AT_ONCE):
        seen.update(rows.batch(piece.unsqueeze(0)).x.cpu().numpy().tobytes())
    return int.from_bytes(seen.digest()[:8], "big") >> 1


def _check_moments(recipe: Recipe) -> None:
    if recipe.data.normalize == "client" and not recipe.data.mean:
        raise RecipeError(
            "data.public belongs to no client, and data.normalize = 'client' has moments of "
            "clients only: state data.mean and data.std"
        )


def hold_out_at_server(setup: Setup, data: Dataset) -> tuple[Dataset, Dataset | None]:
    """Return the clients' data without held-out rows, and the held-out rows or None."""
    if not setup.recipe.data.held_out:
        return data, None
    if data.groups is not None:
        raise RecipeError(
            "data.held_out draws single rows, and data.group keeps rows together: use "
            "data.validation, which holds out whole groups at the clients"
        )
    return _taken_out(setup, data, setup.recipe.data.held_out, "data.held_out")


def _taken_out(setup: Setup, data: Dataset, size: int, key: str) -> tuple[Dataset, Dataset]:
    """Draw ``size`` training rows; return the data without the drawn rows, and the drawn rows.

    If rows carry client names, each client keeps at least its first row.
    """
    if setup.given.clients is not None:
        raise RecipeError(f"{key} are taken out of the training rows, which clients= numbers")
    free, most = torch.arange(len(data.y)), len(data.y) - 1
    if data.clients is not None:
        kept = np.unique(data.clients.numpy(), return_index=True)[1]
        free = torch.from_numpy(np.delete(free.numpy(), kept))
        most = len(free)
    if size > most:
        raise RecipeError(
            f"{key} = {size}: there are {len(data.y)} training rows, and clients need some"
            + (f", each one of its own: {most} are left" * (len(free) == most))
        )
    drawn = free[random.choice(random.key(setup.recipe.seed, key), len(free), size)]
    rest = torch.ones(len(data.y), dtype=torch.bool)
    rest[drawn] = False
    return data.only(rest.nonzero().squeeze(1)), data.only(drawn)


def _check_given(section: PublicSection | None) -> None:
    if section and (section.name, section.rows, section.client) != (None, None, None):
        raise RecipeError("data.public names rows, and public= gives others: give one")


def _seen(data: Dataset, *, labelled: bool = False) -> Public:
    """Return public rows with public labels; the labels of texts are their next tokens."""
    labelled = labelled or data.target == "words"
    x = held(data.inputs, "data.public: the public rows")
    return Public(x, data.y, True) if labelled else _unlabelled(x)


def _unlabelled(x: Tensor) -> Public:
    return Public(x, torch.full((len(x),), NO_LABEL, dtype=torch.int64))


def public_source(
    setup: Setup,
    section: PublicSection,
    facts: DataFacts,
    fill: Tensor | None = None,
    words: Reading | None = None,
) -> Public:
    """Return public rows of the source that the recipe names, in the form of the clients' rows.

    ``fill`` ``(*input)`` replaces missing numbers. ``words`` are the settings for texts.
    """
    assert section.name is not None  # the caller's
    other = load_data(
        section.name,
        root=setup.given.root,
        seed=setup.recipe.seed,
        words=words,
        target=facts.target,
        **section.options,
    )
    subject = f"data.public: {section.name}"
    x = fitted_rows(held(other.inputs, subject), subject, facts, fill)
    other = other.with_inputs(x, other.inputs_test)
    if section.rows is None:
        return _seen(other)
    if section.rows > len(other.x):
        raise RecipeError(
            f"data.public.rows = {section.rows}: {section.name} has {len(other.x)} training rows"
        )
    drawn = random.choice(random.key(setup.recipe.seed, PUBLIC_ROWS), len(other.x), section.rows)
    return _seen(other.only(torch.tensor(drawn)))
