"""The README's numbers are those that its command prints, and sharing pays in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from commands import fedgist

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^(fedlog|local|fedavg) +([\d.]+) % +([\d.]+) % +- +(\d+) +(.+)$", re.MULTILINE)
# the plan is the recipe's; another processor may round otherwise, and a few rows change sides
ROUNDING = 0.5


def table(text: str) -> dict[str, tuple[float, float, int, str]]:
    rows = {
        name: (float(accuracy), float(spread), int(rounds), " ".join(sent.split()))
        for name, accuracy, spread, rounds, sent in ROW.findall(text)
    }
    assert list(rows) == ["fedlog", "local", "fedavg"]
    return rows


def test_sharing_pays_in_the_readme() -> None:
    said = table((ROOT / "README.md").read_text("utf-8"))
    assert said["fedlog"][0] > said["local"][0] + 5
    assert said["fedlog"][0] > said["fedavg"][0] + 5


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_says(tmp_path: Path) -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ndemo:")[2].partition("\n\n")[0]
    lines = [line for line in recipe.splitlines() if line.startswith("\t$(BIN)/fedgist ")]
    printed = "".join(
        fedgist(*shlex.split(line)[1:], cwd=tmp_path, COLUMNS="100").stdout for line in lines
    )
    here, said = table(printed), table((ROOT / "README.md").read_text("utf-8"))
    legend = "; one model: accuracy of a global model on all test rows"
    for page in (printed, (ROOT / "README.md").read_text("utf-8")):
        assert legend in " ".join(page.split())
    for name, (accuracy, spread, rounds, sent) in said.items():
        assert here[name][0] == pytest.approx(accuracy, abs=ROUNDING)
        assert here[name][1] == pytest.approx(spread, abs=ROUNDING)
        assert here[name][2:] == (rounds, sent)
    assert (tmp_path / "runs/demo/accuracy.png").exists()
    assert (tmp_path / "runs/demo/report.html").exists()
    assert (tmp_path / "runs/demo/figures/gains.pdf").exists()
    for run in (tmp_path / "runs/demo").glob("*/recipe.toml"):
        assert run.read_text("utf-8").count("cohort_size = 10") >= 2  # asked for, and planned
