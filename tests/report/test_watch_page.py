"""The page about runs in progress: its values, its texts from strangers, and damaged files."""

from __future__ import annotations

import json
import os
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedgist.federation.server.status import STATUS, FederationStatus, SiteStatus, read_status
from fedgist.report.page import watch_page
from fedgist.report.page.watch_page import RunView, fragment, page, read_state
from fedgist.runs.files.run_directory import LOCK, locked

from written import FEDERATION_STATE, change_line, write_federation, write_run  # isort: skip

NOW = 1764062003.5


def view(folder: Path, now: float | None = None) -> RunView:
    (run,) = read_state([folder], now=now).runs
    return run


class Texts(HTMLParser):
    """The tags of a page with their attributes, and the texts between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


# runs


def test_a_run_in_progress_is_shown_with_its_numbers(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "a",
        [0.5, 0.6, 0.55],
        planned=12,
        result=False,
        up=1000,
        down=3_000_000,
        columns={"privacy/epsilon": 1.25, "clients/asked": 3, "clients/replied": 2},
    )
    run = view(folder)
    assert (run.name, run.line, run.kind, run.state) == (
        str(folder),
        "fedlog, seed 0",
        "running",
        "running",
    )
    assert (run.done, run.planned) == (3, 12)
    assert dict(run.facts) == {
        "accuracy": "55.00 %",
        "time left": "9.0 s",  # nine rounds of a second
        "sent up": "3.0 kB",
        "sent down": "9.0 MB",  # in powers of 1000, not of 1024
        "epsilon spent": "1.25",
        "replies, last round": "2 of 3",
        "last round took": "1.0 s",
    }
    assert run.curve is not None
    assert (run.curve.low, run.curve.high) == ("50.00 %", "60.00 %")
    assert run.curve.words == (
        "Accuracy from round 1 to round 3: lowest 50.00 %, highest 60.00 %, last 55.00 %"
    )
    texts = Texts(fragment(read_state([folder]))).texts
    for text in ("accuracy", "55.00 %", "3", "of 12", "1.25", "accuracy by round"):
        assert any(text in shown for shown in texts), text


def test_a_curve_rises_where_the_metric_rises(tmp_path: Path) -> None:
    curve = view(write_run(tmp_path / "a", [0.5, 0.7, 0.6])).curve
    assert curve is not None
    points = [tuple(map(float, pair.split())) for pair in curve.path[1:].split(" L")]
    # an SVG's y axis points down: rejects a curve that is upside down
    assert points == [(4.0, 76.0), (160.0, 4.0), (316.0, 40.0)]
    assert curve.end == "M316.0 40.0h0"


def test_held_out_rows_are_shown_in_place_of_test_rows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5, 0.6], columns={"eval/validation/accuracy_mean": 0.25})
    run = view(folder)
    assert dict(run.facts)["accuracy"] == "25.00 % (validation)"
    assert run.metric == "accuracy (validation)"
    assert run.curve is not None
    assert run.curve.high == "25.00 %"
    assert "60.00" not in fragment(read_state([folder]))


def test_a_long_curve_has_few_points_and_the_last_of_them(tmp_path: Path) -> None:
    curve = view(write_run(tmp_path / "a", [r / 1000 for r in range(1000)])).curve
    assert curve is not None
    assert curve.path.count("L") + 1 == watch_page.MOST_POINTS
    assert curve.path.endswith(curve.end.removeprefix("M").removesuffix("h0"))


def test_runs_without_privacy_show_no_epsilon_and_finished_ones_no_time_left(
    tmp_path: Path,
) -> None:
    names = dict(view(write_run(tmp_path / "a", [0.5, 0.6])).facts)
    assert "epsilon spent" not in names
    assert "time left" not in names


def test_the_budget_is_shown_with_the_epsilon_spent(tmp_path: Path) -> None:
    private = {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}
    folder = write_run(
        tmp_path / "a", [0.5], raw={"privacy": private}, columns={"privacy/epsilon": 1.234}
    )
    assert dict(view(folder).facts)["epsilon spent"] == "1.23 of 8"


def test_states_are_those_of_watch(tmp_path: Path) -> None:
    running = write_run(tmp_path / "running", [0.5], planned=3, result=False)
    stopped = write_run(tmp_path / "stopped", [0.5], planned=3, result=False)
    write_run(tmp_path / "finished", [0.5])
    silent = write_run(tmp_path / "silent", [0.5], planned=3, result=False)
    for folder in (running, stopped, silent):
        old = time.time() - (3600 if folder == silent else 50)
        for name in ("rounds.jsonl", "recipe.toml"):
            os.utime(folder / name, (old, old))
    (stopped / LOCK).parent.mkdir(exist_ok=True)
    (stopped / LOCK).touch()
    with locked(running):
        state = read_state([tmp_path, tmp_path / "running"])  # given twice, shown once
    kinds = {Path(run.name).name: run.kind for run in state.runs}
    assert kinds == {name: name for name in ("running", "silent", "stopped", "finished")}
    assert [run.kind for run in state.runs][2:] == ["stopped", "finished"]
    assert state.summary == "1 running, 1 silent, 1 stopped, 1 finished"
    assert 'class="pill silent">silent for 1 h 00 min</p>' in fragment(state)


def test_events_of_the_last_rounds_are_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5] * 12, planned=20, result=False)
    gone = "no answer within 60 s"
    change_line(folder, 1, events=["too old to be shown"])
    change_line(
        folder,
        11,
        refused=[{"client": 1, "name": "köln", "reason": "not finite"}, {"client": 4}],
        absent=[{"client": i, "reason": gone} for i in range(10)],
    )
    change_line(folder, 12, late=[{"client": 2, "pool": "cnn", "answers": 11}], events=["withheld"])
    events = [(e.round, e.kind, e.who, e.reason) for e in view(folder).events]
    assert events == [
        (12, "late", "2 (cnn)", "its reply to round 11 is not used"),
        (12, "event", "", "withheld"),
        (11, "refused", "köln", "not finite"),
        (11, "refused", "4", ""),
        (11, "absent", "0, 1, 2, 3, 4, 5, 6, 7 and 2 more", gone),
    ]


def test_many_events_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5], planned=2, result=False)
    change_line(folder, 1, events=[f"event {i}" for i in range(30)])
    run = view(folder)
    assert len(run.events) == watch_page.MOST_EVENTS
    assert run.more_events == 30 - watch_page.MOST_EVENTS
    assert f"and {run.more_events} more" in fragment(read_state([folder]))


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5, 0.6], planned=9, result=False)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "eval/client/acc')
    state = read_state([folder])
    assert state.runs[0].done == 2
    assert not any("rounds.jsonl" in problem for problem in state.problems)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('uracy_mean": 0.75, "comm/up_bytes": 1, "comm/down_bytes": 1}\n')
    assert dict(view(folder).facts)["accuracy"] == "75.00 %"


def test_a_folder_without_a_run_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    state = read_state([folder])
    assert (state.runs[0].kind, state.runs[0].line) == ("waiting", f"no run yet in {folder}")
    assert f"no run yet in {folder}" in fragment(state)
    write_federation(
        folder, FEDERATION_STATE
    )  # a server may wait for its sites before it writes a recipe
    waiting = view(folder, NOW)
    assert waiting.federation is not None
    assert len(waiting.federation.sites.rows) == 2
    write_run(folder / "run", [0.5], planned=3, result=False)
    assert view(folder).kind == "running"


def test_a_file_is_no_folder_to_wait_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    assert view(tmp_path / "a.txt").line.endswith("a.txt holds no run: it is a file")


def test_a_run_before_its_first_round_is_shown(tmp_path: Path) -> None:
    run = view(write_run(tmp_path / "a", [], planned=3, result=False))
    assert (run.done, run.planned, run.curve) == (0, 3, None)
    assert dict(run.facts)["accuracy"] == "-"


def test_unusable_runs_are_named_and_left_out(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", [0.5])
    bad = write_run(tmp_path / "bad", [0.5])
    (bad / "recipe.toml").write_text("method = [")
    state = read_state([tmp_path])
    assert [run.name for run in state.runs] == [str(good)]
    assert state.left_out
    assert any(str(bad) in problem for problem in state.problems)
    assert not read_state([good]).left_out


# federations


def test_a_federation_and_its_sites_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5], planned=3, result=False)
    federation = view(write_federation(folder, FEDERATION_STATE), NOW).federation
    assert federation is not None
    assert federation.name == "sepsis"
    assert federation.counts == "1 ready, 1 absent"
    assert dict(federation.facts) == {
        "address": "fed.example.org:8443",
        "round": "13",
        "attempt": "2",
        "run": "a3f1",
        "written": "3 s ago",
    }
    values = zip(*federation.sites.rows, strict=True)
    columns = dict(zip(federation.sites.columns, values, strict=True))
    assert columns == {
        "site": ("berlin", "ulm"),
        "state": ("ready", "absent"),
        "for": ("13 s", "-"),
        "last round": ("12", "-"),
        "sent": ("123.0 kB", "-"),
        "received": ("456 B", "-"),
        "refusals": ("1", "-"),
        "version": ("0.1.0", "-"),
        "note": ("policy: at night", "-"),
    }
    state = read_state([folder], now=NOW)
    assert state.summary == f"1 running; {FEDERATION_STATE['waiting_for']}"
    assert '<th scope="row">berlin</th>' in fragment(state)
    assert '<span class="pill ready">ready</span>' in fragment(state)


def test_a_server_that_writes_nothing_any_more_is_noticed(tmp_path: Path) -> None:
    state = FederationStatus(written=NOW)
    silent = watch_page.federation_view(state, NOW + 61).silent
    assert silent == "The server has written nothing for 1 min 01 s."
    assert watch_page.federation_view(state, NOW + 59).silent == ""
    assert watch_page.federation_view(state, NOW + 1e6, over=True).silent == ""
    assert watch_page.federation_view(state, NOW - 1e6).silent == "", "a clock that is behind"


@pytest.mark.parametrize("state", [{}, {"sites": [{}]}, {"sites": [{}, 3, None]}, {"sites": "no"}])
def test_missing_fields_do_not_break_the_page(tmp_path: Path, state: object) -> None:
    folder = write_federation(tmp_path, state)
    sites = (SiteStatus(),) if "[{}" in json.dumps(state) else ()
    assert read_status(folder) == FederationStatus(sites=sites)
    assert ("site 0" in fragment(read_state([folder]))) == bool(sites)


def test_unknown_fields_and_states_are_no_problem(tmp_path: Path) -> None:
    later = {
        **FEDERATION_STATE,
        "color": "red",
        "sites": [{"name": "a", "state": "asleep", "beds": [1]}],
    }
    html = fragment(read_state([write_federation(tmp_path, later)]))
    assert '<span class="pill ">asleep</span>' in html


def test_a_later_format_is_read_as_far_as_possible(tmp_path: Path) -> None:
    state = read_status(write_federation(tmp_path, {**FEDERATION_STATE, "format": 2}))
    assert state is not None
    assert "has format 2, newer than this fedgist" in state.problem
    assert len(state.sites) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "[" * 100_000, '{"round": 1e', "9" * 5000])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "a", [0.5], planned=3, result=False)
    (folder / STATUS).write_text(text)
    federation = view(folder).federation
    assert federation is not None
    assert str(folder / STATUS) in federation.problem
    assert "pill running" in fragment(read_state([folder]))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5])
    os.mkfifo(folder / STATUS)
    federation = view(folder).federation
    assert federation is not None
    assert "it is no file" in federation.problem


def test_there_is_no_federation_without_the_file(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("number", ["1e999", "-1", "NaN", "true", '"7"', "1" + 400 * "0", "[]"])
def test_impossible_numbers_are_left_out(tmp_path: Path, number: str) -> None:
    keys = ("number", "since", "last_round", "sent_bytes", "received_bytes", "refusals")
    site = ", ".join(f'"{key}": {number}' for key in keys)
    text = f'{{"round": {number}, "written": {number}, "attempt": {number}, "sites": [{{{site}}}]}}'
    (tmp_path / STATUS).write_text(text)
    assert read_status(tmp_path) == FederationStatus(sites=(SiteStatus(),))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    state=st.dictionaries(st.sampled_from([*FEDERATION_STATE]), anything),
    site=st.dictionaries(st.sampled_from([*FEDERATION_STATE["sites"][0]]), anything),
)
@pytest.mark.slow
def test_whatever_is_in_the_file_the_page_is_made(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], site: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("federation")
    write_federation(folder, {"sites": [site], **state})
    assert "</section>" in page(read_state([folder]), 2.0)


# texts of others

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover='alert(1)",
    "</style><style>body{display:none}",
    "{{ 7 * 7 }}{% raw %}",
    "--><!--",
    "&lt;b&gt;",
    "\u202egnp\x1b[2J\ud800\x00",
    "a" * 5000,
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_texts_of_others_stay_texts(tmp_path: Path, text: str) -> None:
    harmless = Texts(page(_state_with(tmp_path / "harmless", "x"), 2.0))
    shown = Texts(page(_state_with(tmp_path / "hostile", text), 2.0))
    assert shown.tags == harmless.tags, "a text became markup"
    names = [name for name, _ in shown.attributes]
    assert names == [name for name, _ in harmless.attributes], "a text became an attribute"
    assert "49" not in shown.texts
    visible = "".join(shown.texts)
    assert all(sign not in visible for sign in "\u202e\x1b\ud800\x00")
    if len(text) < 100 and text.isprintable():
        assert sum(text in words for words in shown.texts) >= 6  # they are shown as they are
    assert "a" * 301 not in visible


def _state_with(folder: Path, text: str) -> watch_page.WatchState:
    """Return the state of a run in which all texts of others are the same."""
    site = {
        **FEDERATION_STATE["sites"][0],
        **dict.fromkeys(("name", "state", "version", "note"), text),
    }
    keys = ("run", "federation", "address", "waiting_for")
    write_run(folder, [0.5], planned=3, result=False)
    write_federation(folder, {**FEDERATION_STATE, **dict.fromkeys(keys, text), "sites": [site]})
    entry = {"client": 1, "name": text, "pool": text[:50], "reason": text}
    change_line(folder, 1, refused=[entry], absent=[entry], events=[text[:300]])
    return read_state([folder], now=NOW)


def test_names_of_folders_stay_texts(tmp_path: Path) -> None:
    write_run(tmp_path / "<b>bold", [0.5])
    html = fragment(read_state([tmp_path]))
    assert "<b>bold" not in html
    assert "&lt;b&gt;bold" in html
