"""Checks of a federation's recipe: every key that a server without rows cannot honour is refused.

Server and sites call the same checks, because a site does not rely on its server.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedgist.errors import RecipeError, shown
from fedgist.recipe.reading import Recipe, make
from fedgist.recipe.resolve import Setup

OWN_ROWS = "the server of a federation has no rows"
NO_TEXTS = "texts are not supported yet"
OF_TEXTS = ("text_classes", "next_word")  # objectives
AT_SITES = "each site names its own data in its site.toml"


def check_stated(recipe: Recipe) -> None:
    """Raise RecipeError if a recipe states a key that only a simulation reads."""
    data, plain = recipe.data, make({})
    stated = {
        f"data.name = {data.name!r}": (data.name != plain.data.name, AT_SITES),
        f"partition.name = {recipe.partition.name!r}": (
            recipe.partition != plain.partition,
            "the rows of a federation are where they are",
        ),
    }
    stated |= {f"data.{key}": (True, AT_SITES) for key in data.options}
    _refuse(stated)


def as_federated(recipe: Recipe) -> Recipe:
    """Return a recipe as a federation runs it.

    Under differential privacy, losses and scores stay at the sites, because no epsilon covers them;
    with secure sums, because they would be a site's own.
    """
    secure = recipe.federation is not None and recipe.federation.sums == "secure"
    if recipe.privacy.unit == "none" and not secure:
        return recipe
    return recipe.changed({"privacy.share_measurements": False})


def check_setup(setup: Setup) -> None:
    """Raise RecipeError if a federation cannot honour a setting."""
    recipe = setup.recipe
    parts = _of_data(recipe), _of_clients(recipe), _of_training(recipe), _of_evaluation(recipe)
    _refuse({key: problem for part in parts for key, problem in part.items()})
    if setup.method.merges_clients:
        raise RecipeError(
            f"method {recipe.method.name} merges all clients' rows, which sites keep to themselves"
        )
    given = recipe.objective.options
    if recipe.objective.name == "regression" and not (given.get("mean") and given.get("std")):
        raise RecipeError(
            "objective.mean and objective.std are missing: the numbers to predict are never "
            "together in a federation"
        )
    _check_privacy(recipe)


def _refuse(problems: Mapping[str, tuple[bool, str]]) -> None:
    for key, (applies, reason) in problems.items():
        if applies:
            raise RecipeError(f"{key} cannot be used in a federation: {reason}")


def _of_data(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    data, public = recipe.data, recipe.data.public
    problems = {
        "data.shift": (data.shift is not None, "sites have images of their own"),
        "data.train_rows": (data.train_rows is not None, "a site uses all rows that it names"),
        f"data.long_tail = {data.long_tail:g}": (
            data.long_tail < 1,
            "a site uses all rows that it names",
        ),
        f"data.held_out = {data.held_out}": (bool(data.held_out), OWN_ROWS),
        "data.words": (data.words is not None, NO_TEXTS),
        f"objective.name = {recipe.objective.name!r}": (
            recipe.objective.name in OF_TEXTS,
            NO_TEXTS,
        ),
    }
    if public is not None:
        rows = "public rows come from a named source: state data.public.name"
        problems["data.public"] = (public.name is None, rows)
        unused = "clients' rows are not the server's to leave out"
        problems["data.public.unused_rows"] = (public.unused_rows is not None, unused)
    return problems


def _of_training(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    train, every = recipe.train, recipe.evaluate.trained_every
    return {
        f"train.steps_of = {shown(train.steps_of)}": (
            bool(train.steps_of),
            "a simulation repeats a federation with it",
        ),
        f"evaluate.trained_every = {every}": (
            every > 0 and train.round_seconds is not None,
            "train.round_seconds does not limit that training",
        ),
    }


def _of_clients(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    clients = recipe.clients
    online = "the sites that are connected take part"
    problems = {
        f"clients.availability = {shown(clients.availability)}": (
            clients.availability != 1.0,
            online,
        ),
        f"clients.held_out = {shown(clients.held_out)}": (
            bool(clients.held_out),
            "a site that does not connect is held out",
        ),
        f"clients.delay = {clients.delay:g}": (
            clients.delay > 0,
            "replies are as late as they are",
        ),
        f"engine.name = {recipe.engine.name!r}": (
            recipe.engine.name != "local",
            "the engine is the network; leave it out",
        ),
    }
    if recipe.facts is not None and recipe.facts.feature_width is not None:
        private = "facts.feature_width says that each site has a private model: leave it out"
        problems["clients.architectures"] = (bool(clients.architectures), private)
        problems["clients.pools"] = (bool(clients.pools), private)
    return problems


def _of_evaluation(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    section = recipe.evaluate
    return {
        f"evaluate.on = {section.on!r}": (section.on != "client", f"{OWN_ROWS}: use 'client'"),
        f"evaluate.probe = {section.probe!r}": (section.probe != "none", OWN_ROWS),
        "evaluate.sets": (bool(section.sets), OWN_ROWS),
        "evaluate.save_features": (bool(section.save_features), "features stay at the sites"),
        "evaluate.save_predictions": (
            section.save_predictions is True,
            "predictions stay at the sites",
        ),
        f"evaluate.keep = {section.keep!r}": (
            section.keep != "last",
            "sites keep the models of their last round",
        ),
    }


def _check_privacy(recipe: Recipe) -> None:
    privacy = recipe.privacy
    if privacy.unit == "none":
        return
    if privacy.noise != "system":
        raise RecipeError(
            f"privacy.noise = {privacy.noise!r}: in a federation whoever knows the seed could "
            "subtract the noise: use 'system'"
        )
    if recipe.clients.max_rows is None:
        raise RecipeError(
            "privacy needs clients.max_rows in a federation: the largest number of rows of a site, "
            "which the noise depends on, and which is public"
        )
