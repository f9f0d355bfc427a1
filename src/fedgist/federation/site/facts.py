"""A site in an exchange of facts: it checks the question, answers by sums, and compares itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedgist.core.replies import ClientInfo
from fedgist.core.tree import Tree
from fedgist.data.dataset import Dataset
from fedgist.data.sources.table_file import column_names
from fedgist.errors import MessageError, OwnerError, SiteError, listed
from fedgist.federation.network.invitation import Hello, Invitation
from fedgist.federation.site import audit_log
from fedgist.federation.site.file import LEAST_ROWS_TELL, SiteFile
from fedgist.federation.site.ledger import BudgetError, Ledger, Limits, Spent
from fedgist.federation.site.setup import TABLE, classes_held_back, rows_stay_home
from fedgist.recipe.data_section import Data
from fedgist.runs.files import atomic_files as files
from fedgist.wire.envelope import Header, refusal, seal, unseal
from fedgist.world.data import read_data
from fedgist.world.facts.pooled import differences
from fedgist.world.facts.question import CLASSES, COLUMNS, FOUND, Filling, Plan, Question
from fedgist.world.facts.rows import rows_of
from fedgist.world.facts.sums import (
    COMPARE,
    FACTS,
    GROUP,
    MOST_PRIVATE,
    ROUNDS,
    Answered,
    Compared,
    FactsSums,
    Told,
    facts_sums,
    scale_sums,
    with_noise,
)

REPLIES = "facts"  # the folder of replies in the state folder
LARGEST = 1 << 26  # bytes of a request
CANNOT = "this site could not answer"
LOG = logging.getLogger(__name__)


def check_question(question: Question, site: SiteFile, sites: int) -> None:
    """Raise SiteError if a site's policy does not allow a question. Rows are not read."""
    policy, file = site.policy, site.file
    for kind in question.kinds:
        if kind not in policy.facts:
            allowed = f"allows {listed(policy.facts)}" if policy.facts else "allows none"
            raise SiteError(
                f"{file}: the question asks for {kind}, and policy.facts {allowed}: state facts = "
                f"{[*question.kinds]} under [policy] to allow it",
                "policy",
                "facts",
            )
    if policy.sums == "secure" and question.sums != "secure":
        raise SiteError(
            f"{file}: policy.sums = 'secure', and the question has sums = 'plain'", "policy", "sums"
        )
    if question.sums == "secure" and sites < policy.least_sites:
        raise SiteError(
            f"{file}: policy.least_sites = {policy.least_sites}; there are {sites} sites",
            "policy",
            "least_sites",
        )
    if question.epsilon is not None and policy.least_rows > 1:
        raise SiteError(f"{file}: {LEAST_ROWS_TELL}", "policy", "least_rows")
    if policy.epsilon is None:
        return
    if question.epsilon is None:
        raise SiteError(
            f"{file}: policy.epsilon = {policy.epsilon:g}, and the question has no epsilon",
            "policy",
            "epsilon",
        )
    if question.delta > policy.delta:
        raise SiteError(
            f"{file}: policy.delta = {policy.delta:g}; the question has delta = {question.delta:g}",
            "policy",
            "delta",
        )


@dataclass(frozen=True, eq=False)
class SiteRows:
    """A site's rows for a question: the data, and the numbers of the rows that may be used."""

    data: Dataset
    used: Tensor
    left_out: tuple[str, ...]

    def told_names(self, question: Question, least: int) -> dict[str, tuple[str, ...]]:
        """Return the classes and categories of which ``least`` rows may be used."""
        data, names = self.data, dict[str, tuple[str, ...]]()
        if CLASSES in question.unnamed:
            names[CLASSES] = _with_rows(data.names, _counts(data, self.used), least)
        places = [column for column in data.columns for _ in column.inputs]
        for column in data.columns:
            if question.columns.get(column.name) == FOUND and column.categories is not None:
                at = torch.tensor([place is column for place in places])
                counts = data.x[self.used][:, at].sum(0)
                names[f"{COLUMNS}{column.name}"] = _with_rows(column.categories, counts, least)
        return names


def _with_rows(names: Collection[str], counts: Tensor, least: int) -> tuple[str, ...]:
    return tuple(n for n, count in zip(names, counts.tolist(), strict=True) if count >= least)


def _counts(data: Dataset, used: Tensor) -> Tensor:
    """Return the rows of each class, or with each label: (classes,)."""
    y = data.y[used]
    if data.target == "labels":
        return (y > 0).sum(0)
    return torch.bincount(y[y >= 0], minlength=data.num_classes)


def read_rows(question: Question, filling: Filling | None, site: SiteFile, secret: int) -> SiteRows:
    """Return a site's training rows, missing numbers and all.

    Without a filling, the categories are those of the site's own rows. Under a budget an error is
    the owner's alone.

    Raises
    ------
    InputError
        If the rows cannot be read, or do not have the form that is asked for.
    """
    private, options = question.epsilon is not None, dict(site.data_options)
    if site.table.data.name == TABLE and question.columns:
        plan = None if filling is None else Plan(question, filling)
        columns = question.columns if plan is None else plan.columns
        options["columns"] = {n: _for_source(kind) for n, kind in columns.items()}
    section = Data.model_validate({"name": site.table.data.name, **options})
    with rows_stay_home(private=private):
        data = read_data(
            section,
            0,
            root=site.data_root,
            target=question.target,
            code=None if site.code_folder is None else str(site.code_folder),
            secret=secret if private else None,
            unlisted="keep",
            private=private,
        )
        if private and len(data.y) > MOST_PRIVATE:
            raise SiteError(f"{data.name} has more than {MOST_PRIVATE:,} rows under a budget")
        return _allowed(data, site)


def _for_source(kind: object) -> object:
    """Return a column of a question as the source of tables has it."""
    if isinstance(kind, tuple):
        return list(kind)
    return kind if isinstance(kind, str) else "number"


def _allowed(data: Dataset, site: SiteFile) -> SiteRows:
    """Return the rows without those of classes that the site's policy holds back."""
    every = torch.arange(len(data.y))
    if data.target == "numbers":
        return SiteRows(data, every, ())
    held_back, sentences = classes_held_back(data.names, _counts(data, every), site)
    if data.target == "labels":
        mine = (data.y > 0)[:, held_back].any(1)
    else:
        mine = held_back[data.y.clamp(min=0)] & (data.y >= 0)
    return SiteRows(data, every[~mine], sentences)


@dataclass(eq=False)
class FactsSite:
    """A site that answers a question: the same stage is answered once, and by the same bytes."""

    question: Question
    invitation: Invitation
    file: SiteFile
    secret: int
    digest: Callable[[Dataset], str]
    say: Callable[[str], None]
    sums: dict[str, FactsSums] = field(default_factory=dict)  # by the text of a filling

    @property
    def client(self) -> ClientInfo:
        """The site as a client of the server."""
        return ClientInfo(self.invitation.number, (GROUP,))

    @property
    def folder(self) -> Path:
        """Where its replies are kept."""
        return self.file.state_folder / REPLIES / self.invitation.run

    def hello(self) -> Hello:
        """Return what the server must know before it asks: names that the question leaves open."""
        names = dict[str, tuple[str, ...]]()
        if self.question.unnamed:
            rows = read_rows(self.question, None, self.file, self.secret)
            names = rows.told_names(self.question, self.file.policy.least_rows)
        for key, told in names.items():
            self._log(f"told the names of {key}: {listed(told)}")
        invitation = self.invitation
        return Hello(
            run=invitation.run, digest=invitation.digest, number=invitation.number, names=names
        )

    def handle(self, envelope: bytes) -> bytes:
        """Answer an envelope with a reply, or with a refusal and its reason."""
        invitation = self.invitation
        header = Header(
            purpose="refusal",
            run=invitation.run,
            round=0,
            stage="",
            client=invitation.number,
            architecture=GROUP,
        )
        try:
            request, messages = unseal(envelope, LARGEST)
            header = request
            return self._answer(request, messages)
        except OwnerError:  # what rows decide before a charge: the process ends
            raise
        except MessageError as error:
            return refusal(header, error)
        except Exception as error:
            LOG.exception("stage %s failed", header.stage)
            hidden = self.question.epsilon is not None
            return refusal(header, MessageError(CANNOT, "work") if hidden else error)

    def _answer(self, request: Header, messages: Mapping[str, Tree]) -> bytes:
        purpose = "finish" if request.stage == COMPARE else "train"
        expected = (self.invitation.run, self.invitation.number, GROUP, purpose)
        found = (request.run, request.client, request.architecture, request.purpose)
        down = messages.get("download")
        if found != expected or ROUNDS.get(request.stage) != request.round:
            raise MessageError("a request of another exchange")
        if request.stage == COMPARE and isinstance(down, Answered):
            return self._reply(request, self._compared(down))
        if request.stage == COMPARE or not isinstance(down, Told):
            raise MessageError("a question was expected")
        digest = request.messages["download"].digest
        kept = self.folder / f"{request.stage}-{digest}.reply"
        if kept.exists():
            return kept.read_bytes()
        self._check_asked_once(request.stage)
        plan = Plan(self.question, _filling(down.read()))
        rows = read_rows(self.question, plan.filling, self.file, self.secret)
        self._charge(request.round, rows.data)
        with rows_stay_home(private=self.question.epsilon is not None):
            sums = self._sums(request.stage, plan, rows)
        reply = self._reply(request, with_noise(self.question, sums))
        files.private_folder(self.folder)
        files.write(kept, reply, private=True)
        return reply

    def _reply(self, request: Header, upload: Tree) -> bytes:
        return seal(request.model_copy(update={"purpose": "reply"}), {"upload": upload})

    def _check_asked_once(self, stage: str) -> None:
        if any(self.folder.glob(f"{stage}-*.reply")):
            raise MessageError(f"the stage {stage} was answered for another question", "state")

    def _sums(self, stage: str, plan: Plan, rows: SiteRows) -> Tree:
        """Return the sums of the rows; counts of fewer rows than the policy's are not told."""
        for sentence in rows.left_out:
            self._log(sentence)
        if stage != FACTS:
            return scale_sums(plan, rows_of(plan, rows.data, rows.used))
        sums, sentences = without_few(
            plan, facts_sums(plan, rows_of(plan, rows.data, rows.used)), self.file.policy.least_rows
        )
        for sentence in sentences:
            self._log(sentence)
        self.sums[plan.filling.model_dump_json()] = sums
        return sums

    def _charge(self, number: int, data: Dataset) -> None:
        """Charge the ledger for an exchange before its noise is drawn."""
        question, policy, file = self.question, self.file.policy, self.file
        if question.epsilon is None:
            return
        ledger, run, name = Ledger(file.state_folder), self.invitation.run, file.table.name
        before = ledger.charged(name, run)
        if before is not None and before.round >= number:
            raise MessageError("this exchange was charged, and its reply is lost", "state")
        count = 1 if before is None else 2
        spent = Spent(
            epsilon=question.epsilon * count,
            delta=question.delta * count,
            round=number,
            recipe=self.invitation.digest,
        )
        limits = None if policy.epsilon is None else Limits(policy.epsilon, policy.delta)
        try:
            ledger.charge(name, self.digest(data), run, spent, limits)
        except BudgetError as error:
            self._log(error.detail)
            raise

    def _compared(self, answered: Answered) -> Compared:
        """Say how this site's rows differ from the others'; refuse if its owner wants that told."""
        plan = Plan(self.question, _filling(Told(answered.text).read()))
        with rows_stay_home(private=self.question.epsilon is not None):
            key = plan.filling.model_dump_json()
            if key not in self.sums:
                rows = read_rows(self.question, plan.filling, self.file, self.secret)
                self._sums(FACTS, plan, rows)
            found = differences(plan, self.sums[key], answered.total, len(self.invitation.names))
            found += _order_of_columns(self.question, self.file)
        for sentence in found:
            self._log(f"differs: {sentence}")
        if not found:
            self._log("this site's rows are like those of the others")
        if found and self.file.policy.differences == "refuse" and self.question.epsilon is None:
            raise MessageError("; ".join(found), "rows")
        return Compared()

    def _log(self, text: str) -> None:
        audit_log.write(self.file.state_folder, f"facts {self.invitation.run}: {text}")
        self.say(text)


def _filling(text: str) -> Filling:
    try:
        return Filling.model_validate_json(text)
    except ValueError as error:
        raise MessageError("a filling that cannot be read") from error


def without_few(plan: Plan, sums: FactsSums, least: int) -> tuple[FactsSums, list[str]]:
    """Return sums without counts of fewer than ``least`` rows, and what was left out in words."""
    if least == 1:
        return sums, []
    few_numbers = (sums.present > 0) & (sums.present < least)
    names = [n.name for n, few in zip(plan.numbers, few_numbers.tolist(), strict=True) if few]
    bins = torch.tensor(
        [
            few
            for n, few in zip(plan.numbers, few_numbers.tolist(), strict=True)
            if n.edges
            for _ in range(len(n.edges) + 1)
        ],
        dtype=torch.bool,
    )
    changes = {
        name: getattr(sums, name).masked_fill(few_numbers, 0.0)
        for name in ("present", "total", "squares")
    }
    for name in ("histograms", "categories", "classes"):
        counts = getattr(sums, name)
        small = (counts > 0) & (counts < least)
        changes[name] = counts.masked_fill(small | bins if name == "histograms" else small, 0.0)
        if bool(small.any()):
            names.append(f"{int(small.sum())} counts of {name}")
    if 0 < float(sums.complete) < least:
        changes |= {n: getattr(sums, n) * 0.0 for n in ("complete", "complete_total", "products")}
        names.append("correlations")
    said = f"not told, because of fewer than policy.least_rows = {least} rows: {listed(names)}"
    return replace(sums, **changes), [said] if names else []


def _order_of_columns(question: Question, site: SiteFile) -> list[str]:
    """Return a sentence if a table has the columns in another order than the question."""
    path = site.data_options.get("path")
    if site.table.data.name != TABLE or not isinstance(path, str):
        return []
    own = [name for name in column_names(Path(path)) if name in question.columns]
    if own == [*question.columns]:
        return []
    return [f"the columns are in another order here: {listed(own)}; they are read by name"]
