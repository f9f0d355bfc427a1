"""Pretrained models: the numbers of a file in place of a model's random start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedgist.core.net import head_of
from fedgist.data.sources.locations import existing
from fedgist.data.sources.weights_file import classes_of, read_weights
from fedgist.errors import InputError, RecipeError, first_line, listed, printable
from fedgist.world.model_building import Build, Sizes

_TIMES = (
    8  # a file may be so many times a model's size: checkpoints keep moments, in double precision
)
_SLACK = 64 << 20  # bytes that it may have beside
_COUNTER = "num_batches_tracked"  # of torch's batch norm: nothing here reads it
_SHOWN, _LONGEST = 5, 80  # names in a message, and how much of each


def pretrained(build: Build, path: str, sizes: Sizes, head: str | None) -> tuple[Build, str]:
    """Return a builder whose modules hold the arrays of a file, and a note on those that do not.

    A file's names may have a common beginning (``module.``) that the model's have not. The head
    keeps its random start where the file has another one, or none: with other classes, it has to.
    A file of ``fedgist export`` says what its classes are called.

    Parameters
    ----------
    head
        Name of the linear layer that is the head; the last one if None.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            whole = build()
        state = whole.state_dict()
        layer = head_of(whole, sizes.outputs, type(whole).__name__, head)[0]
        size = sum(array.numel() * array.element_size() for array in state.values())
        file = existing(path)
        found = read_weights(file, _TIMES * size + _SLACK)
        others = _other_classes(classes_of(file), sizes)
        arrays, note = _fitting(_renamed(found, state), state, layer, others)
    except (InputError, ValueError, TypeError, RuntimeError) as error:
        raise RecipeError(f"model.weights = {path!r}: {first_line(error)}") from error

    def loaded() -> nn.Module:
        module = build()
        module.load_state_dict(arrays, strict=False)
        return module

    return loaded, f"{Path(path).name}: {note}" if note else ""


def _renamed(arrays: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return arrays without the beginning that all names share, while no name is known."""
    while arrays and not any(name in known for name in arrays):
        firsts = {name.partition(".")[0] for name in arrays}
        if len(firsts) > 1 or not all("." in name for name in arrays):
            break
        arrays = {name.partition(".")[2]: array for name, array in arrays.items()}
    return arrays


def _fitting(
    arrays: Mapping[str, Tensor], state: Mapping[str, Tensor], head: str, others: str
) -> tuple[dict[str, Tensor], str]:
    """Return the arrays that fit, and a note on the head and on what is left over.

    A head of ``others`` (classes, if that is no empty text) does not fit.
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


def _other_classes(said: tuple[str, ...], sizes: Sizes) -> str:
    """Return how classes of a file are other than the data's; nothing if not, or if unnamed."""
    own = sizes.classes
    unnamed = [tuple(map(str, range(len(names)))) for names in (said, own)]
    if sizes.projects or said == own or said in unnamed or own in unnamed:
        return ""
    kind, kinds = ("word", "words") if sizes.text else ("class", "classes")
    problem = f"the file has {len(said)} names of {kinds}, the data {len(own)}"
    if len(said) == len(own):
        place = next(i for i, name in enumerate(said) if name != own[i])
        theirs, ours = (printable(names[place][:_LONGEST]) for names in (said, own))
        problem = f"{kind} {place} is {theirs!r} in the file, {ours!r} in the data"
    if sizes.text:
        raise ValueError(problem)
    return problem


def _problem(name: str, array: Tensor | None, own: Tensor) -> str:
    """Return why an array cannot take the place of a model's own; nothing if it can."""
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
    """Return the names of a file, which may hold anything, for a message."""
    return listed((printable(name[:_LONGEST]) for name in names), _SHOWN)
