"""A site's release policy: which runs it takes part in, and which replies may leave it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedgist.engines.envelope import Header
from fedgist.errors import MessageError, SiteError, listed, shown
from fedgist.federation.recipe_check import as_federated, check_setup
from fedgist.federation.site_file import FILES, SiteFile
from fedgist.federation.site_ledger import Ledger, Spent
from fedgist.methods import METHODS, base_name
from fedgist.recipe.reading import Recipe, flat, own_places, read
from fedgist.recipe.resolve import Setup
from fedgist.world.privacy_budget import PrivacyBudget

#: Sections in which a site and an approved recipe may differ: how the work is done, and where.
WORK = ("engine", "federation", "paper", "tune")


def check_names(recipe: Recipe, site: SiteFile) -> None:
    """Raise SiteError if a recipe names a method, code or files that the site does not allow.

    This comes before anything that the recipe names is imported or read.
    """
    policy, file = site.policy, site.file
    allowed = policy.methods or tuple(METHODS)
    method = base_name(recipe.method.name)
    if method not in allowed and recipe.method.name not in allowed and method not in policy.code:
        text = f"{file}: policy.methods accepts {listed(allowed)}, not {shown(method)}"
        raise SiteError(text, "policy", "methods")
    if strange := [place for place in own_places(recipe) if place not in policy.code]:
        text = (
            f"the recipe names code of its own, {shown(strange[0])}, which policy.code in {file} "
        )
        raise SiteError(f"{text}does not list", "policy", "code")
    clients = recipe.clients
    tables = [*clients.architectures.values(), *clients.pools.values()]
    weights = any(isinstance(table, dict) and table.get("weights") for table in tables)
    if weights or (recipe.model is not None and recipe.model.weights is not None):
        raise _names_a_file("model.weights")
    if clients.graph.path is not None:
        raise _names_a_file("clients.graph.path")
    stated = {} if recipe.data.public is None else recipe.data.public.options
    if files := [key for key in FILES if key in stated and key not in site.table.public]:
        cure = f": name the site's own copy in [public] of {file}"
        raise _names_a_file(f"data.public.{files[0]}", cure)


def _names_a_file(key: str, cure: str = "") -> SiteError:
    text = f"{key} names a file, which a server may not do at a site{cure}"
    return SiteError(text, "plan", key)


def check_approved(recipe: Recipe, site: SiteFile) -> None:
    """Raise SiteError, with both values, if a recipe differs from the one that was approved."""
    if site.policy.recipe is None:
        return
    approved = as_federated(read(site.file.parent / site.policy.recipe))
    ours, theirs = (_settings(each) for each in (approved, recipe))
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            raise SiteError(
                f"the server's recipe has {key} = {shown(theirs.get(key))}, and the approved "
                f"{site.policy.recipe} has {shown(ours.get(key))}",
                "policy",
                "recipe",
            )


def _settings(recipe: Recipe) -> dict[str, object]:
    """Return the settings that must be the same: all but how the work is done, and where."""
    table = recipe.model_dump(mode="json", exclude=set(WORK))
    settings = flat(table)
    settings.pop("clients.num_clients", None)  # the server counts its sites
    return settings


def check_run(setup: Setup, site: SiteFile) -> None:
    """Raise SiteError if the site's policy does not allow a run."""
    check_setup(setup)
    policy, rounds, privacy = site.policy, setup.train.num_rounds, setup.privacy
    if policy.most_rounds is not None and rounds > policy.most_rounds:
        raise SiteError(
            f"{site.file}: policy.most_rounds = {policy.most_rounds}; the run has {rounds} rounds",
            "policy",
            "most_rounds",
        )
    if policy.epsilon is None:
        return
    budget = f"{site.file}: policy.epsilon = {policy.epsilon:g}"
    if privacy.unit == "none":
        raise SiteError(
            f"{budget}, and the run has no differential privacy (privacy.unit)", "policy", "epsilon"
        )
    if privacy.where == "central" and not policy.trust_server:
        raise SiteError(
            f"{budget}, and the server would add the noise (privacy.where = 'central'): "
            "policy.trust_server = true accepts that",
            "policy",
            "trust_server",
        )


@dataclass(frozen=True)
class ReleasePolicy:
    """The decision on each release in one run, with the charge to the site's ledger.

    ``data`` and ``digest`` are the name and the digest of the site's rows. ``budget`` is the run's
    privacy budget as the site itself works it out; None without privacy. Rounds up to ``lost`` were
    charged by a state that is lost: what they released is not known, so they release nothing more.
    """

    site: SiteFile
    run: str
    data: str
    digest: str
    budget: PrivacyBudget | None
    lost: int = -1

    def before_training(self, request: Header) -> None:
        """Charge the ledger for a round, or refuse it. Without a limit, it is charged as well."""
        if self.budget is None:
            return
        stated = self.site.policy.epsilon
        limit = math.inf if stated is None else stated
        if request.round <= self.lost:
            raise MessageError(
                f"round {request.round} was charged before this site lost its state: its release "
                "may have been made",
                "state",
            )
        epsilon = self.budget.epsilon(request.round)
        spent = Spent(epsilon=epsilon, delta=self.budget.delta, round=request.round)
        Ledger(self.site.state_folder).charge(self.data, self.digest, self.run, spent, limit)

    def before_sending(self, request: Header, reply: bytes) -> None:
        """Refuse a reply that is larger than the policy allows."""
        most = self.site.policy.largest_upload
        if most is not None and len(reply) > most:
            raise MessageError(
                f"the reply of round {request.round} has {len(reply)} bytes; this site sends at "
                f"most {most}",
                "policy",
                "largest_upload",
            )


def described(site: SiteFile) -> list[str]:
    """Return the policy in words."""
    policy = site.policy
    methods = listed(policy.methods) if policy.methods else "every method of fedgist"
    words = [f"methods: {methods}"]
    words += [f"code of others: {listed(policy.code)}"] if policy.code else []
    words += [f"at most {policy.most_rounds} rounds"] if policy.most_rounds else []
    words += [f"epsilon in all: {policy.epsilon:g}"] if policy.epsilon is not None else []
    words += [f"replies of at most {policy.largest_upload} bytes"] if policy.largest_upload else []
    if policy.least_rows > 1:
        words += [f"classes with fewer than {policy.least_rows} training rows are not used"]
    never = policy.never_released
    words += [f"never used: rows of {listed(never)}"] if never else []
    words += ["losses and scores leave" if policy.shares_scores else "losses and scores stay here"]
    return words
