"""A site's release policy: which runs it takes part in, and which replies may leave it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fedgist.errors import MessageError, SiteError, listed, shown
from fedgist.federation.agreement.recipe_check import as_federated, check_setup
from fedgist.federation.site import audit_log
from fedgist.federation.site.file import FILES, LEAST_ROWS_TELL, SiteFile
from fedgist.federation.site.ledger import BudgetError, Ledger, Limits, Spent
from fedgist.federation.site.limits import check_lists
from fedgist.methods import METHODS, base_name
from fedgist.models import PREFIX
from fedgist.recipe.reading import Recipe, flat, models_named, own_places, read
from fedgist.recipe.resolve import Setup
from fedgist.runs.files.digests import of_text
from fedgist.wire.envelope import Header
from fedgist.world.privacy_budget import PrivacyBudget

#: Sections in which a site and an approved recipe may differ: how the work is done, and where.
WORK = ("engine", "federation", "paper", "tune")


def check_names(recipe: Recipe, site: SiteFile) -> None:
    """Raise SiteError if a recipe names a method, code, files or sizes that are not allowed.

    This comes before anything that the recipe names is imported or read.
    """
    check_lists(recipe)
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
    if encoders := [name for name in models_named(recipe) if name.startswith(PREFIX)]:
        cure = f": state its digest, and name the site's own in [model] of {file}"
        raise _names_a_file(f"model.name = {shown(encoders[0])}", cure)
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
    approved = read(site.file.parent / site.policy.recipe)
    ours, theirs = (_settings(as_federated(each)) for each in (approved, recipe))
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
    settings["federation.sums"] = "plain" if recipe.federation is None else recipe.federation.sums
    return settings


def digest_of_settings(recipe: Recipe) -> str:
    """Return the digest of the settings that define a run: a site binds the run's state to it.

    Without privacy a run may go on with more rounds. Under privacy that is a new run, because the
    budget was divided among the rounds.
    """
    settings = _settings(as_federated(recipe))
    if recipe.privacy.unit == "none":
        del settings["train.num_rounds"]
    return of_text(json.dumps(settings, sort_keys=True))


def check_run(setup: Setup, site: SiteFile) -> None:
    """Raise SiteError if the site's policy does not allow a run."""
    recipe = setup.recipe
    check_setup(setup)
    policy, rounds, privacy = site.policy, recipe.train.num_rounds, recipe.privacy
    if policy.most_rounds is not None and rounds > policy.most_rounds:
        raise SiteError(
            f"{site.file}: policy.most_rounds = {policy.most_rounds}; the run has {rounds} rounds",
            "policy",
            "most_rounds",
        )
    if policy.sums == "secure" and setup.federation.sums != "secure":
        raise SiteError(
            f"{site.file}: policy.sums = 'secure'; the recipe has federation.sums = "
            f"{setup.federation.sums!r}, by which the server sees this site's messages",
            "policy",
            "sums",
        )
    if privacy.unit == "record" and policy.least_rows > 1:
        raise SiteError(f"{site.file}: {LEAST_ROWS_TELL}", "policy", "least_rows")
    if policy.epsilon is not None:
        _check_budget(recipe, site)
    if privacy.unit != "none":
        _check_declared(recipe, site)


def _check_budget(recipe: Recipe, site: SiteFile) -> None:
    """Raise SiteError if a run does not fit the site's privacy budget, whatever is spent of it."""
    policy, privacy = site.policy, recipe.privacy
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
    if privacy.delta is not None and privacy.delta > policy.delta:
        raise SiteError(
            f"{site.file}: policy.delta = {policy.delta:g}; the run has privacy.delta = "
            f"{privacy.delta:g}",
            "policy",
            "delta",
        )


def _check_declared(recipe: Recipe, site: SiteFile) -> None:
    """Raise SiteError if a private run states other facts than the site's owner declares.

    The rows are not asked: whether a plan is refused would tell what they hold.
    """
    declared, stated = declared_rows(site), recipe.clients.max_rows
    if declared is None:
        raise SiteError(
            f"{site.file}: policy.max_rows is missing: a private run needs the largest number of "
            "rows that these data may have",
            "policy",
            "max_rows",
        )
    if stated is None or stated < declared:
        raise SiteError(
            f"{site.file}: policy.max_rows = {declared}; the recipe states clients.max_rows = "
            f"{stated}, which is less",
            "policy",
            "max_rows",
        )
    columns = {} if recipe.facts is None else recipe.facts.columns
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in columns.items()}
    pairs = {"classes": list(recipe.data.classes), "columns": plain}
    for key, value in pairs.items():
        own = site.table.data.options.get(key, value)
        if own != value:
            text = f"{site.file}: data.{key} = {shown(own)}; the recipe states {shown(value)}"
            raise SiteError(text, "policy", key)


def declared_rows(site: SiteFile) -> int | None:
    """Return the number of rows that the site's data may have, as its owner declares it."""
    policy = site.policy
    if policy.max_rows is not None or policy.recipe is None:
        return policy.max_rows
    return read(site.file.parent / policy.recipe).clients.max_rows


@dataclass(frozen=True)
class ReleasePolicy:
    """The decision on each release in one run, with the charge to the site's ledger.

    ``data`` and ``digest`` are the name and the digest of the site's rows, and ``recipe`` is the
    digest of the run's settings. ``budget`` is the run's privacy budget as the site itself works it
    out; None without privacy. Rounds up to ``lost`` were charged by a state that is lost: what they
    released is not known, so they release nothing more.
    """

    site: SiteFile
    run: str
    recipe: str
    data: str
    digest: str
    budget: PrivacyBudget | None
    lost: int = -1

    def before_work(self, request: Header, count: int) -> None:
        """Refuse work that was done as often as the policy allows."""
        most = self.site.policy.most_requests
        if count > most:
            raise MessageError(
                f"round {request.round}: a {request.purpose} was asked for {most} times, which is "
                "this site's policy.most_requests",
                "policy",
                "most_requests",
            )

    def before_training(self, request: Header) -> None:
        """Charge the ledger for a round, or refuse it. Without a limit, it is charged as well."""
        if self.budget is None:
            return
        policy, folder = self.site.policy, self.site.state_folder
        if request.round <= self.lost:
            raise MessageError(
                f"round {request.round} was charged before this site lost its state: its release "
                "may have been made",
                "state",
            )
        spent = Spent(
            epsilon=self.budget.epsilon(request.round),
            delta=self.budget.delta,
            round=request.round,
            recipe=self.recipe,
        )
        limits = None if policy.epsilon is None else Limits(policy.epsilon, policy.delta)
        try:
            Ledger(folder).charge(self.data, self.digest, self.run, spent, limits)
        except BudgetError as error:
            audit_log.write(folder, f"run {self.run}: {error.detail}")
            raise

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
    if policy.epsilon is not None:
        words += [f"epsilon {policy.epsilon:g} and delta {policy.delta:g} over all runs"]
    words += [f"replies of at most {policy.largest_upload} bytes"] if policy.largest_upload else []
    if policy.least_rows > 1:
        words += [f"classes with fewer than {policy.least_rows} training rows are not used"]
    never = policy.never_released
    words += [f"never used: rows of {listed(never)}"] if never else []
    words += [f"facts before training: {listed(policy.facts)}"] if policy.facts else []
    words += ["losses and scores leave" if policy.shares_scores else "losses and scores stay here"]
    return words
