"""Models made by a factory, ours or a user's: how it is called, and whether its model fits.

A factory is called as ``factory(input_shape, num_classes, **options)``, with the shape of one
example as a tuple of whole numbers, and returns a ``torch.nn.Module`` from a batch of examples to
logits. One given to ``fedgist.run`` may as well take nothing.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedgist.core.objective import Objective
from fedgist.data.dataset import Dataset
from fedgist.data.sources.file_sizes import check_memory
from fedgist.errors import DataError, RecipeError, first_line, shown
from fedgist.recipe.model_factories import Factory

Build = Callable[[], nn.Module]
_COPIES = 4  # of all parameters, in training: themselves, their gradients, two moments of Adam


@dataclass(frozen=True)
class Sizes:
    """What every model of a task has to take and to give.

    ``projects``: whether outputs are embeddings, for which a hidden layer comes before the last.
    ``classes``: what the classes are called, or the words of a text.
    """

    input_shape: tuple[int, ...]
    outputs: int
    text: bool
    projects: bool
    classes: tuple[str, ...] = field(default=(), repr=False)

    @staticmethod
    def of(data: Dataset, objective: Objective) -> Sizes:
        """Return what models of this data have to be for an objective."""
        shape, projects = tuple(data.input_shape), objective.views > 1
        return Sizes(shape, objective.outputs, data.text, projects, data.names)


def builder(
    factory: Factory, sizes: Sizes, options: Mapping[str, Any], where: str, *, bare: bool = False
) -> Build:
    """Return a function that makes the model of some sizes; ``where`` begins its messages.

    Parameters
    ----------
    bare
        Whether the factory is called without arguments if it can be.
    """
    given = () if bare and _takes(factory, (), options) else (sizes.input_shape, sizes.outputs)
    if not _takes(factory, given, options):
        named = "".join(f", {name}=..." for name in options)
        raise RecipeError(
            f"{where}: a factory is called as f(input_shape, num_classes{named}), and this one is "
            f"f{inspect.signature(factory)}"
        )

    def build() -> nn.Module:
        try:
            module: object = factory(*given, **options)
        except ValueError as error:  # it says what does not fit
            raise RecipeError(f"{where}: {first_line(error)}") from error
        except Exception as error:  # a user's code may fail in any way
            raise RecipeError(
                f"{where} failed: {type(error).__name__}: {first_line(error)}"
            ) from error
        if not isinstance(module, nn.Module):
            raise RecipeError(f"{where} returned a {type(module).__name__}, not a torch.nn.Module")
        return module

    stated = ", ".join(f"{key} = {shown(value)}" for key, value in options.items())
    _check_size(build, f"{where} ({stated})" if stated else where)
    return build


def truncated_normal(build: Build) -> Build:
    """Return a builder whose linear layers and convolutions start as Haiku's do.

    Weights are ``s`` times a standard normal number cut off at -2 and 2, with ``s = 1 / sqrt(n)``
    for a layer of n inputs (of a convolution, those of one output); biases are 0.
    """

    def started() -> nn.Module:
        module = build()
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                deviation = layer.weight[0].numel() ** -0.5
                cut = 2 * deviation
                nn.init.trunc_normal_(layer.weight, std=deviation, a=-cut, b=cut)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return module

    return started


def _takes(factory: Factory, given: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C: only a call can tell
        return True
    try:
        signature.bind(*given, **options)
    except TypeError:
        return False
    return True


def _check_size(build: Build, where: str) -> None:
    """Raise RecipeError if a model is too large, counted without making its numbers."""
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            module = build()
        arrays = [*module.parameters(), *module.buffers()]
        count = sum(array.numel() for array in arrays)
        size = sum(array.numel() * array.element_size() for array in arrays)
    except (ValueError, RuntimeError):  # not every model can be made so; a real one will tell
        return
    what = f"{where}: {count:,} parameters, with their gradients and moments,"
    try:
        check_memory(_COPIES * size, what)
    except DataError as error:
        raise RecipeError(str(error)) from error
