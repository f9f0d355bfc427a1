"""Prepare a run: its world, its first server state, its execution plans and its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedgist.core import random
from fedgist.engines.delayed_engine import DelayedEngine, by_chance
from fedgist.engines.engine import Engine
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.loopback_engine import LoopbackEngine
from fedgist.engines.loss_settings import check_loss_settings
from fedgist.engines.method_check import check_method, why_unstackable
from fedgist.engines.plan_timing import choose_plans
from fedgist.engines.population import HostSettings
from fedgist.engines.worker_pool import default_workers, usable_cores
from fedgist.errors import RecipeError
from fedgist.recipe.reading import Recipe
from fedgist.recipe.schema import EngineSection
from fedgist.runs.evaluation import check_evaluation
from fedgist.runs.round import start_server
from fedgist.world.world import Overrides, World, make_world

PER_CORE = 4  # workers: more of them only wait for each other
USEFUL = f"more have no client of their own, or a core has more than {PER_CORE}"


def prepare_run(
    recipe: Recipe, given: Overrides, say: Callable[[str], None] = lambda _: None
) -> tuple[World, Any]:
    """Return the world of a recipe with its plans chosen, and the server's first state.

    ``say`` is called with each note that a user should see.
    """
    world = make_world(recipe, given, say)
    check_evaluation(world.server)
    server = start_server(world.server)
    side = world.server
    settings = host_settings(world)
    key = random.key(recipe.seed).to(settings.device)
    notes = (*side.notes, *check_method(side.method, side.task, server, key), *_lowered(world))
    world = replace(world, server=replace(side, notes=notes))
    check_loss_settings(side.method, side.task, server, key)
    engine = recipe.engine
    threads = _server_threads(engine)
    if engine.name == "loopback":  # every site runs its one client, unstacked
        return _with_engine(world, server_threads=threads), server
    plans = choose_plans(
        world.server.method,
        world.server.task,
        world.population,
        settings,
        server,
        engine.plans,
        cohort_size=None if engine.cohort_size == "auto" else engine.cohort_size,
        memory_limit=engine.memory_limit,
        say=say,
    )
    for name, plan in plans.items():
        if not plan.stack:
            reason = why_unstackable(side.method, side.task, server, key, name)
            note = f"runs client by client: {reason}" if reason else plan.note
            plans[name] = replace(plan, note=note)
    return _with_engine(world, plans=plans, server_threads=threads), server


def _server_threads(engine: EngineSection) -> int:
    chosen = engine.server_threads
    return default_workers(engine.device) if chosen == "auto" else chosen


def _with_engine(world: World, **chosen: object) -> World:
    """Return the world with the chosen execution plans and threads in its recipe."""
    section = world.server.recipe.engine.model_copy(update=chosen)
    planned = world.server.recipe.model_copy(update={"engine": section})
    return replace(world, server=replace(world.server, recipe=planned))


def make_engine(world: World, workers: int | None = None) -> Engine:
    """Return the engine of a world; ``workers``, if given, replaces the recipe's number."""
    recipe, side = world.server.recipe, world.server
    settings = host_settings(world)
    if workers is not None:
        settings = replace(settings, workers=workers)
    engine: Engine
    if recipe.engine.name == "loopback":
        _check_loopback(world)
        keep = recipe.engine.checkpoint_every + 1  # rounds that a resumed server may ask for again
        engine = LoopbackEngine(side.method, side.task, world.population, settings, keep)
    else:
        engine = LocalEngine(
            side.method, side.task, world.population, settings, recipe.engine.plans
        )
    if recipe.clients.delay:
        return DelayedEngine(engine, by_chance(recipe.seed, recipe.clients.delay))
    return engine


def _check_loopback(world: World) -> None:
    recipe, method = world.server.recipe, world.server.method
    if method.merges_clients:
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
    asked = world.server.recipe.engine.workers
    most = min(len(world.server.clients), PER_CORE * usable_cores())
    return None if asked == "auto" else min(asked, max(1, most))


def _lowered(world: World) -> list[str]:
    asked, useful = world.server.recipe.engine.workers, _useful_workers(world)
    if useful is None or useful == asked:
        return []
    return [f"engine.workers = {asked} is lowered to {useful}: {USEFUL}"]


def host_settings(world: World) -> HostSettings:
    """Return how the clients of a world are hosted on this machine."""
    recipe = world.server.recipe
    return HostSettings(
        seed=recipe.seed,
        own_start=recipe.clients.init == "own",
        device=recipe.engine.device,
        workers=_useful_workers(world),
        share_measurements=recipe.privacy.share_measurements,
        trained_every=recipe.evaluate.trained_every,
        own=world.settings,
    )
