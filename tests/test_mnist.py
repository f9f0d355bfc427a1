"""FedLog on MNIST, as the paper's table has it: needs the data set."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.recipe.reading import read


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fedlog_reaches_97_percent_within_five_rounds_and_stays_there(
    data_sets: Path, seed: int
) -> None:
    asked = ["train.num_rounds=10", "evaluate.every=5", f"seed={seed}"]
    rounds = fedgist.run(read(find_recipe("fedlog/mnist"), asked), data_root=data_sets).rounds
    measured = [line.get("eval/client/accuracy_mean") for line in rounds]
    assert [number for number, accuracy in enumerate(measured, 1) if accuracy] == [5, 10]
    assert min(accuracy for accuracy in measured if accuracy) >= 0.97
    assert all(
        line["comm/up_bytes"] == line["comm/down_bytes"] == 51 * 10 * 50 * 4 for line in rounds
    )
