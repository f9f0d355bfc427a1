"""Many runs side by side: grids, tables, runs that are skipped, that fail, or are killed."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import Command, fedgist, wait_for_ends, wait_until
from fedgist.cli.recipe_files import find_recipe, find_table, folder, shipped
from fedgist.errors import RecipeError
from fedgist.methods import METHODS, base_name
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make, read
from fedgist.recipe.resolve import resolve
from fedgist.runs.resuming import of_world
from fedgist.studies import job_process
from fedgist.studies.job import ENDS, Event, Job, jobs_of_seeds
from fedgist.studies.jobs import DATA, OF_NO_DATA, is_done, run_jobs
from fedgist.studies.paper_table import cells, is_table, read_paper_table
from fedgist.studies.search_space import read_space
from fedgist.studies.sweep import axis, grid
from fedgist.world.world import make_world

SMALL = [
    "data.train_rows=120",
    "train.num_rounds=3",
    "engine.cohort_size=3",
    "clients.num_clients=4",
]
DEMO = folder() / "demo.toml"

# grids


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("method.name=fedavg,fedlog", ["fedavg", "fedlog"]),
        ("train.lr=1e-3, 1e-2", ["1e-3", "1e-2"]),
        ("model.hidden=[32],[64,32]", ["[32]", "[64,32]"]),
        ('data.path="a,b","c"', ['"a,b"', '"c"']),
        ("clients.architectures={a=1,b=2},{a=1}", ["{a=1,b=2}", "{a=1}"]),
    ],
)
def test_an_axis_is_split_at_its_own_commas(text: str, values: list[str]) -> None:
    assert axis(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    "text",
    [
        "train.lr",
        "train.lr=",
        "=1,2",
        "train.lr=1,1",
        "model.hidden=[[1],[2]],[3]",
        "seed=1,2",
        "a=1,,2",
    ],
)
def test_an_axis_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--grid "):
        axis(text)


@given(st.lists(st.integers(-99, 99), min_size=1, max_size=9, unique=True))
def test_numbers_come_back_as_they_were(values: list[int]) -> None:
    assert axis("a.b=" + ",".join(map(str, values)))[1] == [str(v) for v in values]


def test_a_grid_is_every_combination_and_seed(tmp_path: Path) -> None:
    jobs = grid(DEMO, SMALL, ["method.name=fedavg,fedlog", "train.lr=0.1,0.2"], 2, tmp_path)
    assert len({job.folder for job in jobs}) == 8
    assert {(j.recipe.method.name, j.recipe.train.lr, j.recipe.seed) for j in jobs} == {
        (m, lr, s) for m in ("fedavg", "fedlog") for lr in (0.1, 0.2) for s in (0, 1)
    }
    assert jobs[0].folder == tmp_path / "method.name=fedavg,train.lr=0.1" / "seed-0"


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (
            ["method.name=fedavg,fedlgo"],
            "method.name=fedlgo: .*unknown method 'fedlgo'; did you mean 'fedlog'",
        ),
        (
            ["method.name=fedavg,fedprox", "method.mu=0,1"],
            "method.name=fedavg method.mu=0: .*unknown key of fedavg",
        ),
        (["train.lr=1", "train.lr=2"], "train.lr is given twice"),
        (
            ["train.lr=0.01,0.0100"],
            "train.lr=0.01 seed 0 and train.lr=0.0100 seed 0 are the same run",
        ),
        (["train.lr=0.01,inf"], "train.lr=inf: .*finite"),
    ],
)
def test_every_cell_is_checked_before_anything_runs(
    tmp_path: Path, axes: list[str], says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        grid(DEMO, SMALL, axes, 1, tmp_path)
    assert not any(tmp_path.iterdir())


# tables


def test_every_table_names_recipes_and_methods_that_the_paper_has_numbers_for() -> None:
    tables = [name for name in shipped() if is_table(folder() / f"{name}.toml")]
    assert "fedlog/table1" in tables
    for name in tables:
        table = read_paper_table(find_table(name))
        for column in table.columns.values():
            paper = read(find_recipe(column.recipe)).paper
            assert paper.source == table.table.source
            methods = set(table.table.methods)
            for printed in (paper.accuracy, paper.communication, column.paper):
                assert set(printed) <= methods
                # of these papers say nothing, or once for several columns
                assert not printed or methods - set(printed) <= {"local", "centralized"}


def test_a_table_has_a_job_for_each_cell_at_either_scale(tmp_path: Path) -> None:
    table = read_paper_table(find_table("fedlog/table1"))
    available = [m for m in table.table.methods if base_name(m) in METHODS]
    paper, recipes = cells(table, "paper", find_recipe, tmp_path)
    assert len(paper) == 3 * len(available) * 10
    assert list(recipes) == ["mnist", "cifar10", "cifar100"]
    assert {job.recipe.paper.departs for job in paper} == {()}  # the paper's scale is the paper's
    small, _ = cells(
        table, "small", find_recipe, tmp_path, columns=["mnist"], methods=["fedlog"], seeds=2
    )
    assert [(job.recipe.train.num_rounds, job.recipe.seed) for job in small] == [(20, 0), (20, 1)]
    assert small[0].recipe.paper.departs == ("train.num_rounds = 20",)


def test_columns_of_one_recipe_have_settings_and_numbers_of_their_own(tmp_path: Path) -> None:
    table = read_paper_table(find_table("repshare/table1"))
    jobs_, recipes = cells(table, "paper", find_recipe, tmp_path, methods=["repshare"], seeds=1)
    counts = {job.name.split()[0]: job.recipe.clients.num_clients for job in jobs_}
    assert (counts["mnist_2"], counts["mnist_5"], counts["mnist_10"]) == (2, 5, 10)
    assert {job.recipe.paper.departs for job in jobs_} == {()}  # they are the paper's
    assert recipes["mnist_5"].paper.accuracy["repshare"] == (90.63,)
    assert recipes["mnist_10"].paper.accuracy["repshare"] == (82.07,)
    assert jobs_[0].recipe.paper.accuracy == recipes["mnist_2"].paper.accuracy
    assert recipes["mnist_2"].paper.accuracy["centralized"] == (94.0,)


def test_a_column_of_one_scale_is_done_at_the_other_by_name_alone(tmp_path: Path) -> None:
    table = read_paper_table(find_table("flesd/table1"))
    small, paper = (set(cells(table, s, find_recipe, tmp_path)[1]) for s in ("small", "paper"))
    assert "imagenet100_1" in paper - small
    assert "small_1" in small - paper
    assert "cifar100_001" in small & paper
    named = cells(table, "small", find_recipe, tmp_path, columns=["imagenet100_1"])[1]
    assert list(named) == ["imagenet100_1"]
    assert named["imagenet100_1"].model is not None
    assert named["imagenet100_1"].model.name == "resnet50"


def test_every_column_of_the_papers_table_is_done_at_the_papers_scale(tmp_path: Path) -> None:
    # rejects a column that no command reaches, or that does what another one does
    table = read_paper_table(find_table("flesd/table1"))
    jobs_, recipes = cells(table, "paper", find_recipe, tmp_path, methods=["flesd"], seeds=1)
    names = {
        f"{data}_{alpha}": (data, float(f"0.{alpha[1:]}" if alpha[0] == "0" else alpha))
        for data in ("cifar10", "cifar100", "tiny_imagenet", "imagenet100")
        for alpha in ("1", "100", "001")
    }
    assert set(recipes) == set(names)
    assert {job.name.split()[0] for job in jobs_} == set(names)
    for name, (data, alpha) in names.items():
        recipe = recipes[name]
        assert recipe.paper.accuracy["flesd"]
        assert recipe.paper.departs == ()
        assert getattr(recipe.partition, "alpha", None) == alpha
        where = str(getattr(recipe.data, "path", "")).replace("-", "_")
        assert data in (recipe.data.name, where)


def test_what_a_table_does_not_have_is_refused(tmp_path: Path) -> None:
    table = read_paper_table(find_table("fedlog/table1"))
    with pytest.raises(RecipeError, match="--column svhn: the table has mnist, cifar10, cifar100"):
        cells(table, "small", find_recipe, tmp_path, columns=["svhn"])
    with pytest.raises(
        RecipeError, match="--method fedfomo: of the table's methods fedgist has local, fedavg"
    ):
        cells(table, "small", find_recipe, tmp_path, methods=["fedfomo"])
    with pytest.raises(RecipeError, match="is a paper's table: fedgist reproduce fedlog/table1"):
        find_recipe("fedlog/table1")
    with pytest.raises(
        RecipeError, match=r"unknown table 'fedlog/tabel1'; did you mean 'fedlog/table1'"
    ):
        find_table("fedlog/tabel1")


# jobs


def jobs(out: Path, *settings: str, seeds: int = 2) -> list[Job]:
    return grid(DEMO, [*SMALL, *settings], ["method.name=fedlog"], seeds, out)


def do(todo: list[Job], at_once: int = 2) -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []

    def listen(job: Job, event: Event) -> bool:
        events.append((job.name, event.kind))
        return False

    run_jobs(todo, at_once, listen)
    return events


def accuracies(job: Job) -> list[float]:
    lines = (job.folder / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["eval/client/accuracy_mean"] for line in lines]


@pytest.mark.slow
def test_jobs_are_ordinary_runs_and_what_is_done_is_skipped(tmp_path: Path) -> None:
    first = jobs(tmp_path / "two")
    events = do(first)
    assert [kind for _, kind in events].count("round") == 6
    assert all(is_done(job) for job in first)
    assert do(first) == [(job.name, "done") for job in first]
    alone = jobs(tmp_path / "one")
    do(alone, 1)
    assert [accuracies(job) for job in alone] == [accuracies(job) for job in first]
    assert accuracies(first[0]) != accuracies(first[1])


@pytest.mark.parametrize(
    ("cuda", "device", "kind"),
    [(None, "auto", ForkProcess), ("13.0", "auto", SpawnProcess), ("13.0", "cpu", ForkProcess)],
)
@pytest.mark.slow
def test_a_job_on_a_gpu_is_not_a_fork_of_a_process_that_may_have_used_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, device: str, kind: type
) -> None:
    # the checks of a recipe use the GPU before the jobs begin: CUDA then fails in every fork
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (todo,) = jobs(tmp_path / "runs", f"engine.device={device}", seeds=1)
    process = job_process.JobProcess(todo, None)
    end = next(e for e in iter(process.next_event, None) if e.kind in ENDS)
    process.join()
    assert (end.kind, type(process.process)) == ("done", kind)


@pytest.mark.slow
def test_a_stopped_job_of_an_earlier_version_begins_again_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (todo,) = jobs(tmp_path / "runs", "train.num_rounds=40", seeds=1)
    run_jobs([todo], 1, lambda _, event: bool(event.line and event.line["round"] >= 12))
    assert not is_done(todo)
    method = METHODS[base_name(todo.recipe.method.name)]
    monkeypatch.setattr(method, "version", method.version + 1)
    notes: list[str] = []
    begun: list[int] = []

    def listen(_: Job, event: Event) -> bool:
        notes.append(event.text)
        if event.kind == "began" and event.line:
            begun.append(event.line["round"])
        return False

    run_jobs([todo], 1, listen)
    assert begun == [0]
    assert any("of an earlier version: begun again" in note for note in notes)
    assert is_done(todo)


@pytest.mark.slow
def test_a_job_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    todo = jobs(tmp_path / "runs")
    broken = make(
        {
            **todo[0].recipe.model_dump(),
            "data": {"name": "npz", "path": str(tmp_path / "nothing.npz")},
        }
    )
    ends: dict[str, Event] = {}

    def listen(job: Job, event: Event) -> bool:
        if event.kind in {"done", "failed"}:
            ends[job.name] = event
        return False

    run_jobs([Job("broken", broken, tmp_path / "broken"), todo[1]], 2, listen)
    assert ends["broken"].kind == "failed"
    assert "nothing.npz" in ends["broken"].text
    assert ends[todo[1].name].kind == "done"


@pytest.mark.slow
def test_a_job_stops_when_it_is_told_to_and_can_go_on(tmp_path: Path) -> None:
    (todo,) = jobs(tmp_path / "runs", "train.num_rounds=200", seeds=1)
    kinds = []

    def listen(job: Job, event: Event) -> bool:
        kinds.append(event.kind)
        return bool(event.line and event.line["round"] >= 2)

    run_jobs([todo], 1, listen)
    assert kinds[-1] == "stopped"
    done = len(accuracies(todo))
    assert 2 <= done < 200
    assert not is_done(todo)


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, seeds=1)
    job.folder.mkdir(parents=True)
    other = job.recipe.model_copy(update={"train": job.recipe.train.model_copy(update={"lr": 0.5})})
    (job.folder / "recipe.toml").write_text(other.to_toml())
    with pytest.raises(
        RecipeError, match=r"holds a run with train.lr = 0.5, not 0.002; choose another --out"
    ):
        is_done(job)


TABLE = {
    "data": {"name": "table", "path": "d.csv", "label": "y", "client": "h", "folds": 2},
    "partition": {"name": "natural"},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"num_rounds": 1},
}


def write_rows(path: Path, first: float) -> None:
    rows = [f"{i % 7 + first * (i == 0)},{'ab'[i % 2]},{'xy'[i // 2 % 2]}" for i in range(40)]
    path.write_text("\n".join(["v,h,y", *rows]))


def cells_of(out: Path, *methods: str) -> list[Job]:
    """Return jobs with two seeds of two divisions for each method."""
    return [
        job
        for name in methods
        for job in jobs_of_seeds(name, make({**TABLE, "method": {"name": name}}), 2, out / name)
    ]


@pytest.mark.slow
def test_runs_on_data_that_changed_do_not_stand_beside_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rejects a table of runs on the old and on the new rows; other seeds and folds have other rows
    monkeypatch.chdir(tmp_path)
    write_rows(Path("d.csv"), 0.0)
    do(cells_of(Path("runs"), "local", "fedavg"))
    write_rows(Path("d.csv"), 0.5)
    assert {kind for _, kind in do(cells_of(Path("runs"), "local", "fedavg"))} == {"done"}
    says = r"runs/local/seed-0-division-0 and runs/fedprox/seed-0-division-0 .*on different data"
    with pytest.raises(RecipeError, match=says):
        do(cells_of(Path("runs"), "local", "fedprox"), at_once=1)
    with pytest.raises(RecipeError, match=says):  # nor are they told when they are all done
        do(cells_of(Path("runs"), "local", "fedprox"), at_once=1)


@pytest.mark.parametrize(
    "settings",
    [
        ["method.name=centralized"],
        ["method.name=fedlog", "model.hidden=[3,3]", "train.batch_size=2"],
        ["method.name=local", "evaluate.every=2", "train.num_rounds=7"],
    ],
)
def test_the_data_do_not_depend_on_settings_of_which_jobs_need_not_agree(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rejects that a sweep over methods or models is refused as one over different data
    assert {text.partition(".")[0] + "." for text in settings} <= set(OF_NO_DATA)
    monkeypatch.chdir(tmp_path)
    write_rows(Path("d.csv"), 0.0)
    first, second = (
        of_world(make_world(resolve(make(TABLE, more), Overrides()))) for more in ([], settings)
    )
    assert first[DATA] == second[DATA]


LONG = [*SMALL, "train.num_rounds=40"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The accuracies of a sweep that nobody stops, by method."""
    todo = grid(DEMO, LONG, ["method.name=fedlog,fedavg"], 1, tmp_path_factory.mktemp("whole"))
    do(todo)
    return {job.recipe.method.name: accuracies(job) for job in todo}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_or_killed_goes_on_and_ends_the_same(
    tmp_path: Path, how: signal.Signals, whole: dict[str, list[float]]
) -> None:
    command = [
        "sweep",
        "demo",
        "--grid",
        "method.name=fedlog,fedavg",
        "--seeds",
        "1",
        "--out",
        "sweep",
        *(word for text in LONG for word in ("--set", text)),
    ]
    begun = Command(command, tmp_path)
    wait_until(lambda: any(p.read_text() for p in tmp_path.glob("sweep/*/*/rounds.jsonl")))
    children = begun.workers()
    begun.signal(how)
    said = begun.end()
    if how == signal.SIGINT:
        assert said.returncode == 130
        assert "go on with: fedgist sweep demo" in said.stderr
    wait_for_ends(children)
    assert "fedavg" in fedgist(*command, cwd=tmp_path).stdout
    for method, expected in whole.items():
        (run,) = tmp_path.glob(f"sweep/*{method}/seed-0")
        assert accuracies(Job("", read(run / "recipe.toml"), run)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[table", "Expected"),
        ("[table]\nsource = 3\nmethods = []\n[columns]", "table.source = 3: must be text"),
        (
            "[table]\nsource = ''\nmethods = 'fedlog'\n[columns]",
            "table.methods = 'fedlog': must be a list",
        ),
        ("[table]\nsource = ''\nmethods = []\n", "columns is missing"),
        (
            "columns = 3\n[table]\nsource = ''\nmethods = []\n",
            "columns = 3: must be a table",
        ),
        (
            "[table]\nsource = ''\nmethods = []\nseeds = {small = 0}\n[columns]",
            "table.seeds.small = 0: must be at least 1",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_in_our_words(
    tmp_path: Path, text: str, says: str
) -> None:
    # seen: pydantic said that input should be a valid tuple
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=re.escape(says)) as refused:
        read_paper_table(path)
    assert "Input should" not in str(refused.value)


@pytest.mark.parametrize("text", [b"[table]\na = " + b"[" * 9000, b"[table]\n\xff", b"\xff"])
def test_tables_and_spaces_that_are_no_text_or_too_deep_are_one_line(
    tmp_path: Path, text: bytes
) -> None:
    # seen: RecursionError from the parser, UnicodeDecodeError when recipes were listed
    path = tmp_path / "file.toml"
    path.write_bytes(text)
    assert is_table(path) == (text[0] != 0xFF)
    for reader in (read_paper_table, read_space):
        with pytest.raises(RecipeError, match=r"file\.toml: \S+"):
            reader(path)


@pytest.mark.slow
def test_data_that_say_how_many_clients_there_are_are_swept(tmp_path: Path) -> None:
    # seen: a sweep's runs failed, for 10 clients, the default, were asked of data that have 2
    recipe = tmp_path / "natural.toml"
    recipe.write_text(
        '[data]\nname = "circle"\n[partition]\nname = "natural"\n[train]\nnum_rounds = 1\n'
    )
    todo = grid(recipe, [], ["method.name=fedavg,local"], 1, tmp_path / "out")
    assert sorted(name for name, kind in do(todo) if kind == "done") == [j.name for j in todo]
    assert do(todo) == [(job.name, "done") for job in todo]  # nothing is run twice
    for job in todo:
        assert read(job.folder / "recipe.toml").clients.num_clients == 2
        other = job.recipe.clients.model_copy(update={"num_clients": 3})
        wrong = replace(job, recipe=job.recipe.model_copy(update={"clients": other}))
        with pytest.raises(RecipeError, match=r"holds a run with clients\.num_clients = 2, not 3"):
            is_done(wrong)
