"""The page on own objectives: its loss beside a loop over patients, its program, and its recipe."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import fedgist, python
from fedgist.core.batch import Batch
from fedgist.testing import check_objective

TEXT = (Path(__file__).parents[2] / "docs" / "own-objective.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return found


@pytest.fixture(scope="module")
def survival(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module that a reader saves: the first block."""
    path = tmp_path_factory.mktemp("page") / "survival.py"
    path.write_text(blocks("python")[0], "utf-8")
    return runpy.run_path(str(path))


def by_loop(rows: list[tuple[float, float, float]]) -> float:
    """Minus Breslow's log partial likelihood of (time, event, log risk), for each row."""
    loss = 0.0
    for time, event, risk in rows:
        if event:
            loss += math.log(sum(math.exp(r) for t, _, r in rows if t >= time)) - risk
    return loss / max(len(rows), 1)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.booleans(), st.floats(-3, 3, width=32), st.booleans()),
        min_size=1,
        max_size=9,
    )
)
def test_the_loss_is_that_of_a_loop_over_the_rows_present(
    survival: Any, rows: list[tuple[int, bool, float, bool]]
) -> None:
    y = torch.tensor([[float(time), float(event)] for time, event, _, _ in rows])
    outputs = torch.tensor([[risk] for _, _, risk, _ in rows], requires_grad=True)
    mask = torch.tensor([present for *_, present in rows])
    loss = survival["Cox"]().loss(outputs, Batch(y[:, :0], y, mask))
    there = [(float(time), float(event), risk) for time, event, risk, present in rows if present]
    assert loss.item() == pytest.approx(by_loop(there), rel=1e-4, abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()


def test_ties_are_breslows_and_not_a_strict_order(survival: Any) -> None:
    y = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 0.0], [3.0, 0.0]])
    outputs = torch.tensor([[0.5], [-0.5], [2.0], [0.0]])
    loss = survival["Cox"]().loss(outputs, Batch(y[:, :0], y, torch.ones(4) > 0))
    # both events have the three rows of time 2 and later; with t_j > t_i they would have one
    at_risk = math.log(math.exp(0.5) + math.exp(-0.5) + 1.0)
    assert float(loss) == pytest.approx(2 * at_risk / 4)
    assert len(check_objective(survival["Cox"](), 2, y=y.repeat(3, 1))) == 7


def test_concordance_counts_pairs_whose_order_is_known(survival: Any) -> None:
    y = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0], [4.0, 0.0]])
    risk = torch.tensor([[3.0], [9.0], [1.0], [1.0]])
    # known: 0 before 1, 2 and 3, and 2 before 3; right are two, a tie is one half
    assert float(survival["concordance"](risk, y)) == pytest.approx(2.5 / 4)
    assert torch.isnan(survival["concordance"](risk, y * torch.tensor([1.0, 0.0])))


@pytest.mark.slow
def test_python_and_the_recipe_train_it(tmp_path: Path) -> None:
    done = python(_script(tmp_path), tmp_path)
    scores = dict(re.findall(r"^(local|fedavg|centralized) (\S+)$", done.stdout, re.MULTILINE))
    assert len(scores) == 3
    assert all(0.65 < float(score) < 1.0 for score in scores.values())
    (tmp_path / "survival.py").write_text(blocks("python")[0], "utf-8")
    (tmp_path / "survival.toml").write_text(blocks("toml")[0], "utf-8")
    first = blocks("sh")[0].splitlines()[0]
    fedgist(*shlex.split(first)[1:], cwd=tmp_path)
    lines = (tmp_path / "runs" / "survival" / "rounds.jsonl").read_text("utf-8").splitlines()
    assert json.loads(lines[-1])["eval/client/concordance_mean"] > 0.65


def _script(folder: Path) -> Path:
    script = folder / "page.py"
    script.write_text("\n".join(blocks("python")), "utf-8")
    return script
