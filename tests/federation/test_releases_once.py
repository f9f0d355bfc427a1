"""A private site that is killed at any moment never releases a stage twice, nor spends twice."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedgist.engines.client_host import ClientHost
from fedgist.errors import MessageError, SiteError
from fedgist.federation.site import audit_log
from fedgist.federation.site.agent import SiteAgent
from fedgist.federation.site.policy import ReleasePolicy
from fedgist.federation.site.store import SiteStore
from fedgist.wire.envelope import unseal
from private_sites import ANY_SIZE, PRIVATE, RUN, plan_of, request, side_of, site_file
from three_sites import recipe, write_rows

FORKS = multiprocessing.get_context("fork")


def in_a_process(work: Callable[[], None]) -> int:
    """Do something in a process of its own; return its exit code."""
    process = FORKS.Process(target=work)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def killed(*given: Any, **named: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    def done(*given: Any, **named: Any) -> Any:
        function(*given, **named)
        killed()

    return done


def stored_reply(function: Callable[..., Any]) -> Callable[..., Any]:
    def keep(self: SiteStore, state: Any) -> None:
        function(self, state)
        if state.answered:
            killed()

    return keep


POINTS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "before the charge": (ReleasePolicy, "before_training", lambda _: killed),
    "after the charge": (ReleasePolicy, "before_training", after),
    "in training": (ClientHost, "train", lambda _: killed),
    "before the state": (ReleasePolicy, "before_sending", after),
    "after the state": (SiteStore, "keep", stored_reply),
    "after sending": (SiteAgent, "answer", lambda function: function),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_site_releases_each_stage_at_most_once(point: str, tmp_path: Path) -> None:
    write_rows(tmp_path)
    side = side_of(recipe("fedlog", **PRIVATE))
    plan, asks, out = plan_of(side), [request(side, n) for n in (1, 2)], tmp_path / "sent"
    out.mkdir()

    def answer_all(label: str, numbers: tuple[int, ...], kill: str | None) -> Callable[[], None]:
        def work() -> None:
            agent = SiteAgent(site_file(tmp_path))
            agent.prepare(plan)
            for number in numbers:
                if kill is not None and number == 2:
                    owner, name, change = POINTS[kill]
                    setattr(owner, name, change(getattr(owner, name)))
                (out / f"{label}-{number}").write_bytes(agent.answer(asks[number - 1]))
            if kill is not None:
                killed()

        return work

    assert in_a_process(answer_all("first", (1, 2), point)) == -signal.SIGKILL
    assert in_a_process(answer_all("again", (1, 2), None)) == 0
    assert in_a_process(answer_all("third", (2, 2), None)) == 0

    assert (out / "again-1").read_bytes() == (out / "first-1").read_bytes()
    replies = [p.read_bytes() for p in sorted(out.glob("*-2"))]
    uploads = {blob for blob in replies if unseal(blob, ANY_SIZE)[0].purpose == "reply"}
    refusals = {unseal(b, ANY_SIZE)[0].reason for b in replies if b not in uploads}
    if point in {"before the charge", "after the state", "after sending"}:
        assert (len(uploads), refusals) == (1, set())  # one release, sent again as it was
    elif point == "after the charge":  # an old copy of the state looks the same
        assert not uploads
        assert len(refusals) == 1
        assert refusals.pop().startswith("round 2 was charged before this site lost its state")
    else:  # begun: whether it left is not known, so it is not made again
        assert not uploads
        assert len(refusals) == 1
        assert refusals.pop().startswith("the release of round 2 was made")
    ledger = json.loads((tmp_path / "state/ledger.json").read_text())
    spent = ledger["accounts"]["data"]["runs"][RUN]
    assert side.spending is not None
    assert spent["epsilon"] == pytest.approx(side.spending.epsilon(2))
    assert spent["round"] == 2


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_an_old_copy_of_a_runs_state_makes_no_charged_release_again(
    kept: int, tmp_path: Path
) -> None:
    # seen: two replies to round 1 with different noise, and one charge
    write_rows(tmp_path)
    side, folder = side_of(recipe("fedlog", **PRIVATE)), tmp_path / "state/runs"
    agent = SiteAgent(site_file(tmp_path))
    agent.prepare(plan_of(side))
    for number in range(1, 4):
        if number == kept + 1:
            shutil.copytree(folder, tmp_path / "copy")
        assert unseal(agent.answer(request(side, number)), ANY_SIZE)[0].purpose == "reply"
    agent.close()
    shutil.rmtree(folder)
    shutil.move(tmp_path / "copy", folder)
    agent = SiteAgent(site_file(tmp_path))
    agent.prepare(plan_of(side))
    for number in range(kept + 1, 4):
        header, _ = unseal(agent.answer(request(side, number)), ANY_SIZE)
        assert header.purpose == "refusal"
        assert f"round {number} was charged before this site lost its state" in header.reason


@pytest.mark.slow
def test_the_budget_of_the_data_is_spent_over_runs(tmp_path: Path) -> None:
    write_rows(tmp_path)
    side = side_of(recipe("fedlog", **PRIVATE))
    assert side.spending is not None
    limit = side.spending.epsilon(3) + side.spending.epsilon(1) + 0.01  # a run, and a round
    for run, last in (("a" * 16, 3), ("b" * 16, 1)):
        agent = SiteAgent(site_file(tmp_path, epsilon=limit, delta=2e-5))
        agent.prepare(plan_of(side, run))
        for number in range(1, 4):
            header, _ = unseal(agent.answer(request(side, number, run)), ANY_SIZE)
            assert header.purpose == ("reply" if number <= last else "refusal"), number
    assert header.reason == "round 3 would spend more epsilon than this site's policy allows"
    lines = (tmp_path / "state" / audit_log.AUDIT).read_text().splitlines()
    assert any("refused: round 2 would spend more" in line for line in lines)
    assert any(f"more than policy.epsilon = {limit:g}: " in line for line in lines)
    assert side.spending.epsilon(3) == pytest.approx(4.0, rel=1e-3)


@pytest.mark.slow
def test_a_site_that_lost_its_state_does_not_release_a_charged_round_again(tmp_path: Path) -> None:
    write_rows(tmp_path)
    side = side_of(recipe("fedlog", **PRIVATE))
    agent = SiteAgent(site_file(tmp_path))
    agent.prepare(plan_of(side))
    for number in (1, 2):
        assert unseal(agent.answer(request(side, number)), ANY_SIZE)[0].purpose == "reply"
    agent.close()
    shutil.rmtree(tmp_path / "state/runs")
    again = SiteAgent(site_file(tmp_path))
    with pytest.raises(SiteError, match=r"its state in .* is missing"):
        again.prepare(plan_of(side, last=(2, 0, "")))
    begin = plan_of(side, last=(2, 0, ""), state_lost="begin")
    assert again.prepare(begin)["began_anew"] is True
    again.close()
    later = SiteAgent(site_file(tmp_path))  # a restart does not forget what was lost
    later.prepare(begin)
    header, _ = unseal(later.answer(request(side, 2)), ANY_SIZE)
    assert header.reason.startswith("round 2 was charged before this site lost its state")
    assert unseal(later.answer(request(side, 3)), ANY_SIZE)[0].purpose == "reply"


@pytest.mark.slow
def test_a_run_is_its_recipe_and_another_one_under_its_name_releases_nothing(
    tmp_path: Path,
) -> None:
    # seen: five recipes under one run, epsilon 4 in the ledger, 10 releases of true epsilon 10.42
    write_rows(tmp_path)
    privacy = PRIVATE["privacy"] | {"unit": "client"}
    sides = [
        side_of(
            recipe(
                "fedavg",
                rounds,
                privacy=privacy,
                clients={"max_rows": 2000, "architectures": {name: {"model": "mlp", "share": 1.0}}},
            )
        )
        for name, rounds in (("m1", 2), ("m2", 2), ("m1", 4))
    ]
    agent = SiteAgent(site_file(tmp_path))
    agent.prepare(plan_of(sides[0]))
    assert unseal(agent.answer(request(sides[0], 1)), ANY_SIZE)[0].purpose == "reply"
    for restarted in (False, True):
        for side in sides[1:]:
            if restarted:
                agent.close()
                agent = SiteAgent(site_file(tmp_path))
            with pytest.raises(SiteError, match="began here with another recipe: begin a new run"):
                agent.prepare(plan_of(side))
    agent.close()
    shutil.rmtree(tmp_path / "state/runs")
    agent = SiteAgent(site_file(tmp_path))  # its state is lost: the ledger still knows
    with pytest.raises(MessageError, match=f"run {RUN} was charged with another recipe: begin a"):
        agent.prepare(plan_of(sides[1], last=(1, 0, ""), state_lost="begin"))


@pytest.mark.slow
def test_without_privacy_a_run_goes_on_with_more_rounds_and_with_nothing_else_changed(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path)
    model = {"model": {"name": "mlp", "hidden": [8]}}
    agent = SiteAgent(site_file(tmp_path, epsilon=None))
    agent.prepare(plan_of(side_of(recipe("fedlog", 2, **model))))
    agent.prepare(plan_of(side_of(recipe("fedlog", 5, **model))))
    with pytest.raises(SiteError, match="began here with another recipe"):
        agent.prepare(plan_of(side_of(recipe("fedlog", 2, **model, seed=6))))


@pytest.mark.slow
def test_the_server_cannot_choose_delta(tmp_path: Path) -> None:
    # seen: policy.epsilon = 1 met by epsilon 0.001 with delta 0.999999: the true counts were sent
    write_rows(tmp_path)
    for delta, policy in ((0.999999, {}), (0.5, {}), (2e-5, {}), (1e-3, {"delta": 1e-4})):
        privacy = PRIVATE["privacy"] | {"epsilon": 1.0, "delta": delta}
        side = side_of(recipe("fedlog", **PRIVATE | {"privacy": privacy}))
        with pytest.raises(SiteError, match=r"policy\.delta = .*; the run has privacy\.delta = "):
            SiteAgent(site_file(tmp_path, epsilon=1.0, **policy)).prepare(plan_of(side))


@pytest.mark.slow
def test_one_state_folder_serves_one_process(tmp_path: Path) -> None:
    # seen: three processes of one folder made 9 releases of the 3 that were paid for
    write_rows(tmp_path)
    side = side_of(recipe("fedlog", **PRIVATE))
    agent = SiteAgent(site_file(tmp_path))
    agent.prepare(plan_of(side))
    with pytest.raises(SiteError, match="in use by another fedgist site: stop it first"):
        SiteAgent(site_file(tmp_path)).prepare(plan_of(side))

    def other() -> None:
        with contextlib.suppress(SiteError):
            SiteAgent(site_file(tmp_path)).prepare(plan_of(side))
            (tmp_path / "prepared").touch()

    assert in_a_process(other) == 0
    assert not (tmp_path / "prepared").exists()
    agent.close()
    assert in_a_process(other) == 0
    assert (tmp_path / "prepared").exists()


@pytest.mark.slow
def test_a_private_run_is_charged_also_before_the_owner_sets_a_limit(tmp_path: Path) -> None:
    # seen: runs before policy.epsilon was set were not counted
    write_rows(tmp_path)
    side = side_of(recipe("fedlog", **PRIVATE))
    agent = SiteAgent(site_file(tmp_path, epsilon=None))
    agent.prepare(plan_of(side))
    assert unseal(agent.answer(request(side, 1)), ANY_SIZE)[0].purpose == "reply"
    ledger = json.loads((tmp_path / "state/ledger.json").read_text())
    assert ledger["accounts"]["data"]["runs"][RUN]["round"] == 1
