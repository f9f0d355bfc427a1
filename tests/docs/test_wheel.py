"""The wheel, installed with the pinned versions outside the checkout, does the demo."""

from __future__ import annotations

import email
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from commands import call

ROOT = Path(__file__).resolve().parents[2]
BLOB = "https://github.com/fedgist/fedgist/blob/main/"
RAW = "https://raw.githubusercontent.com/fedgist/fedgist/main/"
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
        for p in ROOT.glob("recipes/**/*.*")
        if p.suffix in {".toml", ".py"}  # some recipes have their model beside them
    }
    sources = {
        f"fedgist/{p.relative_to(ROOT / 'src/fedgist').as_posix()}"
        for p in ROOT.glob("src/fedgist/**/*.*")
        if "__pycache__" not in p.parts
    }
    assert recipes | sources <= set(names)
    others = [n for n in names if n not in recipes | sources and ".dist-info/" not in n]
    assert others == []


def test_its_page_on_an_index_has_addresses_and_no_relative_link(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    about = email.message_from_bytes(archive.read(name))
    urls = dict(url.split(", ") for url in about.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert {url.split("/fedgist")[0] for url in urls.values()} == {"https://github.com"}
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert pythons <= set(about.get_all("Classifier", []))
    assert (about["License-Expression"], about["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert about["Description-Content-Type"] == "text/markdown"
    page = about.get_payload()
    assert isinstance(page, str)
    assert page.startswith("# fedgist\n")
    readme = (ROOT / "README.md").read_text("utf-8")
    links, of_readme = (re.findall(r"\]\(([^)]+)\)", text) for text in (page, readme))
    assert len(links) == len(of_readme)
    places = [link.removeprefix(BLOB).removeprefix(RAW) for link in links]
    assert places == of_readme  # the same files, but with addresses
    assert [link for link in links if not link.startswith("https://")] == []
    assert [link for link in links if link.endswith(".png") != link.startswith(RAW)] == []


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


WITHOUT_COMPILER = """
import numpy as np
import fedgist
from fedgist.core.nets.compiled import kernel_library
kernel_library.compiler = lambda: None  # zig's may be installed
images = np.random.default_rng(0).normal(size=(40, 3, 16, 16)).astype("float32")
rows = images, np.arange(40) % 10, images[:10], np.arange(10)
plan = {"conv4": {"cohort_size": 2, "kernels": {"conv1": "compiled"}}}
recipe = {
    "model": {"name": "conv4"}, "clients": {"num_clients": 2}, "partition": {"name": "iid"},
    "train": {"num_rounds": 1, "batch_size": 8}, "engine": {"workers": 1, "plans": plan},
}
print(fedgist.__file__, fedgist.run(recipe, data=rows).rounds[0]["train/loss"])
"""


def test_wheels_with_kernels_need_no_compiler(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="the extra `compiler` is not installed")
    made = call([sys.executable, ROOT / "deploy/wheels.py", tmp_path / "dist"], tmp_path, code=None)
    skip_without_registry(made)
    assert made.returncode == 0, made.stderr
    wheels = {path.stem.rpartition("_2_17_")[2]: path for path in (tmp_path / "dist").iterdir()}
    assert set(wheels) == {"x86_64", "aarch64"}
    here = next(line for line in made.stdout.splitlines() if f"{platform.machine()}.whl" in line)
    assert ": tried " in here
    with zipfile.ZipFile(wheels[platform.machine()]) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_COMPILER)
    done = call(
        [sys.executable, script],
        tmp_path,
        PYTHONPATH=str(tmp_path / "installed"),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        PATH=str(tmp_path / "empty"),
    )
    where, loss = done.stdout.split()
    assert Path(where).is_relative_to(tmp_path / "installed")
    assert float(loss) > 0
    assert not list((tmp_path / "cache").rglob("*.so"))
