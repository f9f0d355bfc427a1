"""Features of test rows, made by each client's own body, for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from fedgist.core.tree import map_leaves
from fedgist.runs.files import atomic_files as files
from fedgist.runs.finished.trained_models import client_nets
from fedgist.runs.round import ServerRun
from fedgist.world.world import World

IN_A_PLANE = 2  # numbers of features that can be drawn as they are


def save(server_run: ServerRun, world: World, path: Path) -> None:
    """Write the features of some test rows of each client, with client and class, as they are now.

    ``evaluate.save_features`` says how many rows of each client there are at most.

    Arrays: ``features`` (points, widest), zeros where a client's features are narrower; ``client``
    and ``label`` (points,). Where all features are 2 numbers, also the heads over them, a line for
    each of the different clients, in order: ``weight`` (heads, classes, 2), ``bias`` (heads,
    classes).
    """
    population = world.population
    most = server_run.side.setup.recipe.evaluate.save_features
    tested = [client for client in range(len(population.test)) if len(population.test[client])]
    nets = client_nets(server_run, tested)
    features, owners, labels, heads = [], [], [], list[tuple[Tensor, Tensor | None]]()
    for client, net in zip(tested, nets, strict=True):
        rows = population.test[client][:most]
        batch = map_leaves(
            lambda leaf: leaf[0].cpu(), population.test_examples.batch(rows.unsqueeze(0))
        )
        with torch.no_grad():
            features.append(net.features(batch.x))
        owners.append(torch.full((len(rows),), client))
        labels.append(batch.y)
        heads += [net.head] * (net.arch.feature_width == IN_A_PLANE)
    if not features:
        return
    widest = max(z.shape[1] for z in features)
    arrays = {
        "features": torch.cat(
            [torch.nn.functional.pad(z, (0, widest - z.shape[1])) for z in features]
        ),
        "client": torch.cat(owners),
        "label": torch.cat(labels),
    }
    arrays |= _stacked(heads) if len(heads) == len(features) else {}
    files.write(path, safetensors.torch.save(arrays))


def _stacked(heads: Sequence[tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
    biases = [torch.zeros(len(weight)) if bias is None else bias for weight, bias in heads]
    return {"weight": torch.stack([weight for weight, _ in heads]), "bias": torch.stack(biases)}
