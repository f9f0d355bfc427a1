"""A site's model after a run, as a folder that other commands read without the server.

The folder is the run directory of a simulation with this site as its only client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from fedgist.core.tree import Tree, named
from fedgist.data.normalization import stated_moments
from fedgist.engines.plans.plan import Plan
from fedgist.federation.agreement.server_setup import PRIVATE
from fedgist.federation.site.file import SiteFile
from fedgist.federation.site.setup import SitePart, data_section
from fedgist.recipe.reading import Recipe
from fedgist.recipe.resolve import resolve
from fedgist.recipe.schema import ClientsSection, EvaluateSection, Partitioning
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files import checkpoint as checkpoints
from fedgist.runs.files.checkpoint import Checkpoint
from fedgist.runs.files.record import RECIPE, RECIPE_MARK
from fedgist.runs.last_download import save_downloads
from fedgist.runs.resuming import binding_of, of_world
from fedgist.runs.round import start_server
from fedgist.world.world import make_world


def write_site_model(
    folder: Path,
    part: SitePart,
    site: SiteFile,
    clients: Mapping[str, Tensor],
    finished: Mapping[str, tuple[int, Tree]],
) -> None:
    """Write the site's model into a folder, which is replaced.

    Parameters
    ----------
    clients
        The client's own arrays (1, ...) by name.
    finished
        The round and the last download of each of the site's architectures.
    """
    number = max(at for at, _ in finished.values())
    setup = resolve(_alone(part, site), part.side.setup.given)
    world = make_world(setup)
    side = world.server
    files.write(folder / RECIPE, side.recipe.to_toml() + RECIPE_MARK)
    save_downloads(folder, {name: down for name, (_, down) in finished.items()})
    binding = binding_of(side, of_world(world))
    state = Checkpoint(number, named(start_server(side)), dict(clients), binding=binding)
    checkpoints.save(folder, state)


def _alone(part: SitePart, site: SiteFile) -> Recipe:
    """Return the recipe of a simulation with this site as its only client.

    It normalizes as the run did, whatever rows are held out or held back here. A model that is
    exported may leave, so that no usual ranges are measured where some rows are not to be known.
    """
    text, client = part.side.setup.recipe, part.population.clients[0]
    with_main = part.side.method.trains_main
    tables = _own_models(text, client.architectures, site, with_main=with_main)
    clients = {"num_clients": 1, "init": text.clients.init, **tables}
    built = next(iter(tables.values()), part.side.task.architectures)
    data = data_section(part.side.setup.recipe, site)
    private = text.privacy.unit != "none"
    if (private or part.left_out) and data.ranges is None:
        data = data.model_copy(update={"ranges": {}})
    if private:
        data = data.model_copy(update={"unlisted": "drop"})
    if data.normalize == "client":
        mean, std = stated_moments(part.data, part.population.train[0])
        data = data.model_copy(update={"normalize": "pooled", "mean": mean, "std": std})
    return text.changed(
        {
            "data": data,
            "partition": Partitioning(name="iid"),
            "clients": ClientsSection.model_validate(clients),
            "model": None if tables else text.model,
            "privacy": text.privacy.model_copy(update={"min_replies": 1, "noise": "seed"}),
            "train.round_seconds": None,
            "evaluate": EvaluateSection(),
            "facts": None,
            "federation": None,
            "engine.plans": dict.fromkeys(built, Plan(1, stack=False)),
        }
    )


def _own_models(
    text: Recipe, architectures: Sequence[str], site: SiteFile, *, with_main: bool
) -> dict[str, dict[str, dict[str, object]]]:
    """Return the tables of the site's models, under the names that they had in the run.

    ``with_main`` says that the method also trains a model of the first table.
    """
    section = site.model
    if architectures == (PRIVATE,) and section is not None and text.facts is not None:
        width = text.facts.feature_width
        stated = {**section.model_dump(exclude={"name"}), **section.options, "project": width}
        kept = {key: value for key, value in stated.items() if value is not None}
        return {"architectures": {PRIVATE: {"model": section.name, **kept, "share": 1.0}}}
    if text.clients.pools:
        # the site's own pool comes first; a method may need the others to exist
        pools = {architectures[0]: {}, **text.clients.pools} | text.clients.pools
        return {"pools": {n: _table(n, table) | {"clients": [0]} for n, table in pools.items()}}
    if text.clients.architectures:
        main = next(iter(text.clients.architectures)) if with_main else architectures[0]
        tables = {
            name: _table(name, own) | {"share": float(name in architectures)}
            for name, own in text.clients.architectures.items()
            if name in {*architectures, main}
        }
        return {"architectures": tables}
    return {}


def _table(name: str, own: object) -> dict[str, object]:
    """Return a model's table without its clients; ``own`` may be the share of a model's name."""
    stated = own if isinstance(own, Mapping) else {}
    kept = {k: v for k, v in stated.items() if k not in {"share", "per_round", "clients"}}
    return {"model": name, **kept}
