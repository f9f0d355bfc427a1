"""What a run is made of beside its recipe, as digests: data, clients, starts of models.

A simulation knows all of it. A server without data knows its clients, the starts of their models,
and what the data are: shape, classes and name.
"""

from __future__ import annotations

from torch import Tensor

from fedgist.core import random
from fedgist.core.metrics import ALL_ROWS, HELD_OUT
from fedgist.data.examples import Examples
from fedgist.runs.digests import of_arrays, of_text
from fedgist.world.server_context import ServerContext
from fedgist.world.server_sets import Part
from fedgist.world.world import World

TEST_SETS = "the server's test sets"
WHOLE = 2**31  # bytes of examples up to which every byte counts


def of_world(world: World) -> dict[str, str]:
    """Return the digests of all that a simulation is made of beside its recipe."""
    data, parts = world.data, world.partition
    arrays = {"y": data.y, "y_test": data.y_test}
    arrays |= {
        name: ids
        for name, ids in (("clients", data.clients), ("clients_test", data.clients_test))
        if ids is not None
    }
    arrays |= {f"annotations/{name}": values for name, values in data.annotations.items()}
    rows = {
        f"{split}/{what}": getattr(getattr(parts, split), what)
        for split in ("train", "validation", "test")
        for what in ("rows", "counts")
    }
    values = [data.scale, data.mean, data.std, data.classes]
    examples = of_arrays({"x": data.x, "x_test": data.x_test}, _sampled(world))
    public = {} if world.public is None else {"x": world.public.x, "y": world.public.y}
    return of_server(world.server) | {
        "the data": of_text(f"{examples} {of_arrays(arrays)} {values}"),
        "the clients' rows": of_arrays(rows),
        **({"the public data": of_arrays(public)} if public else {}),
    }


def is_sampled(world: World) -> bool:
    """Return whether the digest of the data covers only a sample of the examples."""
    return _sampled(world) is not None


def _sampled(world: World) -> Tensor | None:
    size = sum(x.numel() * x.element_size() for x in (world.data.x, world.data.x_test))
    return random.key(world.server.recipe.seed, "digest") if size > WHOLE else None


def of_server(side: ServerContext) -> dict[str, str]:
    """Return the digests of what a server knows: its task, its clients, and the models' starts."""
    task = side.task
    starts = {
        f"{name}/{kind}/{path}": array
        for name, net in task.starts.items()
        for kind, arrays in (("params", net.params), ("buffers", net.buffers))
        for path, array in arrays.items()
    }
    clients = [(client.id, *client.architectures) for client in side.clients]
    own = {
        f"{name}/{part}": getattr(rows, part)
        for name, rows in task.test_sets.items()
        if name not in {ALL_ROWS, HELD_OUT} and isinstance(rows, Examples | Part)
        for part in ("x", "y")
    }
    # a file's content is no part of the recipe
    heard = side.hears if side.recipe.clients.graph.name == "file" else None
    graphs = [heard(number) for number in range(task.training.num_rounds + 1)] if heard else []
    declared = [side.data_name, list(task.input_shape), task.num_classes, side.holds_out]
    return {
        "the models' start": of_arrays(starts),
        "the clients": of_text(str(clients)),
        "what the data are": of_text(str(declared)),
        **({TEST_SETS: of_arrays(own)} if own else {}),
        **({"whom clients hear": of_text(str(graphs))} if graphs else {}),
    }
