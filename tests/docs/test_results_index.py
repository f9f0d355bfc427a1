"""The page of all cells: 255, each in one state, counted from the archive's files."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fedgist
from fedgist.methods import METHODS
from fedgist.recipe.reading import make
from fedgist.runs.finished.archived_run import archived_part, to_csv
from fedgist.runs.finished.run_reader import read_run
from fedgist.studies.queue import read_queue
from results_cells import RESULTS
from results_index import NONE, OLD, SIZE, SMALLER, page, parts, queue_prices
from results_page import DATA

OF_PAPERS = {"FedLog": 74, "Representation sharing": 39, "Codistillation": 78, "FLESD": 64}


def test_the_cells_are_those_of_the_papers_and_rows_exist_or_were_not_run() -> None:
    by_paper: Counter[str] = Counter()
    for part in parts(DATA):
        by_paper[part.paper] += part.counts.total()
    assert dict(by_paper) == OF_PAPERS
    about = tomllib.loads((DATA / "cells.toml").read_text("utf-8"))["parts"]
    for one in about:
        assert "rows" in one or one["why"]
        assert len(set(one.get("rows", ()))) == len(one.get("rows", ()))
    for folder in (DATA / "fedlog" / "table1").iterdir():  # no row of a table is forgotten
        (rows,) = (one["rows"] for one in about if f"table1/{folder.name}/" in one.get("of", ""))
        assert {path.name for path in folder.iterdir()} <= {*rows, "local"}


def test_the_page_is_made_from_the_archive() -> None:
    text = (RESULTS / "index.md").read_text("utf-8")
    assert text == page(DATA)
    assert re.search(r"\*\*\d+ of 255 cells are at the paper's size\*\*", text)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of one finished run, in the row there."""
    recipe: dict[str, Any] = {
        "data": {"train_rows": 100},
        "clients": {"num_clients": 4},
        "method": {"name": "local"},
        "train": {"num_rounds": 1},
    }
    fedgist.run(make(recipe), out=tmp_path / "run")
    row = tmp_path / "data" / "there"
    row.mkdir(parents=True)
    (row / "seed-0.csv").write_text(to_csv(archived_part(read_run(tmp_path / "run"), "")))
    return tmp_path / "data"


def states(archive: Path, **part: Any) -> Counter[str]:
    keys = {"paper": "P", "title": "T", "cells": 2, **part}
    lines = [f"{key} = {value!r}" for key, value in keys.items()]
    (archive / "cells.toml").write_text("\n".join(["[[parts]]", *lines]))
    (found,) = parts(archive)
    return found.counts


def test_a_row_is_whole_smaller_old_or_not_run(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ["there", "nowhere"]
    assert states(archive, of="{}", rows=both) == {SIZE: 2, NONE: 2}
    assert states(archive, of="x/{}", smaller="{}", rows=both) == {SMALLER: 2, NONE: 2}
    assert states(archive, why="no data") == {NONE: 2}
    monkeypatch.setattr(METHODS["local"], "version", 9)
    assert states(archive, of="{}", rows=both) == {OLD: 2, NONE: 2}


def test_the_price_is_that_of_what_is_not_run_or_old(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = {archive / name: cost for name, cost in (("there", 3), ("nowhere", 5), ("x/there", 7))}

    def price(**part: Any) -> float:
        states(archive, rows=["there", "nowhere"], **part)
        return parts(archive, prices)[0].price

    assert price(of="{}") == 5
    assert price(of="x/{}", smaller="{}") == 7  # what is there is smaller; the other has no price
    monkeypatch.setattr(METHODS["local"], "version", 9)
    assert price(of="{}") == 3 + 5
    assert price(smaller="{}") == 3


def test_the_queue_tells_the_price_of_a_row_by_its_folder() -> None:
    prices = queue_prices(DATA)
    costs = {of.command: of.cost for of in read_queue(RESULTS / "queue.toml")}
    (cost,) = {c for text, c in costs.items() if "cifar100 --seeds 3 --method fedavg" in text}
    assert prices[DATA / "fedlog" / "table1" / "cifar100" / "fedavg"] == cost
    assert all(DATA in place.parents for place in prices)
