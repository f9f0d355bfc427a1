"""Pages of results say what the archive says: numbers, differences, pictures, what is lacking."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

import fedgist
import results_circle
import results_features
from fedgist.cli.recipe_files import find_recipe
from fedgist.methods import METHODS
from fedgist.recipe.reading import make as make_recipe
from fedgist.recipe.reading import read
from fedgist.report.formatting import Sheet
from fedgist.runs.files.record import FEATURES
from fedgist.runs.finished.archived_run import to_csv
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.versions import ARITHMETIC
from results_cells import PAGES, RESULTS, Experiment, experiment, read_page
from results_page import COPIES, DATA, DOCS, claims, make, section, tables_of, with_tables
from results_pictures import digest, pictures, write

AGAIN = "run: python docs/scripts/results_page.py"
PAPER = """
[paper]
target_accuracy = 80
[paper.accuracy]
fedlog = [91.0, 0.3]
fedavg = [60.0, 0.4]
fedprox = [61.0, 0.4]
[paper.communication]
fedlog = 1e6
fedavg = 43e6
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_and_its_pictures_are_those_of_the_archive(path: Path) -> None:
    text, drawn = make(path)
    assert path.with_suffix(".md").read_text("utf-8") == text, AGAIN
    found = {file.stem: digest_in(file) for file in (RESULTS / "img").glob(f"{path.stem}-*.png")}
    assert found == {picture.name: digest(picture) for picture in drawn}, AGAIN


@pytest.mark.parametrize("place", COPIES)
def test_other_pages_have_the_tables_of_the_archive(place: str) -> None:
    page = (DOCS / place).read_text("utf-8")
    assert with_tables(page, *COPIES[place]) == page, AGAIN


@pytest.mark.slow
def test_no_archived_run_has_a_path_of_a_machine() -> None:
    path = re.compile(r'^#.*["\s=](/|~|[A-Za-z]:[\\/])\w', re.MULTILINE)
    found = [str(file) for file in DATA.rglob("*.csv") if path.search(file.read_text())]
    assert found == []


@pytest.mark.slow
def test_every_archived_run_is_on_a_page() -> None:
    names = [run.folder for path in PAGES for one in of_page(path) for run in one.runs]
    assert set(DATA.rglob("*.csv")) == set(names)


def of_page(path: Path) -> list[Any]:
    about = read_page(path)
    return [experiment(one, DATA) for one in about["experiments"]]


def first_table(found: Experiment) -> list[list[str]]:
    return lines_of(tables_of(found)[0])


def last_table(found: Experiment) -> list[list[str]]:
    return lines_of(tables_of(found)[-1])


def lines_of(sheet: Sheet) -> list[list[str]]:
    return [list(sheet.columns), *map(list, sheet.rows)]


def digest_in(path: Path) -> str:
    with Image.open(path) as image:
        return str(image.info["fedgist"])


# made by hand: an archive of three methods


def archived(
    folder: Path, method: str, seed: int, accuracies: list[float], sent: int, **more: Any
) -> None:
    """Write a run with an accuracy in each round; a list in ``more`` has a value for each, too."""
    raw = {
        "seed": seed,
        "method": {"name": method},
        "train": {"num_rounds": len(accuracies), **more.pop("train", {})},
    }
    recipe = make_recipe(raw).model_dump(mode="json", exclude_none=True)
    rounds = [
        {
            "round": number,
            "comm/up_bytes": sent,
            "comm/down_bytes": sent,
            "eval/client/accuracy_mean": value,
            **{k: v[number - 1] if isinstance(v, list) else v for k, v in more.items()},
        }
        for number, value in enumerate(accuracies, 1)
    ]
    versions = {"method": METHODS[method].version, "arithmetic": ARITHMETIC}
    result = {"rounds": len(rounds), "versions": versions, "time/total_s": 30.0}
    run = FinishedRun(folder, recipe, rounds, result, {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed-{seed}.csv").write_text(to_csv(run), "utf-8")


LAST = {
    "fedlog": [0.91, 0.92, 0.90],
    "fedavg": [0.60, 0.62, 0.61],
    "local": [0.85, 0.87, 0.83],
}
SENT = {"fedlog": 1000, "fedavg": 43_000, "local": 0}


@pytest.fixture
def about(tmp_path: Path) -> dict[str, Any]:
    for method, lasts in LAST.items():
        for seed, last in enumerate(lasts):
            curve = [last / 2, 0.8 if method == "fedlog" else last / 1.5, last]
            archived(tmp_path / "some" / method, method, seed, curve, SENT[method])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(PAPER)
    return {
        "name": "some",
        "title": "Some",
        "recipe": str(recipe),
        "folder": "some",
        "rows": ["fedlog", "fedavg", "fedprox", "local"],
        "commands": ["fedgist list methods"],
    }


def test_accuracies_are_beside_the_papers(about: dict[str, Any], tmp_path: Path) -> None:
    found = experiment(about, tmp_path)
    head, *rows = first_table(found)
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    ours, local = np.array(LAST["fedlog"]), np.array(LAST["local"])
    error = 100 * ours.std(ddof=1) / math.sqrt(3)
    assert table["fedlog"]["ours"] == f"91.00 ± {error:.2f}"
    assert table["fedlog"]["the paper's"] == "91.00 ± 0.30"
    gain = ours - local
    of_pairs = 100 * gain.std(ddof=1) / math.sqrt(3)
    assert table["fedlog"]["against local training"] == f"{100 * gain.mean():+.2f} ± {of_pairs:.2f}"
    # not the errors' sum, nor ours alone
    away = 1.0 / math.hypot(100 * np.array(LAST["fedavg"]).std(ddof=1) / math.sqrt(3), 0.4)
    assert table["fedavg"]["difference"] == f"+1.00 ({away:+.1f} s.e.)"
    archived(tmp_path / "some" / "fedlog", "fedlog", 0, [0.5, 0.97, 0.91], 1000)
    head, *rows = first_table(experiment(about, tmp_path))
    best = dict(zip(head, rows[0], strict=True))["best round"]
    assert best.startswith(f"{100 * np.mean([0.97, 0.92, 0.90]):.2f} ±")
    assert table["fedprox"]["ours"] == "not yet run"
    assert table["fedprox"]["the paper's"] == "61.00 ± 0.40"
    assert table["local"]["against local training"] == "-"


def test_the_papers_test_is_against_its_reference_and_corrected_by_holm(
    about: dict[str, Any], tmp_path: Path
) -> None:
    head, *_ = first_table(experiment(about | {"reference": "fedlog"}, tmp_path))
    assert not any(title.startswith("p ") for title in head)  # three pairs cannot be significant
    for method, last in {"fedlog": 0.93, "fedavg": 0.64, "local": 0.88}.items():
        for seed in (3, 4):
            archived(tmp_path / "some" / method, method, seed, [0.2, 0.3, last], SENT[method])
    head, *rows = first_table(experiment(about | {"reference": "fedlog"}, tmp_path))
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    # all five pairs lie on one side: one of 32 equally likely outcomes
    chances = {label: row["p (fedlog better)"] for label, row in table.items()}
    assert chances == {"fedlog": "-", "fedavg": "0.0312", "fedprox": "-", "local": "0.0312"}
    assert {row["p by Holm"] for row in table.values()} == {"-", "0.0625"}
    head, *rows = first_table(experiment(about | {"reference": "local"}, tmp_path))
    assert dict(zip(head, rows[0], strict=True))["p (local better)"] == "1"


def test_two_seeds_have_no_standard_error(about: dict[str, Any], tmp_path: Path) -> None:
    for method in LAST:
        (tmp_path / "some" / method / "seed-2.csv").unlink()
    head, *rows = first_table(experiment(about | {"reference": "fedlog"}, tmp_path))
    ours = [dict(zip(head, row, strict=True)) | {"the paper's": ""} for row in rows]
    assert not any("±" in cell for row in ours for cell in row.values())


@pytest.mark.parametrize("verdict", ["holds", "perhaps"])
def test_a_claim_has_a_verdict_and_its_numbers_a_source(
    about: dict[str, Any], tmp_path: Path, verdict: str
) -> None:
    found = {"some": experiment(about, tmp_path)}
    text = "{91.0|some: fedlog: last} here"
    stated = {"title": "A page", "claims": [{"claim": "It is good", "here": verdict, "text": text}]}
    if verdict == "perhaps":
        with pytest.raises(ValueError, match="a claim perhaps"):
            claims(stated, found)
        return
    assert claims(stated, found)[-1] == "| It is good | holds | 91.0 here |"
    stated["claims"][0]["text"] = "{91.5|some: fedlog: last} here"  # type: ignore[index]
    with pytest.raises(ValueError, match=r"91\.5 is 91\.000"):
        claims(stated, found)


def test_a_loss_is_no_share_and_its_best_is_the_lowest(
    about: dict[str, Any], tmp_path: Path
) -> None:
    losses: dict[str, Any] = {"train/loss": [5.0, 4.25, 4.5]}
    archived(tmp_path / "some" / "fedprox", "fedprox", 0, [0.1, 0.2, 0.3], 10, **losses)
    of_losses = {"rows": ["fedprox"], "metric": "train/loss"}
    (row,) = first_table(experiment(about | of_losses, tmp_path))[1:]
    assert row == ["fedprox", "3", "1", "4.5000", "4.2500"]


def test_a_ranked_table_is_by_the_mean_and_the_last_rows_were_not_run(
    about: dict[str, Any], tmp_path: Path
) -> None:
    head, *rows = first_table(experiment(about | {"ranks": True}, tmp_path))
    plain = first_table(experiment(about, tmp_path))[1:]
    assert head[-1] == "rank"
    assert sorted(row[:-1] for row in rows) == sorted(plain)
    ours = head.index("ours")
    means = [float(row[ours].split()[0]) for row in rows if row[-1] not in {"", "-"}]
    assert means == sorted(means, reverse=True)
    ranks = [row[-1] for row in rows if row[-1]]
    expected = [str(1 + sum(other > mean for other in means)) for mean in means]
    assert ranks == [*expected, *["-"] * (len(ranks) - len(means))]


def test_gains_are_against_the_one_local_training(about: dict[str, Any], tmp_path: Path) -> None:
    # seen: of two cells of local training the last counted, whatever its settings
    def gain(*rows: str) -> str | None:
        head, first, *_ = first_table(experiment(about | {"rows": ["fedlog", *rows]}, tmp_path))
        return dict(zip(head, first, strict=True)).get("against local training")

    for name in ("few", "many"):
        for seed in range(3):
            archived(tmp_path / "some" / name, "local", seed, [0.5, 0.6], 0)
    assert gain("local", "few") == gain("local")
    assert gain("few", "many") is None
    assert gain("few") == "+31.00 ± 0.58"


def test_bits_are_counted_until_the_target(about: dict[str, Any], tmp_path: Path) -> None:
    head, *rows = last_table(experiment(about, tmp_path))
    assert head[-2:] == ["the paper's to 80 %", "the paper's share of FedAvg's"]
    table = {row[0]: row[1:] for row in rows}
    assert table["fedlog"] == ["16.0 kb", "1/43", "32.0 kb", "2.0", "3 of 3", "1.0 Mb", "1/43"]
    assert table["fedavg"] == ["688.0 kb", "-", "2.1 Mb †", "3.0", "0 of 3", "43.0 Mb", "-"]
    assert "local" not in table  # it sends nothing


def test_one_seed_has_no_errors(about: dict[str, Any], tmp_path: Path) -> None:
    for file in tmp_path.glob("some/*/seed-[12].csv"):
        file.unlink()
    head, *rows = first_table(experiment(about, tmp_path))
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert table["fedlog"]["ours"] == "91.00"
    assert table["fedavg"]["difference"] == "+0.00"
    assert table["fedlog"]["against local training"] == "+6.00"


def test_a_fine_tuned_model_is_a_row_of_its_own(about: dict[str, Any], tmp_path: Path) -> None:
    for seed in range(3):
        tuned = {"eval/client/finetuned_accuracy_mean": 0.7 + seed / 100}
        archived(tmp_path / "some" / "fedprox", "fedprox", seed, [0.5, 0.6], 10, **tuned)
    table = {row[0]: row for row in first_table(experiment(about, tmp_path))}
    assert table["fedprox, fine-tuned"][3] == "71.00 ± 0.58"


@pytest.mark.slow
def test_pictures_carry_the_digest_of_their_numbers(about: dict[str, Any], tmp_path: Path) -> None:
    drawn = pictures(experiment(about | {"near": 70}, tmp_path))
    assert [picture.name for picture in drawn] == [
        "some-by-round",
        "some-by-bytes",
        "some-near-by-round",
        "some-near-by-bytes",
    ]
    for picture in drawn:
        write(picture, tmp_path)
        assert digest_in(tmp_path / f"{picture.name}.png") == digest(picture)
    text = "\n".join(section(experiment(about, tmp_path), drawn))
    assert "| By round | By communication |\n|---|---|\n| ![Some: By round](img/some-by" in text
    assert "9 runs, 4 min 30 s in all; what else" in text.replace("\n", " ")
    rows = {row[0] for row in drawn[2].table[1:]}
    assert rows == {"fedlog", "local"}  # fedavg ends below 70 %
    archived(tmp_path / "some" / "fedlog", "fedlog", 0, [0.5, 0.8, 0.911], 1000)
    again = pictures(experiment(about, tmp_path))
    assert digest(again[0]) != digest(drawn[0])


def test_an_experiment_without_runs_says_so(about: dict[str, Any], tmp_path: Path) -> None:
    found = experiment(about | {"folder": "other"}, tmp_path)
    assert pictures(found) == []
    assert [*section(found, [])][-1] == "Not yet run."


@pytest.mark.parametrize("how", ["damaged", "mixed", "repeated"])
def test_a_cell_that_is_none_is_refused(about: dict[str, Any], tmp_path: Path, how: str) -> None:
    cell = tmp_path / "some" / "fedlog"
    if how == "damaged":
        text = (cell / "seed-0.csv").read_text()
        (cell / "seed-0.csv").write_text(text.replace("0.91", "0.99"))
    elif how == "mixed":
        archived(cell, "fedavg", 0, [0.5], 10)
    else:
        (cell / "seed-5.csv").write_bytes((cell / "seed-0.csv").read_bytes())
    with pytest.raises(ValueError, match="its runs are not one cell, or not whole"):
        experiment(about, tmp_path)


def test_accuracy_over_a_setting(about: dict[str, Any], tmp_path: Path) -> None:
    for method in ("fedlog", "fedavg"):
        for epochs in (1, 2, 5):
            for seed in (0, 1):
                place = tmp_path / "grid" / f"train.local_epochs={epochs},method.name={method}"
                value = 0.5 + epochs / 100 + seed / 100
                train = {"train": {"local_epochs": epochs}}
                archived(place, method, seed, [value], 5, **train)
    options = {"folder": "grid", "rows": None, "over": "train.local_epochs", "shown": [1, 5]}
    found = experiment(about | options, tmp_path)
    assert {line.label for line in found.lines} == {"fedlog", "fedavg"}
    assert all([value for value, _ in line.points] == [1, 2, 5] for line in found.lines)
    assert first_table(found)[0] == ["", "1", "5"]
    assert ["fedlog", "51.50 ± 0.50", "55.50 ± 0.50"] in first_table(found)
    (picture,) = pictures(found)
    assert ["fedavg", 2.0, pytest.approx(0.525), pytest.approx(0.005)] in picture.table
    text = "\n".join(section(found, [picture]))
    assert "Accuracy over train.local_epochs" in text
    assert "†" not in text


def test_gains_are_paired_with_local_training_in_the_same_setting(
    about: dict[str, Any], tmp_path: Path
) -> None:
    level = {"local": 0.5, "fedlog": 0.52}
    for method, start in level.items():
        for rate in (0.1, 0.2):
            if (method, rate) == ("local", 0.2):
                continue
            for seed in (0, 1):
                place = tmp_path / "grid" / f"train.lr={rate},method.name={method}"
                last = [start + rate + seed / (50 if method == "local" else 100)]
                archived(place, method, seed, last, 5, train={"lr": rate})
    found = experiment(about | {"folder": "grid", "rows": None, "gains": True}, tmp_path)
    assert pictures(found) == []
    head, *rows = first_table(found)
    assert head == ["train.lr", "seeds", "local", "fedlog"]
    # seeds 0 and 1: 62 - 60 and 63 - 62
    assert sorted(rows) == [
        ["0.1", "2", "61.00 ± 1.00", "+1.50 ± 0.50"],
        ["0.2", "0", "-", "-"],
    ]
    assert "| train.lr | seeds |" in "\n".join(section(found, []))


def test_a_cell_without_the_setting_is_a_level(about: dict[str, Any], tmp_path: Path) -> None:
    for epochs in (1, 2):
        train = {"train": {"lr": 0.1 * epochs}}
        archived(tmp_path / "grid" / f"lr={epochs}", "fedlog", 0, [0.5 + epochs / 100], 5, **train)
    archived(tmp_path / "grid" / "other", "centralized", 0, [0.9], 5)
    options: dict[str, Any] = {"folder": "grid", "rows": None, "over": "train.momentum"}
    options |= {"also": {"all at once": "grid/other"}}
    found = experiment(about | options, tmp_path)
    assert [cell.label for cell in found.cells] == ["lr=1", "lr=2", "all at once"]
    assert first_table(found) == [
        ["", "without it"],
        ["lr=1", "51.00"],
        ["lr=2", "52.00"],
        ["all at once", "90.00"],
    ]
    found = experiment(about | options | {"over": "train.lr"}, tmp_path)
    assert first_table(found)[1] == ["fedlog", "-", "51.00", "52.00"]
    (picture,) = pictures(found)
    assert ["centralized", 0.001, pytest.approx(0.9), None] in picture.table


@pytest.mark.slow
def test_the_picture_of_the_circle_shows_what_its_runs_hold(tmp_path: Path) -> None:
    for method in ("fedlog", "lg_fedavg@1"):
        for count in (1, 3):
            settings = [f"method.name={method}", f"{results_circle.ITERATIONS}={count}"]
            recipe = read(find_recipe(results_circle.RECIPE), settings)
            fedgist.run(recipe, out=tmp_path / "curves" / f"{method}-{count}")
    results_circle.run_planes(tmp_path / "planes")
    picture = results_circle.figure(tmp_path / "curves", tmp_path / "planes")
    lines = {panel: [line[1:] for line in picture.table if line[0] == panel] for panel in PANELS}
    assert sum(line[0] == "point" for line in lines["points"]) == 80
    # LG-FedAvg's clients have lines of their own, and those of the average lie between them
    assert {line[1] for line in lines["lg_fedavg"] if line[0] == "border"} == {"0", "1"}
    weights = {
        name: safetensors.numpy.load_file(tmp_path / "planes" / name / FEATURES)["weight"]
        for name in ("left", "right", "lg_fedavg")
    }
    mean = (weights["left"] + weights["right"]) / 2  # 40 rows each
    assert np.allclose(weights["lg_fedavg"], mean, atol=1e-5)
    assert {line[1] for line in lines["fedlog"] if line[0] == "border"} == {"0 1"}
    run = json.loads((tmp_path / "curves" / "fedlog-3" / "rounds.jsonl").read_text())
    assert ["fedlog", 3.0, run["eval/client/accuracy_mean"], None] in lines["test"]
    assert ["fedlog", 3.0, run["eval/train/accuracy_mean"], None] in lines["train"]


PANELS = ("points", "start", "lg_fedavg", "fedlog", "train", "test")


@pytest.mark.slow
def test_the_picture_of_features_shows_how_clients_come_to_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_features, "RECIPE", "demo")
    monkeypatch.setattr(results_features, "ROUNDS", (1, 3, 8))
    monkeypatch.setattr(results_features, "METHODS", ("fedavg", "local", "repshare"))
    monkeypatch.setattr(results_features, "ROWS", 40)
    for method in results_features.METHODS:
        results_features.run(tmp_path / method, method, "partition.name=iid", "evaluate.on=test")
    table = results_features.figure(tmp_path).table
    shares = {(method, number): share for method, number, share in table}
    methods = results_features.METHODS
    assert set(shares) == {(m, n) for m in methods for n in (1, 3, 8)}
    assert all(0.0 <= float(share) <= 1.0 for share in shares.values())
    # features of clients that share come to lie where the other's of the same class do
    assert shares["repshare", 8] > shares["repshare", 1] + 0.1
    assert shares["repshare", 8] > shares["local", 8] + 0.1
