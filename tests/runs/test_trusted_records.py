"""Records that cannot lie: a run goes on only with what it was begun with, or says what is not."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedgist
from fedgist.cli import seeded_runs
from fedgist.core.method import Context, Count, Method, Order, Part, Phase, Replies
from fedgist.data.dataset import Dataset
from fedgist.engines.plans.plan import Plan
from fedgist.errors import CheckpointError, DataError, InputError, RecipeError
from fedgist.methods import METHODS
from fedgist.methods.fedavg import FedAvg
from fedgist.recipe.overrides import Overrides
from fedgist.runs import resuming, run_rounds, runner
from fedgist.runs.files import atomic_files, checkpoint, digests
from fedgist.runs.files.record import STATE, Record, read_lines
from fedgist.runs.resuming import round_settings
from fedgist.runs.round import start_server
from fedgist.testing.laws import equal
from fedgist.testing.small_worlds import blobs, trace, world
from interrupted import CTRL_C, KILL, StopAfter, bare, goes_on

ROUNDS = 6
RECIPE: dict[str, Any] = {
    "clients": {"num_clients": 4},
    "train": {"num_rounds": ROUNDS, "batch_size": 8, "lr": 0.05},
    "engine": {"workers": 1, "cohort_size": 2, "checkpoint_every": 2},
}
POOLS = {name: {"model": "mlp", "hidden": [5]} for name in ("small", "large")}
#: Settings of methods by which their rounds depend on the number of rounds.
FALLING: dict[str, dict[str, Any]] = {
    "fedkd": {"first_energy": 0.1, "last_energy": 0.9},
    "fedadam": {"server": {"final_factor": 0.1}},
    "cs_fl": {"first_phase": 0.5},
}
ROWS = [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16, 17]]


def run(folder: Path, recipe: dict[str, Any] | None = None, **more: Any) -> fedgist.Result:
    given: dict[str, Any] = {"data": blobs(), "clients": ROWS} | more
    return fedgist.run(RECIPE if recipe is None else recipe, out=folder, **given)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(folder, observer=StopAfter(5))
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A run with lines of five rounds and a checkpoint of the fourth, for a test to damage."""
    return shutil.copytree(stopped_once, tmp_path / "run")


@pytest.mark.slow
def test_it_goes_on_where_nothing_changed(stopped: Path, tmp_path: Path) -> None:
    resumed = run(stopped, resume=True)
    whole = run(tmp_path / "whole")
    assert bare(resumed.rounds) == bare(whole.rounds) == bare(read_lines(stopped / "rounds.jsonl"))
    assert resumed.clients == whole.clients == read_lines(stopped / "clients.jsonl")
    states = [done.server_run.checkpoint().arrays() for done in (resumed, whole)]
    assert equal(*states)


def cut_in_the_third(blob: bytes) -> bytes:
    lines = blob.splitlines(keepends=True)
    return b"".join(lines[:2]) + lines[2][:20]


def without_the_third(blob: bytes) -> bytes:
    lines = blob.splitlines(keepends=True)
    return b"".join(lines[:2] + lines[3:])


def with_a_flipped_bit(blob: bytes) -> bytes:
    place = blob.index(b'"comm/up_bytes": ') + len(b'"comm/up_bytes": ')
    return blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        # seen: exit code 0, "finished, 12 rounds", lines [1, 2, 7..12]
        (cut_in_the_third, "round 3 is missing"),
        (without_the_third, "round 3 is missing"),
        (lambda _: b"", "round 1 is missing"),
        (lambda blob: b"".join(blob.splitlines(keepends=True)[:3]), "round 4 is missing"),
        (with_a_flipped_bit, "a line was changed, or is missing"),
        (lambda blob: blob.replace(b'"round": 2', b'"round": "2"'), "line 2 has round = '2'"),
        (lambda blob: blob.replace(b'"round": 2', b'"round": 1'), "round 2 is missing"),
        (lambda blob: b"[]\n" + blob, "line 1 is \\[\\], not a table"),
        (lambda blob: b"\xff\xfe\n" + blob, "line 1 is not JSON"),
        (lambda blob: b"[" * 10**5 + b"\n" + blob, "line 1 is not JSON"),
        (None, "round 1 is missing"),
    ],
)
def test_lines_that_do_not_fit_the_checkpoint_are_refused(
    stopped: Path, damage: Callable[[bytes], bytes] | None, says: str
) -> None:
    path = stopped / "rounds.jsonl"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(CheckpointError, match=says) as caught:
        run(stopped, resume=True)
    assert "does not match the checkpoint of round 4" in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert (path.read_bytes() if path.exists() else None) == before  # nothing is lost


def test_a_run_whose_checkpoint_is_lost_begins_again_and_says_so(stopped: Path) -> None:
    (stopped / STATE).unlink()
    notes: list[str] = []

    class Heard(StopAfter):
        def note(self, text: str) -> None:
            notes.append(text)

    resumed = run(stopped, resume=True, observer=Heard(99))
    assert [line["round"] for line in resumed.rounds] == list(range(1, ROUNDS + 1))
    assert f"{stopped} has no checkpoint: its run begins again at round 1" in notes


def test_lines_of_clients_are_checked_as_well(stopped: Path) -> None:
    path = stopped / "clients.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"client": 2', b'"client": 3', 1))
    with pytest.raises(CheckpointError, match="a line was changed, or is missing"):
        run(stopped, resume=True)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        # seen: "is finished", its table, and exit code 0
        ("recipe.toml", "lr = 0.05", "lr = 0.5", "was begun with train.lr = 0.05, not 0.5"),
        ("recipe.toml", "seed = 0", "seed = 1", "was begun with seed = 0, not 1"),
        ("rounds.jsonl", '"comm/up_bytes": ', '"comm/up_bytes": 1', "a line was changed"),
        ("clients.jsonl", '"client": 2', '"client": 3', "a line was changed"),
    ],
)
def test_a_finished_run_that_was_changed_is_refused(
    tmp_path: Path, name: str, old: str, new: str, says: str
) -> None:
    run(tmp_path)
    resume_finished(tmp_path)
    path = tmp_path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=says):
        resume_finished(tmp_path)


def test_a_finished_run_keeps_its_rounds_and_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(RecipeError, match="can only be raised, not cut to 3"):
        resume_finished(tmp_path, 3)
    (tmp_path / STATE).unlink()
    with pytest.raises(CheckpointError, match="has no checkpoint, which a finished run has"):
        resume_finished(tmp_path)


def resume_finished(folder: Path, rounds: int | None = None) -> None:
    """Do what `fedgist run --resume` does with a finished run: nothing, if it is whole."""
    assert list(seeded_runs.resume(folder, [], 1, None, StopAfter(0), rounds)) == []


def test_lines_are_on_the_disk_before_the_checkpoint_that_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, whole = atomic_files.sync, atomic_files.whole

    def seen_sync(path: Path) -> None:
        done.append(path.name)
        sync(path)

    def seen_whole(path: Path, **how: bool) -> AbstractContextManager[Path]:
        if path.name == STATE.name:
            done.append(path.name)
        return whole(path, **how)

    monkeypatch.setattr(atomic_files, "sync", seen_sync)
    monkeypatch.setattr(atomic_files, "whole", seen_whole)
    run(tmp_path / "run")
    assert done[:12] == ["rounds.jsonl", "clients.jsonl", "edges.jsonl", STATE.name] * 3


CHANGES = [
    ({"seed": 1}, "seed = 0, not 1"),
    ({"train": {"lr": 0.06}}, "train.lr = 0.05, not 0.06"),
    ({"train": {"batch_size": 9}}, "train.batch_size = 8, not 9"),
    ({"data": {"validation": 0.25}}, "data.validation = 0.0, not 0.25"),
    ({"train": {"num_rounds": 9}}, "train.num_rounds = 6, not 9; --rounds raises it"),
    ({"train": {"num_rounds": 5}}, "train.num_rounds = 6, not 5$"),
    ({"method": {"name": "fedavg"}}, "method.name = 'fedlog', not 'fedavg'"),
    ({"evaluate": {"every": 2}}, "evaluate.every = 1, not 2"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_another_recipe_is_refused_by_name(
    stopped: Path, change: dict[str, Any], says: str
) -> None:
    recipe = RECIPE | {k: (RECIPE.get(k, {}) | v if k != "seed" else v) for k, v in change.items()}
    with pytest.raises(RecipeError, match=f"was begun with {says}"):
        run(stopped, recipe, resume=True)


@pytest.mark.slow
def test_an_edited_recipe_is_refused_by_name(tmp_path: Path) -> None:
    recipe = RECIPE | {"data": {"name": "digits", "train_rows": 200}}
    fedgist.run(recipe, out=tmp_path / "run")
    file = tmp_path / "run" / "recipe.toml"
    text = file.read_text()
    for old, new, says in (
        ("lr = 0.05", "lr = 0.5", "train.lr = 0.05, not 0.5"),
        ("train_rows = 200", "train_rows = 100", "data.train_rows = 200, not 100"),
        ("num_rounds = 6", "num_rounds = 12", "train.num_rounds = 6, not 12"),
        ("cohort_size = 2\nconv", "cohort_size = 3\nconv", "engine.plans.mlp.cohort_size = 2"),
    ):
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(RecipeError, match=f"was begun with {says}"):
            fedgist.run(None, out=tmp_path / "run", resume=True)
        with pytest.raises(RecipeError, match=f"was begun with {says}"):
            runner.load_run(tmp_path / "run")
    file.write_text(text.replace("workers = 1", "workers = 2"))  # how the work is done may change
    fedgist.run(None, out=tmp_path / "run", resume=True)


def other_data(change: str) -> Dataset:
    data = blobs()
    array = getattr(data, change).clone()
    array[0] = 1 - array[0]
    return replace(data, **{change: array})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": other_data("x")}, "the data changed"),
        ({"data": other_data("x_test")}, "the data changed"),
        ({"data": replace(blobs(), scale=2.0)}, "the data changed"),
        ({"clients": [[0, 1, 2, 3], *ROWS[1:]]}, "the clients' rows changed"),
        ({"clients_test": [[0], [1], [2], [3]]}, "the clients' rows changed"),
    ],
)
def test_exchanged_data_are_refused_by_name(
    stopped: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(RecipeError, match=f"cannot go on: {says} since the run was begun"):
        run(stopped, resume=True, **change)


def test_exchanged_test_sets_are_refused_on_resume_alone(tmp_path: Path) -> None:
    rare = (np.zeros((3, 6), "float32"), np.array([0, 1, 2]))
    given: dict[str, Any] = {"recipe": RECIPE | {"method": {"name": "fedavg"}}}
    run(tmp_path / "run", **given, test_sets={"rare": rare})
    run(tmp_path / "run", **given, test_sets={"rare": rare}, resume=True)
    for other in (
        (rare[0] + 1, rare[1]),
        (rare[0], rare[1][::-1].copy()),
        (rare[0][:2], rare[1][:2]),
    ):
        with pytest.raises(RecipeError, match="the server's test sets changed since"):
            run(tmp_path / "run", **given, test_sets={"rare": other}, resume=True)
    with pytest.raises(RecipeError, match="the server's test sets changed since"):
        run(tmp_path / "run", **given, resume=True)
    # who uses its models need not have them
    asked = Overrides(data=blobs(), clients=[torch.tensor(rows) for rows in ROWS])
    assert runner.load_run(tmp_path / "run", asked)[0].round == ROUNDS


def test_another_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    modules = [torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)) for _ in range(2)]
    run(tmp_path / "run", model=modules[0])
    run(tmp_path / "run", model=modules[0], resume=True)
    with pytest.raises(RecipeError, match="the models' start changed"):
        run(tmp_path / "run", model=modules[1], resume=True)


def test_a_changed_file_of_data_is_refused_everywhere(tmp_path: Path) -> None:
    x, y = np.arange(120.0).reshape(40, 3), np.arange(40) % 2
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    recipe = RECIPE | {"data": {"name": "npz", "path": str(tmp_path / "mine.npz")}}
    fedgist.run(recipe, out=tmp_path / "run")
    runner.load_run(tmp_path / "run")
    x[7, 1] += 1
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    with pytest.raises(RecipeError, match="the data changed"):
        fedgist.run(None, out=tmp_path / "run", resume=True)
    with pytest.raises(RecipeError, match="the data changed"):
        runner.load_run(tmp_path / "run")


def test_large_data_are_sampled_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(resuming, "WHOLE", 100)
    monkeypatch.setattr(digests, "BLOCKS", 2)
    monkeypatch.setattr(digests, "BLOCK", 8)
    notes: list[str] = []

    class Heard(StopAfter):
        def note(self, text: str) -> None:
            notes.append(text)

    run(tmp_path / "run", observer=Heard(99))
    assert [note for note in notes if "looked for in a sample" in note]
    with pytest.raises(RecipeError, match="the data changed"):  # the first bytes are in the sample
        run(tmp_path / "run", resume=True, data=other_data("x"))


def test_every_flipped_bit_of_a_checkpoint_is_seen(stopped: Path) -> None:
    path = stopped / STATE
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        place, bit = draw.randrange(len(whole)), draw.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged") as caught:
            checkpoint.load(stopped)
        assert "\n" not in str(caught.value)
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="damaged"):
            run(stopped, resume=True)
    path.write_bytes(whole)
    run(stopped, resume=True)


def forged(stopped: Path, part: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a checkpoint whose digest fits, by an adversary or another version of a method."""
    saved = checkpoint.load(stopped)
    assert saved is not None
    arrays = dict(getattr(saved, part))
    change(arrays)
    changed: dict[str, Any] = {part: arrays}
    checkpoint.save(stopped, replace(saved, **changed))


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("server", lambda a: a.update(more=torch.zeros(1)), "does not know the array 'more'"),
        ("server", lambda a: a.pop(next(iter(a))), "the server's state misses the array"),
        ("server", lambda a: a.update({n: v[..., :1] for n, v in a.items()}), "the server's state"),
        ("clients", lambda a: a.update({n: v[..., :1] for n, v in a.items()}), "what clients keep"),
        ("clients", lambda a: a.update({n: v.double() for n, v in a.items()}), "what clients keep"),
        ("clients", lambda a: a.update(strange=torch.zeros(1)), "no architecture keeps 'strange'"),
        ("clients", lambda a: a.pop(next(iter(a))), "what clients keep misses the array"),
    ],
)
def test_arrays_of_other_names_types_or_shapes_are_refused(
    stopped: Path, part: str, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    # seen: tracebacks, and arrays of one column broadcast in silence
    forged(stopped, part, change)
    with pytest.raises(CheckpointError, match=says):
        run(stopped, resume=True)


@pytest.mark.parametrize("number", [-1, 2.5, "4", None, True, 5])
def test_a_round_that_is_none_is_refused(stopped: Path, number: Any) -> None:
    saved = checkpoint.load(stopped)
    assert saved is not None
    checkpoint.save(stopped, replace(saved, round=number))
    with pytest.raises(CheckpointError):
        run(stopped, resume=True)


@pytest.mark.parametrize(
    "part", [{"recipe": 1.5}, {"inputs": 3}, {"lines": []}, {"raised": ((1, 2),)}]
)
def test_a_binding_that_is_none_is_refused(stopped: Path, part: dict[str, Any]) -> None:
    # seen: the fuzz suite wrote numbers in place of tables, with a digest that fits: tracebacks
    saved = checkpoint.load(stopped)
    assert saved is not None
    checkpoint.save(stopped, replace(saved, binding=replace(saved.binding, **part)))
    with pytest.raises(CheckpointError, match="its content is not what was written"):
        run(stopped, resume=True)


@pytest.mark.slow
def test_the_number_of_rounds_can_be_raised_and_the_record_says_so(
    stopped: Path, tmp_path: Path
) -> None:
    longer = RECIPE | {"train": RECIPE["train"] | {"num_rounds": 9}}
    whole = run(tmp_path / "whole", longer)
    raised = run(stopped, resume=True, rounds=9)
    event = {"events": ["train.num_rounds was raised from 6 to 9"]}
    lines = bare(raised.rounds)
    assert lines[4].pop("events") == event["events"]
    assert lines == bare(whole.rounds)
    assert raised.summary["rounds_raised"] == ((4, 6, 9),)
    again = run(stopped, longer, resume=True, rounds=10)
    assert again.summary["rounds_raised"] == ((4, 6, 9), (9, 9, 10))
    assert "num_rounds = 10" in (stopped / "recipe.toml").read_text()


@dataclass(frozen=True)
class Visits(Method):
    """Counts uploads of an exchange before training and of rounds, which end at the server."""

    keeps: ClassVar[Part] = "all"

    def stages(self, ctx: Context) -> tuple[str, ...]:
        return ("train", "server-1", "server-2") if ctx.round else ("exchange",)

    def init_server(self, ctx: Context) -> Count:
        return Count(torch.zeros(()))

    def orders(self, server: Count, selected: Sequence[Order], ctx: Context) -> Any:
        return None if ctx.stage.startswith("server") else selected

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(),) if ctx.stage == "train" else ()

    def server_update(self, server: Count, replies: Replies, ctx: Context) -> Count:
        more = 0.0 if ctx.stage.startswith("server") else float(len(replies.clients))
        return Count(server.rows + more)


@pytest.mark.filterwarnings("ignore:stopping when")
@pytest.mark.parametrize(("how", "stage"), [(CTRL_C, "server-1"), (KILL, "server-2")])
def test_the_exchange_before_training_is_done_once(
    how: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: stopped amid round 1, a run began with the exchange anew and trained twice
    monkeypatch.setattr(run_rounds, "SAVE_AFTER_S", 0.0)  # after every stage
    given: dict[str, Any] = {"data": blobs(), "clients": ROWS}
    saved = goes_on(Visits(), how, (1, stage), RECIPE, given, tmp_path, monkeypatch)
    assert saved.round == 0
    assert saved.under_way is not None


@dataclass(frozen=True)
class LastRoundFineTuned(FedAvg):
    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        last = ctx.round == ctx.task.training.num_rounds
        return (Phase(learns=("all",)), *([Phase(learns=("head",))] if last else []))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_whose_rounds_depend_on_their_number_says_so(method: str) -> None:
    about: dict[str, Any] = {"model": {"name": "mlp", "hidden": [32, 8]}}
    about = {"clients": {"pools": POOLS}, "model": None} if "codist" in method else about
    about["options"] = FALLING.get(method, {})
    short, long = (world(method, train={"num_rounds": count}, **about) for count in (2, 4))
    ours, theirs = (trace(one, Plan(5), rounds=2).state for one in (short, long))
    depends = any(not torch.equal(array, theirs[name]) for name, array in ours.items())
    start = start_server(long.server)
    assert depends or method not in FALLING
    settings = round_settings(short.server, long.server, 2, start)
    assert any(before != after for _, before, after in settings) or not depends


@pytest.mark.slow
def test_rounds_cannot_be_raised_where_something_depends_on_their_number(tmp_path: Path) -> None:
    train = RECIPE["train"] | {"lr_schedule": "cosine"}
    run(tmp_path / "cosine", RECIPE | {"train": train})
    says = "cannot be raised from 6 to 9: train.lr_schedule depends on it, and round 2"
    with pytest.raises(RecipeError, match=says):
        run(tmp_path / "cosine", RECIPE | {"train": train}, resume=True, rounds=9)
    run(tmp_path / "tuned", method=LastRoundFineTuned())
    says = "LastRoundFineTuned depends on it, and round 6 would have been another"
    with pytest.raises(RecipeError, match=says):
        run(tmp_path / "tuned", method=LastRoundFineTuned(), resume=True, rounds=9)
    with pytest.raises(RecipeError, match="can only be raised, not cut to 3"):
        run(tmp_path / "tuned", method=LastRoundFineTuned(), resume=True, rounds=3)
    with pytest.raises(RecipeError, match="rounds = 9 raises the number of rounds of a run that"):
        run(tmp_path / "new", rounds=9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data.validation:UserWarning")
@pytest.mark.parametrize(
    "evaluate", [{"keep": "best_validation"}, {"patience": 9}, {"keep": "last"}]
)
def test_rounds_are_not_raised_behind_a_choice_among_evaluated_ones(
    evaluate: dict[str, Any], tmp_path: Path
) -> None:
    # seen: round 3, evaluated as the last one alone, was kept, and the longer run kept another
    sections = {"evaluate": {"every": 4, **evaluate}, "data": {"validation": 0.2}}
    chosen = RECIPE | {k: RECIPE.get(k, {}) | v for k, v in sections.items()}
    run(tmp_path / "run", chosen)
    if evaluate == {"keep": "last"}:
        assert run(tmp_path / "run", chosen, resume=True, rounds=9).rounds[-1]["round"] == 9
        return
    says = "evaluate.patience choose among evaluated rounds, and round 6 was evaluated as the last"
    with pytest.raises(RecipeError, match=says):
        run(tmp_path / "run", chosen, resume=True, rounds=9)


@pytest.mark.filterwarnings("ignore:the run ended after")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data.validation:UserWarning")
@pytest.mark.parametrize(
    ("method", "every", "says"),
    [
        ("fedbabu", 0, "fine-tuned by fedbabu,"),
        ("fedavg", 30, r"trained \(evaluate.trained_every\),"),
        ("fedavg", 0, ""),
    ],
)
def test_a_run_that_ends_early_says_which_last_tests_it_lacks(
    method: str, every: int, says: str, tmp_path: Path
) -> None:
    sections = {
        "method": {"name": method},
        "evaluate": {"patience": 1, "trained_every": every},
        "data": {"validation": 0.2},
        "train": {"num_rounds": 60, "lr": 1e-12},
    }
    raw = RECIPE | {k: RECIPE.get(k, {}) | v for k, v in sections.items()}
    result = run(tmp_path / "run", raw)
    notes = [note for note in result.summary["notes"] if "the run ended after" in note]
    assert result.rounds[-1]["round"] < 60
    assert len(notes) == bool(says)
    assert not says or re.search(f"models were not tested {says} as they are after", notes[0])


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.add({"round": 1})
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2')
    assert read_lines(tmp_path / "rounds.jsonl") == [{"round": 1}]
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({}) + "\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        read_lines(tmp_path / "rounds.jsonl")


def test_what_was_given_is_recorded_as_given(tmp_path: Path) -> None:
    # seen: recorded as the data set and the model that the recipe would have named
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    run(tmp_path / "run", model=module)
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert text.count('name = "given"') == 3
    with pytest.raises(
        RecipeError, match=r"model.name = 'given': it was given in Python, as model="
    ):
        runner.load_run(tmp_path / "run")
    for argument, section in (("data", {"name": "mnist"}), ("clients", {"alpha": 1.0})):
        table = {"data": "data", "clients": "partition"}[argument]
        with pytest.raises(
            RecipeError, match=rf"{table}\.\w+ is given in the recipe, and {argument}="
        ):
            run(tmp_path / "new", RECIPE | {table: section})
    with pytest.raises(
        RecipeError, match=r"clients.num_clients = 5, but clients= lists the rows of 4"
    ):
        run(tmp_path / "new", RECIPE | {"clients": {"num_clients": 5}})
