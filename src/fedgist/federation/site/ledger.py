"""The ledger of a site's privacy budget: what all runs together have spent of it.

The budget belongs to the data, under the name that ``site.toml`` gives them. If the rows change,
the budget goes on, because most rows are usually the same. Only the owner can say that the data are
new (``fedgist site --new-data``).

A ledger is sealed by its digest, which the last charge in the audit log names. A new ledger is
written beside the old one, then named in the audit log, and then put in the old one's place. So a
process that is killed at any moment leaves one of two ledgers, and the audit log says which one
holds. The lock of the state folder keeps other processes away.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from fedgist.errors import MessageError, SiteError, first_line
from fedgist.federation.site import audit_log
from fedgist.options import CLOSED
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.digests import of_text

LEDGER, NEXT = "ledger.json", "ledger.next.json"
NEARLY = 1e-9  # of an epsilon or a delta, by rounding
REMEDY = (
    "put ledger.json and audit.log back from one copy. Without them nobody knows how much of the "
    "privacy budget is spent; if the rows are new, begin with an empty state folder"
)


class Spent(BaseModel):
    """The epsilon and the delta that one run has spent, up to a round.

    ``recipe`` is the digest of the run's settings, to which the charges of the run are bound.
    """

    model_config = CLOSED

    epsilon: float
    delta: float
    round: int
    recipe: str


class Account(BaseModel):
    """The budget of one set of data: their digest, and what each run has spent."""

    model_config = CLOSED

    digest: str
    runs: dict[str, Spent] = {}

    @property
    def epsilon(self) -> float:
        """The epsilon of all runs together; those of single runs add up."""
        return sum(spent.epsilon for spent in self.runs.values())

    @property
    def delta(self) -> float:
        """The delta of all runs together; those of single runs add up."""
        return sum(spent.delta for spent in self.runs.values())


class Accounts(BaseModel):
    """The content of a ledger: accounts by the name of the data, and accounts that were closed."""

    model_config = CLOSED

    format: Literal[1] = 1
    accounts: dict[str, Account] = {}
    closed: list[tuple[str, Account]] = []


@dataclass(frozen=True)
class Limits:
    """The largest epsilon and the largest delta of all runs together."""

    epsilon: float
    delta: float


class BudgetError(MessageError):
    """A charge that the budget does not allow.

    Its text goes to the server, so it tells nothing of other runs. ``detail`` is for the owner.
    """

    def __init__(self, text: str, detail: str) -> None:
        super().__init__(text, "budget")
        self.detail = detail


@dataclass(frozen=True)
class Ledger:
    """The ledger in a site's state folder, whose lock the caller holds."""

    folder: Path

    def account(self, data: str, digest: str) -> Account:
        """Return the account of the data, or a new one if there is none."""
        return self._read().accounts.get(data, Account(digest=digest))

    def charged(self, data: str, run: str) -> Spent | None:
        """Return what a run has spent; None if it was never charged."""
        account = self._read().accounts.get(data)
        return None if account is None else account.runs.get(run)

    def charge(
        self, data: str, digest: str, run: str, spent: Spent, limits: Limits | None
    ) -> Account:
        """Write down what a run will have spent after a round, before it is spent.

        Raises
        ------
        BudgetError
            If all runs together would spend more than the limits, if there are any. Nothing is
            charged then.
        MessageError
            If the run was charged with another recipe. Nothing is charged then.
        """
        accounts = self._read()
        account = accounts.accounts.get(data, Account(digest=digest))
        before = account.runs.get(run)
        if before is not None:
            check_same_recipe(run, before, spent.recipe)
        most = spent if before is None or before.epsilon < spent.epsilon else before
        later = account.model_copy(update={"runs": account.runs | {run: most}})
        if limits is not None:
            _check_limits(account, later, spent.round, limits)
        if later != account or data not in accounts.accounts:
            amount = f"epsilon {most.epsilon:g} and delta {most.delta:g} up to round {most.round}"
            self._write(accounts, data, later, f"run {run} is charged {amount}, of {data!r}")
        return later

    def begin_anew(self, data: str, digest: str) -> Account | None:
        """Close the account of the data and open a new one; return the closed one."""
        accounts = self._read()
        before = accounts.accounts.get(data)
        closed = [*accounts.closed, *([] if before is None else [(data, before)])]
        changed = accounts.model_copy(update={"closed": closed})
        self._write(changed, data, Account(digest=digest), f"a new budget of {data!r} is opened")
        return before

    def _read(self) -> Accounts:
        """Return the content of the ledger that the audit log names.

        Raises
        ------
        SiteError
            If it is damaged, missing or an old copy, with the remedy.
        """
        named, path = audit_log.last_ledger(self.folder), self.folder / LEDGER
        for candidate in (path, self.folder / NEXT):
            try:
                text = candidate.read_text("utf-8")
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise SiteError(f"{path} cannot be read ({first_line(error)}): {REMEDY}") from error
            if named == of_text(text):
                return self._parsed(text)
        if named is None and not path.exists() and not self._has_releases():
            return Accounts()
        raise SiteError(f"{path} {self._problem(named)}: {REMEDY}")

    def _problem(self, named: str | None) -> str:
        if named is None:
            return "is not named by audit.log, which is missing or was changed"
        missing = not (self.folder / LEDGER).exists()
        return "is missing" if missing else "is damaged, or older than the last charge in audit.log"

    def _has_releases(self) -> bool:
        return any(self.folder.glob("runs/*/releases.json"))

    def _parsed(self, text: str) -> Accounts:
        try:
            return Accounts.model_validate_json(text)
        except ValidationError as error:
            path = self.folder / LEDGER
            raise SiteError(f"{path} cannot be read ({first_line(error)}): {REMEDY}") from error

    def _write(self, accounts: Accounts, data: str, account: Account, event: str) -> None:
        changed = accounts.model_copy(update={"accounts": accounts.accounts | {data: account}})
        text = json.dumps(changed.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
        files.write(self.folder / NEXT, text, private=True)
        audit_log.write_charge(self.folder, of_text(text), event)
        _put_in_place(self.folder)


def _put_in_place(folder: Path) -> None:
    (folder / NEXT).replace(folder / LEDGER)


def check_same_recipe(run: str, charged: Spent, recipe: str) -> None:
    """Raise MessageError if a run was charged with another recipe than the one of this digest."""
    if charged.recipe != recipe:
        raise MessageError(f"run {run} was charged with another recipe: begin a new run", "plan")


def _check_limits(before: Account, later: Account, number: int, limits: Limits) -> None:
    pairs = {
        "epsilon": (before.epsilon, later.epsilon, limits.epsilon),
        "delta": (before.delta, later.delta, limits.delta),
    }
    for name, (spent, would_be, limit) in pairs.items():
        if would_be > limit * (1 + NEARLY):
            raise BudgetError(
                f"round {number} would spend more {name} than this site's policy allows",
                f"round {number} would spend more than policy.{name} = {limit:g}: {spent:.4g} are "
                f"spent, and {would_be:.4g} would be",
            )
