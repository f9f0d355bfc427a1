"""Objects that a notebook gives in place of a recipe's names: arrays, modules, clients' rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
from fedgist.errors import MethodError, RecipeError
from fedgist.federation.method_loading import checked_class, identity
from fedgist.federation.model_groups import module_group
from fedgist.federation.recipe import Recipe
from fedgist.federation.recipe_sections import MethodSection


def rows_of_clients(clients: Sequence[Any] | None) -> list[Tensor] | None:
    """Return each client's row numbers as tensors; a Boolean mask names the rows where it is true.

    Raises
    ------
    RecipeError
        If they are neither whole numbers nor masks.
    """
    return None if clients is None else [_rows(client, rows) for client, rows in enumerate(clients)]


def _rows(client: int, rows: object) -> Tensor:
    numbers = np.asarray(rows)
    if numbers.dtype == bool:
        numbers = np.flatnonzero(numbers)
    if numbers.size and numbers.dtype.kind not in "iu":
        msg = f"clients: rows of client {client} are {numbers.dtype}, not whole numbers or a mask"
        raise RecipeError(msg)
    return torch.as_tensor(numbers.astype(np.int64))


def with_method(recipe: Recipe, method: Method) -> Recipe:
    """Return the recipe with a method object's name and fields written into it.

    Raises
    ------
    MethodError
        If ``method`` is not a method object.
    RecipeError
        If the recipe gives hyper-parameters as well.
    """
    if isinstance(method, str):
        msg = f"method is the text {method!r}: give an object, or name it in the recipe's [method]"
        raise MethodError(msg)
    if isinstance(method, type):
        msg = f"method is the class {method.__name__}: give an object, {method.__name__}()"
        raise MethodError(msg)
    checked_class(type(method), type(method).__name__)
    if recipe.method.options:
        key = next(iter(recipe.method.options))
        msg = (
            f"method.{key} is given in the recipe, and a method object as well: give only one of "
            "the two"
        )
        raise RecipeError(msg)
    name, options = identity(method)
    return recipe.model_copy(update={"method": MethodSection(name=name, **options)})


def dataset_of(data: Any) -> Dataset | None:
    """Return arrays, a torch data set or a Dataset as a Dataset.

    Raises
    ------
    RecipeError
        If ``data`` is none of these.
    """
    if data is None or isinstance(data, Dataset):
        return data
    if isinstance(data, torch.utils.data.Dataset):
        pairs = [data[i] for i in range(len(data))]  # type: ignore[arg-type]  # map-style data sets have a length
        data = (
            torch.stack([torch.as_tensor(x) for x, _ in pairs]),
            torch.tensor([int(y) for _, y in pairs]),
        )
    if not isinstance(data, tuple) or len(data) not in {2, 4}:
        msg = "data must be (x, y), (x, y, x_test, y_test), a torch data set or a fedgist Dataset"
        raise RecipeError(msg)
    arrays = [_array(a) for a in data]
    x, y = arrays[0], _labels(arrays[1])
    x_test, y_test = (arrays[2], _labels(arrays[3])) if len(arrays) == 4 else (x[:0], y[:0])  # noqa: PLR2004
    labels = torch.cat([y, y_test])
    return Dataset("your data", x, y, x_test, y_test, int(labels.max()) + 1 if len(labels) else 0)


def _labels(labels: Tensor) -> Tensor:
    whole = labels.to(torch.int64)
    if not torch.equal(whole.to(labels.dtype), labels):
        msg = "data: labels must be whole numbers, from 0 on"
        raise RecipeError(msg)
    return whole


def _array(value: Any) -> Tensor:
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "biuf":
        msg = f"data must be arrays of numbers, not of {numbers.dtype}; number the labels from 0 on"
        raise RecipeError(msg)
    array = torch.as_tensor(numbers)
    return array.to(torch.float32) if array.dtype == torch.float64 else array


def groups_of(model: Any, *, own_start: bool) -> dict[str, Any] | None:
    """Return the groups of clients given by a module, a factory, or a mapping of these."""
    if model is None:
        return None
    if isinstance(model, Mapping):
        return {
            name: module_group(m, own_start=own_start, clients=members)
            for name, (m, members) in model.items()
        }
    return {"model": module_group(model, own_start=own_start)}
