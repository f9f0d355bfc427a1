"""A run from Python: what is shown of it, what is called back, and what it returns."""

from __future__ import annotations

import builtins
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import fedgist
from fedgist.methods.fedavg import FedAvg
from fedgist.runs.files.record import Line
from fedgist.testing.small_worlds import blobs, rows

QUICK: dict[str, Any] = {
    "model": {"hidden": [5]},
    "train": {"num_rounds": 3, "batch_size": 5},
    "engine": {"workers": 1, "cohort_size": 3},
}
GIVEN: dict[str, Any] = {"data": blobs(), "clients": rows()}


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What IPython shows in a cell, first and last; rich takes the cell for a notebook's."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    for name in ("display", "__IPYTHON__"):  # which IPython would leave there
        monkeypatch.setattr(builtins, name, None, raising=False)
    no_history = Config({"HistoryAccessor": {"enabled": False}})
    shell = InteractiveShell.instance(
        config=no_history, display_pub_class=CapturingDisplayPublisher
    )
    publisher = shell.display_pub
    assert isinstance(publisher, CapturingDisplayPublisher)
    yield publisher.outputs
    InteractiveShell.clear_instance()


def test_a_notebook_shows_a_table_that_grows(shown: list[Any]) -> None:
    result = fedgist.run(QUICK, **GIVEN)
    assert [output["update"] for output in shown[:2]] == [False, True]
    assert len({output["transient"]["display_id"] for output in shown}) == 1
    last = shown[-1]["data"]["text/html"]
    assert "fedlog on blobs: 5 clients, mlp (53 parameters), seed 0" in last
    assert "<progress value='3' max='3'>" in last
    accuracy = f"{100 * result.rounds[-1]['eval/client/accuracy_mean']:.2f} %"
    assert re.findall(r"<tr><td[^>]*>(\d+)</td>", last) == ["1", "2", "3"]
    assert f">{accuracy}</td>" in last


def test_without_a_notebook_nothing_is_shown_unless_asked_for(
    capfd: pytest.CaptureFixture[str], shown: list[Any]
) -> None:
    fedgist.run(QUICK, **GIVEN, progress=False)
    assert (shown, capfd.readouterr()) == ([], ("", ""))


def test_progress_in_a_pipe_is_a_line_a_round(capfd: pytest.CaptureFixture[str]) -> None:
    fedgist.run(QUICK, **GIVEN)
    assert capfd.readouterr() == ("", "")
    fedgist.run(QUICK, **GIVEN, progress=True)
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed if line.startswith("round")] == [
        "1/3",
        "2/3",
        "3/3",
    ]


def test_a_callback_has_each_rounds_line() -> None:
    lines: list[Line] = []
    result = fedgist.run(QUICK, **GIVEN, callback=lines.append)
    assert lines == result.rounds


@pytest.mark.parametrize("more", [(), ("chose",)])
def test_any_object_with_an_observers_functions_observes(more: tuple[str, ...]) -> None:
    # rejects an observer that must be derived, or whose further functions are not called
    heard: dict[str, list[Any]] = {}

    def hearer(name: str) -> Any:
        return lambda *given: heard.setdefault(name, []).append(given[0])

    names = ("began", "finished_round", "note", *more)
    own: Any = SimpleNamespace(**{name: hearer(name) for name in names})
    early = {**QUICK, "evaluate": {"patience": 1}, "data": {"validation": 0.3}}
    result = fedgist.run(early, **GIVEN, observer=own)
    assert heard["finished_round"] == result.rounds
    assert {"working", "chose"} & heard.keys() == {*more}  # no stage of the server is long


def test_a_callback_that_raises_stops_a_run_that_is_saved(tmp_path: Path) -> None:
    # rejects an exception that leaves the rounds since the last checkpoint to be done again
    def enough(line: Line) -> None:
        if line["round"] == 2:
            raise LookupError(line["round"])

    whole = fedgist.run(QUICK, **GIVEN, out=tmp_path / "whole")
    with pytest.raises(LookupError):
        fedgist.run(QUICK, **GIVEN, out=tmp_path / "run", callback=enough)
    done: list[int] = []
    resumed = fedgist.run(
        QUICK,
        **GIVEN,
        out=tmp_path / "run",
        resume=True,
        callback=lambda line: done.append(line["round"]),
    )
    assert done == [3]
    losses = [[line["train/loss"] for line in r.rounds] for r in (whole, resumed)]
    assert losses[0] == losses[1]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"progress": 1}, "progress is 1; it must be True, False or None"),
        ({"callback": 5}, "callback is a int; it must be a function of a round's line"),
        ({"progress": True, "observer": object()}, "observer is a object without 'began'"),
    ],
)
def test_what_cannot_watch_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fedgist.run(QUICK, **GIVEN, **change)


@pytest.mark.slow
def test_a_result_is_a_line_and_in_a_notebook_a_table(tmp_path: Path) -> None:
    # seen: it printed its whole record
    result = fedgist.run(QUICK, **GIVEN, out=tmp_path / "<b>")
    final = f"{100 * result.rounds[-1]['eval/client/accuracy_mean']:.2f} %"
    text = (
        f"fedlog on blobs: 5 clients, mlp (53 parameters), seed 0 -> {tmp_path / '<b>'}; 3 rounds; "
    )
    text += f"accuracy {final}; 1.1 kB up, 1.1 kB down"
    assert repr(result) == str(result) == f"<fedgist.Result: {text}>"
    html = result._repr_html_()
    assert text.replace("<", "&lt;").replace(">", "&gt;") in html
    assert re.findall(r"<tr><td[^>]*>(\d+)</td>", html) == ["1", "2", "3"]
    many = {**QUICK, "train": {"num_rounds": 30, "batch_size": 32}}
    html = fedgist.run(many, **GIVEN)._repr_html_()
    shown = [int(n) for n in re.findall(r"<tr><td[^>]*>(\d+)</td>", html)]
    assert (len(shown), shown[0], shown[-1]) == (12, 1, 30)


def test_a_method_of_this_script_is_said_to_be_resumable_from_python_alone(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """A method as if declared in a notebook."""

    Mine.__module__, Mine.__qualname__ = "__main__", "Mine"
    says = r"method __main__:Mine is defined in this notebook or script: only Python"
    with pytest.warns(UserWarning, match=says):
        fedgist.run(QUICK, **GIVEN, method=Mine(), out=tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedgist.run(QUICK, **GIVEN, method=Mine())  # nothing is written: nothing to resume
