"""Class statistics of features, and linear heads: messages and functions that methods share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.message import message
from fedgist.core.privacy import LEAST_WEIGHT
from fedgist.core.task import Task
from fedgist.errors import MethodError

#: Types of the numbers in messages of sums, by the name of the setting ``wire``.
WIRES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float64": torch.float64}
)


@message(reduce="sum")
class LinearHead:
    """A linear head over features of width m: ``eta`` (classes, m + 1), the biases first.

    It does not contain an architecture's name for its last layer, so one head serves several
    architectures: :meth:`fedgist.core.nets.net.Net.with_head` installs it.
    """

    eta: Tensor

    @property
    def weight(self) -> Tensor:
        """The weights, (classes, m)."""
        return self.eta[:, 1:]

    @property
    def bias(self) -> Tensor:
        """The biases, (classes,)."""
        return self.eta[:, 0]


def with_constant(z: Tensor) -> Tensor:
    """Return features (batch, m) with the constant 1 put first: (batch, m + 1)."""
    return torch.cat([torch.ones_like(z[:, :1]), z], dim=1)


#: What the cosine of a row and a class is multiplied by, as a score.
COSINE = 10.0


def unit_rows(z: Tensor) -> Tensor:
    """Return features (batch, m), or class sums, divided by their length; rows of zeros stay."""
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / torch.where(length > 0, length, 1.0)


def weights_of(batch: Batch, like: Tensor) -> Tensor:
    """Return the weight of each row of a batch, (batch,), 0 of absent ones."""
    weight = batch.mask.to(like.dtype)
    return weight if batch.weight is None else weight * batch.weight


def class_sums(
    values: Tensor, y: Tensor, mask: Tensor, num_classes: int, weight: Tensor | None = None
) -> Tensor:
    """Return the sum of ``values`` (batch, width) over the rows of each class: (classes, width).

    ``y`` and ``mask`` are (batch,). Absent rows have weight 0, and the others their ``weight``
    (batch,), if it is given (``batch.weight``). If ``values`` are features with the constant 1 put
    first, the first column of the sums is the number of rows of each class.
    """
    of_class = (F.one_hot(y, num_classes) * mask.unsqueeze(1)).to(values.dtype)
    if weight is not None:
        of_class = of_class * weight.unsqueeze(1)
    return of_class.T @ values


def members(batch: Batch, task: Task) -> Tensor:
    """Return which features are of which class: (batch, classes), or (batch * pixels, classes).

    Of several labels, a row is a member of each that it has. Absent rows and missing labels are
    members of none.
    """
    if task.objective.target == "labels":
        return (batch.y > 0) * batch.mask.unsqueeze(1)
    counted = (batch.y >= 0) & batch.mask.view(-1, *(1 for _ in task.places))
    of_class = F.one_hot(batch.y.clamp(min=0), task.num_classes) * counted.unsqueeze(-1)
    return of_class.flatten(0, -2)


def class_means(
    total: Tensor, rows: Tensor, floor: float = 0.0, least: float = LEAST_WEIGHT
) -> tuple[Tensor, Tensor]:
    """Return means (..., width) of sums ``total`` (..., width), and a mask (...) of 1 or 0.

    ``rows`` (...) are the numbers of rows, or sums of their weights. A mean is 0 and masked out if
    its number of rows is at most ``floor``. Numbers below ``least`` are replaced by ``least`` in
    the division (:func:`fedgist.core.privacy.least_count`).
    """
    there = (rows > floor).to(total.dtype)
    return total / rows.clamp(min=least).unsqueeze(-1) * there.unsqueeze(-1), there


def one_feature_width(
    task: Task, method: str, shares: Literal["one head", "class means"] = "one head"
) -> int:
    """Return the feature width of all architectures; to share one head, they also need a bias.

    A method that shares one head sets its numbers, so the head may not be fixed by a user.
    """
    widths = {name: a.feature_width for name, a in task.architectures.items()}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise MethodError(
            f"method {method} shares {shares}, so all bodies need one feature width; "
            f"they have {listed}; model.project = {min(widths.values())} projects the others to it"
        )
    if shares == "one head":
        check_heads(task, method)
    return next(iter(widths.values()))


def check_heads(task: Task, method: str) -> None:
    """Raise MethodError unless a method can compute the numbers of every head, bias included."""
    heads = {name: (f"{a.head}.weight", f"{a.head}.bias") for name, a in task.architectures.items()}
    fixed = [n for n, arrays in heads.items() if task.architectures[n].fixed & {*arrays}]
    if fixed:
        raise MethodError(
            f"method {method} computes the head, and that of {fixed[0]} has requires_grad = False: "
            "let it learn, or use another method"
        )
    bare = [name for name, a in task.architectures.items() if not a.head_bias]
    if bare:
        raise MethodError(f"method {method} needs a head with a bias; that of {bare[0]} has none")
