"""Global prototypes of classes: what clients learn from them, and how they predict by them."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.losses import mean_over_places, weighted_mean
from fedgist.core.message import message
from fedgist.core.nets.net import Net
from fedgist.core.task import Context
from fedgist.core.wire_form import FLAGS, rows_where


@message(reduce="sum")
class Prototypes:
    """The global prototype of each class, (classes, m), and a mask of those that exist."""

    mean: Tensor = field(metadata=rows_where("exists"))
    exists: Tensor = field(metadata=FLAGS)

    @staticmethod
    def of_nobody(classes: int, width: int, device: torch.device) -> Prototypes:
        """Return no prototypes."""
        mean = torch.zeros(classes, width, device=device)
        return Prototypes(mean, torch.zeros_like(mean[:, 0]))


def near_prototypes(lam: float, net: Net, batch: Batch, down: Prototypes, ctx: Context) -> Tensor:
    """Return the task's loss plus ``lam`` times the distance to the prototypes, ().

    ``batch.x`` is ``(batch, *input)``, and a prototype is (m,). The distance is the mean square
    over the features, and over the labels or the pixels of a row. Where a class has no prototype it
    is 0.
    """
    z = net.features(batch.x)
    task_loss = ctx.task.objective.loss(net.logits(z), batch)
    if ctx.task.objective.target == "labels":
        distance = _to_labels(z, batch.y, down)
    else:
        y = batch.y.clamp(min=0)
        of_place = (z - down.mean[y]).square().mean(-1) * down.exists[y]
        distance = mean_over_places(of_place, batch.y >= 0) if ctx.task.places else of_place
    return task_loss + lam * weighted_mean(distance, batch.mask, batch.weight)


def by_nearest(net: Net, x: Tensor, mean: Tensor, exists: Tensor) -> Tensor:
    """Return minus the squared distances to prototypes, (batch, classes), or the same per pixel.

    ``x`` is ``(batch, *input)``, ``mean`` (classes, m) and the mask ``exists`` (classes,). Classes
    without a prototype rank below all others. If there is none at all, the head predicts.
    """
    z = net.features(x)
    near = -(z.unsqueeze(-2) - mean).square().sum(-1)
    behind = torch.where(exists, near, 0.0).amin(-1, keepdim=True) - 1.0
    return torch.where(exists.any(), torch.where(exists, near, behind), net.logits(z))


def _to_labels(z: Tensor, y: Tensor, down: Prototypes) -> Tensor:
    """Return the mean distance (batch,) of features (batch, m) to the prototypes of their labels.

    ``y`` (batch, labels) is 1 for a label that a row has. Labels without a prototype do not count.
    """
    has = (y > 0) * down.exists
    distance = (z.unsqueeze(1) - down.mean).square().mean(2)
    return (distance * has).sum(1) / has.sum(1).clamp(min=1.0)
