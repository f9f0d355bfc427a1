"""Searches: spaces, validation only, pruning, and studies that go on."""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from commands import Command, fedgist, wait_for_ends, wait_until
from fedgist.cli.main import app
from fedgist.cli.recipe_files import find_recipe, find_space, folder, shipped
from fedgist.cli.study_commands import print_best
from fedgist.errors import InputError, OutputError, RecipeError
from fedgist.recipe.reading import read
from fedgist.runs.files import run_directory
from fedgist.runs.files.columns import VALIDATION_ACCURACY
from fedgist.studies.job import Event, Job
from fedgist.studies.jobs import run_jobs
from fedgist.studies.paper_table import read_paper_table
from fedgist.studies.queue import read_queue
from fedgist.studies.search_space import (
    Range,
    extremes,
    notes_on_moved,
    own_values,
    read_space,
)
from fedgist.studies.tune import BEST, STUDY, Tuner, storing
from fedgist.world.facts.question import read_question

pytest.importorskip("optuna")

DEMO = folder() / "demo.toml"
SMALL = [
    "data.train_rows=150",
    "train.num_rounds=3",
    "engine.cohort_size=3",
    "clients.num_clients=4",
]
OF_A_TABLE = """
[data]
name = "table"
path = "d.csv"
label = "y"
validation = 0.2

[partition]
name = "iid"

[clients]
num_clients = 2

[model]
name = "logistic"

[method]
name = "fedavg"

[train]
num_rounds = 1
"""
SPACE = """
["train.lr"]
low = 1e-3
high = 1e-1
log = true

[train.local_epochs]
low = 1
high = 2

[method.nu]
choices = [0.5, 1.0]
"""


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    return path


def test_a_space_is_read_with_dotted_or_nested_keys(space: Path) -> None:
    assert read_space(space) == {
        "train.lr": {"low": 1e-3, "high": 1e-1, "log": True},
        "train.local_epochs": {"low": 1, "high": 2},
        "method.nu": {"choices": [0.5, 1.0]},
    }


@pytest.mark.parametrize("method", ["fedadam", "periodic_codist", "merged_codist"])
def test_spaces_that_come_with_fedgist_fit_their_recipe(method: str) -> None:
    # a key by pool needs a table in the recipe
    path = find_recipe("codistillation/cifar100")
    for params in extremes(read_space(find_space(f"codistillation/{method}"))):
        settings = [f"{key}={json.dumps(value)}" for key, value in params.items()]
        made = read(path, [f"method.name={method}", *settings])
        assert made.method.options["server"]["lr"]["large"] == params["method.server.lr.large"]
    assert "spaces/codistillation/fedadam" not in shipped()
    with pytest.raises(RecipeError, match=r"no search space merged: .*codistillation/merged_codi"):
        find_space("merged")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no key"),
        ("x = 3", "x = 3: expected a table"),
        ('["train.lr"]\nlow = 1', "high = None"),
        (
            '["train.lr"]\nlow = 2\nhigh = 1',
            "low = 2, high = 1: expected two numbers, the lower one first",
        ),
        ('["train.lr"]\nlow = 0\nhigh = 1\nlog = true', "log = true needs low > 0"),
        ('["train.lr"]\nchoices = []', r"choices = \[\]: expected a list"),
        ('["train.lr"]\nchoices = [1]\nlow = 1', "either choices, or low and high"),
        (
            '["train.lr"]\nlow = 1\nhigh = 2\nlgo = true',
            r"unknown range key 'lgo'; did you mean 'low'\? known: low, high, log",
        ),
        ('["train.lr"]\nlow = true\nhigh = true', "expected two numbers"),
        ('["train.lr"]\nlow = 1\nhigh = 2\nlog = "yes"', "log = 'yes': expected true or false"),
        ('["train.lr"]\nlow = 1\nhigh = 2\nstep = 0', "step = 0: expected a number above 0"),
        ('["train.lr"]\nlow = 1\nhigh = 2\nstep = "x"', "step = 'x': expected a number"),
        ('["train.lr"]\nlow = 1\nhigh = 9\nstep = 0.5', "step = 0.5: expected a whole number"),
        ('["train.lr"]\nchoices = [0.1, nan]', "choices: nan is not finite"),
        ('["seed"]\nlow = 1\nhigh = 2', "seed cannot be searched"),
        ('["train.lr"', "space.toml"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=says):
        read_space(path)


def test_a_space_that_does_not_fit_the_recipe_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    path = tmp_path / "space.toml"
    path.write_text('["method.mu"]\nlow = 0.1\nhigh = 1.0')
    with pytest.raises(RecipeError, match=r"space.toml: method.mu: unknown key of fedlog"):
        Tuner(DEMO, SMALL, path, tmp_path / "study", 1)
    assert not (tmp_path / "study").exists()


def finish(job: Job, accuracy: float) -> None:
    """Stand in for a run: its record says so much, and that the test data say otherwise."""
    job.folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"round": r, VALIDATION_ACCURACY: v, "eval/client/accuracy_mean": 1 - v}
        for r, v in ((1, 0.99), (2, accuracy))
    ]
    (job.folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_the_objective_is_the_last_rounds_validation_accuracy_over_seeds(
    tmp_path: Path, space: Path
) -> None:
    # rejects the test data's (best at the other end) and the best round's (0.99 in all)
    tuner = Tuner(DEMO, SMALL, space, tmp_path / "study", 2)
    values: dict[str, list[float]] = {}
    for number, job in enumerate(tuner.jobs(4)):
        finish(job, 0.1 * number)
        values.setdefault(str(job.folder.parent), []).append(0.1 * number)
        assert not tuner.listen(job, Event("done"))
    best = tuner.best()
    assert best is not None
    assert best[1] == pytest.approx(max(sum(v) / 2 for v in values.values()))
    assert tuner.finished == 4
    assert all(
        job.recipe.data.validation == 0.2 for opened in tuner.open.values() for job in opened.jobs
    )
    recipe = tuner.best_recipe()
    assert recipe is not None
    assert recipe.data.validation == read(DEMO).data.validation == 0
    assert recipe.train.lr == best[0]["train.lr"]


def test_best_trials_that_tie_are_named_and_the_first_is_taken(
    tmp_path: Path, space: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuner = Tuner(DEMO, SMALL, space, tmp_path / "study", 1)
    params = []
    for number, job in enumerate(tuner.jobs(4)):
        finish(job, 0.25 if number == 0 else 0.75)
        params.append(dict(tuner.open[job.name].trials[0].params))
        tuner.listen(job, Event("done"))
    best = tuner.best()
    assert best == (params[1], 0.75)
    assert tuner.ties() == [other for other in params[2:] if other != params[1]]
    (tmp_path / "study" / "trial-x").mkdir(exist_ok=True)
    print_best(tuner, tmp_path / "study")
    text = " ".join(capsys.readouterr().out.split())
    assert "! a tie: as good, 75.00 %, are train.lr = " in text
    assert text.index(str(params[1]["train.lr"])) < text.index(str(params[2]["train.lr"]))


@pytest.mark.slow
def test_without_a_tie_nothing_is_said_of_one(tmp_path: Path, space: Path) -> None:
    tuner = Tuner(DEMO, SMALL, space, tmp_path / "study", 1)
    assert tuner.ties() == []
    for number, job in enumerate(tuner.jobs(3)):
        finish(job, 0.1 * number)
        tuner.listen(job, Event("done"))
    assert tuner.ties() == []


def test_a_database_that_cannot_be_written_is_named(tmp_path: Path, space: Path) -> None:
    tuner = Tuner(DEMO, SMALL, space, tmp_path / "study", 1)
    job = next(tuner.jobs(1))
    finish(job, 0.5)
    with closing(sqlite3.connect(tmp_path / "study" / "study.db")) as database, database:
        database.execute("DROP TABLE trial_values")
    says = r"study.db cannot be written: .*no such table"
    with pytest.raises(OutputError, match=says), storing(tmp_path / "study"):
        tuner.listen(job, Event("done"))


@pytest.mark.slow
def test_a_bad_trial_is_stopped_early_and_its_other_seeds_are_not_run(
    tmp_path: Path, space: Path
) -> None:
    tuner = Tuner(DEMO, [*SMALL, "train.num_rounds=8"], space, tmp_path / "study", 1)
    for job in tuner.jobs(6):
        for number in range(1, 6):
            assert not tuner.listen(
                job, Event("round", {"round": number, VALIDATION_ACCURACY: 0.9})
            )
        finish(job, 0.9)
        tuner.listen(job, Event("done"))
    again = Tuner(DEMO, [*SMALL, "train.num_rounds=8"], space, tmp_path / "study", 1)
    queue = again.jobs(7)
    bad = next(queue)
    stops = [
        again.listen(bad, Event("round", {"round": n, VALIDATION_ACCURACY: 0.2}))
        for n in range(1, 6)
    ]
    assert stops == [False, False, False, True, True]  # not in the first half of a trial
    assert again.listen(bad, Event("stopped"))
    assert again.finished == 7


def test_the_first_trial_is_what_the_recipe_says_moved_into_the_ranges(
    tmp_path: Path, space: Path
) -> None:
    own = ["train.lr=0.5", "train.local_epochs=1", "method.nu=1.0"]
    first, second = Tuner(DEMO, [*SMALL, *own], space, tmp_path / "study", 1).jobs(2)
    told = first.recipe.settings()
    assert (told["train"]["lr"], told["train"]["local_epochs"], told["method"]["nu"]) == (0.1, 1, 1)
    assert second.recipe.settings() != told


@given(st.integers(0, 40), st.integers(1, 40), st.sampled_from([0.1, 0.05, 0.01, 0.3]))
def test_a_value_of_a_range_is_not_moved(first: int, steps: int, step: float) -> None:
    # seen: 0.3 is not in the range from 0.1 to 0.3 by 0.1, and 0.7 became 0.7000000000000001
    for place in range(steps + 1):
        value = round((first + place) * step, 6)
        low, high = round(first * step, 6), round((first + steps) * step, 6)
        space: dict[str, Range] = {"a": {"low": low, "high": high, "step": step}}
        assert own_values({"a": value}, space) == {"a": value}
        assert notes_on_moved({"a": value}, space) == []


def test_what_a_recipe_says_is_moved_to_the_nearest_that_a_space_allows() -> None:
    said = {"a": {"b": 7, "c": 0.29, "d": "x", "e": None, "f": "y", "g": True, "h": 99}}
    space: dict[str, Range] = {
        "a.b": {"low": 1, "high": 5},
        "a.c": {"low": 0.0, "high": 1.0, "step": 0.25},
        "a.d": {"choices": ["x", "z"]},
        "a.e": {"low": 1, "high": 2},
        "a.f": {"choices": ["z"]},
        "a.g": {"low": 0.0, "high": 1.0},
        "a.h": {"low": 0, "high": 5, "step": 2},
        "a.b.deeper": {"low": 1, "high": 2},
        "nowhere": {"low": 1, "high": 2},
    }
    assert own_values(said, space) == {"a.b": 5, "a.c": 0.25, "a.d": "x", "a.h": 4}
    assert notes_on_moved(said, space) == [
        "a.b = 7 is not in its range: the first trial has 5",
        "a.c = 0.29 is not in its range: the first trial has 0.25",
        "a.f = y is none of its choices: the first trial draws one",
        "a.g = True is none of its choices: the first trial draws one",
        "a.h = 99 is not in its range: the first trial has 4",
    ]


def test_a_failed_trial_does_not_count_and_a_killed_one_is_asked_again(
    tmp_path: Path, space: Path
) -> None:
    tuner = Tuner(DEMO, SMALL, space, tmp_path / "study", 1)
    queue = tuner.jobs(3)
    failed, killed = next(queue), next(queue)
    tuner.listen(failed, Event("failed", text="no"))
    again = Tuner(DEMO, SMALL, space, tmp_path / "study", 1)
    assert again.finished == 0
    assert (
        next(again.jobs(3)).folder == killed.folder
    )  # the same parameters: the run in its folder goes on


ROUNDS_OF_EACH = 4


def score(lr: float, number: int) -> float:
    """Stand in for what a run measures: the same in every process, other for every trial."""
    return (lr * 997) % 1.0 + number / 100


def search(tuner: Tuner, trials: int, dies: tuple[int, int] = (-1, 0)) -> None:
    """Go on with a search; ``dies`` is the trial and the round after whose line it is killed."""
    for job in tuner.jobs(trials):
        trial = tuner.open[job.name].trials[0]
        path = job.folder / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        bad = tuner.listen(job, Event("began", {"round": len(lines)}))
        for number in range(len(lines) + 1, ROUNDS_OF_EACH + 1):
            if bad:
                break
            line = {"round": number, VALIDATION_ACCURACY: score(trial.params["train.lr"], number)}
            job.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if (trial.number, number) == dies:
                return
            bad = tuner.listen(job, Event("round", line))
        tuner.listen(job, Event("stopped" if bad else "done"))


def told(tuner: Tuner) -> list[object]:
    """Everything that a search knows of its trials."""
    found = tuner.study.get_trials()
    return [(t.number, t.params, t.state, t.value, t.intermediate_values) for t in found]


@pytest.mark.slow
def test_a_killed_search_makes_the_trials_of_one_that_never_was(
    tmp_path: Path, space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ten trials are drawn at random, those after them by what was measured; some are pruned
    settings = [*SMALL, f"train.num_rounds={ROUNDS_OF_EACH}"]
    whole = Tuner(DEMO, settings, space, tmp_path / "whole", 1)
    search(whole, 13)
    assert {trial.state.name for trial in whole.study.get_trials()} == {"COMPLETE", "PRUNED"}
    trial = importlib.import_module("optuna").trial.Trial
    for dies in ((1, 2), (1, 4), (6, 3), (11, 3), (12, 4)):
        search(Tuner(DEMO, settings, space, tmp_path / "cut", 1), 13, dies)
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(trial, "suggest_int", killed)  # when it has one of three values
            search(Tuner(DEMO, settings, space, tmp_path / "cut", 1), 13)
    cut = Tuner(DEMO, settings, space, tmp_path / "cut", 1)
    search(cut, 13)
    assert told(cut) == told(whole)


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def kill_when_begun(search: Command, out: Path, trials: int) -> None:
    """Kill a search when so many of its trials have a record."""
    wait_until(lambda: len(list(out.glob("*/*/rounds.jsonl"))) >= trials)
    children = search.workers()
    search.signal(signal.SIGKILL)
    search.end()
    wait_for_ends(children)


@pytest.mark.slow
def test_a_search_that_is_killed_twice_makes_the_trials_of_a_whole_one(
    tmp_path: Path, space: Path
) -> None:
    settings = [word for text in [*SMALL, "train.num_rounds=15"] for word in ("--set", text)]
    command = ["tune", "demo", "--space", str(space), "--trials", "3", "--jobs", "1", *settings]
    for trials in (1, 2):
        kill_when_begun(Command([*command, "--out", "cut"], tmp_path), tmp_path / "cut", trials)
    for out in ("cut", "whole"):
        fedgist(*command, "--out", out, cwd=tmp_path)
    mine = [*SMALL, "train.num_rounds=15"]
    cut_one, whole = (Tuner(DEMO, mine, space, tmp_path / out, 1) for out in ("cut", "whole"))
    assert len(whole.study.get_trials()) == 3
    assert told(cut_one) == told(whole)


def test_a_run_without_validation_rows_is_an_error_that_says_so(
    tmp_path: Path, space: Path
) -> None:
    tuner = Tuner(DEMO, [*SMALL, "data.validation=0.1"], space, tmp_path / "study", 1)
    job = next(tuner.jobs(1))
    job.folder.mkdir(parents=True)
    (job.folder / "rounds.jsonl").write_text('{"round": 3, "eval/client/accuracy_mean": 0.5}\n')
    with pytest.raises(RecipeError, match="has no accuracy on validation rows"):
        tuner.listen(job, Event("done"))
    finish(job, 0.5)
    tuner.listen(job, Event("done"))
    recipe = tuner.best_recipe()
    assert recipe is not None
    assert recipe.data.validation == 0.1  # as it was asked for


def test_a_second_search_in_a_folder_is_refused_and_the_first_one_goes_on(
    tmp_path: Path, space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rejects that the trials which run in a first search are taken for those of a killed one
    monkeypatch.setattr(run_directory, "PATIENCE_S", 0.05)
    out = tmp_path / "study"
    command = ["tune", str(DEMO), "--space", str(space), "--out", str(out)]
    with storing(out):
        tuner = Tuner(DEMO, SMALL, space, out, 1)
        job = next(tuner.jobs(2))
        before = (out / STUDY).read_bytes()
        second = CliRunner().invoke(app, [*command, *(f"--set={text}" for text in SMALL)])
        assert isinstance(second.exception, RecipeError)
        assert str(second.exception) == f"another fedgist tune is using {out}"
        assert (out / STUDY).read_bytes() == before
        tuner.listen(job, Event("failed"))  # no UpdateFinishedTrialError
    with storing(out):  # it is free again
        pass
    with storing(tmp_path / "not" / "begun"):
        pass
    assert not (tmp_path / "not" / "begun").exists()


@pytest.mark.slow
def test_a_study_of_another_question_is_refused(tmp_path: Path, space: Path) -> None:
    Tuner(DEMO, SMALL, space, tmp_path / "study", 1)
    with pytest.raises(
        RecipeError, match="holds a study of another recipe, space or number of seeds"
    ):
        Tuner(DEMO, [*SMALL, "train.batch_size=5"], space, tmp_path / "study", 1)


@pytest.mark.slow
def test_a_search_on_digits_finds_settings(tmp_path: Path, space: Path) -> None:
    tuner = Tuner(DEMO, SMALL, space, tmp_path / "study", 1)
    run_jobs(tuner.jobs(3), 2, tuner.listen)
    best = tuner.best()
    assert best is not None
    assert 0 < best[1] <= 1
    lines = [
        json.loads(li)
        for p in tmp_path.glob("study/*/*/rounds.jsonl")
        for li in p.read_text().splitlines()
    ]
    assert max(line[VALIDATION_ACCURACY] for line in lines if line["round"] == 3) >= best[1]


@pytest.mark.parametrize("read_file", [read_space, read_paper_table, read_question, read_queue])
def test_a_byte_order_mark_begins_no_table(
    read_file: Callable[[Path], Any], tmp_path: Path
) -> None:
    """As the editor of Windows writes one: the file is read, and what is wrong is what it says."""
    file = tmp_path / "file.toml"
    file.write_text("[nothing]\nof = 1\n", "utf-8-sig")
    with pytest.raises(InputError, match=r"nothing|is missing"):
        read_file(file)


@pytest.mark.slow
def test_a_search_goes_on_with_the_data_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: trials on the old and the new rows were compared, without a word
    monkeypatch.chdir(tmp_path)

    def searched(trials: int) -> Result:
        words = ["tune", "r.toml", "--space", "space.toml", "--trials", str(trials), "--out", "s"]
        return CliRunner().invoke(app, [*words, "--jobs", "1", "-q"])

    def write_rows(shift: float) -> None:
        rows = [f"{i % 7 + shift},{i % 5},{'ill' if i % 2 else 'well'}" for i in range(60)]
        Path("d.csv").write_text("a,b,y\n" + "\n".join(rows) + "\n")

    Path("r.toml").write_text(OF_A_TABLE)
    Path("space.toml").write_text('["train.lr"]\nlow = 0.001\nhigh = 0.1\nlog = true\n')
    write_rows(0.0)
    assert searched(1).exit_code == 0
    write_rows(0.5)
    assert searched(1).exit_code == 0  # nothing is compared with anything
    refused = searched(2)
    assert (refused.exit_code, "on different data" in str(refused.exception)) == (1, True)
    write_rows(0.0)
    assert searched(2).exit_code == 1  # the trial on other rows is there now


def test_a_recipe_of_ones_own_is_not_replaced_by_the_best_one(tmp_path: Path) -> None:
    (tmp_path / BEST).write_text("# mine")
    with pytest.raises(RecipeError, match="is of no search in"), storing(tmp_path):
        pass
    assert (tmp_path / BEST).read_text() == "# mine"
