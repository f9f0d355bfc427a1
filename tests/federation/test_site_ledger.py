"""The ledger of a site's privacy budget: charged once, over runs, and sealed by the audit log."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedgist.errors import MessageError, SiteError
from fedgist.federation.site import ledger as site_ledger
from fedgist.federation.site.audit_log import AUDIT
from fedgist.federation.site.ledger import LEDGER, BudgetError, Ledger, Limits, Spent
from fedgist.runs.files import atomic_files

LIMITS = Limits(5.0, 1e-5)


def spent(epsilon: float, number: int = 1, recipe: str = "0a") -> Spent:
    return Spent(epsilon=epsilon, delta=1e-6, round=number, recipe=recipe)


def test_runs_add_up_and_a_round_is_charged_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for epsilon in (1.0, 2.0, 2.0, 1.0):  # round 2 twice; an older round costs nothing more
        ledger.charge("d", "x", "first", spent(epsilon), LIMITS)
    assert ledger.account("d", "x").epsilon == 2.0
    assert ledger.charge("d", "x", "second", spent(3.0), LIMITS).epsilon == 5.0
    before = (tmp_path / LEDGER).read_bytes()
    with pytest.raises(MessageError, match="round 2 would spend more epsilon than this site"):
        ledger.charge("d", "x", "second", spent(3.1, 2), LIMITS)
    assert (tmp_path / LEDGER).read_bytes() == before
    assert ledger.account("d", "x").delta == pytest.approx(2e-6)


def test_other_rows_go_on_with_the_budget_until_the_owner_opens_a_new_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("d", "x", "r", spent(4.0), LIMITS)
    with pytest.raises(MessageError):
        ledger.charge("d", "other rows", "s", spent(2.0), LIMITS)
    closed = ledger.begin_anew("d", "other rows")
    assert closed is not None
    assert closed.epsilon == 4.0
    assert ledger.charge("d", "other rows", "s", spent(2.0), LIMITS).epsilon == 2.0
    assert ledger.account("another table", "y").epsilon == 0.0


def test_deltas_of_runs_add_up_and_are_limited_as_epsilons_are(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for run in range(10):
        ledger.charge("d", "x", f"run {run}", spent(0.1), LIMITS)
    with pytest.raises(BudgetError, match="would spend more delta than") as refusal:
        ledger.charge("d", "x", "an eleventh", spent(0.1), LIMITS)
    # the server hears nothing of other runs, the owner everything
    assert not any(number in str(refusal.value) for number in ("1e-05", "1.1e-05"))
    assert "1e-05 are spent, and 1.1e-05 would be" in refusal.value.detail


def test_a_run_is_charged_for_one_recipe(tmp_path: Path) -> None:
    # seen: five recipes under one run were charged as one, epsilon 4 for 10 releases of 10.42
    ledger = Ledger(tmp_path)
    ledger.charge("d", "x", "r", spent(1.0), LIMITS)
    with pytest.raises(MessageError, match="run r was charged with another recipe"):
        ledger.charge("d", "x", "r", spent(1.0, recipe="0b"), LIMITS)
    assert ledger.charge("d", "x", "s", spent(1.0, recipe="0b"), LIMITS).epsilon == 2.0


def test_the_digest_of_the_rows_behind_a_budget_stays_that_of_its_opening(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for digest, epsilon in (("x", 1.0), ("y", 2.0)):
        ledger.charge("d", digest, "r", spent(epsilon), LIMITS)
    assert ledger.account("d", "z").digest == "x"


def digit_changed(folder: Path) -> None:
    text = (folder / LEDGER).read_text()
    (folder / LEDGER).write_text(text.replace("4.0", "0.5"))


def old_copy(folder: Path) -> None:
    shutil.copy(folder / "old", folder / LEDGER)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: (folder / LEDGER).write_text("{"),
    "a digit changed": digit_changed,
    "an old copy": old_copy,
    "gone": lambda folder: (folder / LEDGER).unlink(),
    "its log is gone": lambda folder: (folder / AUDIT).unlink(),
    "the line of its charge is gone": lambda folder: (folder / AUDIT).write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_ledger_that_is_not_that_of_the_last_charge_is_refused(
    damage: str, tmp_path: Path
) -> None:
    # seen: a lost ledger began at zero, and a changed digit was believed
    ledger = Ledger(tmp_path)
    ledger.charge("d", "x", "r", spent(2.0), LIMITS)
    shutil.copy(tmp_path / LEDGER, tmp_path / "old")
    ledger.charge("d", "x", "r", spent(4.0, 2), LIMITS)
    DAMAGE[damage](tmp_path)
    tries: list[Callable[[], object]] = [
        lambda: ledger.charge("d", "x", "r", spent(4.5), LIMITS),
        lambda: ledger.account("d", "x"),
        lambda: ledger.begin_anew("d", "y"),
    ]
    for attempt in tries:
        with pytest.raises(SiteError, match="nobody knows how much of the privacy budget is spent"):
            attempt()


def test_without_ledger_and_log_releases_still_tell_that_something_is_lost(tmp_path: Path) -> None:
    assert Ledger(tmp_path).account("d", "x").epsilon == 0.0
    (tmp_path / "runs/r").mkdir(parents=True)
    (tmp_path / "runs/r/releases.json").write_text("{}")
    with pytest.raises(SiteError, match="nobody knows"):
        Ledger(tmp_path).account("d", "x")


KILLED_AT = {"write": 1.0, "append": 1.0, "append, torn": 1.0, "replace": 2.0}


@pytest.mark.parametrize("point", KILLED_AT)
def test_a_kill_within_a_charge_leaves_the_old_ledger_or_the_new(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("d", "x", "r", spent(1.0), LIMITS)

    def dies(*given: Any, **_: Any) -> None:
        if point.endswith("torn"):
            with (tmp_path / AUDIT).open("ab") as log:
                log.write(given[1][:40])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if point == "replace":
            patch.setattr(site_ledger, "_put_in_place", dies)
        else:
            patch.setattr(atomic_files, point.split(",", maxsplit=1)[0], dies)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge("d", "x", "r", spent(2.0, 2), LIMITS)
    assert ledger.account("d", "x").epsilon == KILLED_AT[point]
    assert ledger.charge("d", "x", "r", spent(3.0, 3), LIMITS).epsilon == 3.0
    assert ledger.account("d", "x").epsilon == 3.0
