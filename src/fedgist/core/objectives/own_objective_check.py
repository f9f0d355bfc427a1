"""Check a user's objective on made-up rows against the rules for all objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch, fake_rows
from fedgist.core.objectives.own_objective import TaskLoss, checked_objective, metrics_of
from fedgist.errors import RecipeError, first_line

ROWS, PRESENT = 12, 9  # made-up rows, and how many of them are present
CLOSE = 1e-4  # tolerance of sums in another order


def check_objective(thing: object, num_classes: int, y: Tensor | None = None) -> list[str]:
    """Try a user's objective on made-up rows; return what was tried.

    Parameters
    ----------
    thing
        The object: see :mod:`fedgist.core.objectives.own_objective`.
    num_classes
        Number of classes, or of numbers or labels per row.
    y
        Labels (rows, ...) to try it on, at least 12 rows. The default is made up: positive numbers,
        classes in turn, or random labels.

    Raises
    ------
    RecipeError
        If it breaks a rule: one line that names the rule.
    """
    own = checked_objective(thing)
    batch, outputs = _made_up(own, num_classes, y)
    for sentence, rule in RULES.items():
        try:
            held = rule(own, outputs, batch)
        except Exception as error:  # a user's function may fail in any way
            why = f"{type(error).__name__}: {first_line(error)}"
            raise RecipeError(f"objective {type(thing).__name__}: {sentence}; {why}") from error
        if not held:
            raise RecipeError(f"objective {type(thing).__name__}: {sentence}, and it does not")
    for metric in metrics_of(own):
        metric.check(_answers(own, outputs[:PRESENT]), batch.y[:PRESENT])
    return [*RULES, "the metrics return numbers"]


def _made_up(own: TaskLoss, num_classes: int, y: Tensor | None) -> tuple[Batch, Tensor]:
    key = random.key(0, "own objective")
    x, labels = fake_rows(key, ROWS, (1,), num_classes, target=own.labels)
    labels = labels.abs() if y is None else y[:ROWS]
    outputs = random.normal(random.fold(key, "outputs"), (ROWS, own.outputs))
    return Batch(x[:, :0], labels, torch.arange(ROWS) < PRESENT), outputs


def _answers(own: TaskLoss, outputs: Tensor) -> Tensor:
    answers = getattr(own, "answers", None)
    result: Tensor = outputs if answers is None else answers(outputs)
    return result


def _is_a_number(own: TaskLoss, outputs: Tensor, batch: Batch) -> bool:
    loss = own.loss(outputs, batch)
    return tuple(loss.shape) == () and bool(torch.isfinite(loss))


def _has_gradients(own: TaskLoss, outputs: Tensor, batch: Batch) -> bool:
    watched = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(own.loss(watched, batch), watched)
    absent = gradient[PRESENT:]
    return bool(torch.isfinite(gradient).all() and gradient.any() and not absent.any())


def _ignores_absent_rows(own: TaskLoss, outputs: Tensor, batch: Batch) -> bool:
    other, y = outputs.clone(), batch.y.clone()
    other[PRESENT:], y[PRESENT:] = 7.0, 0
    return _close(own.loss(other, replace(batch, y=y)), own.loss(outputs, batch))


def _ignores_order(own: TaskLoss, outputs: Tensor, batch: Batch) -> bool:
    turned = torch.cat([torch.arange(PRESENT).flip(0), torch.arange(PRESENT, ROWS)])
    other = replace(batch, y=batch.y[turned])
    return _close(own.loss(outputs[turned], other), own.loss(outputs, batch))


def _stacks(own: TaskLoss, outputs: Tensor, batch: Batch) -> bool:
    two = torch.stack([outputs, -outputs])
    masks = torch.stack([batch.mask, torch.ones_like(batch.mask)])

    def alone(single: Tensor, mask: Tensor) -> Tensor:
        return own.loss(single, replace(batch, mask=mask))

    stacked = torch.func.vmap(alone)(two, masks)
    return all(_close(stacked[k], alone(two[k], masks[k])) for k in range(len(two)))


def _keeps_its_inputs(own: TaskLoss, outputs: Tensor, batch: Batch) -> bool:
    before = outputs.clone(), batch.y.clone()
    own.loss(outputs, batch)
    return torch.equal(outputs, before[0]) and torch.equal(batch.y, before[1])


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE)


Rule = Callable[[TaskLoss, Tensor, Batch], bool]
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "the loss changes no input": _keeps_its_inputs,
        "the loss is a finite number, of shape ()": _is_a_number,
        "the loss has finite gradients, and none of absent rows": _has_gradients,
        "rows under a false mask have no effect": _ignores_absent_rows,
        "the order of rows has no effect": _ignores_order,
        "the loss works under vmap, and gives each client its own number": _stacks,
    }
)
