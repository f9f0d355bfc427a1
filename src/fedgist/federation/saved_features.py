"""Features of test rows out of a finished run, for pictures.

What each client's body makes of its own examples.
"""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from fedgist.core.tree import map_leaves
from fedgist.federation import atomic_files as files
from fedgist.federation.round_loop import Federation

FEATURES = "features.safetensors"


def save(federation: Federation, folder: Path, rows: int) -> None:
    """Write the features of up to ``rows`` test rows of each client, with client and class.

    Arrays: ``features`` (points, widest), zeros where a client's features are narrower; ``client``
    and ``label`` (points,).
    """
    population, method = federation.world.population, federation.method
    orders, downs, ctx = federation.downloads(federation.round)
    found, owners, labels = [], [], []
    for client in range(len(population.test)):
        some = population.test[client][:rows]
        if not len(some):
            continue
        place = 0 if method.merges_clients else client
        net = map_leaves(
            lambda leaf: leaf.cpu(), federation.engine.client(ctx, orders[place], downs[place])
        ).net
        batch = map_leaves(
            lambda leaf: leaf[0].cpu(), population.test_examples.batch(some.unsqueeze(0))
        )
        with torch.no_grad():
            found.append(net.features(batch.x))
        owners.append(torch.full((len(some),), client))
        labels.append(batch.y)
    if not found:
        return
    widest = max(z.shape[1] for z in found)
    arrays = {
        "features": torch.cat(
            [torch.nn.functional.pad(z, (0, widest - z.shape[1])) for z in found]
        ),
        "client": torch.cat(owners),
        "label": torch.cat(labels),
    }
    files.write(folder / FEATURES, safetensors.torch.save(arrays))
