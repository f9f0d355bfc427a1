"""Figures of confusion matrices have the counts of the record, and leave out what is no matrix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedgist
from fedgist.report.pictures.confusion_pictures import (
    COLUMN,
    MOST_CLASSES,
    last_confusion,
    of_confusions,
)
from fedgist.report.tables.comparison import study
from fedgist.runs.finished.run_reader import find
from fedgist.testing.small_worlds import blobs, rows
from written import write_run


def test_the_counts_of_all_seeds_are_drawn(tmp_path: Path) -> None:
    data = replace(blobs(), classes=("cat", "<dog>", "owl"))
    for seed in (0, 1):
        recipe = {
            "seed": seed,
            "train": {"num_rounds": 1},
            "engine": {"workers": 1, "cohort_size": 5},
        }
        fedgist.run(recipe, data=data, clients=rows(), out=tmp_path / f"seed-{seed}")
    (picture,) = of_confusions(study(find([tmp_path])))
    files = [tmp_path / f"seed-{seed}" / "rounds.jsonl" for seed in (0, 1)]
    counts = [np.array(json.loads(f.read_text().splitlines()[-1])[COLUMN]) for f in files]
    assert picture.table[0] == ["true", "cat", "<dog>", "owl"]
    assert [line[0] for line in picture.table[1:]] == ["cat", "<dog>", "owl"]
    assert [line[1:] for line in picture.table[1:]] == (counts[0] + counts[1]).tolist()
    assert sum(map(sum, counts[0].tolist())) == 5 * 30, "each client has all test rows"
    assert "&lt;dog&gt;" in picture.svg()


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_counts_of_another_round_than_the_kept_one_are_not_drawn(kept: int, tmp_path: Path) -> None:
    # seen: of three seeds one had counts of the round that it kept, and was called all seeds
    for seed in (0, 1):
        write_run(
            tmp_path / str(seed), [0.5, 0.6, 0.7], seed=seed, columns={COLUMN: [[3, 1], [0, 4]]}
        )
    first, second = find([tmp_path])
    last_alone = [line if line["round"] == 3 else {**line, COLUMN: None} for line in first.rounds]
    first = replace(first, rounds=last_alone, result={**first.result, "kept_round": kept})
    pictures = list(of_confusions(study([first, second])))
    assert (last_confusion(first) is not None) == (kept == 3)
    assert ("1 of 2 runs have such counts" in pictures[0].caption) == (kept != 3)


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2], [3]],
        [[1, 2, 3], [4, 5, 6]],
        [[0, 0], [0, 0]],
        [[1, -1], [0, 1]],
        [["a", 1], [1, 1]],
        "text",
        [1, 2],
        [[2**70, 1], [1, 1]],
    ],
)
def test_what_is_no_matrix_of_counts_is_left_out(counts: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.5], columns={COLUMN: counts})
    (run,) = find([tmp_path])
    assert last_confusion(run) is None
    assert list(of_confusions(study([run]))) == []


def test_many_classes_have_no_figure(tmp_path: Path) -> None:
    for name, count in (("local", MOST_CLASSES), ("fedlog", MOST_CLASSES + 1)):
        columns: dict[str, Any] = {COLUMN: np.eye(count, dtype=int).tolist()}
        write_run(tmp_path / name, [0.5], method=name, columns=columns)
    (picture,) = of_confusions(study(find([tmp_path])))
    assert picture.title == "Confusion of classes: local"
