"""Resolve a recipe once: its method and models become objects; its sections are kept.

The result is a :class:`Setup`. All parts of a run are built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedgist.core.method import Method
from fedgist.core.objectives.own_metric import OwnMetric, own_metric
from fedgist.core.objectives.own_objective import TaskLoss, metrics_of
from fedgist.core.objectives.target import Target
from fedgist.engines.device_choice import usable_device
from fedgist.engines.plans.plan import Plan
from fedgist.errors import InputError, RecipeError
from fedgist.models import PREFIX, architecture_of
from fedgist.recipe.federation_section import FederationSection
from fedgist.recipe.method_loading import build_method
from fedgist.recipe.model_factories import (
    ModelTable,
    PoolTable,
    architecture_tables,
    pool_tables,
    whole_model,
)
from fedgist.recipe.objective_loading import labels_read, own_objective
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.own_code import load_own, modules_from
from fedgist.recipe.reading import models_named
from fedgist.recipe.schema import (
    ModelSection,
    Recipe,
)

METRICS = "objective.metrics"


@dataclass(frozen=True, eq=False)
class Setup:
    """A recipe, and what it names as objects: its method, its models, its metrics.

    Whoever needs a setting reads it from ``recipe``. ``models`` holds the models of ``[model]`` or
    ``clients.architectures`` by architecture name. It is empty if the user passed modules in
    Python, or if the recipe has ``pools``. ``num_clients`` is None if the data determine it.
    ``own_objective`` is a user's own objective, or None.
    """

    recipe: Recipe = field(repr=False)
    method: Method
    metrics: tuple[str | OwnMetric, ...]
    own_objective: TaskLoss | None
    models: Mapping[str, ModelTable]
    pools: Mapping[str, PoolTable]
    device: str
    num_clients: int | None
    given: Overrides = field(repr=False)

    @property
    def federation(self) -> FederationSection:
        """How many sites a round of a real federation needs, and how long the server waits."""
        return self.recipe.federation or FederationSection()

    @property
    def private_width(self) -> int | None:
        """The feature width of the private models of a federation's sites, if they have any."""
        return None if self.recipe.facts is None else self.recipe.facts.feature_width

    @property
    def labels(self) -> Target:
        """The form of the labels that the objective reads."""
        return labels_read(self.recipe.objective, self.own_objective)

    def recorded(
        self, num_clients: int, plans: Mapping[str, Plan], server_threads: int, shards: int
    ) -> Recipe:
        """Return the recipe as a run records it, with the values chosen for the run."""
        return self.recipe.changed(
            {
                "clients.num_clients": num_clients,
                "engine.device": self.device,
                "engine.plans": dict(plans),
                "engine.server_threads": server_threads,
                "engine.shards": shards,
            }
        )


def resolve(recipe: Recipe, given: Overrides | None = None) -> Setup:
    """Resolve a recipe and a user's objects. Only this function makes the parts of a run.

    Raises
    ------
    RecipeError
        If the method, a model or the device cannot be used: one line that names the key, the value
        and the choices.
    """
    given = given or Overrides()
    _check_encoders(recipe)
    try:
        with modules_from(recipe.engine.code_folder):
            method = given.method or build_method(recipe.method.name, recipe.method.options)
            own, metrics = _objective(recipe, given)
            models, pools = _models(recipe, given)
    except InputError as error:
        raise RecipeError(f"{recipe.file}: {error}" if recipe.file else str(error)) from error
    return Setup(
        recipe=recipe,
        method=method,
        metrics=metrics,
        own_objective=own,
        models=models,
        pools=pools,
        device=usable_device(recipe.engine.device),
        num_clients=_num_clients(recipe, given),
        given=given,
    )


def _objective(
    recipe: Recipe, given: Overrides
) -> tuple[TaskLoss | None, tuple[str | OwnMetric, ...]]:
    """Return a user's own objective or None, and the metrics.

    They are the names of those of fedgist, and a user's own as objects.
    """
    own = own_objective(recipe.objective, given.objective)
    if own is not None:
        return own, metrics_of(own)
    return None, tuple(
        given.metrics.get(name) or (own_metric(load_own(METRICS, name)) if ":" in name else name)
        for name in recipe.objective.metrics
    )


def _models(
    recipe: Recipe, given: Overrides
) -> tuple[Mapping[str, ModelTable], Mapping[str, PoolTable]]:
    """Return the models by architecture, and by pool. At most one of the mappings has entries."""
    clients = recipe.clients
    if clients.pools:
        if given.groups is not None:
            raise RecipeError(
                "clients.pools name the clients' models; they cannot be given as objects as well"
            )
        return {}, pool_tables(clients.pools)
    if given.groups is not None:
        return {}, {}
    if clients.architectures:
        return architecture_tables(clients.architectures), {}
    section = recipe.model or ModelSection()
    return {architecture_of(section.name): whole_model(section)}, {}


def _check_encoders(recipe: Recipe) -> None:
    """Raise RecipeError if images would be normalized twice."""
    encoders = [name for name in models_named(recipe) if name.startswith(PREFIX)]
    images = recipe.data.words is None  # words are not normalized
    if encoders and images and recipe.data.normalize != "none":
        raise RecipeError(
            f"data.normalize = {recipe.data.normalize!r}: model {encoders[0]} has its own "
            "normalization: use 'none'"
        )


def _num_clients(recipe: Recipe, given: Overrides) -> int | None:
    if given.clients is not None:
        return len(given.clients)
    stated = "num_clients" in recipe.clients.model_fields_set
    determined = (
        recipe.partition.name == "natural" or recipe.facts is not None
    )  # by the data or sites
    return None if determined and not stated else recipe.clients.num_clients
