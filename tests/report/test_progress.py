"""What a person is told of a round while a run goes on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import fedgist
from fedgist.cli.job_progress import job_score
from fedgist.core.replies import Asked
from fedgist.recipe.reading import make
from fedgist.report.formatting import bytes_text, replies
from fedgist.report.terminal.progress import Plain, observing, trouble_texts
from fedgist.runs.round_record import RoundRecord
from fedgist.studies.job import Job
from fedgist.testing.small_worlds import blobs
from fedgist.wire.delayed_engine import LATE


def test_refused_and_absent_clients_are_named_and_simulated_delays_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = {
        "round": 1,
        "comm/up_bytes": 10,
        "comm/down_bytes": 20,
        "time/round_s": 0.1,
        "refused": [{"client": 7, "reason": "total is not finite"}],
        "absent": [
            *({"client": c, "reason": "not connected"} for c in range(10)),
            {"client": 11, "reason": "no reply in time"},
            {"client": 12, "reason": LATE},
        ],
        "events": ["a total over 1 replies of wide was withheld; privacy.min_replies is 3"],
    }
    Plain().finished_round(line)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert "client 7: upload refused, total is not finite" in text
    assert "absent: clients 0, 1, 2, 3, 4, 5, 6, 7 and 2 more, not connected" in text
    assert "absent: client 11, no reply in time" in text
    assert "12" not in text.replace("20 B", "")
    assert "privacy.min_replies is 3" in text


@pytest.mark.parametrize("method", ["fedlog", "fedavg"])
@pytest.mark.filterwarnings("ignore:model mlp. the frozen body:UserWarning")
def test_a_round_in_which_nothing_learns_shows_no_loss(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a frozen body FedLog trains nothing, and FedAvg the head."""
    recipe = {**DEMO, "method": {"name": method}, "model": {"hidden": [5], "frozen": True}}
    result = fedgist.run(recipe, observer=Plain())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [" loss " in line for line in lines] == [method == "fedavg"] * 3
    assert [line["train/loss"] > 0 for line in result.rounds] == [method == "fedavg"] * 3


@pytest.mark.slow
def test_a_long_round_says_how_far_the_servers_own_work_is() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    recipe = {
        "data": {"train_rows": 200, "public": {"rows": 50}},
        "clients": {"num_clients": 2, "pools": {"a": {"model": "mlp"}, "b": {"model": "logistic"}}},
        "train": {"num_rounds": 2},
        "evaluate": {"on": "global"},
        "method": {"name": "merged_codist", "distillation": {"steps": 60, "batch_size": 4}},
        "engine": {"workers": 1, "plans": {name: {"cohort_size": 2} for name in "ab"}},
    }
    with observing(console, quiet=False, as_json=False) as observer:
        fedgist.run(recipe, observer=observer)
    shown = out.getvalue()
    assert "merged_codist: distill-0, 2 of 4" in shown
    assert "merged_codist: distill-1, 3 of 4" in shown
    assert "2/2" in shown
    assert "%" in shown  # the mean of both models


DEMO = {"train": {"num_rounds": 3}, "engine": {"workers": 1, "cohort_size": 5}}


def test_a_pipe_is_told_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    fedgist.run(DEMO, observer=Plain())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [line.endswith(" left") for line in lines] == [True, True, False]


def test_the_bar_of_a_resumed_run_counts_the_bytes_before(tmp_path: Path) -> None:
    fedgist.run(DEMO, out=tmp_path / "run")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    with observing(console, quiet=False, as_json=False) as observer:
        out_again = tmp_path / "run"
        result = fedgist.run(None, out=out_again, resume=True, rounds=4, observer=observer)
    sent = [line["comm/up_bytes"] + line["comm/down_bytes"] for line in result.rounds]
    assert bytes_text(sum(sent[:-1])) in out.getvalue()
    assert bytes_text(sum(sent)) in out.getvalue()


def test_absent_clients_appear_by_their_names() -> None:
    recipe = DEMO | {"clients": {"delay": 0.5}, "method": {"name": "fedavg"}}
    named = {"Dorf": range(10), "Ulm": range(10, 22), "Bonn": range(22, 32)}
    fault = "total is not finite"
    record = RoundRecord(1, refused=[(Asked(1, "mlp"), fault)], absent=[(Asked(2, "mlp"), "gone")])
    line = record.line(tuple(named))
    assert line["refused"] == [{"client": 1, "name": "Ulm", "reason": fault}]
    assert line["absent"] == [{"client": 2, "name": "Bonn", "reason": "gone"}]
    assert "name" not in record.line()["refused"][0]
    assert trouble_texts(line) == [
        "client Ulm: upload refused, " + fault,
        "absent: client Bonn, gone",
    ]
    result = fedgist.run(recipe, data=blobs(), clients=named)
    entries = [entry for line in result.rounds for entry in line.get("absent", [])]
    assert entries
    assert all(entry["name"] == list(named)[entry["client"]] for entry in entries)


EARLY = DEMO | {
    "data": {"validation": 0.3},
    "train": {"num_rounds": 60, "lr": 0.1},
    "evaluate": {"patience": 2, "keep": "best_validation"},
}


def test_an_early_stop_says_what_decided(capsys: pytest.CaptureFixture[str]) -> None:
    result = fedgist.run(EARLY, observer=Plain())
    table, done = result.summary["selection"], result.summary["rounds"]
    best = f"{100 * table['best']:.2f} %"
    printed = capsys.readouterr().out
    assert (
        f"stopped early after round {done} of 60: for 2 rounds no better accuracy on validation "
        f"rows than {best}, of round {table['best_round']}"
    ) in printed
    kept = f"the models of round {table['best_round']} are kept: accuracy on validation rows {best}"
    assert kept in printed
    assert any(kept in note for note in result.summary["notes"])


def test_a_job_is_shown_by_its_own_main_metric() -> None:
    job = Job("x", make({"objective": {"name": "simclr"}}), Path("x"))
    line = {"round": 1, "eval/client/accuracy_mean": 0.1, "eval/global/probe": 0.2}
    assert job_score(job, line, "") == "20.00 %"
    assert job_score(job, line | {"eval/client/probe_mean": 0.3}, "") == "30.00 %"
    assert job_score(job, line, "eval/client/accuracy_mean") == "10.00 %"
    assert job_score(job, {"round": 2}, "") == ""
    assert job_score(job, None, "") == ""


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_line_says_how_many_replied_unless_all_did(complete: int, more: int) -> None:
    line = {"clients/expected": complete + more, "clients/complete": complete, "clients/asked": 99}
    assert replies(line) == (f"{complete} of {complete + more} replied" if more else "")
