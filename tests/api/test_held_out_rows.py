"""data.test_fraction from Python: the same test rows as those of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedgist

pd = pytest.importorskip("pandas")

RECIPE: dict[str, Any] = {"train": {"num_rounds": 2, "batch_size": 5}, "engine": {"workers": 1}}


def hospitals() -> Any:
    rng = np.random.default_rng(0)
    ill = rng.random(90) < 0.4
    return pd.DataFrame(
        {
            "age": (50 + 15 * ill + rng.normal(0, 5, 90)).round(3),
            "sex": rng.choice(["f", "m"], 90),
            "hospital": rng.choice(["Dorf", "Stadt", "Ulm"], 90),
            "state": np.where(ill, "ill", "well"),
        }
    )


def test_hospitals_have_the_same_test_rows_from_a_table_and_from_python(tmp_path: Path) -> None:
    frame = hospitals()
    frame.to_csv(tmp_path / "h.csv", index=False)
    table: dict[str, Any] = {"name": "table", "path": str(tmp_path / "h.csv"), "label": "state"}
    table |= {"client": "hospital", "test_fraction": 0.25}
    of_file = fedgist.run(RECIPE | {"data": table, "partition": {"name": "natural"}})
    of_python = fedgist.run(
        RECIPE | {"data": {"test_fraction": 0.25}},
        data=(frame[["age", "sex"]], frame["state"]),
        clients=frame.groupby("hospital").indices,
    )
    for ours, theirs in zip(of_python.rounds, of_file.rounds, strict=True):
        scores = [key for key in theirs if key.startswith(("eval/", "train/"))]
        assert scores
        assert {key: ours[key] for key in scores} == {key: theirs[key] for key in scores}


def test_it_is_refused_beside_test_rows() -> None:
    x, y = np.ones((8, 2)), np.arange(8) % 2
    recipe = RECIPE | {"data": {"test_fraction": 0.25}}
    with pytest.raises(ValueError, match=r"test_fraction = 0.25 is not read: data= has test rows"):
        fedgist.run(recipe, data=(x, y, x, y))
    with pytest.raises(ValueError, match=r"clients_test= chooses .*: give one of them"):
        fedgist.run(recipe, data=(x, y), clients=[range(8)], clients_test=[[0]])
    with pytest.raises(ValueError, match="unknown key of data given in Python"):
        fedgist.run(RECIPE | {"data": {"path": "x.csv"}}, data=(x, y))
