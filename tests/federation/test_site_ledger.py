"""The ledger of a site's privacy budget: charged once, over runs, by one process at a time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from fedgist.errors import MessageError, SiteError
from fedgist.federation.site_ledger import LEDGER, Ledger, Spent

FORKS = multiprocessing.get_context("fork")


def spent(epsilon: float, number: int = 1) -> Spent:
    return Spent(epsilon=epsilon, delta=1e-6, round=number)


def test_runs_add_up_and_a_round_is_charged_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for epsilon in (1.0, 2.0, 2.0, 1.0):  # round 2 twice; an older round costs nothing more
        ledger.charge("d", "x", "first", spent(epsilon), 5.0)
    assert ledger.account("d", "x").epsilon == 2.0
    assert ledger.charge("d", "x", "second", spent(3.0), 5.0).epsilon == 5.0
    before = (tmp_path / LEDGER).read_bytes()
    with pytest.raises(MessageError, match="round 2 would spend more than this site's epsilon 5"):
        ledger.charge("d", "x", "second", spent(3.1, 2), 5.0)
    assert (tmp_path / LEDGER).read_bytes() == before
    assert ledger.account("d", "x").delta == pytest.approx(2e-6)


def test_other_rows_go_on_with_the_budget_until_the_owner_opens_a_new_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("d", "x", "r", spent(4.0), 5.0)
    with pytest.raises(MessageError):
        ledger.charge("d", "other rows", "s", spent(2.0), 5.0)
    closed = ledger.begin_anew("d", "other rows")
    assert closed is not None
    assert closed.epsilon == 4.0
    assert ledger.charge("d", "other rows", "s", spent(2.0), 5.0).epsilon == 2.0
    assert ledger.account("another table", "y").epsilon == 0.0


def test_a_damaged_ledger_is_refused_and_not_begun_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("d", "x", "r", spent(4.0), 5.0)
    (tmp_path / LEDGER).write_text("{")
    with pytest.raises(SiteError, match="nobody knows how much of the privacy budget is spent"):
        ledger.charge("d", "x", "r", spent(4.5), 5.0)


def _spends(folder: Path, run: str) -> None:
    for number in range(1, 11):
        try:
            Ledger(folder).charge("d", "x", run, spent(0.2 * number, number), 3.0)
        except MessageError:
            return


def test_two_runs_at_once_cannot_spend_the_same(tmp_path: Path) -> None:
    runs = [FORKS.Process(target=_spends, args=(tmp_path, name)) for name in ("one", "two")]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
        assert run.exitcode == 0
    account = Ledger(tmp_path).account("d", "x")
    assert account.epsilon <= 3.0 + 1e-9
    assert account.epsilon >= 2.8  # nothing of the budget was lost
