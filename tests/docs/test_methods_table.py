"""The table of methods is made from the code, has every method, and leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import python
from fedgist.core.objectives.metrics import OBJECTIVES
from fedgist.methods import METHODS
from methods_table import (
    BEGIN,
    END,
    OWN,
    PAGE,
    TASKS,
    WITH,
    sizes,
    target_of,
    task_of,
    unlike,
    with_table,
)

TABLE = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]


def test_the_table_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert with_table(page) == page, "run: python docs/scripts/methods_table.py"


def test_the_table_has_every_method_once_and_every_objective() -> None:
    assert sorted(re.findall(r"\[`(\w+)`\]", TABLE)) == sorted(METHODS)
    assert set(TASKS) == {*OBJECTIVES, OWN}
    assert all(" with " in task_of(*pair) for pair in WITH)


@pytest.mark.parametrize(
    ("method", "objective", "text"),
    [
        ("fedavg", OWN, "your own"),
        ("fedlog", "regression", "numbers"),
        ("fedlog", "segmentation", ""),
        ("fd", "regression", ""),
        ("fedproto", "multilabel", 'several labels with `inference = "logits"`'),
        ("flesd", "simclr", "encoders"),
    ],
)
def test_tasks_that_a_method_serves_are_named(method: str, objective: str, text: str) -> None:
    assert task_of(method, objective) == text
    assert (target_of(objective) in METHODS[method].targets) == bool(text)


@pytest.mark.parametrize(
    ("name", "up", "sees", "models"),
    [
        ("local", 0, "nothing", "yes"),
        ("fedavg", 4 * 21_840 + 4, "totals", "apart"),
        ("fedlog", 4 * 10 * 51, "totals", "one width"),
        ("fd", 4 * 10 * 11, "each message", "yes"),
        ("fedmd", 4 * 10 * 1000, "totals", "yes"),
    ],
)
def test_sizes_and_models_are_those_of_the_papers(
    name: str, up: int, sees: str, models: str
) -> None:
    method = METHODS[name]()
    assert sizes(method)[::2] == (up, sees)
    assert unlike(method) == models


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
