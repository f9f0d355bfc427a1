"""A run by files: what server and sites derive from a recipe alone, without a word between them."""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core import random
from fedgist.core.method import Context, Order
from fedgist.engines.message_form import asks_clients
from fedgist.errors import RecipeError
from fedgist.federation.agreement.recipe_check import as_federated
from fedgist.federation.keys.certificates import fingerprint
from fedgist.federation.keys.kits import Kit
from fedgist.federation.network.invitation import digest_of_recipe
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe
from fedgist.recipe.resolve import Setup, resolve
from fedgist.runs.files.digests import of_text
from fedgist.world.server_context import ServerContext


@dataclass(frozen=True)
class FilePlan:
    """A run by files: its resolved recipe, the recipe's digest, and the name of the run."""

    setup: Setup
    digest: str
    run: str


def file_plan(recipe: Recipe, kit: Kit) -> FilePlan:
    """Return the run of a recipe in a kit's federation: always the same one.

    Raises
    ------
    RecipeError
        If noise would come from the server, which sees the files before it adds any.
    """
    setup = resolve(as_federated(recipe), Overrides())
    privacy = setup.recipe.privacy
    if privacy.unit != "none" and privacy.where == "central":
        raise RecipeError(
            "privacy.where = 'central' adds noise to a total that all sites send together; a file "
            "is seen by itself: use 'local'"
        )
    if setup.federation.sums == "secure":
        raise RecipeError(
            "federation.sums = 'secure' needs several answers of each site, and a file is one, "
            "which the server sees by itself"
        )
    digest = digest_of_recipe(setup.recipe)
    return FilePlan(setup, digest, of_text(f"{fingerprint(kit.root)} {digest}")[:16])


def only_exchange(side: ServerContext) -> Context:
    """Return the round and stage of the only exchange of a run.

    Raises
    ------
    RecipeError
        If there are none, or several.
    """
    method, task, found = side.method, side.task, list[Context]()
    key = random.key(side.setup.recipe.seed).to(side.setup.device)
    for number in range(task.training.num_rounds + 1):
        for stage in method.stages(Context(key, task, number, "")):
            ctx = Context(key, task, number, stage)
            found += [ctx] if _asks(side, ctx) else []
        if len(found) > 1:
            break
    if len(found) != 1:
        count = "several exchanges" if found else "no exchange"
        raise RecipeError(
            f"method {side.setup.recipe.method.name} has {count} in {task.training.num_rounds} "
            "rounds, and files are sent once: use train.num_rounds = 1 and a method with one, such "
            "as 'analytic', or 'fedlog' over frozen bodies"
        )
    return found[0]


def _asks(side: ServerContext, ctx: Context) -> bool:
    (name, *others) = side.clients[0].architectures
    if others:
        raise RecipeError("files are for sites with one architecture each")
    return asks_clients(side.method, ctx, Order(0, name))
