"""The ledger of a site's privacy budget: what all runs together have spent of it.

The budget belongs to the data, under the name that ``site.toml`` gives them. If the rows change,
the budget goes on, because most rows are usually the same. Only the owner can say that the data are
new (``fedgist site --new-data``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from fedgist.errors import MessageError, SiteError, first_line
from fedgist.recipe.section import CLOSED
from fedgist.runs import atomic_files as files

LEDGER = "ledger.json"
PATIENCE_S = 30.0
NEARLY = 1e-9  # of an epsilon, by rounding


class Spent(BaseModel):
    """The epsilon and the delta that one run has spent, up to a round."""

    model_config = CLOSED

    epsilon: float
    delta: float
    round: int


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
        """The delta of all runs together."""
        return sum(spent.delta for spent in self.runs.values())


class Accounts(BaseModel):
    """The content of a ledger: accounts by the name of the data, and accounts that were closed."""

    model_config = CLOSED

    format: Literal[1] = 1
    accounts: dict[str, Account] = {}
    closed: list[tuple[str, Account]] = []


@dataclass(frozen=True)
class Ledger:
    """A ledger in a folder, which only one process changes at a time."""

    folder: Path

    def account(self, data: str, digest: str) -> Account:
        """Return the account of the data; open one if there is none."""
        return self._read().accounts.get(data, Account(digest=digest))

    def charge(self, data: str, digest: str, run: str, spent: Spent, limit: float) -> Account:
        """Write down what a run will have spent after a round, before it is spent.

        Raises
        ------
        MessageError
            If all runs together would spend more than ``limit``. Nothing is charged then.
        """
        with self._changing() as accounts:
            account = accounts.accounts.get(data, Account(digest=digest))
            before = account.runs.get(run)
            most = spent if before is None or before.epsilon < spent.epsilon else before
            later = account.model_copy(update={"runs": account.runs | {run: most}})
            if later.epsilon > limit * (1 + NEARLY):
                raise MessageError(
                    f"round {spent.round} would spend more than this site's epsilon {limit:g}: "
                    f"{account.epsilon:.4g} are spent, and {later.epsilon:.4g} would be",
                    "budget",
                )
            if later != account or data not in accounts.accounts:
                self._write(accounts, data, later)
        return later

    def begin_anew(self, data: str, digest: str) -> Account | None:
        """Close the account of the data and open a new one; return the closed one."""
        with self._changing() as accounts:
            before = accounts.accounts.get(data)
            closed = [*accounts.closed, *([] if before is None else [(data, before)])]
            changed = accounts.model_copy(update={"closed": closed})
            self._write(changed, data, Account(digest=digest))
        return before

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Accounts]:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / f"{LEDGER}.lock", timeout=PATIENCE_S)
        try:
            lock.acquire()
        except Timeout as error:
            text = f"{self.folder / LEDGER} is in use by another process"
            raise SiteError(text, "work") from error
        try:
            yield self._read()
        finally:
            lock.release()

    def _read(self) -> Accounts:
        path = self.folder / LEDGER
        try:
            return Accounts.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return Accounts()
        except (OSError, ValidationError) as error:
            raise SiteError(
                f"{path} cannot be read ({first_line(error)}): put it back from a copy. Without it "
                "nobody knows how much of the privacy budget is spent"
            ) from error

    def _write(self, accounts: Accounts, data: str, account: Account) -> None:
        changed = accounts.model_copy(update={"accounts": accounts.accounts | {data: account}})
        text = json.dumps(changed.model_dump(mode="json"), indent=2, sort_keys=True)
        files.write(self.folder / LEDGER, text + "\n")
