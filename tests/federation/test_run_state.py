"""The state of a federation's server: what is written while sites come and go."""

from __future__ import annotations

import errno
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest

from fedgist.engines.engine import Answer
from fedgist.errors import CheckpointError, FederationError, Stopped
from fedgist.federation.agreement.server_setup import server_context
from fedgist.federation.keys.roster import ROSTER, Roster, RosterFile, write_roster
from fedgist.federation.network.invitation import Greeting, Hello, Invitation, Versions, outlines
from fedgist.federation.network.wire import SiteWire
from fedgist.federation.server.engine import SitesEngine
from fedgist.federation.server.run_state import RunStateFile
from fedgist.federation.server.serving import SiteDesk
from fedgist.federation.server.status import STATUS, SiteStatus, StatusBoard, read_status
from fedgist.recipe.federation_section import FederationSection
from fedgist.recipe.resolve import resolve
from fedgist.runs.files.run_directory import PARTICIPANTS, SITES_STATE
from fedgist.runs.round import context
from fedgist.wire.remote_engine import Patience
from three_sites import NAMES, SAME, parsed, recipe

THREADS, SITES, WRITES = 4, 50, 400


def test_the_board_is_written_whole_by_several_threads(tmp_path: Path) -> None:
    # seen: 50 sites connected at once, and the server ended because a temporary file was gone
    board = StatusBoard(tmp_path, "run", "federation", "localhost:8443")
    board.sites = {number: SiteStatus.of(number, f"site-{number}") for number in range(SITES)}
    states = [("ready", "absent")[number % 2] for number in range(WRITES)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda n: board.saw(n % SITES, states[n]), range(WRITES)))
    assert len(json.loads((tmp_path / STATUS).read_text())["sites"]) == SITES
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


def test_the_reason_of_another_attempt_is_shown_during_the_pause(tmp_path: Path) -> None:
    # seen: "3 of 4 sites are ready; missing: nobody" in a federation of three
    board, absent = StatusBoard(tmp_path, "run", "federation", "localhost:8443"), Any
    parts: Any = (absent, SiteWire(), (), FederationSection(), absent, board, Event(), 0.01)
    engine = SitesEngine(*parts)
    engine.before_repeating("2 of 3 clients replied, and 3 are needed")
    assert board.waiting_for == "2 of 3 clients replied, and 3 are needed"
    assert (board.attempt, engine.pause_s) == (2, 0.02)


def test_a_message_on_its_way_does_not_hide_that_a_site_was_cut(tmp_path: Path) -> None:
    # seen: a revoked site was shown as training
    board = StatusBoard(tmp_path, "run", "federation", "localhost:8443")
    board.sites = {0: SiteStatus.of(0, "berlin")}
    board.saw(0, "ready")
    board.moved(0, 10, 0)
    assert board.sites[0].state == "training"
    board.saw(0, "revoked", "its certificate was revoked")
    board.moved(0, 10, 0)
    board.moved(0, 0, 7)
    board.saw(0, "absent")
    site = board.sites[0]
    assert (site.state, site.note) == ("revoked", "its certificate was revoked")
    assert (site.sent_bytes, site.received_bytes) == (20, 7)


def test_a_full_disk_does_not_end_a_run_because_of_its_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board = StatusBoard(tmp_path, "run", "federation", "localhost:8443")
    board.sites = {0: SiteStatus.of(0, "berlin")}

    def full(*given: Any, **how: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.open", full)
    board.saw(0, "ready")
    assert "No space left on device" in caplog.text


def test_a_site_that_begins_anew_is_in_the_record(tmp_path: Path) -> None:
    raw = recipe("fedavg", federation={"state_lost": "begin"}, **SAME)
    side = server_context(resolve(parsed(raw)), NAMES)
    state = RunStateFile.open(tmp_path, NAMES)
    state.answered([1], (4, 0))
    board = StatusBoard(tmp_path, state.state.run, "t", "localhost:8443")
    board.sites = {n: SiteStatus.of(n, name) for n, name in enumerate(NAMES)}
    write_roster(tmp_path / ROSTER, Roster("t", {name: n for n, name in enumerate(NAMES)}))
    desk = SiteDesk(side, state, board, RosterFile(tmp_path / ROSTER), b"", Event())
    greeting = Greeting(process="p", versions=Versions.own()).model_dump()
    invitation = Invitation.model_validate(desk.invitation(1, greeting))
    assert invitation.last == (4, 0, "")
    hello = Hello(
        run=invitation.run, digest=invitation.digest, number=1, outlines=outlines(side.task)
    )
    with pytest.raises(FederationError, match="the site lost its state: it answered round 4"):
        desk.judge(1, hello.model_dump(mode="json"))
    desk.judge(1, hello.model_copy(update={"began_anew": True}).model_dump(mode="json"))

    class Remote:
        method = side.method
        patience = Patience()

        def ask(self, *given: Any) -> Answer:
            return Answer(events=("another",))

    remote: Any = Remote()
    engine = SitesEngine(
        remote, SiteWire(), side.clients, FederationSection(), state, board, Event(), news=desk.news
    )
    ctx = context(side, 5, "train")
    assert engine.ask(ctx, [], []).events == (
        "another",
        "client 1 (lyon) lost its state and begins anew",
    )
    assert engine.ask(ctx, [], []).events == ("another",)


@pytest.mark.parametrize("sums", ["plain", "secure"])
def test_a_site_that_is_added_later_does_not_stop_secure_sums(sums: str, tmp_path: Path) -> None:
    # seen: each member refused the keys of "place 2", which are signed by another name
    raw = recipe("fedlog", federation={"sums": sums}, **SAME)
    side = server_context(resolve(parsed(raw)), [*NAMES[:2], "place 2"])
    state = RunStateFile.open(tmp_path, side.client_names)
    board = StatusBoard(tmp_path, state.state.run, "t", "localhost:8443")
    board.sites = {n: SiteStatus.of(n, name) for n, name in enumerate(side.client_names)}
    write_roster(tmp_path / ROSTER, Roster("t", {name: n for n, name in enumerate(NAMES)}))
    desk = SiteDesk(side, state, board, RosterFile(tmp_path / ROSTER), b"", Event())
    greeting = Greeting(process="p", versions=Versions.own()).model_dump()
    desk.invitation(1, greeting)
    if sums == "plain":
        desk.invitation(2, greeting)
        return
    with pytest.raises(FederationError, match=f"{NAMES[2]} was added after it began: it takes"):
        desk.invitation(2, greeting)


@pytest.mark.parametrize("lost", [{2}, {0, 2}, {0, 1, 2}])
def test_a_round_says_from_the_start_for_whom_it_waits(lost: set[int], tmp_path: Path) -> None:
    board, wire, shown = StatusBoard(tmp_path, "r", "t", "localhost:8443"), SiteWire(), list[str]()
    board.sites = {number: SiteStatus.of(number, name) for number, name in enumerate(NAMES)}
    stop, absent = Event(), cast("Any", None)

    def say(text: str) -> None:
        shown.append(text)
        assert json.loads((tmp_path / STATUS).read_text())["waiting_for"] == text
        stop.set()  # the first look is enough

    section = FederationSection(least_sites=3)
    state = RunStateFile.open(tmp_path, NAMES)
    engine = SitesEngine(absent, wire, (), section, state, board, stop, say=say)
    for site in {0, 1, 2} - lost:
        wire.join(site, lambda request: None)
    with pytest.raises(Stopped):
        engine.online(1)
    missing, ready = ", ".join(NAMES[site] for site in sorted(lost)), 3 - len(lost)
    are = "is" if ready == 1 else "are"
    assert shown == [f"waiting for {missing}; round 1 begins with 3 of 3, and {ready} {are} ready"]


def test_after_a_restart_a_round_says_when_it_begins_at_the_latest(tmp_path: Path) -> None:
    board, stop = StatusBoard(tmp_path, "r", "t", "localhost:8443"), Event()
    absent: Any = None
    board.sites = {number: SiteStatus.of(number, name) for number, name in enumerate(NAMES)}
    state, wire, shown = RunStateFile.open(tmp_path, NAMES), SiteWire(), list[str]()
    state.begin(4, [0, 1, 2])
    section = FederationSection(least_sites=2, deadline_s=600)

    def say(text: str) -> None:
        shown.append(text)
        stop.set()

    engine = SitesEngine(absent, wire, (), section, state, board, stop, say=say)
    for site in (0, 1):
        wire.join(site, lambda request: None)
    with pytest.raises(Stopped):
        engine.online(4)
    words = r"waiting for ulm; round 4 begins with 2 of 3 at \d\d:\d\d, or with all"
    assert re.fullmatch(words, shown[0])


def test_a_stage_under_way_says_whose_reply_it_waits_for(tmp_path: Path) -> None:
    board, wire = StatusBoard(tmp_path, "r", "t", "localhost:8443"), SiteWire()
    absent: Any = None
    board.sites = {number: SiteStatus.of(number, name) for number, name in enumerate(NAMES)}
    engine = SitesEngine(absent, wire, (), FederationSection(), absent, board, Event())
    wire.check = engine.check_stop
    for site in (0, 1, 2):
        wire.join(site, lambda request: None)
    engine.stage = "round 2, train goes on with 2 of 3 at 12:04, or with all"
    assert not list(wire.exchange([(0, (b"",)), (2, (b"",))], 0.01, 100))
    assert board.waiting_for == f"waiting for berlin, ulm; {engine.stage}"


def test_an_edited_state_or_list_of_participants_is_refused(tmp_path: Path) -> None:
    # seen: neither was sealed by anything
    folder = tmp_path / "run"
    first = RunStateFile.open(folder, NAMES)
    first.write_participants("round,client\r\n")
    first.write_participants("round,client\r\n1,0\r\n1,2\r\n")
    first.begin(2, [0, 1])
    assert RunStateFile.open(folder, NAMES).state == first.state
    participants, state = folder / PARTICIPANTS, folder / SITES_STATE
    for path, text in (
        (participants, "round,client\r\n1,0\r\n1,1\r\n"),
        (participants, ""),
        (state, state.read_text().replace('"begun": [', '"begun" : [').replace("2,", "3,", 1)),
    ):
        before = path.read_bytes()
        path.write_text(text, newline="")
        with pytest.raises(CheckpointError, match="changed: put it back from a copy"):
            RunStateFile.open(folder, NAMES)
        path.write_bytes(before)
    participants.unlink()
    with pytest.raises(CheckpointError, match="is missing or was changed"):
        RunStateFile.open(folder, NAMES)


def test_a_kill_between_the_state_and_the_participants_is_no_damage(tmp_path: Path) -> None:
    state = RunStateFile.open(tmp_path, NAMES)
    state.write_participants("round,client\r\n")
    before = (tmp_path / PARTICIPANTS).read_bytes()
    state.write_participants("round,client\r\n1,0\r\n")
    (tmp_path / PARTICIPANTS).write_bytes(before)
    RunStateFile.open(tmp_path, NAMES)


def test_an_edited_view_of_a_federation_says_so(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path, "run", "federation", "localhost:8443")
    board.sites = {0: SiteStatus.of(0, "berlin")}
    board.saw(0, "ready")
    seen = read_status(tmp_path)
    assert seen is not None
    assert (seen.problem, seen.sites[0].state) == ("", "ready")
    text = (tmp_path / STATUS).read_text()
    (tmp_path / STATUS).write_text(text.replace('"ready"', '"revoked"'))
    changed = read_status(tmp_path)
    assert changed is not None
    assert changed.problem.endswith("was changed since the server wrote it")
