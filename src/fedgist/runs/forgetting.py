"""Forgetting: a server drops what it keeps of one client, or takes it out of its totals."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch

from fedgist.core.method import Reply
from fedgist.core.peer_method import PeerMethod
from fedgist.core.tree import named
from fedgist.errors import CheckpointError, MethodError
from fedgist.recipe.overrides import Overrides
from fedgist.runs.files import checkpoint as checkpoints
from fedgist.runs.files.checkpoint import Checkpoint
from fedgist.runs.files.run_directory import locked
from fedgist.runs.last_download import DOWNLOADS
from fedgist.runs.round import ServerRun
from fedgist.runs.runner import load_run
from fedgist.wire.delayed_engine import DelayedEngine
from fedgist.world.data import client_number


def forget(folder: Path, client: int | str, given: Overrides | None = None) -> int:
    """Drop all messages of a client that the server of a stopped run keeps, and return its number.

    The run's checkpoint is replaced, including the state of the best round. A resumed run records
    the event. Models of other clients still contain what they learned from the client.
    """
    if (folder / DOWNLOADS).exists():
        raise MethodError(
            f"{folder} is a site's own model, which keeps no messages of clients: the server's run "
            "directory does"
        )
    with locked(folder):
        server_run, world = load_run(folder, given)
        with contextlib.closing(server_run.engine):
            return forget_in(server_run, folder, client_number(world.partition, client), client)


def forget_in(
    server_run: ServerRun,
    folder: Path,
    number: int,
    client: int | str,
    reply: Reply | None = None,
) -> int:
    """Replace the checkpoint in a folder by one without a client, and return its number.

    ``reply`` is the client's message that is in the totals, if it was made again elsewhere.
    """
    saved = checkpoints.load(folder)
    if saved is None:
        raise CheckpointError(f"{folder} has no checkpoint")
    now, had = _without(server_run, saved, number, reply)
    best, best_had = saved.best, False
    if best is not None:
        best, best_had = _without(server_run, best, number, reply)
    if not (had or best_had):
        raise MethodError(f"the server keeps nothing of client {client} that it could forget")
    forgotten = (*saved.binding.forgotten, (saved.round, number))
    binding = replace(saved.binding, forgotten=forgotten)
    checkpoints.save(folder, replace(now, best=best, binding=binding))
    return number


def _without(
    server_run: ServerRun, state: Checkpoint, client: int, reply: Reply | None
) -> tuple[Checkpoint, bool]:
    """Return a state without the client's messages, and whether the server kept any of them."""
    server_run.restore(replace(state, best=None))
    engine = server_run.engine  # what arrives late would be kept again
    dropped = isinstance(engine, DelayedEngine) and engine.forget(client)
    before = {name: array.clone() for name, array in named(server_run.server).items()}
    server_run.forget(client, reply)
    after = named(server_run.server)
    method = server_run.method
    if isinstance(method, PeerMethod) and method.kept_of(server_run.server, client) is not None:
        return state, False
    changed = not all(torch.equal(before[name], after[name]) for name in after)
    return server_run.checkpoint().copied(), changed or dropped
