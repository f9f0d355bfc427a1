"""The table of methods and tasks is made from the code, has every method, and leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import python
from fedgist.core.objectives.metrics import OBJECTIVES
from fedgist.methods import METHODS
from tasks_page import BEGIN, END, HEADS, OWN, PAGE, WITH, cell, target_of, with_table

TABLE = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]


def test_the_table_of_methods_and_tasks_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert with_table(page) == page, "run: python docs/scripts/tasks_page.py"


def test_the_table_has_every_method_once_and_every_objective() -> None:
    assert sorted(re.findall(r"\[`(\w+)`\]", TABLE)) == sorted(METHODS)
    assert set(HEADS) == {*OBJECTIVES, OWN}
    assert all(cell(*pair).startswith("yes with") for pair in WITH)


@pytest.mark.parametrize(
    ("method", "objective", "text"),
    [
        ("fedavg", OWN, "yes"),
        ("fedlog", "regression", "yes"),
        ("fedlog", "segmentation", "no"),
        ("fd", "regression", "no"),
        ("fedproto", "multilabel", 'yes with `inference = "logits"`'),
        ("flesd", "simclr", "yes"),
    ],
)
def test_cells_say_yes_or_no(method: str, objective: str, text: str) -> None:
    assert cell(method, objective) == text
    assert (target_of(objective) in METHODS[method].targets) == text.startswith("yes")


TASK_PAGES = sorted((PAGE.parent / "tasks").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", TASK_PAGES, ids=[page.stem for page in TASK_PAGES])
def test_the_python_of_a_tasks_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert blocks or page.stem == "index"
    if blocks:
        script = tmp_path / "page.py"
        script.write_text("\n".join(blocks), "utf-8")
        assert python(script, tmp_path).stdout
