"""The wheel, installed with the pinned versions outside the checkout, does the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from commands import call

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")

pytestmark = [pytest.mark.slow, pytest.mark.environment]


def skip_without_registry(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode and "Retrying" in done.stderr:
        pytest.skip(f"the package registry cannot be reached: {done.stderr.splitlines()[-1]}")


@pytest.fixture(scope="module")
def outside() -> dict[str, str]:
    """The environment without the paths that lead back to the checkout."""
    return {name: "" for name in os.environ if name.startswith(("PYTHON", "FEDGIST"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the Makefile builds it; skipped where the registry cannot be reached."""
    folder = tmp_path_factory.mktemp("dist")
    made = call([sys.executable, *PIP, "wheel", "--no-deps", "-w", folder, ROOT], folder, code=None)
    skip_without_registry(made)
    assert made.returncode == 0, made.stderr
    (built,) = folder.glob("fedgist-*.whl")
    return built


def test_it_holds_the_recipes_and_the_page_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    recipes = {
        f"fedgist/recipes/{p.relative_to(ROOT / 'recipes').as_posix()}"
        for p in ROOT.glob("recipes/**/*.toml")
    }
    sources = {
        f"fedgist/{p.relative_to(ROOT / 'src/fedgist').as_posix()}"
        for p in ROOT.glob("src/fedgist/**/*.*")
        if "__pycache__" not in p.parts
    }
    assert recipes | sources <= set(names)
    others = [n for n in names if n not in recipes | sources and ".dist-info/" not in n]
    assert others == []


def test_two_rounds_of_the_demo(wheel: Path, tmp_path: Path, outside: dict[str, str]) -> None:
    call([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    # without bytecode of all of torch, most of which no command imports
    pinned = ("install", "--no-compile", "-c", ROOT / "constraints.txt", f"{wheel}[plot]")
    done = call([sys.executable, *PIP, "--python", python, *pinned], tmp_path, None, **outside)
    skip_without_registry(done)
    assert done.returncode == 0, done.stderr
    fedgist = python.with_name("fedgist")
    run = ("run", "demo", "--out", "first", "--set", "train.num_rounds=2")
    call([fedgist, *run], tmp_path, code=0, **outside)
    call([fedgist, "report", "first", "-o", "page.html"], tmp_path, code=0, **outside)
    result = json.loads((tmp_path / "first" / "result.json").read_text())
    assert (result["status"], result["rounds"]) == ("finished", 2)
    assert "<svg" in (tmp_path / "page.html").read_text("utf-8")
    where = call(
        [python, "-c", "import fedgist; print(fedgist.__file__)"], tmp_path, code=0, **outside
    )
    assert str(tmp_path) in where.stdout
