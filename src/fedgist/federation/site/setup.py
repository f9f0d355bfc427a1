"""A site's part of a run, made of the server's recipe and the site's own rows and model.

What matters for privacy is worked out here again, and nothing is taken on the server's word: the
noise, the number of releases, and the rows that may be used at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgist.core import random
from fedgist.core.message import Form, payload_bytes
from fedgist.core.method import Context, Order, Task
from fedgist.core.nets.net import Architecture
from fedgist.core.tree import Tree
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.examples import examples
from fedgist.data.normalization import own_moments
from fedgist.data.partition import hold_out
from fedgist.data.sources.loading import load_data
from fedgist.engines.client_host import ClientHost
from fedgist.engines.client_requests import SentCohort
from fedgist.engines.message_form import asks_clients, upload_form
from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import HostSettings, OwnSettings, Population
from fedgist.errors import OwnerError, SiteError, first_line
from fedgist.federation.agreement.server_setup import PRIVATE, message_forms, server_context
from fedgist.federation.site.file import SiteFile
from fedgist.federation.site.limits import check_size, check_steps
from fedgist.models import PREFIX
from fedgist.models.encoders import encoder_digest
from fedgist.recipe.data_loading import data_source
from fedgist.recipe.data_section import Data
from fedgist.recipe.federation_section import FederationSection
from fedgist.recipe.model_factories import whole_model
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.own_code import modules_from
from fedgist.recipe.reading import Recipe
from fedgist.recipe.resolve import Setup, resolve
from fedgist.recipe.schema import EngineSection
from fedgist.recipe.section_options import check_public, with_checked_options
from fedgist.wire.loopback_engine import task_of_site
from fedgist.world.client_settings import settings_in
from fedgist.world.data import read_data, validation_draw, with_fates
from fedgist.world.declared import check_facts, declared_facts
from fedgist.world.model_sizes import Sizes
from fedgist.world.models import architectures_of, groups_of_recipe
from fedgist.world.objective_choice import LEAST_ROWS, least_rows
from fedgist.world.privacy_budget import check_rows
from fedgist.world.server_context import ServerContext
from fedgist.world.server_parts import Models, host_settings

TABLE = "table"  # the data source whose columns the recipe declares


@dataclass(frozen=True, eq=False)
class SitePart:
    """A site's part of a run: its task, its rows as a population of one client, and its settings.

    ``side`` is the server's context as this site reads the recipe. ``left_out`` are sentences about
    rows that the site's policy does not allow to be used.
    """

    side: ServerContext
    task: Task
    population: Population
    settings: HostSettings
    data: Dataset
    left_out: tuple[str, ...] = ()


def site_part(
    recipe: Recipe,
    names: Sequence[str],
    number: int,
    site: SiteFile,
    secret: int,
    say: Callable[[str], None] = lambda _: None,
) -> SitePart:
    """Return the part of site ``number`` in a server's recipe.

    ``names`` are the names of all sites. ``secret`` seeds the start of a private model, and draws
    among rows under privacy of records. ``say`` is called with notes on long calculations.

    Raises
    ------
    InputError
        If the site's data or model do not fit the recipe, with both values.
    """
    setup = setup_at_site(recipe, site)
    check_size(setup, site, names)
    side = server_context(setup, names, say)
    with rows_stay_home(private=setup.recipe.privacy.unit != "none"):
        data, left_out = _rows(setup, site, secret, say)
        population = _population(setup, side, data, number, secret)
        check_rows(setup.recipe.privacy, data, population.train, population.validation)
    private = setup.recipe.privacy.unit != "none"
    most = setup.recipe.clients.max_rows if private else len(population.train[0])
    settings = _hosting(setup, side, names, number, site)
    check_steps(side, number, most or 0, site, settings.work(number))
    client = side.clients[number]
    task = task_of_site(_with_private_model(setup, side.task, site, secret), client.architectures)
    part = SitePart(side, task, population, settings, data, left_out)
    _check_uploads(part, site)
    return part


def _hosting(
    setup: Setup, side: ServerContext, names: Sequence[str], number: int, site: SiteFile
) -> HostSettings:
    """Return the settings of the site's host: the recipe's, and what the site's file says."""
    settings, table = host_settings(setup, side.task, names), site.table.settings
    shares = settings.share_measurements and site.policy.shares_scores
    settings = replace(settings, share_measurements=shares)
    if not table:
        return settings
    source, privacy = f"{site.file}: settings", side.task.privacy
    own = settings_in(table, number, side.method, side.task, source)
    stated = settings.own.get(number, OwnSettings())
    if own.work is not None and privacy is not None and privacy.steps is not None:
        raise SiteError(
            f"{source}.train: private steps are charged before the run, as the recipe counts them: "
            "leave it out"
        )
    both = OwnSettings(own.method or stated.method, own.work or stated.work)
    return replace(settings, own={number: both})


@contextlib.contextmanager
def rows_stay_home(*, private: bool) -> Iterator[None]:
    """Inside this context, under privacy, an error is the owner's: what it tells, rows decided."""
    try:
        yield
    except Exception as error:
        if not private:
            raise
        raise OwnerError(first_line(error)) from error


def _rows(
    setup: Setup, site: SiteFile, secret: int, say: Callable[[str], None]
) -> tuple[Dataset, tuple[str, ...]]:
    """Return the rows that the policy allows, and sentences about the others."""
    recipe = setup.recipe
    private = recipe.privacy.unit != "none"
    data = read_data(
        data_section(recipe, site),
        recipe.seed,
        root=site.data_root,
        target=setup.labels,
        code=recipe.engine.code_folder,
        secret=secret if recipe.privacy.unit == "record" else None,
        unlisted="none" if private else "refuse",
        private=recipe.privacy.unit != "none",
    )
    for note in (*data.how_read, *data.notes):
        say(note)
    data, left_out = allowed_rows(data, site)
    check_facts(declared_facts(setup), data)
    return data, left_out


def try_training(part: SitePart) -> bool:
    """Answer with one batch and throw the answer away; return whether anything is trained.

    The first round is then not the first try.

    Raises
    ------
    SiteError
        If the model cannot be trained on this site's rows and device.
    """
    side, client = part.side, part.population.clients[0]
    size = max(LEAST_ROWS, part.side.setup.recipe.train.batch_size)
    few = replace(part.population, train=Rows.of([part.population.train[0][:size]]))
    plans = dict.fromkeys(part.task.architectures, Plan(1, stack=False))
    trains = False
    with rows_stay_home(private=side.setup.recipe.privacy.unit != "none"):
        try:
            host = ClientHost(side.method, part.task, few, part.settings, plans)
            for architecture in client.architectures:
                order = Order(client.id, architecture)
                for ctx, down in _downloads(part, host.key, order):
                    sent = SentCohort(ctx.round, ctx.stage, (client.id,), architecture, True, down)
                    host.train(sent)
                    trains |= bool(side.method.phases(ctx))
        except (ValueError, RuntimeError, TypeError) as error:
            raise SiteError(f"a training step on this site's rows failed: {error}") from error
    return trains


def _downloads(
    part: SitePart, key: Tensor, order: Order, *, all_stages: bool = False
) -> list[tuple[Context, Tree]]:
    """Return the download of a fresh server in the first stage with clients, or in all stages."""
    method, task = part.side.method, part.task
    server = method.init_server(Context(key, task, 0, "init"))
    downloads = []
    for number in (0, 1):
        for stage in method.stages(Context(key, task, number, "")):
            ctx = Context(key, task, number, stage)
            if asks_clients(method, ctx, order):
                downloads.append((ctx, method.download(server, order, ctx)))
    return downloads if all_stages else downloads[:1]


def allowed_rows(data: Dataset, site: SiteFile) -> tuple[Dataset, tuple[str, ...]]:
    """Return the data without rows of classes or labels that the site's policy holds back.

    These rows are used for nothing, so nothing about them can be in any message or score.
    """
    check_classes(data, site)
    if data.target not in {"class", "labels"}:
        return data, ()
    held_back, sentences = classes_held_back(data.names, _members(data, data.y).sum(0), site)
    kept, kept_test = (~(_members(data, y) & held_back).any(1) for y in (data.y, data.y_test))
    if bool(kept.all() and kept_test.all()):
        return data, ()
    if not bool(kept.any()):
        raise SiteError(f"{site.file}: policy leaves no training rows: {'; '.join(sentences)}")
    some = data.only(kept.nonzero().squeeze(1))
    some = replace(some, y_test=data.y_test[kept_test])
    return some.with_inputs(some.inputs, data.inputs_test[kept_test]), sentences


def classes_held_back(
    names: Sequence[str], counts: Tensor, site: SiteFile
) -> tuple[Tensor, tuple[str, ...]]:
    """Return which classes a site's policy holds back, Booleans (classes,), and sentences.

    ``counts`` (classes,) are the training rows of each class.
    """
    policy = site.policy
    never = torch.tensor([name in policy.never_released for name in names])
    few = (counts < policy.least_rows) & (counts > 0) & ~never
    reasons = (
        (never & (counts > 0), "because policy.never_released names it"),
        (few, f"because it has fewer than policy.least_rows = {policy.least_rows} rows"),
    )
    sentences = tuple(
        f"class {name}: its rows are not used, {reason}"
        for mask, reason in reasons
        for name, applies in zip(names, mask.tolist(), strict=True)
        if applies
    )
    return never | (counts < policy.least_rows), sentences


def _members(data: Dataset, y: Tensor) -> Tensor:
    """Return which rows have which class or label: Booleans (rows, classes)."""
    return one_hot(y, data.num_classes) > 0 if data.target == "class" else y > 0


def check_classes(data: Dataset, site: SiteFile) -> None:
    """Raise SiteError if a policy on classes does not fit the classes of the data, or their lack.

    Rows without classes are used whole or not at all.
    """
    policy = site.policy
    if data.target in {"class", "labels"}:
        if strange := [name for name in policy.never_released if name not in data.names]:
            raise SiteError(f"{site.file}: policy.never_released names no class: {strange[0]!r}")
        return
    if policy.never_released:
        raise SiteError(
            f"{site.file}: policy.never_released names classes, and rows of {data.name} have none"
        )
    if len(data.y) < policy.least_rows:
        raise SiteError(
            f"{site.file}: {data.name} has {len(data.y)} training rows, fewer than "
            f"policy.least_rows = {policy.least_rows}"
        )


def plain_data(site: SiteFile) -> Dataset:
    """Return the site's rows as their source reads them, without any recipe."""
    section = Data.model_validate({"name": site.table.data.name, **site.data_options})
    target, root = site.table.target, site.data_root
    with modules_from(site.code_folder):
        source = data_source(section.name)
    options, read = section.options, section.read
    return load_data(section.name, root=root, target=target, read=read, source=source, **options)


def sites_named(recipe: Recipe, name: str) -> tuple[str, ...]:
    """Return the names of sites in a recipe's tables, and this site's.

    Places stand for sites whose names are not known, as many as the recipe needs at least.
    """
    tables = [*recipe.clients.architectures.values(), *recipe.clients.pools.values()]
    listed = [table.get("clients", ()) for table in tables if isinstance(table, Mapping)]
    names = [each for some in listed if isinstance(some, list | tuple) for each in some]
    listed_names = list(dict.fromkeys([*(n for n in names if isinstance(n, str)), name]))
    section = recipe.federation or FederationSection()
    least = max(section.least_sites, recipe.privacy.min_replies)
    return (*listed_names, *(f"place {number}" for number in range(len(listed_names), least)))


def would_leave(part: SitePart) -> list[str]:
    """Return in words what would leave this site in each stage of a round."""
    sentences = []
    for ctx, form in _uploads(part):
        arrays = [f"{name} {list(shape)}" for name, (_, shape) in form.arrays.items()]
        rounds = "before round 1" if ctx.round == 0 else "in each round"
        sentences.append(
            f"would leave {rounds}, stage {ctx.stage}: {form.kind.__name__} "
            f"({', '.join(arrays) or 'nothing'}), {form.payload_bytes} bytes"
        )
    scores = part.settings.share_measurements and part.task.privacy is None
    measured = "training losses and scores, in the last round with a confusion matrix"
    more = measured if scores else "no losses and no scores"
    return [*sentences, f"would leave besides: {more}"]


def _uploads(part: SitePart) -> Iterator[tuple[Context, Form]]:
    """Yield the form of the upload of each stage and architecture."""
    client, key = part.population.clients[0], random.key(part.side.setup.recipe.seed)
    for architecture in client.architectures:
        order = Order(client.id, architecture)
        for ctx, down in _downloads(part, key, order, all_stages=True):
            yield ctx, upload_form(part.side.method, ctx, architecture, down)


def _check_uploads(part: SitePart, site: SiteFile) -> None:
    """Raise SiteError if an upload is larger than the policy allows: it would never leave."""
    most = site.policy.largest_upload
    for ctx, form in () if most is None else _uploads(part):
        size = payload_bytes(form.zeros(torch.device("cpu")))
        if most is not None and size > most:
            raise SiteError(
                f"{site.file}: policy.largest_upload = {most}; an upload of stage {ctx.stage} has "
                f"{size} bytes"
            )


def setup_at_site(recipe: Recipe, site: SiteFile) -> Setup:
    """Return the server's recipe with this site's device, code and data folders.

    The site decides how it computes, so the server's section ``[engine]`` is ignored.
    """
    code = site.code_folder
    engine = {"device": site.table.device, "code_folder": None if code is None else str(code)}
    changes: dict[str, object] = {"engine": EngineSection.model_validate(engine)}
    if recipe.data.public is not None and site.table.public:
        public = recipe.data.public.model_dump() | site.public_options
        changes["data.public"] = public
    here = recipe.changed(changes)
    check_public(here)
    return resolve(here, Overrides(root=site.data_root))


def data_section(recipe: Recipe, site: SiteFile) -> Data:
    """Return the section ``[data]`` that reads the site's rows as the recipe declares."""
    options, facts = dict(site.data_options), recipe.facts
    if site.table.data.name == TABLE and facts is not None and facts.columns:
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in facts.columns.items()}
        options.setdefault("columns", plain)
    shared = {key: getattr(recipe.data, key) for key in Data.model_fields}
    section = Data.model_validate({**shared, "name": site.table.data.name, **options})
    with modules_from(site.code_folder):
        return with_checked_options(recipe.changed({"data": section})).data


def _population(
    setup: Setup, side: ServerContext, data: Dataset, number: int, secret: int
) -> Population:
    """Return the site's rows as a population of one client."""
    recipe = setup.recipe
    most = recipe.clients.max_rows
    if most is not None and len(data.y) > most:
        raise SiteError(
            f"{data.name} has {len(data.y)} training rows; the recipe states clients.max_rows = "
            f"{most}"
        )
    nets = [side.task.architectures[name] for name in side.clients[number].architectures]
    if len(data.y) < (least := least_rows(setup.method, side.task.objective, nets)):
        raise SiteError(f"{data.name} has fewer than {least} rows, too few to train on")
    key, share = random.key(recipe.seed, "partition"), recipe.data.validation
    draw = validation_draw(data, secret) if recipe.privacy.unit == "record" else None
    rows = [torch.arange(len(data.y))]
    train, validation = hold_out(rows, share, key, draw, data.groups, first=number)
    if recipe.data.normalize == "client":
        mean, std = own_moments(data, train[0])
        data = replace(data, mean=mean, std=std)
    views = side.task.objective.views
    on_train, on_test = examples(data, recipe.data.augment, setup.device, views)
    on_train = with_fates(setup, data, on_train, train, secret)
    test = Rows.of([torch.arange(len(data.y_test))])
    return Population((side.clients[number],), on_train, on_test, train, validation, test)


def _with_private_model(setup: Setup, task: Task, site: SiteFile, secret: int) -> Task:
    """Return the task with the site's own model in the place of its outline, if there is one."""
    section, width = site.model, setup.private_width
    if width is None:
        if section is not None:
            raise SiteError(
                f"{site.file}: [model] is given, and the recipe names the sites' models; leave it "
                "out"
            )
        return task
    if section is None:
        raise SiteError(
            f"{site.file}: [model] is missing: the recipe leaves the model to each site, with "
            f"features of width {width}"
        )
    _check_encoder(setup, site)
    objective = task.objective
    sizes = Sizes.of(declared_facts(setup), objective)
    model = whole_model(section.model_copy(update={"project": width}))
    groups = groups_of_recipe({PRIVATE: model}, {}, sizes)
    own = Models(groups, *architectures_of(groups, sizes, secret, setup.device))
    _check_width(setup, site, own.architectures[PRIVATE])
    private = replace(task, architectures=own.architectures, starts=own.starts)
    if message_forms(setup, private) != message_forms(setup, task):
        raise SiteError(
            f"{site.file}: model {section.name}: its head does not fit those of the others: a "
            f"linear layer with a bias, from {width} features to {sizes.outputs} outputs"
        )
    return private


def _check_width(setup: Setup, site: SiteFile, arch: Architecture) -> None:
    """Raise SiteError if a random projection would come between an encoder and the heads."""
    facts = setup.recipe.facts
    if facts is not None and facts.encoder is not None and arch.projected:
        raise SiteError(
            f"{site.file}: the features of the encoder are not facts.feature_width = "
            f"{facts.feature_width} numbers: fedgist site --check prints how many they are"
        )


def _check_encoder(setup: Setup, site: SiteFile) -> None:
    """Raise SiteError if a site's model is not the encoder that the recipe's digest names."""
    facts, section = setup.recipe.facts, site.model
    if facts is None or facts.encoder is None:
        return
    assert section is not None  # the caller's
    if not (section.name.startswith(PREFIX) and section.frozen and section.adapters is None):
        raise SiteError(
            f"{site.file}: [model]: the recipe states an encoder (facts.encoder): use name = "
            "'transformers:FOLDER' and frozen = true, without adapters"
        )
    if setup.recipe.data.normalize != "none":
        raise SiteError(
            f"data.normalize = {setup.recipe.data.normalize!r}: the encoder has its own "
            "normalization: use 'none'"
        )
    own = encoder_digest(section.name.removeprefix(PREFIX))
    if own != facts.encoder:
        raise SiteError(
            f"{site.file}: model {section.name} has the digest {own}, and the recipe has "
            f"facts.encoder = {facts.encoder}: the weights or the preparation of images differ"
        )
