"""Checks of a resumed run: its recipe, data, rows and initial models must be unchanged.

Data and models are compared by digests, which a checkpoint holds. The workers and the device may
change. The number of rounds may be raised if the rounds done so far would be the same in the longer
run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgist.core import random
from fedgist.core.objectives.metrics import ALL_ROWS, HELD_OUT
from fedgist.core.tree import Tree
from fedgist.data.examples import Examples
from fedgist.data.row_traces import traces
from fedgist.engines.engine import EVALUATE
from fedgist.errors import CheckpointError, RecipeError, shown
from fedgist.recipe.reading import Recipe, defaults, flat
from fedgist.runs.files.checkpoint import Binding, Checkpoint, load
from fedgist.runs.files.digests import of_all_rows, of_arrays, of_text
from fedgist.runs.files.record import FEATURES, saved_arrays_in
from fedgist.runs.files.seals import MENDING, of_file, seal_of
from fedgist.runs.repeated_steps import repeated_steps
from fedgist.runs.round import context, start_server
from fedgist.runs.versions import Computed
from fedgist.world.server_context import ServerContext
from fedgist.world.server_sets import PartialTestSet
from fedgist.world.world import World

TEST_SETS = "the server's test sets"
ALL_BYTES = "all bytes of the rows"
NAMES = "the names of clients or inputs"
HOW_READ = "the way in which rows are read (data.read)"
WHOLE = 2**31  # bytes of examples up to which every byte counts


def of_world(world: World, *, whole: bool = False) -> dict[str, str]:
    """Return the digests of a simulation's data, rows and initial models, by name.

    With ``whole`` there is also a digest of all bytes of rows that are read lazily, for which every
    row is read.
    """
    data, parts = world.data, world.partition
    arrays = {"y": data.y, "y_test": data.y_test}
    arrays |= {
        name: ids
        for name, ids in (("clients", data.clients), ("clients_test", data.clients_test))
        if ids is not None
    }
    arrays |= {f"annotations/{name}": values for name, values in data.annotations.items()}
    rows = {
        f"{split}/{array_name}": getattr(getattr(parts, split), array_name)
        for split in ("train", "validation", "test")
        for array_name in ("rows", "counts")
    }
    values = [data.scale, data.mean, data.std, data.classes]
    inputs = traces("x", data.inputs) | traces("x_test", data.inputs_test)
    examples = of_arrays(inputs, _sampled(world))
    public = {} if world.public is None else {"x": world.public.x, "y": world.public.y}
    return of_server(world.server) | {
        "the data": of_text(f"{examples} {of_arrays(arrays)} {values}"),
        "the clients' rows": of_arrays(rows),
        NAMES: of_text(str([world.server.client_names, [each.inputs for each in data.columns]])),
        **({"the public data": of_arrays(public)} if public else {}),
        **({ALL_BYTES: of_all_rows(data)} if whole else {}),
        **({HOW_READ: of_text("lazy")} if data.lazy is not None else {}),
    }


def is_sampled(world: World) -> bool:
    """Return whether the digest of the data covers only a sample of the examples."""
    return _sampled(world) is not None


def _sampled(world: World) -> Tensor | None:
    parts = [x for x in (world.data.x, world.data.x_test) if not x.is_meta]
    size = sum(x.numel() * x.element_size() for x in parts)
    return random.key(world.server.setup.recipe.seed, "digest") if size > WHOLE else None


def of_server(side: ServerContext) -> dict[str, str]:
    """Return the digests of a server's inputs: its task, its clients, and the initial models."""
    task = side.task
    nets = dict(task.starts)
    nets |= {f"{n}/frozen": net.arch.frozen for n, net in nets.items() if net.arch.frozen}
    starts = {
        f"{name}/{kind}/{path}": array
        for name, net in nets.items()
        for kind, arrays in (("params", net.params), ("buffers", net.buffers))
        for path, array in arrays.items()
    }
    clients = [(client.id, *client.architectures) for client in side.clients]
    own = {
        name: array
        for set_name, rows in task.test_sets.items()
        if set_name not in {ALL_ROWS, HELD_OUT} and isinstance(rows, Examples | PartialTestSet)
        for name, array in {**traces(f"{set_name}/x", rows.x), f"{set_name}/y": rows.y}.items()
    }
    declared = [side.data_name, list(task.input_shape), task.num_classes, side.holds_out]
    return {
        **Computed.now(side.setup.method).inputs,
        "the models' start": of_arrays(starts),
        "the clients": of_text(str(clients)),
        "what the data are": of_text(str(declared)),
        **({TEST_SETS: of_arrays(own)} if own else {}),
        **_by_round(side),
    }


def _by_round(side: ServerContext) -> dict[str, str]:
    """Return digests of what files say of each round: their content is no part of the recipe."""
    recipe, numbers = side.setup.recipe, range(side.task.training.num_rounds + 1)
    section, told = recipe.clients, dict[str, object]()
    if section.graph.name == "file" and side.neighbors:
        told["whom clients hear"] = [side.neighbors(number) for number in numbers]
    if isinstance(section.availability, str):
        told["who is online"] = [[c.id for c in side.online(number)] for number in numbers]
    if recipe.train.steps_of:
        taken = (repeated_steps(side) or {}).items()
        told["how many steps are repeated"] = sorted(s for s in taken if s[0][0] in numbers)
    return {name: of_text(str(each)) for name, each in told.items()}


ROUNDS_KEY = "train.num_rounds"


def binding_of(
    side: ServerContext, inputs: Mapping[str, str], saved: Checkpoint | None = None
) -> Binding:
    """Return the binding of a run before its first line."""
    binding = Binding(_result_settings(side.recipe), dict(inputs))
    if saved is None:
        return binding
    before, now = saved.binding.recipe[ROUNDS_KEY], binding.recipe[ROUNDS_KEY]
    change = () if before == now else ((saved.round, before, now),)
    kept = saved.binding
    raised, over = (*kept.raised, *change), kept.over and not change
    return replace(binding, raised=raised, forgotten=kept.forgotten, over=over)


def check_binding(
    side: ServerContext,
    inputs: Mapping[str, str],
    saved: Checkpoint,
    folder: Path,
    *,
    raising: bool,
) -> None:
    """Raise RecipeError, naming the difference, if the run in ``folder`` had other inputs.

    ``raising`` says whether the user requested a larger number of rounds.
    """
    begun = saved.binding
    if raising:  # later rounds were not asked about
        inputs = {**inputs, **_by_round(_shorter(side, begun))}
    now = binding_of(side, inputs)
    _check_recipe(now.recipe, begun, folder, raising=raising)
    for input_name in dict.fromkeys([*begun.inputs, *now.inputs]):
        if input_name == NAMES and NAMES not in begun.inputs:
            continue  # begun by a version that did not compare them
        if begun.inputs.get(input_name) != now.inputs.get(input_name):
            raise RecipeError(
                f"{folder} cannot go on: {input_name} changed since the run was begun; put it "
                "back, or begin a run in another folder"
            )
    if raising:
        _check_rounds(side, saved, folder)


def check_finished(recipe: Recipe, folder: Path, rounds: int | None = None) -> None:
    """Raise an error if the recipe or a file of a finished run changed since the run ended.

    The data of the run are not read. ``rounds`` is the number of rounds that the user requests now.
    """
    saved = load(folder)
    if saved is None:
        raise CheckpointError(
            f"{folder} has no checkpoint, which a finished run has; put it back from a copy, or "
            "start the run again with --overwrite"
        )
    begun = saved.binding.recipe
    _check_recipe(_result_settings(recipe), saved.binding, folder, raising=False)
    if rounds is not None:
        _check_not_cut(begun[ROUNDS_KEY], rounds, folder)
    if problems := seal_of(folder).problems:
        raise CheckpointError(f"{folder} does not match its seal: {problems[0]}; {MENDING}")


def check_features(folder: Path, saved: Checkpoint | None) -> None:
    """Check the saved features of a resumed run, and remove features of later rounds."""
    sealed = saved.binding.files if saved else {}
    for name, digest in sealed.items():
        if name.startswith(Path(FEATURES).stem) and of_file(folder / name) != digest:
            raise CheckpointError(
                f"{folder / name} does not match the checkpoint: it was changed, or is missing; "
                + MENDING
            )
    for name in saved_arrays_in(folder):
        if name not in sealed:
            (folder / name).unlink()


def _check_recipe(
    now: Mapping[str, object], begun: Binding, folder: Path, *, raising: bool
) -> None:
    """Raise RecipeError that names the first key of the recipe that changed."""
    later = defaults()  # of keys that the recipe did not have yet
    for key in dict.fromkeys([*begun.recipe, *now]):
        old, new = (some.get(key, later.get(key)) for some in (begun.recipe, now))
        if old == new or (key == ROUNDS_KEY and raising):
            continue
        more = isinstance(old, int) and isinstance(new, int) and new > old
        hint = "; --rounds raises it" if key == ROUNDS_KEY and more else ""
        raise RecipeError(f"{folder} was begun with {key} = {shown(old)}, not {shown(new)}{hint}")


def _check_not_cut(old: int, new: int, folder: Path) -> None:
    if new < old:
        raise RecipeError(
            f"{folder} was begun with {ROUNDS_KEY} = {old}; it can only be raised, not cut to "
            + str(new)
        )


def _check_rounds(side: ServerContext, saved: Checkpoint, folder: Path) -> None:
    """Raise RecipeError if the number of rounds falls, or finished rounds depend on it."""
    old, new = saved.binding.recipe[ROUNDS_KEY], side.setup.recipe.train.num_rounds
    _check_not_cut(old, new, folder)
    if side.spending is not None and new > old:
        raise RecipeError(
            f"{ROUNDS_KEY} cannot be raised from {old} to {new}: privacy.epsilon was divided "
            f"among {old} rounds"
        )
    shorter = _shorter(side, saved.binding)
    start = start_server(side)
    for number in range(1, saved.round + 1):
        for setting, before, after in round_settings(shorter, side, number, start):
            if before != after:
                raise RecipeError(
                    f"{ROUNDS_KEY} cannot be raised from {old} to {new}: {setting} depends on it, "
                    f"and round {number} would have been another"
                )
    evaluate = side.setup.recipe.evaluate
    chooses = evaluate.keep != "last" or evaluate.patience > 0
    if chooses and new > old == saved.round and old % evaluate.every:
        raise RecipeError(
            f"{ROUNDS_KEY} cannot be raised from {old} to {new}: evaluate.keep and "
            f"evaluate.patience choose among evaluated rounds, and round {old} was evaluated as "
            "the last one alone"
        )


def _shorter(side: ServerContext, begun: Binding) -> ServerContext:
    """Return the server's context with the number of rounds with which the run was begun."""
    training = side.task.training.model_copy(update={"num_rounds": begun.recipe[ROUNDS_KEY]})
    return replace(side, task=replace(side.task, training=training))


def round_settings(
    shorter: ServerContext, longer: ServerContext, number: int, start: Tree
) -> list[tuple[str, object, object]]:
    """Return the settings of a round in a shorter and a longer run, with their names.

    ``start`` is the initial state of the server in both runs.
    """
    sides, name = (shorter, longer), f"method {shorter.setup.recipe.method.name}"
    rates = [side.task.training.lr_factor(number) for side in sides]
    stages = [side.method.stages(context(side, number, "")) for side in sides]
    phases = [
        [
            side.method.phases(replace(context(side, number, stage), architecture=name))
            for stage in stages[0]
            for name in side.task.architectures
        ]
        for side in sides
    ]
    # a server's own learning rate, for instance
    numbers = [side.method.report(start, context(side, number, EVALUATE)) for side in sides]
    return [
        ("train.lr_schedule", rates[0], rates[1]),
        (name, stages[0], stages[1]),
        (name, phases[0], phases[1]),
        (name, str(numbers[0]), str(numbers[1])),
    ]


def _result_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that can change the bits of its results."""
    sections = recipe.model_dump(mode="json", exclude={"engine"})
    plans = recipe.model_dump(mode="json", include={"engine": {"plans", "server_threads"}})
    described: dict[str, Any] = json.loads(json.dumps(flat(sections | plans)))
    return described
