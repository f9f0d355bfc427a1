"""A site: one real client with its own rows and model, which answers envelopes.

A site stores its state before each stage of the last rounds, together with its reply, because a
server may repeat a request: for a stage whose reply was lost, or after a return to a checkpoint.
For the same stage with the same download, the site sends its old reply again. For the same stage
with another download, the site returns to its state before that stage.

A site answers only stages with clients, in rounds up to the last one. Under privacy it answers each
of these stages once, because its privacy budget is divided among them. Its releases are part of its
state, which is stored before training begins and again before the reply is sent. A site that is
killed in between does not release that stage again.

A site's :class:`Consent` decides what leaves it. Its policy comes before the privacy budget is
charged, the charge before training, and the stored state before the reply is sent.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgist.core.finite_scores import LOST
from fedgist.core.message import Form, payload_bytes, reduction, why_refused
from fedgist.core.method import ClientInfo, Context, Method, Order, Task
from fedgist.core.objectives.metrics import LOSS
from fedgist.core.tree import Tree, take
from fedgist.engines.client_host import ClientHost
from fedgist.engines.client_requests import SentCohort
from fedgist.engines.engine import EVALUATE, Score, ScoreTable, TrainingLoss
from fedgist.engines.message_form import asks_clients, download_form
from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import HostSettings, Population
from fedgist.errors import MessageError, MethodError
from fedgist.wire.envelope import Header, refusal, seal, unseal

Work = tuple[object, ...]  # of what kind, on which rows, and in which round, stage and model
StageKey = tuple[int, int, str]  # round, index of the stage in the round, architecture
SLACK = 1 << 20  # bytes of an envelope in addition to the expected payload
CANNOT = "this site could not answer"
REQUESTS = ("train", "score", "finish")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answered:
    """A stage with an answer: the download's digest, the state before it, and the reply."""

    digest: str
    before: Mapping[str, Tensor]
    reply: bytes


@dataclass(frozen=True)
class SiteState:
    """The state that a site needs to continue after a restart.

    ``client`` are the client's arrays. ``released`` holds the digest of the download behind each
    release. ``answered`` are the stages that can be repeated, and ``forgotten`` is the last stage
    that cannot.
    """

    client: Mapping[str, Tensor]
    released: Mapping[StageKey, str]
    answered: Mapping[StageKey, Answered]
    forgotten: StageKey


Keep = Callable[[SiteState], None]


class Consent(Protocol):
    """A site's decision on each release. The functions raise MessageError to refuse one."""

    def before_work(self, request: Header, count: int) -> None:
        """Check whether a stage may be trained, or rows scored, for the ``count``-th time."""

    def before_training(self, request: Header) -> None:
        """Check a request against the site's policy, and charge its privacy budget durably."""

    def before_sending(self, request: Header, reply: bytes) -> None:
        """Check a finished reply, before it is stored and sent."""


class FullConsent:
    """The consent of a simulated site: everything may leave."""

    def before_work(self, request: Header, count: int) -> None:
        """Accept the work."""

    def before_training(self, request: Header) -> None:
        """Accept the request."""

    def before_sending(self, request: Header, reply: bytes) -> None:
        """Accept the reply."""


class Site:
    """One unstacked client that answers a server's envelopes."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: HostSettings,
        *,
        run: str,
        rounds_kept: int = 2,
        keep: Keep | None = None,
        consent: Consent | None = None,
        worked: Counter[Work] | None = None,
    ) -> None:
        """Host a population of one client; stages of ``rounds_kept`` rounds can be repeated.

        ``keep`` stores the site's state durably: it returns when the state would survive a restart.
        ``worked`` counts how often each work was done, and may begin with what was done before.
        """
        self.consent = consent or FullConsent()
        (self.client,) = population.clients
        if task.privacy is not None and task.privacy.source == "system":
            if keep is None:
                raise MethodError(
                    "a site whose noise comes from the system must keep what it released: "
                    "give Site(keep=...)"
                )
            # losses and scores are outside the privacy budget, so they stay at the site
            settings = replace(settings, share_measurements=False)
        self.keep = keep
        alone = dict.fromkeys(task.architectures, Plan(1, stack=False))
        self.host = ClientHost(method, task, population, settings, alone)
        self.method, self.task, self.settings = method, task, settings
        self.run, self.rounds_kept = run, rounds_kept
        self.done: dict[StageKey, Answered] = {}
        self.forgotten: StageKey = (-1, 0, "")  # the last stage that cannot be repeated
        self.released: dict[StageKey, str] = {}  # digests of the downloads behind releases
        self.worked = Counter[Work]() if worked is None else worked
        self.forms: dict[tuple[bool, str, str], Form] = {}
        self.asks: dict[tuple[bool, str], bool] = {}  # whether a stage involves clients
        self.finished: dict[str, tuple[int, Tree]] = {}  # round and last download by architecture
        nets = task.starts.values()
        largest = max(payload_bytes(net.state()) for net in nets)
        self.largest = 4 * largest + SLACK  # bytes of the largest envelope that is opened

    def handle(self, envelope: bytes) -> bytes:
        """Answer an envelope with a reply, or with a refusal and its reason.

        Any failure of the site is a refusal, too. The server reads the kind of the error alone,
        because its text may show rows; the text stays in the site's own log.
        """
        header = Header(
            purpose="refusal",
            run=self.run,
            round=0,
            stage="",
            client=self.client.id,
            architecture="",
        )
        try:
            request, messages = unseal(envelope, self._limit(len(envelope)))
            header = request
            down = self._download(request, messages)
            if request.purpose == "finish":
                return self._finish(request, down)
            if request.purpose == "score":
                return self._score(request, down)
            return self._train(request, down)
        except MessageError as error:
            return refusal(header, error)
        except Exception as error:
            LOG.exception("round %d, stage %s failed", header.round, header.stage)
            # what rows decide must not be told: not even of which kind it is
            hidden = self.task.privacy is not None
            return refusal(header, MessageError(CANNOT, "work") if hidden else error)

    def state(self) -> SiteState:
        """Return the state for a restart."""
        client = {name: array.clone() for name, array in self.host.state().items()}
        return SiteState(client, dict(self.released), dict(self.done), self.forgotten)

    def restore(self, state: SiteState) -> None:
        """Restore the state after a restart."""
        self.host.restore(state.client)
        self.released, self.done = dict(state.released), dict(state.answered)
        self.forgotten = state.forgotten

    def rewind(self, arrays: Mapping[str, Tensor]) -> None:
        """Return to a simulation's checkpoint and forget the answered stages.

        ``arrays`` are the site's own, (1, ...) by name. The record of releases is kept.
        """
        self.host.restore(arrays)
        self.done, self.forgotten = {}, (-1, 0, "")

    def largest_request(self) -> int:
        """Return the size in bytes of the largest envelope that this site opens."""
        return self._limit(self.largest + 1)

    def _limit(self, size: int) -> int:
        """Return the size in bytes of the largest envelope to open, given one of ``size`` bytes."""
        if size > self.largest:  # larger than a few models: derive the largest download
            for number in (0, 1):
                stages = self.method.stages(Context(self.host.key, self.task, number, ""))
                for stage in (*stages, EVALUATE):
                    for architecture in self.client.architectures:
                        self._form(number, stage, architecture)
            sizes = [form.payload_bytes for form in self.forms.values()]
            self.largest = max([self.largest, *(size + SLACK for size in sizes)])
        return self.largest

    def _form(self, number: int, stage: str, architecture: str) -> Form:
        """Return the form of a valid download of a stage."""
        key = (number == 0, stage, architecture)
        if key not in self.forms:
            order = Order(self.client.id, architecture)
            ctx = Context(self.host.key, self.task, number, stage)
            self.forms[key] = download_form(self.method, ctx, order)
        return self.forms[key]

    def _download(self, request: Header, messages: Mapping[str, Any]) -> Any:
        """Return the download that an envelope holds."""
        models = self.client.architectures
        no_rows = request.purpose == "score" and request.split in {None, "test"}
        problems = [
            (request.run != self.run, f"this site is in run {self.run!r}, not {request.run!r}"),
            (request.client != self.client.id, f"this site has no client {request.client}"),
            (request.purpose not in REQUESTS, f"a {request.purpose} cannot be answered"),
            (
                request.architecture not in models,
                f"this site has no model {request.architecture!r}",
            ),
            (set(messages) != {"download"}, f"it holds {sorted(messages)}, not one download"),
            (no_rows, f"this site has no rows of the split {request.split!r}"),
        ]
        if problem := next((text for wrong, text in problems if wrong), None):
            raise MessageError(problem)
        last = self.task.training.num_rounds
        if request.round > last:
            raise MessageError(f"round {request.round} is after the last round, {last}")
        if request.stage not in self._stages(request):
            raise MessageError(
                f"a client has no stage {request.stage!r} in round {request.round} to "
                f"{request.purpose}"
            )
        form = self._form(request.round, request.stage, request.architecture)
        if reason := why_refused(messages["download"], form):
            raise MessageError(f"the download is not valid: {reason}")
        return messages["download"]

    def _stages(self, request: Header) -> tuple[str, ...]:
        """Return the stages of a round in which a server may involve a client."""
        ctx = self._context(request)
        if request.purpose != "train":
            return (EVALUATE,)
        involving = []
        for stage in self.method.stages(ctx):
            key = (request.round == 0, stage)
            if key not in self.asks:
                order = Order(self.client.id, request.architecture)
                self.asks[key] = asks_clients(self.method, replace(ctx, stage=stage), order)
            involving += [stage] if self.asks[key] else []
        return tuple(involving)

    def _train(self, request: Header, down: Tree) -> bytes:
        stages = self.method.stages(self._context(request))
        key = (request.round, stages.index(request.stage), request.architecture)
        digest = request.messages["download"].digest
        if (answered := self.done.get(key)) is not None and answered.digest == digest:
            return answered.reply
        self._check_repeatable(key)
        self._check_release(key, digest)
        self._count_work(request)
        self.consent.before_training(request)
        if self.task.privacy is not None:
            self.released[key] = digest
        self._go_back(key)
        state = self.state()
        if self.keep:
            self.keep(state)  # the release is recorded before it exists
        try:
            reply = self._do(request, down)
            self.consent.before_sending(request, reply)
            self.done[key] = Answered(digest, state.client, reply)
            self._forget(request.round - self.rounds_kept)
            if self.keep:
                self.keep(self.state())  # a restart has every reply that a server may have
        except Exception:
            self.done.pop(key, None)
            self.host.restore(state.client)  # a part of the training may be in it
            raise
        return reply

    def _count_work(self, request: Header) -> None:
        """Count a work, which the site's consent may refuse to do again."""
        about = request.round, request.stage, request.architecture
        work = (request.purpose, request.split, *about)
        self.consent.before_work(request, self.worked[work] + 1)
        self.worked[work] += 1

    def _check_release(self, key: StageKey, digest: str) -> None:
        """Refuse a second release of a stage that the privacy budget covers once.

        For noise from the seed, the same download gives the same release again.
        """
        privacy = self.task.privacy
        if privacy is None:
            return
        before = self.released.get(key)
        if before is not None and (before != digest or privacy.source == "system"):
            raise MessageError(
                f"the release of round {key[0]} was made: another one would cost more privacy",
                "state",
            )

    def _check_repeatable(self, key: StageKey) -> None:
        if key <= self.forgotten:
            raise MessageError(
                f"round {key[0]} lies too far back: only {self.rounds_kept} rounds are remembered",
                "state",
            )

    def _go_back(self, key: StageKey) -> None:
        """Return to the state before a stage, if this stage or a later one was answered already."""
        undone = sorted(k for k in self.done if k >= key)
        if undone:
            self.host.restore(self.done[undone[0]].before)
        for later in undone:
            del self.done[later]

    def _forget(self, last_round: int) -> None:
        """Forget the stages of all rounds up to this one."""
        old = [key for key in self.done if key[0] <= last_round]
        self.forgotten = max([self.forgotten, *old])
        for key in old:
            del self.done[key]

    def _do(self, request: Header, down: Tree) -> bytes:
        """Train, and return the reply."""
        trained = self.host.train(self._sent(request, down))
        if trained.refused:  # the site validates as the server does
            reason = f"the upload is not valid: {trained.refused[0]}"
            LOG.warning("round %d, stage %s: %s", request.round, request.stage, reason)
            hidden = self.task.privacy is not None
            return refusal(request, MessageError(CANNOT if hidden else reason, "work"))
        summed = reduction(type(trained.message)) == "sum"
        messages = {"upload": trained.message if summed else take(trained.message, 0)}
        if self.settings.share_measurements and trained.losses is not None:
            messages["loss"] = TrainingLoss(trained.losses[0].clone())
        limited = self.task.training.round_seconds is not None
        about = {"purpose": "reply", "steps": trained.steps if limited else None}
        return seal(request.model_copy(update=about), messages)

    def _finish(self, request: Header, down: Tree) -> bytes:
        """Keep the last download, with which the site's model is complete."""
        self._count_work(request)
        self.finished[request.architecture] = (request.round, down)
        return seal(request.model_copy(update={"purpose": "reply"}), {})

    def _score(self, request: Header, down: Tree) -> bytes:
        if not self.settings.share_measurements:
            raise MessageError("this site keeps its scores to itself", "policy", "scores_leave")
        assert request.split is not None  # checked with the download
        self._count_work(request)
        tables = self.host.score(self._sent(request, down), request.split)
        messages = {f"score-{model}": score_of(table) for model, table in tables.items()}
        reply = seal(request.model_copy(update={"purpose": "reply"}), messages)
        self.consent.before_sending(request, reply)
        return reply

    def _sent(self, request: Header, down: Tree) -> SentCohort:
        ids = (self.client.id,)
        return SentCohort(request.round, request.stage, ids, request.architecture, True, down)

    def _context(self, request: Header) -> Context:
        return Context(self.host.key, self.task, request.round, request.stage)


def score_of(table: ScoreTable) -> Score:
    """Return the only row of a table as a message, with the defined metrics.

    A model that is not finite has only the loss that says so.
    """
    values = {name: v[0].cpu() for name, v in table.values.items() if not bool(v[0].isnan())}
    if values.get(LOSS.name) == LOST:
        values = {LOSS.name: values[LOSS.name]}
    confusion = None if table.confusion is None else table.confusion.cpu()
    return Score(table.rows[0].cpu(), values, confusion)


def population_of_one(population: Population, place: int) -> Population:
    """Return the population of one client: its own rows only, numbered from 0."""
    client: ClientInfo = population.clients[place]
    train, validation = population.train[place], population.validation[place]
    kept = torch.cat([train, validation])
    on_train = population.examples.only(kept)
    on_test = population.test_examples.only(population.test[place])
    sizes = len(train), len(validation), len(population.test[place])
    rows = (torch.arange(sizes[0]), sizes[0] + torch.arange(sizes[1]), torch.arange(sizes[2]))
    own_train, own_validation, own_test = (type(population.train).of([row]) for row in rows)
    return Population((client,), on_train, on_test, own_train, own_validation, own_test)
