"""Features of test rows of a finished run, made by each client's own body, for pictures."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from fedgist.core.tree import map_leaves
from fedgist.federation import atomic_files as files
from fedgist.federation.record import FEATURES
from fedgist.federation.round_loop import Federation
from fedgist.federation.trained_models import simulation
from fedgist.federation.world import World


def save(federation: Federation, world: World, folder: Path) -> None:
    """Write the features of some test rows of each client, with client and class.

    ``evaluate.save_features`` says how many rows of each client there are at most.

    Arrays: ``features`` (points, widest), zeros where a client's features are narrower; ``client``
    and ``label`` (points,).
    """
    population, engine = world.population, simulation(federation)
    most = federation.side.recipe.evaluate.save_features
    orders, downs, ctx = federation.downloads(federation.round)
    features, owners, labels = [], [], []
    for client in range(len(population.test)):
        rows = population.test[client][:most]
        if not len(rows):
            continue
        place = 0 if federation.method.merges_clients else client
        net = map_leaves(
            lambda leaf: leaf.cpu(), engine.client(ctx, orders[place], downs[place])
        ).net
        batch = map_leaves(
            lambda leaf: leaf[0].cpu(), population.test_examples.batch(rows.unsqueeze(0))
        )
        with torch.no_grad():
            features.append(net.features(batch.x))
        owners.append(torch.full((len(rows),), client))
        labels.append(batch.y)
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
    files.write(folder / FEATURES, safetensors.torch.save(arrays))
