"""A host of the clients on one machine: their rows, models and state, and its answers to requests.

A :class:`ClientHost` answers three requests about a cohort: to train and upload, to score its
clients' models on their own rows, or to predict rows with one model that all of them share. It is
the clients' side of the local engine, in each of its processes, and of a real site, which hosts one
client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.finite_scores import of_finite, scored
from fedgist.core.message import Form, payloads
from fedgist.core.method import Context, Method, Net, Nothing, Phase, Task
from fedgist.core.nets.net import Architecture, stacked
from fedgist.core.objectives.objective import RowPredictions
from fedgist.core.optim import OptimizerState
from fedgist.core.tree import Tree, below, build, map_leaves, named, take
from fedgist.data.examples import Examples, labels_of
from fedgist.data.sources.file_sizes import in_words
from fedgist.engines.client_requests import (
    PredictRequest,
    ScoreRequest,
    SentCohort,
    Trained,
    TrainRequest,
)
from fedgist.engines.engine import FINETUNED, TESTS, TRAINED, ScoreTable, Split
from fedgist.engines.kept_features import kept_features
from fedgist.engines.message_form import addable, form_of_stack, screen_uploads
from fedgist.engines.plans.layout import with_layout
from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import HostSettings, OwnSettings, Population
from fedgist.errors import CheckpointError, RecipeError
from fedgist.training import cohort as cohorts
from fedgist.training import inference, local_training
from fedgist.training.client_store import ClientStore, folder
from fedgist.training.cohort import Clients, Cohort, with_steps
from fedgist.training.recorded_step import Recordings


class ClientHost:
    """A host of clients, which answers requests for one cohort at a time."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: HostSettings,
        plans: Mapping[str, Plan],
    ) -> None:
        """Host a population of clients with an execution plan for each architecture."""
        self.method, self.task, self.population = method, task, population
        self.settings, self.plans = settings, dict(plans)
        self.key = random.key(settings.seed).to(settings.device)
        self.forms: dict[tuple[bool, str, str], Form] = {}
        self.recordings = Recordings()
        laid_out = {n: with_layout(arch, self.plans[n]) for n, arch in task.architectures.items()}
        encoders = {
            n: replace(task.starts[n], arch=with_layout(arch, replace(self.plans[n], stack=False)))
            for n, arch in task.architectures.items()
        }
        self.features = kept_features(method, task, encoders, population, settings)
        of_features = {name: kept.arch for name, kept in self.features.items()}
        self.laid_out_models = laid_out | of_features
        self.own_type, self.stores = self._stores()

    def answer(self, request: TrainRequest | ScoreRequest | PredictRequest) -> Any:
        """Return the answer to a request, as the request's type describes it."""
        if isinstance(request, TrainRequest):
            return self.train(request.sent)
        if isinstance(request, ScoreRequest):
            return self.score(request.sent, request.split, tuned_only=request.tuned_only)
        return self.predict_rows(request.sent, request.split, request.rows)

    def train(self, sent: SentCohort) -> Trained:
        """Install the downloads, train, make the uploads, and store the clients' state."""
        cohort = self.cohort(sent)
        clients = cohorts.receive(cohort, self.clients(sent))
        phases = self.method.phases(cohort.ctx)
        lr_factor = self.task.training.lr_factor(sent.round)
        self._check_steps(sent, lambda taken: len(taken) == len(phases))
        seconds = self.task.training.round_seconds
        clients, losses, steps = local_training.train(cohort, clients, phases, lr_factor, seconds)
        self._check_steps(sent, lambda taken: taken == steps)
        if seconds is not None:
            cohort = with_steps(cohort, steps)
        if sent.round == self.task.training.num_rounds:  # in earlier rounds, the next loss tells
            losses = of_finite(losses, clients.net.params)
        message, clients = inference.upload(cohort, clients)
        message = inference.protected_upload(cohort, message)
        store = self.stores[sent.architecture]
        if store.arrays:
            store.put(sent.ids, self._kept(clients))
        key = (sent.round == 0, sent.stage, sent.architecture)
        if key not in self.forms:
            self.forms[key] = addable(form_of_stack(message), self.task)
        sizes = payloads(message, len(sent.ids))  # a sum does not show the bytes of its terms
        message, refused = screen_uploads(message, self.forms[key], len(sent.ids))
        accepted = tuple(k for k in range(len(sent.ids)) if k not in refused)
        payload = sum(sizes[k] for k in accepted)
        losses_shown = losses if phases else None
        return Trained(accepted, refused, message, losses_shown, payload, steps)

    def _check_steps(self, sent: SentCohort, fits: Callable[[tuple[int, ...]], bool]) -> None:
        """Raise RecipeError unless each client's steps in the run that is repeated fit."""
        steps = self.settings.steps
        if steps is None:
            return
        for client in sent.ids:
            taken = steps.get((sent.round, sent.stage, client, sent.architecture), ())
            if not fits(taken):
                raise RecipeError(
                    f"train.steps_of: in round {sent.round}, stage {sent.stage!r}, client {client} "
                    f"took the steps {list(taken)} there: its answer was not used, or the recipe "
                    "is another"
                )

    def score(
        self, sent: SentCohort, split: Split, *, tuned_only: bool = False
    ) -> dict[str, ScoreTable]:
        """Score each client's model and, if there are phases before a test, its trained copies."""
        cohort = self.cohort(sent)
        clients = cohorts.receive(cohort, self.clients(sent))
        models = {} if tuned_only else {"": clients}
        for name, phases in self.second_tests(cohort.ctx, split).items():
            factor = self.task.training.lr_factor(sent.round) if name == TRAINED else 1.0
            models[name] = local_training.train(cohort, clients, phases, factor)[0]
        table = self.population.table(split, sent.ids).to(self.settings.device)
        examples = self._examples(sent.architecture, split, table)
        tables = {}
        for name, model in models.items():
            predictions = inference.predict(cohort, model, table, examples)
            about = cohort.ctx, sent.ids, predictions, table, examples.y
            own_scores = score_table(*about, by_row=by_row(self.task, split))
            measured = inference.measure(cohort, model, table, examples)
            tables[name] = replace(own_scores, values=own_scores.values | measured)
        return tables

    def has_second_tests(self, ctx: Context, split: Split) -> bool:
        """Return whether clients of any architecture train a copy before a further test."""
        of_each = (replace(ctx, architecture=name) for name in self.task.architectures)
        return any(self.second_tests(at_client, split) for at_client in of_each)

    def second_tests(self, ctx: Context, split: Split) -> dict[str, tuple[Phase, ...]]:
        """Return the phases before further tests, by the name of the trained copy."""
        if split not in TESTS:
            return {}
        tests = {FINETUNED: self.method.before_test(ctx), TRAINED: self._next_training(ctx)}
        return {name: phases for name, phases in tests.items() if phases}

    def _next_training(self, ctx: Context) -> tuple[Phase, ...]:
        """Return the local training of a round, if models are also tested after it."""
        every, last = self.settings.trained_every, self.task.training.num_rounds
        if not every or (ctx.round % every and ctx.round != last):
            return ()
        stages = [replace(ctx, stage=stage) for stage in self.method.stages(ctx)]
        return next((phases for at in stages if (phases := self.method.phases(at))), ())

    def predict_rows(self, sent: SentCohort, split: Split, rows: Tensor) -> RowPredictions:
        """Return the per-row results (rows, ...) of rows (rows,) for the model that all share."""
        cohort = self.cohort(sent)
        clients = cohorts.receive(cohort, self.clients(sent))
        table = rows.unsqueeze(0).to(self.settings.device)
        examples = self._examples(sent.architecture, split, table)
        return take(inference.predict(cohort, clients, table, examples), 0)

    def cohort(self, sent: SentCohort) -> Cohort:
        """Return the cohort of a request, for the trainer."""
        device = self.settings.device
        name, usual = sent.architecture, self.task.training.work
        work = self.settings.length((sent.round, sent.stage, sent.ids[0], name), usual)
        about = self.key, self._task(name), sent.round, sent.stage
        ctx = Context(*about, architecture=name, work=work)
        table = self.population.table("train", sent.ids).to(device)
        down = map_leaves(lambda leaf: leaf.to(device), sent.down)
        stack_them = self.plans[name].stack
        if not stack_them and sent.broadcast:
            down = map_leaves(lambda leaf: leaf.unsqueeze(0), down)
        return Cohort(
            self.method,
            ctx,
            torch.tensor(sent.ids, device=device),
            down,
            sent.broadcast and stack_them,
            self._examples(name, "train", table),
            table,
            stack_them,
            self.recordings,
        )

    def _task(self, architecture: str) -> Task:
        """Return the task as clients of an architecture see it: with rows, or with features."""
        kept = self.features.get(architecture)
        return self.task if kept is None else kept.task

    def _examples(self, architecture: str, split: Split, table: Tensor) -> Examples:
        """Return the examples of an architecture: rows, or features of the rows of a table."""
        kept = self.features.get(architecture)
        return self.population.examples_of(split) if kept is None else kept.examples(split, table)

    def whole(self, clients: Clients) -> Clients:
        """Return clients whose nets have their bodies, for rows in place of features."""
        kept = self.features.get(clients.net.arch.name)
        if kept is None:
            return clients
        arch = self.task.architectures[clients.net.arch.name]
        return replace(clients, net=replace(clients.net, arch=arch))

    def clients(self, sent: SentCohort) -> Clients:
        """Return the clients' stored state, their first state, or the common initial net."""
        store, arch = self.stores[sent.architecture], self.laid_out_models[sent.architecture]
        for client in store.absent(sent.ids):
            first = self._kept(self._newcomer(client, sent.architecture))
            store.put([client], {name: array.unsqueeze(0) for name, array in first.items()})
        net = stacked(self._start_net(arch), len(sent.ids))
        if not store.arrays:
            return Clients(net, build(self.own_type, {}), {})
        arrays = store.get(sent.ids)

        own = build(self.own_type, below("own/", arrays))
        memory = build(dict[str, OptimizerState], below("memory/", arrays))
        return Clients(net.with_arrays(below("net/", arrays)), own, memory)

    def state(self) -> dict[str, Tensor]:
        """Return the clients' state: arrays (clients, ...) by architecture and name."""
        return {
            f"{architecture}/{name}": array
            for architecture, store in self.stores.items()
            for name, array in store.state().items()
        }

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the clients' state, arrays (clients, ...) by name, from a checkpoint."""
        prefixes = tuple(f"{architecture}/" for architecture in self.stores)
        if strange := [name for name in arrays if not name.startswith(prefixes)]:
            raise CheckpointError(
                f"the checkpoint does not fit this run: no architecture keeps {strange[0]!r}"
            )
        for architecture, store in self.stores.items():
            store.restore(below(f"{architecture}/", arrays))

    def _stores(self) -> tuple[type, dict[str, ClientStore]]:
        firsts, members, own_type = dict[str, dict[str, Tensor]](), dict[str, list[int]](), Nothing
        for name, arch in self.laid_out_models.items():
            ctx = Context(self.key, self._task(name), 0, "init", architecture=name)
            own = self.method.init_client(self._start_net(arch), ctx)
            own_type = type(own)
            members[name] = [c.id for c in self.population.clients if name in c.architectures]
            firsts[name] = self._kept(self._client(name, own))
        self.state_bytes = sum(
            len(members[name]) * array.nbytes
            for name, first in firsts.items()
            for array in first.values()
        )
        self.in_file = self.settings.keeps_in_file(self.state_bytes)
        device = self.settings.device
        return own_type, {
            name: ClientStore(members[name], first, device, in_file=self.in_file)
            for name, first in firsts.items()
        }

    @property
    def notes(self) -> list[str]:
        """What is kept in files, because it takes more memory than it may."""
        notes = [kept.note for kept in self.features.values() if kept.note]
        if self.in_file:
            notes.append(
                f"what absent clients keep (up to {in_words(self.state_bytes)}) is in a file of "
                f"{folder()} (engine.memory_limit)"
            )
        return notes

    def _client(self, architecture: str, own: Tree) -> Clients:
        """Return one client in its first state, with the optimizer state that it will keep."""
        clients = cohorts.begin(self._start_net(self.laid_out_models[architecture]), own, 1)
        memory: dict[str, OptimizerState] = {}
        task = self._task(architecture)
        for stage in self.method.stages(Context(self.key, task, 1, "")):
            ctx = Context(self.key, task, 1, stage, architecture=architecture)
            memory |= local_training.memory_of(self.method, ctx, clients)
        return take(replace(clients, memory=memory), 0)

    def _start_net(self, arch: Architecture) -> Net:
        return replace(self.task.starts[arch.name], arch=arch)

    def _kept(self, clients: Clients) -> dict[str, Tensor]:
        """Return the arrays that clients keep, by name; ``clients`` is one client or a stack."""
        return {
            **{f"net/{n}": a for n, a in clients.net.state(self.method.keeps).items()},
            **{f"own/{n}": a for n, a in named(clients.own).items()},
            **{f"memory/{n}": a for n, a in named(clients.memory).items()},
        }

    def _newcomer(self, client: int, architecture: str) -> Clients:
        arch = self.laid_out_models[architecture]
        net = self._start_net(arch)
        if not self.task.common_starts:
            seed = int(random.key(self.settings.seed, "start", architecture, client))
            fresh = replace(arch.start(seed), arch=arch)
            net = map_leaves(lambda leaf: leaf.to(self.settings.device), fresh)
        key = random.fold(self.key, "client", client, "init")
        own_settings = self.settings.own.get(client, OwnSettings()).method
        ctx = Context(
            key, self._task(architecture), 0, "init", own_settings, architecture=architecture
        )
        own = self.method.init_client(net, ctx)
        return replace(self._client(architecture, own), net=net)


def by_row(task: Task, split: Split) -> bool:
    """Return whether a row may change only its own result: a private search counts right rows."""
    return split == "validation" and task.privacy is not None


def score_table(
    ctx: Context,
    ids: Sequence[int],
    predictions: RowPredictions,
    table: Tensor,
    y: Tensor,
    *,
    by_row: bool = False,
) -> ScoreTable:
    """Score the per-row results (K, rows, ...) of a table (K, rows).

    ``y`` are the labels of all examples. In the last round the table has a confusion matrix. With
    ``by_row``, results that are not finite count row by row.
    """
    mask, last = table >= 0, ctx.round == ctx.task.training.num_rounds
    objective, labels = ctx.task.objective, labels_of(y, table)
    about = objective, predictions, labels, mask
    values, confusion = scored(*about, confusion=last, by_row=by_row)
    return ScoreTable(tuple(ids), mask.sum(1), values, confusion)
