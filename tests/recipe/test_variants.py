"""Variants of a method: tables of a recipe that run one method by other settings."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import fedgist
from fedgist.errors import RecipeError
from fedgist.recipe.reading import make, read
from fedgist.recipe.resolve import resolve
from fedgist.report.tables.comparison import study
from fedgist.report.tables.paper_comparison import side_by_side
from fedgist.runs.finished import run_reader
from fedgist.studies.paper_table import cells, read_paper_table
from fedgist.studies.sweep import grid

RECIPE = """
[data]
train_rows = 100
[clients]
num_clients = 3
[method]
name = "fedprox@strong"
[train]
num_rounds = 2
local_epochs = 2
[objective]
metrics = ["accuracy", "macro_f1"]
[engine]
workers = 1
cohort_size = 3
[methods.fedprox]
mu = 0.1
[methods."fedprox@strong"]
mu = 3.0
train.lr = 0.5
train.local_epochs = 1
objective.metrics = ["accuracy"]
[methods."fedprox@weak"]
mu = 0.01
[paper]
source = "a paper"
[paper.accuracy]
fedprox = [70.0, 1.0]
"fedprox@strong" = [80.0, 2.0]
[paper.communication]
"fedprox@strong" = 8e3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "variants.toml"
    path.write_text(RECIPE)
    return path


def test_its_table_has_hyper_parameters_training_and_objective(file: Path) -> None:
    strong = read(file)
    assert (strong.method.name, strong.method.options) == ("fedprox@strong", {"mu": 3.0})
    assert (strong.train.lr, strong.train.local_epochs, strong.train.num_rounds) == (0.5, 1, 2)
    assert strong.objective.metrics == ("accuracy",)
    weak = read(file, ["method.name=fedprox@weak"])
    assert (weak.method.options, weak.train.lr) == ({"mu": 0.01}, 1e-3)
    assert weak.objective.metrics == ("accuracy", "macro_f1")
    plain = read(file, ["method.name=fedprox"])
    assert plain.method.options == {"mu": 0.1}  # nothing of its variants
    assert read(file, ["method.mu=7.0"]).method.options == {"mu": 7.0}
    assert read(file, ["method.name=fedavg"]).method.options == {}
    assert weak.paper.departs == ()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "method.name=fedprox@stong",
            r"@stong.\]; did you mean .fedprox@strong.\? known: fedprox@strong, fedprox@weak$",
        ),
        ("method.name=fedprx@strong", "known: none"),
        ("method.name=fedavg@2", r'no \[methods."fedavg@2"\]; known: none'),
        ("method.nu=1.0", "method.nu: unknown key of fedprox; "),
    ],
)
def test_an_unknown_variant_is_one_line_with_those_there_are(
    file: Path, setting: str, says: str
) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        resolve(read(file, [setting]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            {"methods": {"fedprox@a": {"nu": 1.0}}},
            "methods.fedprox@a.nu: unknown key of fedprox; .*known: mu",
        ),
        ({"methods": {"fedprx@a": {}}}, "unknown method 'fedprx'; did you mean 'fedprox'"),
        (
            {"methods": {"fedprox@a": {"objective": {"metric": 1}}}},
            "methods.fedprox@a.objective.metric: unknown key",
        ),
        (
            {"methods": {"fedprox@a": {"objective": 3}}, "method": {"name": "fedprox@a"}},
            "methods.fedprox@a.objective = 3: must be a table",
        ),
        ({"method": {"name": "fedprx@a"}}, "method.name = 'fedprx@a': unknown method 'fedprx'"),
        ({"method": {"name": "fedprox@"}}, "method.name: 'fedprox@': a variant is METHOD@NAME"),
        ({"method": {"name": "fedprox@a/b"}}, "of letters, digits"),
        (
            {"methods": {"fedprox@a": {}}, "method": {"name": "fedprox@b", "mu": 1.0}},
            "known: fedprox@a",
        ),
    ],
)
def test_what_is_wrong_in_the_tables_is_named(raw: dict[str, object], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make(raw)


def test_a_run_is_recorded_resumed_and_used_under_its_name(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert fedgist.run(file, out=out).summary["method"] == "fedprox@strong"
    resolved = (out / "recipe.toml").read_text()
    assert tomllib.loads(resolved)["method"] == {"name": "fedprox@strong", "mu": 3.0}
    assert read(out / "recipe.toml").settings() == read(file).settings()
    longer = fedgist.run(out=out, resume=True, rounds=3)
    assert longer.summary["rounds"] == 3
    with pytest.raises(RecipeError, match=r"begun with method\.name = 'fedprox@strong', not"):
        fedgist.run(read(file, ["method.name=fedprox@weak"]), out=out, resume=True)


@pytest.mark.slow
def test_sweeps_and_comparisons_tell_variants_apart(file: Path, tmp_path: Path) -> None:
    jobs = grid(file, [], ["method.name=fedprox,fedprox@strong,fedprox@weak"], 1, tmp_path / "s")
    assert len({job.folder for job in jobs}) == 3
    for job in jobs:
        fedgist.run(job.recipe, out=job.folder)
    table = study(run_reader.find([tmp_path / "s"]), reference="fedprox@strong")
    assert {row.label for row in table.rows} == {"fedprox", "fedprox@strong", "fedprox@weak"}
    papers = {row.method: row.paper for row in table.rows}
    assert papers["fedprox@strong"] is not None
    assert papers["fedprox@weak"] is None
    sheets = side_by_side({"x": table}, {"x": read(file)}, ["fedprox@strong", "local"], "a paper")
    assert len(sheets) == 1  # the recipe has no target for the other one
    cells_of = {line[0]: line[1:] for line in sheets[0].rows}
    assert cells_of["fedprox@strong"][1] == "80.00 ± 2.00"
    assert cells_of["local"] == ("-", "-")  # the paper prints none


def test_a_papers_table_runs_them(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        '[table]\nsource = "a paper"\nmethods = ["fedprox@strong", "fedprox", "gpfl@2", "local"]\n'
        '[columns.x]\nrecipe = "variants"\n'
    )
    table = read_paper_table(path)
    jobs, _ = cells(table, "paper", lambda _: file, tmp_path / "out", seeds=1)
    assert [job.name for job in jobs] == [
        f"x {method} seed 0" for method in ("fedprox@strong", "fedprox", "local")
    ]
    one, _ = cells(table, "paper", lambda _: file, tmp_path, seeds=1, methods=["fedprox@strong"])
    assert [job.recipe.method.options for job in one] == [{"mu": 3.0}]
    with pytest.raises(RecipeError, match="--method fedprox@weak: of the table's methods"):
        cells(table, "paper", lambda _: file, tmp_path, methods=["fedprox@weak"])
