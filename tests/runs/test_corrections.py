"""Corrections: which runs they concern, what is said of these, and how older runs go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedgist
import results_stale
from fedgist.cli.main import app
from fedgist.errors import InputError
from fedgist.methods import METHODS
from fedgist.recipe.reading import make
from fedgist.report import comparison
from fedgist.runs import corrections
from fedgist.runs.corrections import CORRECTIONS, FIRST, as_begun, computes, lacking
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.archived_run import archived_part, read_csv, to_csv
from fedgist.runs.record import read_lines
from fedgist.runs.sealing import sealed
from fedgist.studies.archive import Archive
from fedgist.studies.job import Job
from fedgist.studies.jobs import is_done, run_jobs

# made by the version before the first correction: FedLog's server kept no sums. Four rounds and a
# checkpoint, and in whole.jsonl the six rounds of the same run by that version
OLD = Path(__file__).parents[1] / "recorded" / "before_corrections"


def table(method: str, **sections: Any) -> dict[str, Any]:
    return make({"method": {"name": method, **sections.pop("options", {})}, **sections}).model_dump(
        mode="json"
    )


def test_numbers_are_in_order_and_methods_exist() -> None:
    numbers = [c.number for c in CORRECTIONS]
    assert numbers == list(range(FIRST + 1, FIRST + 1 + len(numbers)))
    for correction in CORRECTIONS:
        assert (correction.methods or set()) <= set(METHODS)
        for name in correction.methods or METHODS:
            assert computes(name) >= correction.number
    assert computes("lg_fedavg@2") == computes("lg_fedavg")


MNIST: dict[str, Any] = {"model": {"name": "fedlog_mnist"}}
LACK: list[tuple[str, dict[str, Any], list[int]]] = [
    ("fedproto", MNIST, [2]),
    ("fedproto", {"model": {"name": "fedlog_mnist", "dropout": 0.0}}, []),
    ("fedproto", {"model": {"name": "mlp"}}, []),
    ("fedavg", MNIST, []),
    ("fedlog", MNIST, []),
    ("fedlog", {"train": {"fraction_train": 0.5}}, [3]),
    ("fedlog", {"clients": {"availability": 0.3}}, [3]),
    ("fedlog", {"clients": {"delay": 0.3}}, [3]),
    ("fedlog", {"train": {"fraction_train": 0.5}, "options": {"memory": 0.0}}, []),
    ("fedlog_c", {"train": {"fraction_train": 0.5}, **MNIST}, [2, 3]),
    ("fedper", {}, [7]),
    ("fedper", {"options": {"local_layers": 1}}, []),
]


@pytest.mark.parametrize(("method", "sections", "numbers"), LACK)
def test_a_correction_concerns_runs_whose_numbers_it_changes(
    method: str, sections: dict[str, Any], numbers: list[int]
) -> None:
    recipe = table(method, **{k: dict(v) for k, v in sections.items()})
    assert [c.number for c in lacking(recipe, FIRST)] == numbers
    assert lacking(recipe, computes(method)) == []


def test_a_table_of_pools_states_its_key() -> None:
    options = {"distillation": {"final_factor": {"small": 0.0, "large": 0.0}}}
    recipe = {"method": {"name": "periodic_codist", **options}}
    assert lacking(recipe, FIRST) == []
    recipe = {"method": {"name": "periodic_codist", "distillation": {"steps": 3}}}
    assert [c.number for c in lacking(recipe, FIRST)] == [4]


def test_a_run_that_goes_on_computes_as_it_was_begun() -> None:
    assert as_begun(make({}), FIRST).method.options == {"memory": 0.0}
    assert as_begun(make({}), computes("fedlog")).method.options == {}
    stated = make({"method": {"name": "fedlog", "memory": "class"}})
    assert as_begun(stated, FIRST).method.options == {"memory": "class"}


@pytest.mark.slow
def test_an_older_run_is_read_goes_on_as_it_was_and_cannot_forget(tmp_path: Path) -> None:
    # rejects a memory that begins in the middle of a run, and a state that does not fit
    folder = tmp_path / "run"
    shutil.copytree(OLD / "run", folder)
    done = CliRunner().invoke(app, ["forget", str(folder), "--client", "2"])
    assert "with method.memory = 0.0 they are gone after one more round" in str(done.exception)
    result = fedgist.run(None, out=folder, resume=True, rounds=6)
    expected = read_lines(OLD / "whole.jsonl")
    column = "eval/client/accuracy_mean"
    seen = [line[column] for line in read_lines(folder / "rounds.jsonl")]
    assert seen == pytest.approx([line[column] for line in expected], abs=0.02)
    assert result.summary["computes"] == FIRST
    assert "memory = 0.0" in (folder / "recipe.toml").read_text()
    again = CliRunner().invoke(app, ["show", str(folder)])
    assert again.exit_code == 0, again.output


def stale(folder: Path) -> None:
    """Let a finished run seem to be of before all corrections."""
    path = folder / "result.json"
    result = json.loads(path.read_text())
    result["computes"] = FIRST
    path.write_text(json.dumps(sealed(result)))


RECIPE: dict[str, Any] = {
    "data": {"train_rows": 100},
    "clients": {"num_clients": 4},
    "train": {"num_rounds": 2, "fraction_train": 0.5},
    "engine": {"workers": 1, "cohort_size": 2},
}


def test_stale_runs_are_named_and_never_mixed_with_others(tmp_path: Path) -> None:
    for seed in (0, 1):
        fedgist.run(RECIPE | {"seed": seed}, out=tmp_path / f"seed-{seed}")
    assert len(comparison.study(run_reader.find([tmp_path])).rows) == 1
    stale(tmp_path / "seed-1")
    rows = comparison.study(run_reader.find([tmp_path])).rows
    assert [(row.label, row.seeds) for row in rows] == [
        ("fedlog", [0]),
        ("fedlog before correction 3", [1]),
    ]


def test_stale_runs_are_done_again_and_their_archive_is_replaced(tmp_path: Path) -> None:
    job = Job("one", make(RECIPE), tmp_path / "runs" / "one" / "seed-0")
    archive = Archive(tmp_path / "archive", tmp_path / "runs", "the command")
    ends = []

    def listen(job: Job, event: Any) -> bool:
        ends.extend([event.kind] if event.kind != "round" else [])
        return False

    run_jobs([job], 1, listen, archive=archive)
    assert is_done(job)
    assert archive.holds(job)
    stale(job.folder)
    archive.place(job).write_text(
        to_csv(archived_part(run_reader.read_run(job.folder), "the command"))
    )
    assert not is_done(job)
    assert not archive.holds(job)
    longer = Job("one", make(RECIPE | {"train": RECIPE["train"] | {"num_rounds": 3}}), job.folder)
    assert not archive.holds(longer)  # another recipe does not keep a stale run in its place
    run_jobs([job], 1, listen, archive=archive)
    assert is_done(job)
    assert read_csv(archive.place(job)).result["computes"] == computes("fedlog")
    with pytest.raises(InputError, match=r"holds a run with train.num_rounds = 2, not 3"):
        archive.holds(longer)
    assert "failed" not in ends


def test_a_correction_in_the_middle_of_a_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPE | {"method": {"name": "fedproto"}, "model": {"name": "mlp", "dropout": 0.5}}
    monkeypatch.setattr(corrections, "CORRECTIONS", ())
    fedgist.run(recipe, out=tmp_path / "run")
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="begun before correction 2 of method fedproto"):
        result = fedgist.run(None, out=tmp_path / "run", resume=True, rounds=3)
    assert result.summary["computes"] == FIRST


@pytest.mark.slow
def test_the_list_of_stale_runs_is_that_of_the_labels_on_the_pages() -> None:
    listed = {folder for _, folder in results_stale.stale()}
    runs = run_reader.find(sorted(results_stale.DATA.rglob("seed-*.csv")))
    labelled = {str(r.folder.parent.relative_to(results_stale.DATA)) for r in runs if r.before}
    assert listed == labelled
