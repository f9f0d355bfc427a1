"""Pretrained weights: a model starts with the arrays of a file that fit it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedgist.core.net import head_of
from fedgist.core.projection import head_and_projection
from fedgist.data.sources.locations import existing
from fedgist.data.sources.weights_file import classes_of, read_weights
from fedgist.errors import InputError, RecipeError, first_line, listed, printable
from fedgist.recipe.overrides import Build
from fedgist.world.model_sizes import Sizes

# the largest size of a weights file in sizes of its model: checkpoints keep moments in float64
_TIMES = 8
_SLACK = 64 << 20  # bytes that it may have beside
_COUNTER = "num_batches_tracked"  # of torch's batch norm: nothing here reads it
_SHOWN, _LONGEST = 5, 80  # names in a message, and how much of each


def pretrained(build: Build, path: str, sizes: Sizes, head: str | None) -> tuple[Build, str]:
    """Return a builder of modules with a file's arrays, and a note on arrays not taken from it.

    The names in the file may share a prefix (``module.``) that the model's names do not have. The
    head keeps its random start if the file has no head, a head of another shape, or other classes.
    A file made by ``fedgist export`` contains the names of its classes.

    Parameters
    ----------
    head
        Name of the linear layer that is the head. None means the last linear layer.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            whole = build()
        state = whole.state_dict()
        layer = head_of(whole, sizes.outputs, type(whole).__name__, head)[0]
        layer = head_and_projection(whole, layer)
        size = sum(array.numel() * array.element_size() for array in state.values())
        file = existing(path)
        file_arrays = read_weights(file, _TIMES * size + _SLACK)
        others = _other_classes(classes_of(file), sizes)
        arrays, note = _fitting(_renamed(file_arrays, state), state, layer, others)
    except (InputError, ValueError, TypeError, RuntimeError) as error:
        raise RecipeError(f"model.weights = {path!r}: {first_line(error)}") from error

    def loaded() -> nn.Module:
        module = build()
        module.load_state_dict(arrays, strict=False)
        return module

    return loaded, f"{Path(path).name}: {note}" if note else ""


def _renamed(
    arrays: Mapping[str, Tensor], model_arrays: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the arrays without shared name prefixes, until some name is one of the model's."""
    while arrays and not any(name in model_arrays for name in arrays):
        firsts = {name.partition(".")[0] for name in arrays}
        if len(firsts) > 1 or not all("." in name for name in arrays):
            break
        arrays = {name.partition(".")[2]: array for name, array in arrays.items()}
    return arrays


def _fitting(
    arrays: Mapping[str, Tensor], state: Mapping[str, Tensor], head: str, others: str
) -> tuple[dict[str, Tensor], str]:
    """Return the arrays that fit the model, and a note on the head and on unused arrays.

    ``others`` describes how the file's classes differ from the data's. Unless it is empty, the
    file's head does not fit.
    """
    fitting, random = {}, []
    in_head = f"{head}." if head else ""  # a linear layer alone is all head
    for name, own in state.items():
        problem = _problem(name, arrays.get(name), own)
        if others and name.startswith(in_head):
            problem = others
        if not problem:
            fitting[name] = arrays[name]
        elif name.startswith(in_head):
            random.append(problem)
        elif not name.endswith(_COUNTER):
            hint = "" if name in arrays else f"; it has {_listed(arrays)}"
            raise ValueError(problem + hint)
    over = [n for n in arrays if n not in state and not n.endswith(_COUNTER)]
    notes = [f"the head keeps its random start: {random[0]}"] if random else []
    notes += [f"not used: {_listed(over)}"] if over else []
    return fitting, "; ".join(notes)


def _other_classes(file_classes: tuple[str, ...], sizes: Sizes) -> str:
    """Return how a file's classes differ from the data's; empty if they agree or have no names."""
    own = sizes.classes
    unnamed = [tuple(map(str, range(len(names)))) for names in (file_classes, own)]
    if sizes.projects or file_classes == own or file_classes in unnamed or own in unnamed:
        return ""
    of_words = sizes.target == "words"
    kind, kinds = ("word", "words") if of_words else ("class", "classes")
    problem = f"the file has {len(file_classes)} names of {kinds}, the data {len(own)}"
    if len(file_classes) == len(own):
        place = next(i for i, name in enumerate(file_classes) if name != own[i])
        theirs, ours = (printable(names[place][:_LONGEST]) for names in (file_classes, own))
        problem = f"{kind} {place} is {theirs!r} in the file, {ours!r} in the data"
    if of_words:
        raise ValueError(problem)
    return problem


def _problem(name: str, array: Tensor | None, own: Tensor) -> str:
    """Return why a file's array cannot replace the model's array; empty if it can."""
    if array is None:
        return f"the file has no {name}"
    if array.shape != own.shape:
        return f"{name} is {list(array.shape)} in the file, {list(own.shape)} in the model"
    if array.is_floating_point() != own.is_floating_point() or array.is_complex():
        return f"{name} is of type {array.dtype} in the file, {own.dtype} in the model"
    if array.is_floating_point() and not bool(torch.isfinite(array.to(own.dtype)).all()):
        return f"{name} holds numbers that are not finite"
    return ""


def _listed(names: Iterable[str]) -> str:
    """Return names from an untrusted file for a message: shortened, and printable only."""
    return listed((printable(name[:_LONGEST]) for name in names), _SHOWN)
