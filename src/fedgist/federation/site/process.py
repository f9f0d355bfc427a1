"""The work of ``fedgist site``: take part in a run, check everything beforehand, open a budget."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import tomli_w

from fedgist.data.dataset import Dataset
from fedgist.engines.process_control import as_workers_do
from fedgist.errors import KitError, OwnerError
from fedgist.federation.agreement.recipe_check import as_federated
from fedgist.federation.keys.certificates import expiry_note
from fedgist.federation.keys.kits import Kit, read_kit
from fedgist.federation.network.grpc_site import Connection
from fedgist.federation.site import audit_log
from fedgist.federation.site.agent import GROUPS, SiteAgent, digest_of
from fedgist.federation.site.file import SiteFile
from fedgist.federation.site.ledger import Ledger
from fedgist.federation.site.policy import (
    check_approved,
    check_names,
    check_run,
    declared_rows,
    described,
)
from fedgist.federation.site.setup import (
    data_section,
    plain_data,
    setup_at_site,
    site_part,
    sites_named,
    try_training,
    would_leave,
)
from fedgist.federation.site.store import locked
from fedgist.federation.site.total_keys import forget_group
from fedgist.models import PREFIX
from fedgist.models.encoders import encoder_digest, encoder_width
from fedgist.recipe.reading import Recipe, read
from fedgist.world.data import read_data
from fedgist.world.declared import as_section
from fedgist.world.privacy_budget import large_delta

TRIED = "one step of training was done"
TRIED_UNTRAINED = "a message was made, and nothing is trained"
LOG = logging.getLogger(__name__)


def take_part(kit: Kit, site: SiteFile, say: Callable[[str], None]) -> None:
    """Take part in a federation until the run has ended.

    Raises
    ------
    FederationError
        If the server refuses this site.
    InputError
        If the site's data, model or policy do not fit the server's recipe.
    """
    before = ""

    def tell(text: str) -> None:
        nonlocal before
        LOG.info("%s", text)
        if text != before:  # the same problem again and again is shown once
            say(text)
        before = text

    if (note := expiry_note(kit.certificate)) is not None:
        tell(note)
    agent = SiteAgent(site, tell, kit)
    agent.hold()
    check_rows_of_owner(site)
    tell(f"connecting to {kit.address} as {kit.name}")
    with contextlib.closing(agent):
        end = Connection(kit, agent).run()
    tell(f"{end}; the audit log is {site.state_folder / audit_log.AUDIT}")


def check_rows_of_owner(site: SiteFile) -> None:
    """Read a private site's rows before any server hears of it.

    Raises
    ------
    InputError
        If the rows cannot be read, or are more than their owner declares.
    """
    if site.policy.epsilon is None:
        return
    count, most = _rows_in_all(site), declared_rows(site)
    if most is not None and count > most:
        raise OwnerError(
            f"{site.file}: policy.max_rows = {most}, and the data have {count} rows: state a "
            "number that they never exceed"
        )


def _rows_in_all(site: SiteFile) -> int:
    """Return the number of rows, test rows included, as the approved recipe reads them if any."""
    if site.policy.recipe is None:
        data = plain_data(site)
    else:
        setup = setup_at_site(read(site.file.parent / site.policy.recipe), site)
        section, code = data_section(setup.recipe, site), setup.recipe.engine.code_folder
        data = read_data(
            section, setup.recipe.seed, root=site.data_root, target=setup.labels, code=code
        )
    return len(data.y) + len(data.y_test)


def open_new_budget(site: SiteFile) -> list[str]:
    """Open a new privacy budget for the site's data; return what was done in words."""
    data = plain_data(site)
    name, digest = site.table.name, digest_of(data)
    with locked(site.state_folder):
        before = Ledger(site.state_folder).begin_anew(name, digest)
        forget_group(site.state_folder / GROUPS, name)
    spent = "nothing was spent" if before is None else f"epsilon {before.epsilon:g} was spent"
    text = f"the budget of {name!r} begins anew for {data.name}; {spent} of the one before"
    audit_log.write(site.state_folder, f"new data: {text}")
    return [text]


def check_site(site: SiteFile, kit: Path, recipe: Path | None) -> list[str]:
    """Check a site without a network; return what was seen, and what would leave, in words.

    Raises
    ------
    InputError
        At the first problem: one line that names it and the remedy.
    """
    sentences = [_about_kit(kit), *_about_encoder(site)]
    check_rows_of_owner(site)
    if recipe is None:
        data = plain_data(site)
        sentences += _about_delta(site, data, "policy.delta", site.policy.delta)
        facts = tomli_w.dumps({"facts": as_section(data.facts)})
        classes = tomli_w.dumps({"data": {"classes": list(data.names)}})
        return [
            *sentences,
            _about_data(data, f"{len(data.y)} training"),
            *(f"policy: {text}" for text in described(site)),
            "the form of these data, for the federation's recipe:",
            *f"{classes}\n{facts}".splitlines(),
            "not checked: the model and what would leave, which need --recipe RECIPE",
        ]
    return [*sentences, *_tried(site, read(recipe), kit.name)]


def _about_encoder(site: SiteFile) -> list[str]:
    """Return the digest of a site's encoder, for the recipe, if its model is one."""
    if site.model is None or not site.model.name.startswith(PREFIX):
        return []
    name = site.model.name.removeprefix(PREFIX)
    facts = f"encoder = {encoder_digest(name)!r}, feature_width = {encoder_width(name)}"
    return [f"encoder: in [facts], {facts}; and data.normalize = 'none'"]


def _about_kit(folder: Path) -> str:
    try:
        kit = read_kit(folder)
    except KitError as error:
        return f"kit: not ready ({error})"
    return f"kit: {kit.name} of {kit.federation}, which dials {kit.address}"


def _tried(site: SiteFile, recipe: Recipe, name: str) -> list[str]:
    """Return what a site would do in a run of a recipe, after one step of training."""
    check_names(recipe, site)
    check_approved(recipe, site)
    names = sites_named(recipe, name)
    part = site_part(as_federated(recipe), names, names.index(name), site, secret=0)
    check_run(part.side.setup, site)
    with as_workers_do():
        trains = try_training(part)
    data, counts = part.data, [f"{len(part.population.train.rows)} training"]
    if part.side.setup.recipe.data.validation:
        counts.append(f"{len(part.population.validation.rows)} validation")
    models = ", ".join(part.population.clients[0].architectures)
    models = models if site.model is None else f"{site.model.name}, which stays here"
    delta = part.side.setup.recipe.privacy.delta
    return [
        *_about_delta(site, data, "policy.delta", site.policy.delta),
        *([] if delta is None else _about_delta(site, data, "privacy.delta", delta)),
        _about_data(data, ", ".join(counts)),
        *part.left_out,
        f"model: {models}; {TRIED if trains else TRIED_UNTRAINED}",
        *(f"policy: {text}" for text in described(site)),
        *part.side.notes,
        *would_leave(part),
    ]


def _about_delta(site: SiteFile, data: Dataset, key: str, delta: float) -> list[str]:
    """Return a sentence for the owner, whose rows the server must not be able to count."""
    count = len(data.y)
    if (site.policy.epsilon is None and key == "policy.delta") or delta * count <= 1:
        return []
    return [large_delta(key, delta, count, "the number of training rows")]


def _about_data(data: Dataset, counts: str) -> str:
    rows = f"{counts} and {len(data.y_test)} test rows"
    return f"data: {data.name}, {rows}; {data.facts.summary}"
