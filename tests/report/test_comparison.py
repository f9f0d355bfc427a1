"""Comparisons of runs: how they are grouped, paired and counted, and which notes are given."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedgist.errors import ReportError
from fedgist.report.formatting import Sheet
from fedgist.report.pictures import curves as drawn_curves
from fedgist.report.tables import comparison
from fedgist.report.tables.comparison import Study
from fedgist.report.tables.run_tables import overview
from fedgist.report.tables.study_tables import one_sheet, sheets
from fedgist.report.terminal.table_formats import as_data, render
from fedgist.runs.files.columns import measured
from fedgist.runs.finished.run_reader import find

from written import sealed_run, write_run  # isort: skip

CURVES = {
    "fedlog": [[0.5, 0.8, 0.95, 0.93], [0.5, 0.9, 0.94, 0.96], [0.6, 0.7, 0.8, 0.91]],
    "fedavg": [[0.4, 0.5, 0.6, 0.55], [0.4, 0.5, 0.6, 0.66], [0.4, 0.5, 0.6, 0.61]],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for method, curves in CURVES.items():
        for seed, curve in enumerate(curves):
            write_run(
                tmp_path / method / f"seed-{seed}",
                curve,
                seed=seed,
                method=method,
                clients=[curve[-1], 0.5],
            )
    return tmp_path


def study_of(folder: Path, **options: Any) -> Study:
    return comparison.study(find([folder]), **options)


def test_seeds_are_one_row_and_the_last_round_is_the_result(folder: Path) -> None:
    study = study_of(folder)
    assert [(row.label, row.seeds) for row in study.rows] == [
        ("fedavg", [0, 1, 2]),
        ("fedlog", [0, 1, 2]),
    ]
    fedlog = study.rows[1]
    assert fedlog.final is not None
    assert fedlog.best is not None
    assert fedlog.final.mean == pytest.approx((0.93 + 0.96 + 0.91) / 3)
    assert fedlog.best.mean == pytest.approx(
        (0.95 + 0.96 + 0.91) / 3
    )  # labelled best, never mixed in
    assert fedlog.last10 is None  # of four rounds there are no last ten


def test_the_last_ten_are_the_mean_of_ten(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1, 0.2] + [0.5] * 9 + [0.6])
    last10 = study_of(tmp_path).rows[0].last10
    assert last10 is not None
    assert last10.mean == pytest.approx(0.51)


def test_the_last_ten_are_those_of_all_runs_or_not_shown(tmp_path: Path) -> None:
    # seen: of three runs that stopped early one had ten rounds, and stood beside means of three
    write_run(tmp_path / "a", [0.5] * 12)
    write_run(tmp_path / "b", [0.5] * 5, seed=1, planned=12)
    assert study_of(tmp_path).rows[0].last10 is None


def test_a_smaller_spread_over_clients_is_better() -> None:
    measure = measured("eval/client/accuracy_std")
    assert (measure.better, measure.unit) == ("lower", "fraction")
    assert measured("eval/client/accuracy_mean").better == "higher"


def test_communication_to_a_target_is_counted_seed_by_seed(folder: Path) -> None:
    study = study_of(folder, target_accuracy=0.9)
    fedavg, fedlog = (row.target for row in study.rows)
    assert fedlog is not None
    # first reached in rounds 3, 2, 4: rejects the round in which the mean curve reaches it
    assert fedlog.rounds.mean == 3.0
    assert (fedlog.reached, fedlog.up.mean, fedlog.down.mean, fedlog.both.mean) == (
        3,
        300,
        900,
        1200,
    )
    assert fedlog.both.error == pytest.approx(400 / 3**0.5)
    # never reached: the round of the highest accuracy (3, 4, 4), marked
    assert fedavg is not None
    assert fedavg.reached == 0
    assert fedavg.rounds.mean == pytest.approx(11 / 3)
    words = next(sheet for sheet in sheets(study) if sheet.title == "Communication to 90.0 %")
    assert words.rows[0][1] == "0 of 3 †"
    assert words.rows[1][-1] == "9.6 kb"  # bits, as papers print them


def test_a_first_exchange_counts_as_the_bytes_of_round_0(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5, 0.95])
    lines = (run / "rounds.jsonl").read_text()
    (run / "rounds.jsonl").write_text(
        '{"round": 0, "comm/up_bytes": 7, "comm/down_bytes": 1}\n' + lines
    )
    sealed_run(run)
    target = study_of(tmp_path, target_accuracy=0.9).rows[0].target
    assert target is not None
    assert target.both.mean == 8 + 2 * 400


def test_differences_to_a_reference_are_paired(folder: Path) -> None:
    study = study_of(folder, reference="fedlog")
    versus = study.rows[0].versus
    assert versus is not None
    assert versus.difference.mean == pytest.approx((0.55 - 0.93 + 0.66 - 0.96 + 0.61 - 0.91) / 3)
    assert versus.p is None  # three pairs cannot be significant, whatever they are
    assert study.rows[1].versus is None
    few = "3 pairs: the smallest p possible is 0.25, so no p is shown; p < 0.05 takes 6 seeds; for"
    assert any(note.startswith(few) for note in study.notes)
    against = next(sheet for sheet in sheets(study) if sheet.title == "Against fedlog (points)")
    assert against.columns[1:5] == ("difference", "95 % interval", "better", "p")
    assert against.rows[0][3:5] == ("fedlog", "-")


@pytest.mark.parametrize(
    ("data", "overlap"),
    [
        ({"folds": 3}, 0.5),
        ({"folds": 3, "validation": 0.5}, 1.0),  # 400 of 600 rows are no test rows, 200 train
        ({"test_fraction": 0.2, "validation": 0.2, "repeats": 2}, 0.3125),
    ],
)
def test_an_overlap_is_of_the_rows_that_train(
    data: dict[str, float], overlap: float, tmp_path: Path
) -> None:
    # seen: validation rows counted as trained on, and intervals were too narrow
    for division in (0, 1):
        raw = {"data": {"name": "npz", "path": "d.npz", "division": division, **data}}
        write_run(tmp_path / f"seed-0-division-{division}", [0.5], raw=raw)
    assert study_of(tmp_path).rows[0].overlap == pytest.approx(overlap)


def test_divisions_are_the_samples_and_their_seeds_are_averaged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {m: rng.normal(mean, 0.02, (4, 2)) for m, mean in (("fedlog", 0.9), ("local", 0.8))}
    for method, finals in values.items():
        for division, seed in np.ndindex(4, 2):
            raw = {"data": {"name": "digits", "folds": 2, "repeats": 2, "division": division}}
            path = tmp_path / method / f"seed-{seed}-division-{division}"
            write_run(path, [float(finals[division, seed])], seed=seed, method=method, raw=raw)
    study = study_of(tmp_path, reference="local")
    row = study.rows[0]
    assert (row.seeds, row.divisions, row.overlap) == ([0, 1], [0, 1, 2, 3], 1.0)
    folds = values["fedlog"].mean(1)
    assert row.final is not None
    assert row.final.count == 4
    assert row.final.error == pytest.approx((1.25 * folds.var(ddof=1)) ** 0.5)
    assert row.versus is not None
    gaps = (values["fedlog"] - values["local"]).mean(1)
    t = gaps.mean() / (1.25 * gaps.var(ddof=1)) ** 0.5
    assert row.versus.p == pytest.approx(2 * stats.t.sf(t, 3))
    # the same samples and the same error wherever a mean stands
    assert row.final.error is not None
    shown = f"{100 * folds.mean():.2f} ± {100 * row.final.error:.2f} %"
    assert overview(find([tmp_path / "fedlog"])).rows[0][1] == shown
    points = drawn_curves.curve(row.runs, study.metric)
    assert points is not None
    assert points.mean == [pytest.approx(folds.mean())]
    assert points.high[0] - points.mean[0] == pytest.approx(row.final.error)
    (results, *_) = tables = sheets(study)
    assert results.columns[-1] == "divisions"
    assert results.rows[0][-1] == "4"
    assert "on other divisions of these rows (4 divisions; variance corrected" in results.caption
    against = next(sheet for sheet in tables if sheet.title.startswith("Against"))
    assert "paired by division; p, two-sided: corrected t test" in against.caption
    assert against.rows[0][3] == "fedlog"


def test_p_is_corrected_for_the_number_of_comparisons(tmp_path: Path) -> None:
    # seven pairs: all worse (p = 1/64), mixed (p as scipy has it, larger), and equal (p = 1)
    finals = {
        "fedlog": [0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96],
        "fedavg": [0.8, 0.83, 0.81, 0.85, 0.80, 0.79, 0.70],
        "fedprox": [0.91, 0.90, 0.90, 0.90, 0.90, 0.90, 0.90],
        "local": [0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96],
    }
    for method, values in finals.items():
        for seed, value in enumerate(values):
            write_run(tmp_path / method / f"seed-{seed}", [value], seed=seed, method=method)
    rows = {row.label: row.versus for row in study_of(tmp_path, reference="fedlog").rows}
    p = {label: versus.p for label, versus in rows.items() if versus and versus.p is not None}
    holm = {label: versus.p_holm for label, versus in rows.items() if versus}
    assert p["fedavg"] == 1 / 64
    assert p["fedavg"] < p["fedprox"] < p["local"] == 1
    # by hand: the smallest times three, the next times two, the last as it is
    assert holm["fedavg"] == pytest.approx(3 / 64)
    assert holm["fedprox"] == pytest.approx(min(1, 2 * p["fedprox"]))
    assert holm["local"] == 1
    (table,) = [s for s in sheets(study_of(tmp_path, reference="fedlog")) if "Against" in s.title]
    assert table.columns[4:6] == ("p", "p (Holm)")
    assert "correction for 3 comparisons" in table.caption


@pytest.mark.parametrize("folders", [("two", "two", "two"), ("a", "b", "c")])
def test_show_has_the_rows_of_compare_however_runs_lie(
    tmp_path: Path, folders: tuple[str, ...]
) -> None:
    # rejects a mean over what lies in one folder, whatever its settings, and rows by folder
    finals = {0.1: [0.5, 0.7], 0.9: [0.1, 0.3, 0.2]}
    for (lr, accuracies), folder in zip(finals.items(), folders, strict=False):
        for seed, accuracy in enumerate(accuracies):
            where = folder if seed < 2 else folders[2]
            path = tmp_path / where / f"seed-{seed + round(10 * lr)}"
            write_run(path, [accuracy], seed=seed, raw={"train": {"lr": lr}})
    rows = {row[0]: row[1] for row in overview(find([tmp_path])).rows}
    assert list(rows) == ["fedlog lr=0.1, 2 seeds", "fedlog lr=0.9, 3 seeds"]
    assert [text.partition(" ")[0] for text in rows.values()] == ["60.00", "20.00"]


def test_show_leaves_no_run_out(tmp_path: Path) -> None:
    # users' own data are not in a recipe: what repeats a run may be another one
    for name, accuracy in (("a", 0.5), ("b", 0.6)):
        for seed in (0, 1):
            raw = {"train": {"lr": 0.01}}
            write_run(tmp_path / name / f"seed-{seed}", [accuracy], seed=seed, raw=raw)
    write_run(tmp_path / "c", [0.7], raw={"train": {"lr": 0.9}})
    rows = [row[:2] for row in overview(find([tmp_path])).rows]
    assert [(name, text.partition(" ")[0]) for name, text in rows] == [
        ("fedlog lr=0.01, 2 seeds", "50.00"),
        ("fedlog lr=0.9", "70.00"),
        ("fedlog lr=0.01, 2 seeds", "60.00"),
    ]


def test_rows_are_named_by_what_differs(tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        write_run(tmp_path / f"a{lr}", [0.5], raw={"train": {"lr": lr}})
    write_run(tmp_path / "b", [0.5], method="fedavg", raw={"train": {"lr": 0.5}})
    assert [row.label for row in study_of(tmp_path).rows] == [
        "fedlog lr=0.01",
        "fedlog lr=0.1",
        "fedavg",
    ]


def test_a_part_that_is_named_gives_its_rows_its_own_word(tmp_path: Path) -> None:
    for name in ("constant", "cosine"):
        raw = {"train": {"lr_schedule": {"name": name}}}
        write_run(tmp_path / name, [0.5], raw=raw)
    assert [row.label for row in study_of(tmp_path).rows] == [
        "fedlog lr_schedule=constant",
        "fedlog lr_schedule=cosine min_factor=0",
    ]


def test_settings_that_shorten_to_the_same_words_are_written_out(tmp_path: Path) -> None:
    for lr in (0.10001, 0.10002):
        write_run(tmp_path / f"a{lr}", [0.5], raw={"train": {"lr": lr}})
    assert [row.label for row in study_of(tmp_path).rows] == [
        "fedlog train.lr=0.10001",
        "fedlog train.lr=0.10002",
    ]


def test_how_the_work_was_done_makes_no_other_row(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], seed=0, raw={"engine": {"workers": 1}})
    write_run(
        tmp_path / "b", [0.5], seed=1, raw={"engine": {"workers": 2}, "evaluate": {"every": 2}}
    )
    assert len(study_of(tmp_path).rows) == 1


def test_a_run_that_is_older_than_a_key_did_what_its_default_does(tmp_path: Path) -> None:
    # seen: seeds of one table, run before and after a new key, stood in two rows
    for seed in (0, 1):
        write_run(tmp_path / str(seed), [0.5], seed=seed)
    path = tmp_path / "0/recipe.toml"
    path.write_text("\n".join(x for x in path.read_text().split("\n") if "optimizer" not in x))
    sealed_run(path.parent)
    assert [row.seeds for row in study_of(tmp_path).rows] == [[0, 1]]
    write_run(tmp_path / "2", [0.5], seed=2, raw={"train": {"optimizer": "sgd"}})
    assert len(study_of(tmp_path).rows) == 2


def test_an_unfinished_run_counts_as_far_as_it_is_and_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-0", [0.5, 0.7], planned=4, result=False)
    write_run(tmp_path / "seed-1", [0.5, 0.7, 0.8, 0.9], seed=1)
    study = study_of(tmp_path)
    assert study.rows[0].unfinished == 1
    assert study.rows[0].final is not None
    assert study.rows[0].final.mean == pytest.approx(0.8)
    assert f"{tmp_path / 'seed-0'}: unfinished: round 2 of 4" in study.notes
    assert any("different rounds, 2 to 4" in note for note in study.notes)
    write_run(tmp_path / "seed-2", [0.5, 0.6], planned=4, seed=2)
    shared = f"2 runs, such as {tmp_path / 'seed-0'}: unfinished: round 2 of 4"
    assert shared in study_of(tmp_path).notes
    assert sheets(study)[0].rows[0][0] == "fedlog *"


def test_a_run_without_a_round_does_no_harm(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-0", [0.5])
    write_run(tmp_path / "seed-1", [], seed=1, result=False)
    assert study_of(tmp_path, target_accuracy=0.9).rows[0].final is not None


def test_a_corrupt_line_is_named_and_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5, 0.6, 0.7])
    lines = (run / "rounds.jsonl").read_text().splitlines()
    lines[1] = lines[1][:20]
    (run / "rounds.jsonl").write_text(
        "\n".join([*lines, '{"round": 4, "ev'])
    )  # the last one is being written
    sealed_run(run)
    study = study_of(tmp_path)
    line, lacking = study.notes
    assert line.startswith(f"{run / 'rounds.jsonl'} line 2 is not JSON: Unterminated string")
    assert line.endswith(": it is left out")
    assert lacking == f"{run / 'rounds.jsonl'}: round 2 is missing; its bytes are not counted"
    assert study.rows[0].rounds == (3, 3)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        '{"accuracy": 1}',
        '{"round": "x"}',
        "null",
        "\x00",
        '{"round": 9, "eval/x": "nan"}',
        '{"round": 9, "eval/x": NaN}',
        '{"round": 9, "eval/x": 1e999}',
    ],
)
def test_a_line_that_is_no_round_is_corrupt(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run", [0.5])
    (run / "rounds.jsonl").write_text(text + "\n" + (run / "rounds.jsonl").read_text())
    sealed_run(run)
    assert len(study_of(tmp_path).notes) == 1


def test_what_cannot_be_compared_is_said_plainly(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], seed=0)
    write_run(tmp_path / "b", [0.6], seed=1, method="fedavg", raw={"evaluate": {"on": "test"}})
    copy = write_run(tmp_path / "c", [0.7], seed=0)
    study = study_of(tmp_path, reference="fedlog")
    assert "fedavg has no seed and division in common with fedlog: not compared" in study.notes
    assert any(note.startswith("mixed metrics") for note in study.notes)
    assert any(note.startswith(f"{copy} repeats {tmp_path / 'a'}") for note in study.notes)
    assert study.rows[0].seeds == [0]


def test_a_metric_or_a_reference_that_is_not_there_is_refused_with_the_choices(
    folder: Path,
) -> None:
    with pytest.raises(
        ReportError,
        match=r"no run has 'eval/x'; columns: eval/client/accuracy_mean, eval/client/acc",
    ):
        study_of(folder, metric="eval/x")
    with pytest.raises(ReportError, match=r"unknown reference 'fedlgo'; did you mean 'fedlog'"):
        study_of(folder, reference="fedlgo")
    with pytest.raises(ReportError, match="nowhere holds no run: there is no such folder"):
        study_of(folder / "nowhere")


def with_other_columns(run: Path, old: str, new: str) -> None:
    """Call columns of a run's rounds something else."""
    file = run / "rounds.jsonl"
    file.write_text(file.read_text("utf-8").replace(old, new), "utf-8")
    sealed_run(file.parent)


def test_runs_are_compared_by_what_most_of_them_have(tmp_path: Path) -> None:
    write_run(tmp_path / "both", [0.5], columns={"eval/client/probe_mean": 0.4})
    assert study_of(tmp_path).metric == "eval/client/accuracy_mean"  # the objective's own
    for method in ("fedavg", "local"):  # encoders, which have no accuracy
        encoder = write_run(tmp_path / method, [0.6], method=method)
        with_other_columns(encoder, "eval/client/accuracy_", "eval/client/probe_")
    study = study_of(tmp_path)
    assert study.metric == "eval/client/probe_mean"
    found = {row.label: row.final.mean for row in study.rows if row.final}
    assert found == {"fedlog": 0.4, "fedavg": 0.6, "local": 0.6}
    table = overview(find([tmp_path]))
    assert table.columns[1] == "linear probe"
    assert sorted(row[1] for row in table.rows) == ["40.00 %", "60.00 %", "60.00 %"]


def test_before_the_first_evaluation_runs_are_compared_by_their_training_loss(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "early", [0.5, 0.4], columns={"train/loss": 1.5})
    with_other_columns(run, "eval/", "other/")
    study = study_of(tmp_path)
    assert study.metric == "train/loss"
    assert study.measure.better == "lower"


def test_of_a_loss_the_best_is_the_lowest(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5, 0.6])
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    text = "".join(
        json.dumps({**line, "train/loss": value}) + "\n"
        for line, value in zip(lines, (0.2, 0.3), strict=True)
    )
    (run / "rounds.jsonl").write_text(text)
    sealed_run(run)
    best = study_of(tmp_path, metric="train/loss").rows[0].best
    assert best is not None
    assert best.mean == 0.2


PAPER = {
    "source": "A paper, table 1",
    "target_accuracy": 90,
    "accuracy": {"fedlog": [98.15, 0.05]},
    "communication": {"fedlog": 3.18e6},
    "departs": ["train.num_rounds = 4"],
}


def test_the_papers_numbers_stand_beside_ours(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5, 0.95], raw={"paper": PAPER})
    study = study_of(tmp_path)
    assert study.target_accuracy == 0.9  # the paper's, without being told
    results, _, target = sheets(study)
    assert results.rows[0][-1] == "98.15 ± 0.05"
    assert "A paper, table 1" in results.caption
    assert target.rows[0][-1] == "3.2 Mb"
    assert "these runs depart from the paper's settings: train.num_rounds = 4" in study.notes


def test_every_format_says_the_same(folder: Path) -> None:
    study = study_of(folder, reference="fedlog", target_accuracy=0.9)
    data = as_data(study)
    assert json.loads(str(render(study, "json"))) == json.loads(json.dumps(data))
    rows = list(csv.DictReader(io.StringIO(str(render(study, "csv")))))
    assert [float(row["final_mean"]) for row in rows] == [row["final_mean"] for row in data["rows"]]
    assert rows[0]["seeds"] == "0 1 2"
    markdown, latex = str(render(study, "markdown")), str(render(study, "latex"))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(study, "terminal"))
    terminal = console.export_text()
    for text in (markdown, latex, terminal):
        assert "93.33" in text
        assert "-34.00" in text or "-32.67" in text
    assert "| fedlog | **93.33 ± 1.45** | [87.08, 99.58] | 3 | 4 |" in markdown
    assert r"{\bfseries\boldmath $93.33 \pm 1.45$}" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 5
    assert "±" not in latex
    assert "%" not in latex.replace(r"\%", "").replace("\n% ", "")


def test_a_reader_chooses_columns_and_the_order_of_rows(folder: Path) -> None:
    chosen = ("interval", "best", "difference", "p", "bytes")
    study = study_of(folder, reference="fedavg", order=["final"])
    table = one_sheet(study, ("final", *chosen))
    assert [row[0] for row in table.rows] == ["fedlog", "fedavg"]
    head = ("method", "final", "95 % interval", "best", "difference (points)", "p", "bytes")
    assert table.columns == head
    assert table.rows[0][1:] == (
        *("93.33 ± 1.45", "[87.08, 99.58]", "94.00 ± 1.53", "+32.67 ± 2.67", "-", "1.6 kB"),
    )
    assert table.bold == {(0, 1)}
    assert "best: the highest test score" in table.caption
    assert str(render(study, "latex", chosen)).count(r"\begin{tabular}") == 1
    assert [row.label for row in study_of(folder, order=["fedlog"]).rows] == ["fedlog", "fedavg"]
    for names, words in (
        (["finl"], "--columns: unknown column 'finl'; did you mean 'final'"),
        (["p"], "--columns p needs --reference"),
    ):
        with pytest.raises(ReportError, match=words):
            one_sheet(study_of(folder), names)
    with pytest.raises(ReportError, match="--order: unknown row 'fedlgo'; did you mean 'fedlog'"):
        study_of(folder, order=["fedlgo"])


def test_results_as_good_as_the_best_within_its_error_are_bold(tmp_path: Path) -> None:
    for method, finals in (
        ("fedavg", [0.9, 0.92]),
        ("local", [0.89, 0.92]),
        ("fedlog", [0.8, 0.7]),
    ):
        for seed, final in enumerate(finals):
            write_run(tmp_path / f"{method}{seed}", [final], seed=seed, method=method)
    assert sheets(study_of(tmp_path))[0].bold == {(0, 1), (2, 1)}


def test_texts_stand_left_and_numbers_right() -> None:
    rows = (("a", "-", "[1, 2]", "fedlog", "0 B"), ("b", "1 ± 2", "-", "12 or so", "-"))
    assert Sheet("", tuple("vwxyz"), rows).texts == [True, False, False, False, False]
    others = (("a", "-", "local", "mlp"), ("b", "-", "-", "mlp, 3"))
    assert Sheet("", tuple("wxyz"), others).texts == [True, False, True, True]


def test_runs_are_found_below_any_folder_once(folder: Path) -> None:
    assert len(find([folder, folder / "fedlog", folder / "fedlog" / "seed-0"])) == 6
    for seed in (9, 10):
        write_run(folder / "more" / f"seed-{seed}", [0.5], seed=seed)
    assert [run.seed for run in find([folder / "more"])] == [9, 10]


@pytest.mark.parametrize("number", ["²", "①", "٣", "½", "-1", "1²", ""])
def test_a_folder_may_have_any_sign_for_a_number(folder: Path, number: str) -> None:
    # rejects a question whether it is a digit before int(), which does not read every digit
    write_run(folder / "more" / f"run-{number}", [0.5], seed=9)
    assert len(find([folder])) == 7


def test_one_damaged_run_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    for name, text in (
        ("recipe.toml", "\x00["),
        ("recipe.toml", ""),
        ("result.json", "[]"),
        ("result.json", ""),
    ):
        folder = tmp_path / f"{name}{len(text)}"
        write_run(folder / "a", [0.5])
        bad = write_run(folder / "b", [0.6], seed=1)
        (bad / name).write_text(text)
        study = study_of(folder)
        assert study.rows[0].seeds == [0]
        assert any(str(bad) in note and name in note for note in study.notes)


def test_of_damaged_runs_alone_the_reason_is_the_error(tmp_path: Path) -> None:
    (write_run(tmp_path / "a", [0.5]) / "recipe.toml").write_text("[")
    sealed_run(tmp_path / "a")
    with pytest.raises(ReportError, match=r"recipe.toml cannot be read"):
        study_of(tmp_path)


def test_a_round_that_is_written_twice_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5, 0.6])
    text = (run / "rounds.jsonl").read_text()
    (run / "rounds.jsonl").write_text(text + text.splitlines()[1] + "\n")
    sealed_run(run)
    study = study_of(tmp_path)
    assert study.rows[0].up is not None
    assert study.rows[0].up.mean == 200
    assert any("1 round written twice" in note for note in study.notes)


def test_clients_that_were_late_or_absent_are_counted_apart(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5, 0.6, 0.7])
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[0]["absent"] = [{"client": 1, "reason": "no reply in time"}]
    lines[1]["late"] = [{"client": 1, "answers": 1}]
    lines[2]["absent"] = [{"client": c, "reason": "not connected"} for c in (0, 2)]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sealed_run(run)
    notes = study_of(tmp_path).notes
    assert f"{run}: replies that came too late and were not used: 1" in notes
    assert f"{run}: clients asked that did not answer, over all rounds: 2" in notes


def test_a_last_round_without_a_value_and_refused_uploads_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5, 0.6])
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[1]["eval/client/accuracy_mean"] = None
    lines[1]["refused"] = [{"client": 3, "reason": "total is not finite"}]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sealed_run(run)
    notes = study_of(tmp_path).notes
    assert f"{run}: its last value of eval/client/accuracy_mean is from round 1, not 2" in notes
    assert f"{run}: 1 upload was refused; reason of the first: total is not finite" in notes


def test_an_accuracy_is_no_target_for_a_loss(folder: Path) -> None:
    with pytest.raises(
        ReportError, match="a target accuracy cannot be used with the metric 'train/loss'"
    ):
        study_of(folder, metric="train/loss", target_accuracy=0.9)


def test_what_scripts_read_keeps_its_names(folder: Path) -> None:
    # a key may be added; one that goes breaks somebody's script
    data = json.loads(str(render(study_of(folder, reference="fedlog"), "json")))
    assert set(data) >= {"metric", "better", "reference", "target_accuracy", "rows", "notes"}
    estimates = {
        f"{name}_{part}"
        for name in ("final", "last10", "best", "up_bytes", "down_bytes", "difference")
        for part in ("mean", "se")
    }
    assert set(data["rows"][0]) >= estimates | {
        "label",
        "method",
        "seeds",
        "unfinished",
        "rounds_least",
        "rounds_most",
        "folders",
        "final_low",
        "final_high",
        "difference_low",
        "difference_high",
        "p",
        "p_holm",
    }
