"""A site in an exchange of facts: it checks the question, answers by sums, and compares itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedgist.core.replies import ClientInfo
from fedgist.core.tree import Tree, map_leaves
from fedgist.data.dataset import Dataset
from fedgist.data.sources.locations import existing
from fedgist.data.sources.table_file import TableFrame, cells_without_number, expect, load_table
from fedgist.data.table_columns import TableForm
from fedgist.errors import (
    FedgistError,
    MessageError,
    OwnerError,
    SiteError,
    first_line,
    listed,
)
from fedgist.federation.network.invitation import Hello, Invitation
from fedgist.federation.site import audit_log
from fedgist.federation.site.file import LEAST_ROWS_TELL, SiteFile
from fedgist.federation.site.ledger import BudgetError, Ledger, Limits, Spent
from fedgist.federation.site.setup import check_classes, classes_held_back, rows_stay_home
from fedgist.recipe.data_section import Data
from fedgist.runs.files import atomic_files as files
from fedgist.wire.envelope import Header, Packed, refusal, seal, unseal
from fedgist.world.data import read_data
from fedgist.world.facts.pooled import differences
from fedgist.world.facts.question import (
    CLASSES,
    COLUMNS,
    FOUND,
    MOST_NAMES,
    Filling,
    Plan,
    Question,
)
from fedgist.world.facts.rows import TABLE, as_asked, rows_of
from fedgist.world.facts.sums import (
    COMPARE,
    FACTS,
    GROUP,
    MOST_PRIVATE,
    ROUNDS,
    Answered,
    Compared,
    FactsSums,
    ScaleSums,
    Told,
    facts_sums,
    scale_sums,
    with_noise,
)

REPLIES = "facts"  # the folder of replies in the state folder
LARGEST = 1 << 26  # bytes of a request
LONGEST_NAME = 200  # characters of a class or a category
LARGEST_SUM = 2.0**31  # of all sites, if sums are secure
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
    if question.unnamed and policy.least_rows == 1:
        raise SiteError(
            f"{file}: the question wants the names of {question.unnamed[0]}, which may be those of "
            "single rows: policy.least_rows = 5 allows names of five rows or more",
            "policy",
            "least_rows",
        )
    _check_columns(question, site)
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


def _check_columns(question: Question, site: SiteFile) -> None:
    """Raise SiteError if a question names a column that the site's file leaves out."""
    options = site.table.data.options
    stated, ignored = options.get("columns"), options.get("ignore", ())
    for name in question.columns:
        if isinstance(ignored, list) and name in ignored:
            raise SiteError(f"{site.file}: data.ignore names {name!r}", "policy", "columns")
        if isinstance(stated, dict) and name not in stated:
            raise SiteError(f"{site.file}: data.columns has no {name!r}", "policy", "columns")


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
        for key, found in names.items():
            if len(found) > MOST_NAMES or any(len(name) > LONGEST_NAME for name in found):
                raise SiteError(
                    f"{key}: {len(found)} names, of which the longest has "
                    f"{max(map(len, found))} characters; at most {MOST_NAMES} names of "
                    f"{LONGEST_NAME} characters are told: list them in the question"
                )
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
    private = question.epsilon is not None
    own = Data.model_validate({"name": site.table.data.name, **site.data_options})
    section = as_asked(own, question, filling)
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


def _allowed(data: Dataset, site: SiteFile) -> SiteRows:
    """Return the rows without those of classes that the site's policy holds back."""
    check_classes(data, site)
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
        self._check_table()
        if self.question.unnamed:
            rows = read_rows(self.question, None, self.file, self.secret)
            names = rows.told_names(self.question, self.file.policy.least_rows)
        invitation = self.invitation
        hello = Hello(
            run=invitation.run, digest=invitation.digest, number=invitation.number, names=names
        )
        for key, told in names.items():
            self._log(f"tells the names of {key}: {listed(told)}")
        return hello

    def _table(self) -> TableFrame | None:
        """Return the site's table as it is, if its rows are one."""
        options = self.file.data_options
        path, sep, signs = (options.get(key) for key in ("path", "sep", "missing_signs"))
        if self.file.table.data.name != TABLE or not isinstance(path, str):
            return None
        further = [str(sign) for sign in signs] if isinstance(signs, list) else []
        return load_table(
            existing(path), TableForm.of(sep if isinstance(sep, str) else None, further)
        )

    def _check_table(self) -> None:
        """Raise SiteError if the table lacks a column; say which cells hold no number."""
        if (table := self._table()) is None:
            return
        try:
            expect(table, [*self.question.columns])
        except FedgistError as error:
            raise SiteError(str(error), "plan", "columns") from error
        for name in self.question.columns:
            if name not in dict(self.question.asked):
                continue
            lost = cells_without_number(table, name)
            if lost.any():
                self._log(
                    f"{name}: {int(lost.sum())} cells hold no number and count as missing, such as "
                    f"in row {int(lost.argmax()) + 1} below the header"
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
            self._log(f"{header.stage} failed: {first_line(error)}")
            hidden = self.question.epsilon is not None
            return refusal(header, MessageError(CANNOT, "work") if hidden else error)

    def _answer(self, request: Header, messages: Mapping[str, Tree]) -> bytes:
        purpose = "finish" if request.stage == COMPARE else "train"
        expected = (self.invitation.run, self.invitation.number, GROUP, purpose)
        found = (request.run, request.client, request.architecture, request.purpose)
        down = messages.get("download")
        if found != expected or ROUNDS.get(request.stage) != request.round:
            raise MessageError("a request of another exchange")
        kept = self._kept(request)
        if kept.exists():
            return kept.read_bytes()
        self._check_asked_once(request.stage)
        if request.stage == COMPARE and isinstance(down, Answered):
            words = self._compared(down)
            told = refusal(request, MessageError(words, "rows")) if words else None
            return self._keep(kept, told or self._reply(request, Compared()))
        if request.stage == COMPARE or not isinstance(down, Told):
            raise MessageError("a question was expected")
        plan = Plan(self.question, _filling(down))
        rows = read_rows(self.question, plan.filling, self.file, self.secret)
        self._charge(request.round, rows.data)
        with rows_stay_home(private=self.question.epsilon is not None):
            sums = self._sums(request.stage, plan, rows)
        return self._keep(kept, self._reply(request, with_noise(self.question, sums)))

    def _kept(self, request: Header) -> Path:
        """Return where the reply to a request is kept."""
        return self.folder / f"{request.stage}-{request.messages['download'].digest}.reply"

    def _keep(self, path: Path, reply: bytes) -> bytes:
        """Write a reply down before it leaves."""
        files.private_folder(self.folder)
        files.write(path, reply, private=True)
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
        least = self.file.policy.least_rows
        pieces = rows_of(plan, rows.data, rows.used)
        if stage != FACTS:
            return without_few_scales(scale_sums(plan, pieces), len(rows.used), least)
        exact = facts_sums(plan, pieces)
        self._check_sizes(plan, exact)
        sums, sentences = without_few(plan, exact, least)
        other = float(exact.rows) - float(exact.classes.sum())
        if plan.counted and self.question.target == "class" and other >= 1:
            sentences.append(f"{other:.0f} rows are of no listed class")
        for sentence in sentences:
            self._log(sentence)
        self.sums[plan.filling.model_dump_json()] = sums
        return sums

    def _check_sizes(self, plan: Plan, sums: FactsSums) -> None:
        """Raise MessageError if a number is too far from its centre to be summed."""
        sites = len(self.invitation.names)
        most = LARGEST_SUM / sites if self.question.sums == "secure" else math.inf
        far = [
            number.name
            for number, square in zip(plan.numbers, sums.squares.tolist(), strict=True)
            if not square < most
        ]
        if not far:
            return
        for name in far:
            self._log(f"{name}: some values are too far from the centre, in its unit, to be summed")
        raise MessageError(
            f"{listed(far)}: values too far from the centre: state a larger unit, or leave it out",
            "rows",
        )

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

    def _compared(self, answered: Answered) -> str:
        """Log how this site's rows differ from the others'; return what the server is told."""
        plan = Plan(self.question, _filling(told := Told(answered.text)))
        digest = Packed.of(told).about.digest
        if not (self.folder / f"{FACTS}-{digest}.reply").exists():
            raise MessageError("this site gave no facts that could be in this total", "state")
        with rows_stay_home(private=self.question.epsilon is not None):
            key = plan.filling.model_dump_json()
            if key not in self.sums:
                rows = read_rows(self.question, plan.filling, self.file, self.secret)
                self._sums(FACTS, plan, rows)
            found = differences(plan, self.sums[key], answered.total, len(self.invitation.names))
            found += self._order_of_columns()
        for sentence in found:
            self._log(f"differs: {sentence}")
        if not found:
            self._log("this site's rows are like those of the others")
        open_sums = self.question.sums == "plain" and self.question.epsilon is None
        if found and self.file.policy.differences == "refuse" and open_sums:
            return f"its rows differ in {listed(_subjects(found))}"
        return ""

    def _order_of_columns(self) -> list[str]:
        """Return a sentence if a table has the columns in another order than the question."""
        if (table := self._table()) is None:
            return []
        own = [name for name in table.frame.columns if name in self.question.columns]
        if own == [*self.question.columns]:
            return []
        return [f"the order of columns: it is {listed(own)} here; they are read by name"]

    def _log(self, text: str) -> None:
        audit_log.write(self.file.state_folder, f"facts {self.invitation.run}: {text}")
        self.say(text)


def _subjects(sentences: Iterable[str]) -> list[str]:
    """Return what sentences on differences are about, without any number of the site's rows."""
    return [sentence.partition(":")[0] for sentence in sentences]


def _filling(told: Told) -> Filling:
    try:
        return Filling.model_validate_json(told.read())
    except ValueError as error:
        raise MessageError("a filling that cannot be read") from error


def without_few_scales(sums: ScaleSums, rows: int, least: int) -> ScaleSums:
    """Return sums of so many rows without those of numbers that few rows have or lack."""
    few = _few(sums.present, rows, least)
    return map_leaves(lambda array: array.masked_fill(few, 0.0), sums)


def _few(present: Tensor, rows: float, least: int) -> Tensor:
    """Return which numbers fewer than ``least`` of the rows have, or lack: Booleans (numbers,)."""
    missing = rows - present
    return ((present > 0) & (present < least)) | ((missing > 0) & (missing < least))


def without_few(plan: Plan, sums: FactsSums, least: int) -> tuple[FactsSums, list[str]]:
    """Return sums without counts of fewer than ``least`` rows, and what was left out, in words.

    If what is left out of a whole could be read off the rest, the rest loses a count as well.
    """
    if least == 1:
        return sums, []
    few = _few(sums.present, float(sums.rows), least)
    left_out = [n.name for n, is_few in zip(plan.numbers, few.tolist(), strict=True) if is_few]
    changes = {
        name: getattr(sums, name).masked_fill(few, 0.0) for name in ("present", "total", "squares")
    }
    counts = sums.histograms, sums.categories, sums.classes
    bins, categories, classes = (array.clone() for array in counts)
    if plan.counted and plan.question.target == "class":
        left_out += ["classes"] * _hide(classes, float(sums.rows), least)
    elif plan.question.target == "labels":
        few_labels = _few(classes, float(sums.rows), least)
        left_out += ["labels"] * bool(few_labels.any())
        classes.masked_fill_(few_labels, 0.0)
    at = 0
    for place, number in enumerate(plan.numbers):
        width = len(number.edges) + 1 if number.edges else 0
        here = slice(at, at + width)
        at += width
        if few[place]:
            bins[here] = 0.0
        hidden = _hide(bins[here], float(changes["present"][place]), least)
        left_out += [f"bins of {number.name}"] * hidden
    at = 0
    for name, kinds in plan.categories.items():
        here = slice(at, at + len(kinds))
        at += len(kinds)
        left_out += [f"categories of {name}"] * _hide(categories[here], float(sums.rows), least)
    changes |= {"histograms": bins, "categories": categories, "classes": classes}
    apart = [float(p) - float(sums.complete) for p in [*changes["present"], sums.rows]]
    if float(sums.complete) < least or any(0 < rows < least for rows in apart):
        left_out += ["correlations"] * bool(sums.complete > 0)
        changes |= {n: getattr(sums, n) * 0.0 for n in ("complete", "complete_total", "products")}
    said = f"not told, because of fewer than policy.least_rows = {least} rows: {listed(left_out)}"
    return replace(sums, **changes), [said] if left_out else []


def _hide(counts: Tensor, whole: float, least: int) -> bool:
    """Set counts (kinds,) of fewer than ``least`` rows to 0; return whether any was told before.

    If those that are missing from ``whole`` are then fewer than ``least`` rows together, the
    smallest count that is left goes as well, until they are as many.
    """
    before = counts.clone()
    counts.masked_fill_(counts < least, 0.0)
    while 0 < whole - float(counts.sum()) < least and bool((counts > 0).any()):
        counts[counts.masked_fill(counts == 0, math.inf).argmin()] = 0.0
    return not torch.equal(counts, before)
