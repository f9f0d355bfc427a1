"""Prepare a run: its world, its first server state, its execution plans and its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fedgist.core import random
from fedgist.core.tree import Tree
from fedgist.engines.engine import Engine
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.method_check import check_loss_settings, check_method, why_unstackable
from fedgist.engines.plans.layout import with_kernels
from fedgist.engines.plans.plan import Plan
from fedgist.engines.plans.timing import choose_plans
from fedgist.engines.population import HostSettings
from fedgist.engines.worker_pool import default_workers, usable_cores
from fedgist.errors import RecipeError
from fedgist.recipe.resolve import Setup
from fedgist.runs.evaluation import check_evaluation, scoring_notes
from fedgist.runs.ray_engine import ray_engine
from fedgist.runs.repeated_steps import repeated_steps
from fedgist.runs.round import start_server
from fedgist.wire.delayed_engine import DelayedEngine, by_chance
from fedgist.wire.loopback_engine import LoopbackEngine
from fedgist.world.secure_sums import check_secure_sums
from fedgist.world.world import World, make_world

PER_CORE = 4  # workers per core: more workers only wait for each other
USEFUL = f"more have no client of their own, or a core has more than {PER_CORE}"


def prepare_run(
    setup: Setup, say: Callable[[str], None] = lambda _: None, workers: int | None = None
) -> tuple[World, Tree, Engine]:
    """Return the world of a recipe with its plans chosen, the server's first state, and the engine.

    ``say`` is called with each note that a user should see. ``workers``, if given, replaces the
    recipe's number.
    """
    world = make_world(setup, say)
    side = world.server
    check_evaluation(side)
    server = start_server(side)
    key = random.key(setup.recipe.seed).to(setup.device)
    checked = check_method(side.method, side.task, server, key)
    notes = (*world.data.notes, *side.notes, *checked, *_lowered(world), *scoring_notes(side))
    check_loss_settings(side.method, side.task, server, key)
    plans: Mapping[str, Plan] = {}
    if setup.recipe.engine.name != "loopback":  # there every site runs its one client, unstacked
        plans = _plans(world, server, say)
    threads = _server_threads(setup)
    task = with_kernels(side.task, plans)
    side = replace(side, task=task, notes=notes, plans=plans, server_threads=threads)
    engine, shards = _engine(replace(world, server=side), workers, say)
    world = replace(world, server=replace(side, shards=shards))
    return world, server, engine


def _plans(world: World, server: Tree, say: Callable[[str], None]) -> dict[str, Plan]:
    """Return the execution plan of each architecture: measured, unless the recipe has it."""
    side, engine = world.server, world.server.setup.recipe.engine
    plans = choose_plans(
        side.method,
        side.task,
        world.population,
        hosting_of(world),
        server,
        engine.plans,
        cohort_size=None if engine.cohort_size == "auto" else engine.cohort_size,
        memory_limit=engine.memory_limit,
        kernels=engine.kernels,
        say=say,
    )
    key = random.key(side.setup.recipe.seed).to(side.setup.device)
    for name, plan in plans.items():
        if not plan.stack:
            reason = why_unstackable(side.method, side.task, server, key, name)
            note = f"runs client by client: {reason}" if reason else plan.note
            plans[name] = replace(plan, note=note)
    return plans


def _server_threads(setup: Setup) -> int:
    chosen = setup.recipe.engine.server_threads
    return default_workers(setup.device) if chosen == "auto" else chosen


def _engine(world: World, workers: int | None, say: Callable[[str], None]) -> tuple[Engine, int]:
    """Return the engine of a world and its number of shards.

    ``workers``, if given, replaces the recipe's number, and then all clients are on this machine.
    """
    side, setup = world.server, world.server.setup
    recipe = setup.recipe
    settings, section = hosting_of(world), recipe.engine
    if workers is not None:
        settings = replace(settings, workers=workers)
    settings = replace(settings, steps=repeated_steps(side))
    if section.name == "ray" and settings.steps is not None:
        raise RecipeError("train.steps_of: engine.name = 'ray' has no part in it: use 'local'")
    shards = 1 if section.shards == "auto" else section.shards
    _check_shards(world, shards)
    engine: Engine
    if section.name == "loopback":
        _check_loopback(world)
        keep = section.checkpoint_every + 1  # rounds that a resumed server may ask for again
        about = side.method, side.task, world.population, settings, keep
        engine = LoopbackEngine(*about, secure=setup.federation.sums == "secure")
    elif setup.federation.sums == "secure":
        raise RecipeError(
            f"engine.name = {section.name!r} adds up what it can read: in a simulation, "
            "federation.sums = 'secure' needs engine.name = 'loopback'"
        )
    elif section.name == "ray" and workers is None:
        engine, shards = ray_engine(world, settings, say)
    else:
        parts = side.method, side.task, world.population, settings, side.plans
        engine = LocalEngine(*parts, shards=shards)
        for note in engine.host.notes:
            say(note)
    if recipe.clients.delay:
        if side.method.needs_every_upload:
            raise RecipeError(
                f"clients.delay = {recipe.clients.delay:g}: late uploads are dropped, and what "
                f"clients of method {recipe.method.name} keep is right only if the server uses "
                "each upload"
            )
        engine = DelayedEngine(engine, by_chance(recipe.seed, recipe.clients.delay))
    return engine, shards


def _check_shards(world: World, shards: int) -> None:
    side = world.server
    if shards > len(side.clients):
        count = len(side.clients)
        why = "the number of clients"
        if side.method.merges_clients:
            why = f"for method {side.setup.recipe.method.name} merges all clients' rows"
        raise RecipeError(f"engine.shards = {shards}: must be at most {count}, {why}")


def _check_loopback(world: World) -> None:
    setup = world.server.setup
    check_secure_sums(world.server)
    recipe = setup.recipe
    if world.server.method.merges_clients:
        raise RecipeError(
            f"engine.name = 'loopback': method {recipe.method.name} merges all clients' rows, "
            "which sites keep to themselves; use 'local'"
        )
    if recipe.privacy.noise == "system":
        raise RecipeError(
            "engine.name = 'loopback': with privacy.noise = 'system' a site must keep what it "
            "released, which sites within one process do not: use 'local'"
        )
    if recipe.evaluate.on == "test":
        raise RecipeError(
            "evaluate.on = 'test' needs the whole test set at every site, and engine.name = "
            "'loopback' gives each site only its own rows; use 'client' or 'global'"
        )


def _useful_workers(world: World) -> int | None:
    """Return the number of a recipe's workers that have work; None if it names no number."""
    workers = world.server.setup.recipe.engine.workers
    most = min(len(world.server.clients), PER_CORE * usable_cores())
    return None if workers == "auto" else min(workers, max(1, most))


def _lowered(world: World) -> list[str]:
    workers, useful = world.server.setup.recipe.engine.workers, _useful_workers(world)
    if useful is None or useful == workers:
        return []
    return [f"engine.workers = {workers} is lowered to {useful}: {USEFUL}"]


def hosting_of(world: World) -> HostSettings:
    """Return how the clients of a world are hosted on this machine."""
    return replace(world.hosting, workers=_useful_workers(world))
