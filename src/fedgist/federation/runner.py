"""``fedgist.run``: what the command line calls, and a notebook."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
from fedgist.engines.client_work import Settings
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.plan_timing import choose_plans
from fedgist.errors import RecipeError
from fedgist.federation import checkpoint as checkpoints
from fedgist.federation import saved_features as features
from fedgist.federation.checkpoint import Checkpoint
from fedgist.federation.recipe import Recipe, make, read
from fedgist.federation.record import PARTITION, RECIPE, RESULT, Line, Record, summary, to_json
from fedgist.federation.round_loop import Federation, Observer, loop, start_server, totals
from fedgist.federation.run_directory import alone, enter
from fedgist.federation.stop_signals import stoppable
from fedgist.federation.trained_models import ClientModel, client_model
from fedgist.federation.world import Given, World, class_counts, make_world, module_group

MAIN = "eval/client/accuracy_mean"


class Stopped(Exception):  # noqa: N818  # no error: somebody asked
    """A run stopped early, its checkpoint written; ``folder`` is what resumes it (None.

    Kept in memory only).
    """

    def __init__(self, folder: Path | None, options: str = "") -> None:
        super().__init__(
            f"stopped; resume with: fedgist run --resume {folder}{options}" if folder else "stopped"
        )
        self.folder = folder


@dataclass(frozen=True)
class Result:
    """A run's outcome.

    ``rounds`` as a table (a list of rows), ``clients`` per evaluation, the end, the models.
    """

    rounds: list[Line]
    clients: list[Line]
    summary: dict[str, Any]
    folder: Path | None
    federation: Federation = field(repr=False)

    @property
    def ledger(self) -> list[Line]:
        """Payload bytes a round and direction."""
        return [
            {k: line.get(k, 0) for k in ("round", "comm/up_bytes", "comm/down_bytes")}
            for line in self.rounds
        ]

    def model(self, client: int) -> ClientModel:
        """Return a client's final model: an ``nn.Module`` from raw examples to logits."""
        return client_model(self.federation, client)


class _Silent:
    """Observes nothing."""

    def began(self, world: World, folder: str, done: int) -> None: ...
    def finished_round(self, line: Line) -> None: ...
    def note(self, text: str) -> None: ...


def run(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Dataset | tuple[Any, ...] | torch.utils.data.Dataset[Any] | None = None,
    clients: Sequence[Any] | None = None,
    clients_test: Sequence[Any] | None = None,
    model: nn.Module
    | Callable[[], nn.Module]
    | Mapping[str, tuple[Any, Sequence[int]]]
    | None = None,
    method: Method | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    data_root: str | Path | None = None,
    observer: Observer | None = None,
) -> Result:
    """Run a federation.

    Parameters
    ----------
    recipe
        A file, a mapping with the same keys, or nothing (FedLog on digits).
    data
        Instead of the recipe's: arrays ``(x, y, x_test, y_test)`` or ``(x, y)``, a map-style torch
        data set of ``(x, y)`` pairs, or a :class:`~fedgist.data.dataset.Dataset`.
    clients, clients_test
        Instead of the recipe's partition: each client's training rows, and test rows (the whole
        test set if not given).
    model
        Instead of the recipe's: a module (its numbers are the start), a factory, or for groups of
        clients ``{"small": (module, [0, 1]), "large": (factory, [2])}``.
    method
        A :class:`~fedgist.core.method.Method` object, registered or not.
    out
        The run directory; without one, nothing is written.
    resume, overwrite
        What to do with a run that is already in ``out``.

    Raises
    ------
    ValueError
        If the recipe or the data cannot be used: one line that names the key, the value and the
        choices.
    Stopped
        After Ctrl-C or SIGTERM, when the round was finished and saved.
    """
    folder = Path(out) if out is not None else None
    parsed = _parse(recipe)
    own_start = parsed.clients.init == "own"
    given = Given(
        data=_dataset(data),
        clients=None
        if clients is None
        else [torch.as_tensor(np.asarray(c), dtype=torch.int64) for c in clients],
        clients_test=None
        if clients_test is None
        else [torch.as_tensor(np.asarray(c), dtype=torch.int64) for c in clients_test],
        groups=_groups(model, own_start=own_start),
        method=method,
        root=None if data_root is None else Path(data_root),
    )
    with alone(folder):
        saved = enter(folder, resume=resume, overwrite=overwrite)
        if saved and folder and (folder / RECIPE).exists():
            parsed = _resumed(parsed, folder)
        state = checkpoints.load(folder) if saved and folder else None
        return _run(parsed, given, folder, state, observer or _Silent())


def _parse(recipe: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return make(recipe)
    return read(None if recipe is None else Path(recipe))


def _resumed(asked: Recipe, folder: Path) -> Recipe:
    """Return the recipe of the run in ``folder``.

    How the work is done may be said anew, what is done may not.
    """
    old = read(folder / RECIPE)
    engine = old.engine.model_copy(
        update={"workers": asked.engine.workers, "device": asked.engine.device}
    )
    return old.model_copy(update={"engine": engine})


def open_world(
    recipe: Recipe, given: Given, say: Callable[[str], None] = lambda _: None
) -> tuple[World, Any]:
    """Return the world of a recipe, its plans chosen, and the server's first state."""
    how = settings(recipe)  # an impossible device is found before any work
    world = make_world(recipe, given)
    server = start_server(world)
    engine = recipe.engine
    plans = choose_plans(
        world.method,
        world.task,
        world.population,
        how,
        server,
        engine.plans,
        cohort_size=None if engine.cohort_size == "auto" else engine.cohort_size,
        memory_limit=engine.memory_limit,
        say=say,
    )
    engine = engine.model_copy(update={"plans": plans})
    return replace(world, recipe=world.recipe.model_copy(update={"engine": engine})), server


def settings(recipe: Recipe) -> Settings:
    """Return what the local engine needs to know."""
    return Settings(
        seed=recipe.seed,
        own_start=recipe.clients.init == "own",
        device=_device(recipe.engine.device),
        min_replies=recipe.privacy.min_replies,
        workers=None if recipe.engine.workers == "auto" else recipe.engine.workers,
    )


def _device(name: str) -> str:
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        msg = f"engine.device = {name!r} cannot be used: {str(error).splitlines()[0]}"
        raise RecipeError(msg) from error
    return name


def load_run(folder: Path, given: Given | None = None) -> Federation:
    """Return the federation of a run directory, as its checkpoint left it."""
    if not (folder / RECIPE).exists():
        hint = (
            f"; choose one of {', '.join(sorted(p.name for p in folder.glob('seed-*')))}"
            if folder.is_dir()
            else ""
        )
        msg = f"{folder} holds no run{hint if 'seed' in hint else ''}"
        raise RecipeError(msg)
    saved = checkpoints.load(folder)
    if saved is None:
        msg = f"{folder} has no checkpoint yet: its models are not saved"
        raise RecipeError(msg)
    world, server = open_world(read(folder / RECIPE), given or Given())
    engine = LocalEngine(
        world.method,
        world.task,
        world.population,
        replace(settings(world.recipe), workers=1),
        world.recipe.engine.plans,
    )
    federation = Federation(world, engine, server)
    federation.restore(saved)
    return federation


def _run(
    recipe: Recipe, given: Given, folder: Path | None, saved: Checkpoint | None, observer: Observer
) -> Result:
    began = time.perf_counter()
    world, server = open_world(recipe, given, observer.note)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder, saved.round if saved else -1)
    record.write(RECIPE, world.recipe.to_toml())
    record.write(PARTITION, to_json(class_counts(world)) + "\n")
    engine = LocalEngine(
        world.method,
        world.task,
        world.population,
        settings(world.recipe),
        world.recipe.engine.plans,
    )
    try:
        federation = Federation(world, engine, server)
        if saved:
            federation.restore(saved)
        engine.start()
        observer.began(world, str(folder or ""), federation.round)
        notes = [
            f"{name} {plan.note}" for name, plan in world.recipe.engine.plans.items() if plan.note
        ]
        for note in notes:
            observer.note(note)

        def keep(line: Line, details: Sequence[Line]) -> None:
            record.add(line, details)
            observer.finished_round(line)

        def save() -> None:
            if folder:
                checkpoints.save(folder, federation.checkpoint())

        hint = "stopping: this round is finished and saved first; once more to stop at once"
        with stoppable(lambda: observer.note(hint)) as stop:
            whole = loop(federation, keep, save, stop)
        if not whole:
            raise Stopped(folder)
        end = {
            "status": "finished",
            "seed": recipe.seed,
            "method": world.recipe.method.name,
            "rounds": federation.round,
            MAIN: summary(record.rounds, MAIN),
            "communication": totals(record.rounds),
            "time/total_s": time.perf_counter() - began,
            "notes": notes,
            "versions": versions(),
        }
        if any("eval/global/accuracy" in line for line in record.rounds):
            end["eval/global/accuracy"] = summary(record.rounds, "eval/global/accuracy")
        if folder and world.recipe.evaluate.save_features:
            features.save(federation, folder, world.recipe.evaluate.save_features)
        record.write(RESULT, json.dumps(json.loads(to_json(end)), indent=2) + "\n")
    finally:
        engine.close()
    return Result(record.rounds, record.clients, end, folder, federation)


def versions() -> dict[str, str]:
    """Return what a result depends on."""
    names = ("fedgist", "torch", "numpy")
    return {
        "python": platform.python_version(),
        **{n: metadata.version(n) for n in names},
        "cores": str(os.cpu_count()),
    }


def _dataset(data: Any) -> Dataset | None:
    if data is None or isinstance(data, Dataset):
        return data
    if isinstance(data, torch.utils.data.Dataset):
        pairs = [data[i] for i in range(len(data))]  # type: ignore[arg-type]  # map-style data sets have a length
        data = (
            torch.stack([torch.as_tensor(x) for x, _ in pairs]),
            torch.tensor([int(y) for _, y in pairs]),
        )
    if not isinstance(data, tuple) or len(data) not in {2, 4}:
        msg = "data must be (x, y), (x, y, x_test, y_test), a torch data set or a fedgist Dataset"
        raise RecipeError(msg)
    arrays = [_array(a) for a in data]
    x, y = arrays[0], arrays[1].to(torch.int64)
    x_test, y_test = (arrays[2], arrays[3].to(torch.int64)) if len(arrays) == 4 else (x[:0], y[:0])  # noqa: PLR2004
    labels = torch.cat([y, y_test])
    return Dataset("your data", x, y, x_test, y_test, int(labels.max()) + 1 if len(labels) else 0)


def _array(value: Any) -> Tensor:
    array = torch.as_tensor(np.asarray(value))
    return array.to(torch.float32) if array.dtype == torch.float64 else array


def _groups(model: Any, *, own_start: bool) -> dict[str, Any] | None:
    if model is None:
        return None
    if isinstance(model, Mapping):
        return {
            name: module_group(m, own_start=own_start, clients=members)
            for name, (m, members) in model.items()
        }
    return {"model": module_group(model, own_start=own_start)}
