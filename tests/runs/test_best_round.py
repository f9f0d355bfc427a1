"""The best round on validation data: chosen, kept, resumed, and the reason to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedgist
from fedgist.api.result import Result
from fedgist.core.tree import named
from fedgist.errors import RecipeError
from fedgist.report.tables.comparison import study
from fedgist.report.tables.run_tables import overview
from fedgist.runs.best_round import Selection
from fedgist.runs.files.checkpoint import load
from fedgist.runs.files.record import Line, is_over, read_result
from fedgist.runs.finished import run_reader
from fedgist.runs.runner import load_run
from fedgist.studies.job import Job
from fedgist.studies.jobs import is_done
from fedgist.testing.small_worlds import without_times, world

COLUMN = "eval/validation/accuracy_mean"


def scored(*values: float | None) -> list[Line]:
    lines: list[Line] = [{"round": number} for number in range(1, len(values) + 1)]
    for line, value in zip(lines, values, strict=True):
        if value is not None:
            line[COLUMN] = value
    return lines


def test_the_best_round_is_the_first_of_equals_in_the_metrics_direction() -> None:
    lines = scored(0.3, None, 0.0, 0.7, 0.2, 0.7)
    higher, lower = (Selection(COLUMN, better, keeps=True, patience=0) for better in DIRECTIONS)
    best, least = higher.best(lines), lower.best(lines)
    assert best is lines[3]
    assert least is lines[2]  # a score of 0 is a score
    assert higher.best(scored(None, None)) is None
    assert higher.best([{"round": 1, COLUMN: None}, {"round": 2, COLUMN: float("nan")}]) is None


DIRECTIONS: Any = ("higher", "lower")


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ((0.5, 0.4), False),
        ((0.5, 0.4, 0.5), True),  # as good is not better
        ((0.5, 0.4, 0.6), False),
        ((0.5, None, None, None), False),  # rounds that are not scored cannot be better
        ((0.5, None, None, 0.4), True),
        ((), False),
        ((None, None, None), False),
    ],
)
def test_patience_counts_rounds_without_a_better_one(
    values: tuple[float | None, ...],
    stops: bool,  # noqa: FBT001  # a case of the table
) -> None:
    assert Selection(COLUMN, "higher", keeps=False, patience=2).stops(scored(*values)) is stops
    assert not Selection(COLUMN, "higher", keeps=False, patience=0).stops(scored(*values))


RECIPE: dict[str, Any] = {
    "data": {"validation": 0.3, "train_rows": 400},
    "clients": {"num_clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "local"},
    "train": {"num_rounds": 12, "lr": 0.05, "batch_size": 32},
    "evaluate": {"keep": "best_validation", "save_features": 3},
    "engine": {"workers": 1, "cohort_size": 4, "checkpoint_every": 2},
}


def run(out: Path | None = None, *, method: str = "local", **changes: Any) -> Result:
    recipe = {**RECIPE, "method": {"name": method}}
    for section, values in changes.pop("sections", {}).items():
        recipe[section] = {**recipe.get(section, {}), **values}
    return fedgist.run(recipe, out=out, **changes)


def state(result: Result) -> dict[str, torch.Tensor]:
    saved = result.server_run.checkpoint()
    return {**saved.server, **saved.clients}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "lr"), [("local", 0.05), ("fedavg", 0.3), ("fedlog", 0.05)])
def test_the_models_kept_are_those_of_the_best_round_and_both_numbers_are_recorded(
    tmp_path: Path, method: str, lr: float
) -> None:
    whole = run(tmp_path / "a", method=method, sections={"train": {"lr": lr}})
    scores = [line[COLUMN] for line in whole.rounds]
    chosen = 1 + scores.index(max(scores))
    assert chosen < 12  # else nothing is shown
    assert whole.summary["kept_round"] == chosen
    assert whole.summary["selection"] == {
        "column": COLUMN,
        "best_round": chosen,
        "best": max(scores),
        "last_round": 12,
        "last": scores[-1],
    }
    assert whole.summary["rounds"] == len(whole.rounds) == 12
    assert whole.summary["stopped_early"] is False
    (note,) = whole.summary["notes"]
    best = f"accuracy on validation rows {100 * max(scores):.2f} %"
    assert note.startswith(f"the models of round {chosen} are kept: {best} in round {chosen}")
    test = whole.summary["eval/client/accuracy_mean"]
    assert (test["final_round"], test["final"]) == (
        chosen,
        whole.rounds[chosen - 1]["eval/client/accuracy_mean"],
    )
    sections = {"train": {"num_rounds": chosen, "lr": lr}, "evaluate": {"keep": "last"}}
    shorter = run(tmp_path / "b", method=method, sections=sections)
    expected = state(shorter)
    assert all(torch.equal(array, expected[name]) for name, array in state(whole).items())
    features = [(tmp_path / f / "features.safetensors").read_bytes() for f in ("a", "b")]
    assert features[0] == features[1]
    read_back, _ = load_run(tmp_path / "a")
    assert read_back.round == chosen
    assert all(
        torch.equal(v, named(shorter.server_run.server)[k])
        for k, v in named(read_back.server).items()
    )
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(whole.model(2)(x), shorter.model(2)(x))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"workers": 2, "cohort_size": 2}, {"name": "loopback"}])
def test_workers_and_wires_keep_the_same_models(engine: dict[str, Any]) -> None:
    sections = {"train": {"num_rounds": 7}, "evaluate": {"save_features": 0}}
    one = run(sections={**sections, "engine": {"cohort_size": 2}})
    other = run(sections={**sections, "engine": engine})
    assert other.summary["kept_round"] == one.summary["kept_round"] < 7
    x = torch.rand(5, 1, 8, 8)
    for client in range(4):
        difference = one.model(client)(x) - other.model(client)(x)
        assert float(difference.detach().abs().max()) <= (0 if "workers" in engine else 1e-4)


class Killed(Exception):  # noqa: N818
    """What a callback raises to end a run early."""


@pytest.mark.slow
def test_a_resumed_run_chooses_keeps_and_stops_as_one_that_was_not_interrupted(
    tmp_path: Path,
) -> None:
    sections = {"evaluate": {"patience": 3}, "train": {"num_rounds": 40}}
    whole = run(tmp_path / "whole", sections=sections)
    done = len(whole.rounds)
    best = whole.summary["selection"]["best_round"]
    assert done == best + 3 < 40
    assert whole.summary["stopped_early"] is True
    for stop in {1, best, best + 1, done}:

        def kill(line: Line, stop: int = stop) -> None:
            if line["round"] == stop:
                raise Killed

        out = tmp_path / f"stopped-{stop}"
        with pytest.raises(Killed):
            run(out, sections=sections, callback=kill)
        again = run(out, sections=sections, resume=True)
        assert [without_times(a) for a in again.rounds] == [without_times(b) for b in whole.rounds]
        assert all(torch.equal(state(again)[name], array) for name, array in state(whole).items())
        for key in ("selection", "kept_round", "stopped_early", "rounds"):
            assert again.summary[key] == whole.summary[key]
        saved, expected = load(out), load(tmp_path / "whole")
        assert saved is not None
        assert expected is not None
        assert saved.round == expected.round == done
        arrays = expected.arrays()
        assert all(torch.equal(array, arrays[name]) for name, array in saved.arrays().items())


def test_a_run_that_stopped_early_is_finished_and_tables_show_the_round_kept(
    tmp_path: Path,
) -> None:
    sections = {"evaluate": {"patience": 3}, "train": {"num_rounds": 40}}
    result = run(tmp_path / "run", sections=sections)
    (read,) = run_reader.find([tmp_path / "run"])
    assert read.finished
    assert read.kept == result.summary["kept_round"]
    kept = result.rounds[result.summary["kept_round"] - 1]
    assert read.last("eval/client/accuracy_mean") == kept["eval/client/accuracy_mean"]
    assert overview([read]).title == "Round kept"
    table = study([read])
    assert f"round {read.kept} of {read.done} counts, by validation data" in str(table.notes)
    final = table.rows[0].final
    assert final is not None
    assert final.mean == kept["eval/client/accuracy_mean"]
    assert is_done(Job("job", result.server_run.side.recipe, tmp_path / "run"))
    table = json.loads((tmp_path / "run/result.json").read_text())
    assert is_over(40, len(result.rounds), table)
    assert not is_over(40, len(result.rounds) - 1, table)
    assert read_result(tmp_path) == {}


@pytest.mark.slow
def test_patience_alone_stops_and_keeps_the_last_round() -> None:
    sections = {"evaluate": {"keep": "last", "patience": 3, "save_features": 0}}
    result = run(sections=sections)
    assert result.summary["stopped_early"] is True
    assert "kept_round" not in result.summary
    assert result.server_run.round == len(result.rounds) < 12
    assert "selection" not in run(sections={"evaluate": {"keep": "last"}}).summary


@pytest.mark.parametrize("on", ["global", "client"])
def test_rows_that_the_server_holds_out_judge_rounds(on: str) -> None:
    # steps so long that the first rounds are the best
    recipe: dict[str, Any] = {
        "data": {"held_out": 60, "train_rows": 200},
        "clients": {"num_clients": 4},
        "method": {"name": "fedavg"},
        "train": {"num_rounds": 8, "optimizer": "sgd", "lr": 3.0},
        "evaluate": {"on": on, "keep": "best_validation", "patience": 2},
        "engine": {"workers": 1, "cohort_size": 4},
    }
    result = fedgist.run(recipe)
    scores = [line["eval/validation/accuracy_mean"] for line in result.rounds]
    best = 1 + scores.index(max(scores))
    assert result.summary["kept_round"] == result.server_run.round == best
    assert len(scores) == min(8, best + 2)


@pytest.mark.parametrize("setting", [{"keep": "best_validation"}, {"patience": 2}])
@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"validation": 0.0}}, "nobody holds out rows: raise data.validation"),
        ({"privacy": {"share_measurements": False}}, "scores do not leave the clients"),
        ({"evaluate": {"on": "global"}}, "clients are not scored with evaluate.on = 'global'"),
    ],
)
def test_what_needs_scores_is_refused_without_them(
    setting: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    recipe: dict[str, Any] = {
        "data": {"validation": 0.3, "train_rows": 100},
        "method": {"name": "fedavg"},
    }
    for section, values in sections.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    recipe["evaluate"] = {**recipe.get("evaluate", {}), **setting}
    with pytest.raises(RecipeError, match=says) as caught:
        fedgist.run(recipe)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"evaluate.{next(iter(setting))}")


def test_bounds_of_both_settings() -> None:
    for value in (-1, 1.5, "soon"):
        with pytest.raises(RecipeError, match=r"evaluate\.patience = "):
            world(evaluate={"patience": value})
    with pytest.raises(
        RecipeError, match=r"evaluate\.keep = 'best': .*'last' or 'best_validation'"
    ):
        world(evaluate={"keep": "best"})
