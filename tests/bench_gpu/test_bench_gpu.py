"""The GPU benchmark, tried without a GPU: its parts, its time, its packages, its file."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
import traceback
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import call

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def run(folder: Path, *words: object, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run the command; return the file that it wrote, and what it said."""
    out = folder / "bench-gpu.json"
    done = call([sys.executable, BENCH / "gpu.py", "--out", out, *words], folder, code)
    assert [path.name for path in folder.iterdir()] == [out.name], "nothing else is left"
    return json.loads(out.read_text("utf-8")), done.stdout + done.stderr


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmark by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
def gpu(bench: Any) -> Any:
    return bench("gpu")


def check_form(report: dict[str, Any], names: list[str]) -> None:
    assert list(report) == ["device", "quick", "seconds", "machine", "parts", "format"]
    assert list(report["parts"]) == names
    for part in report["parts"].values():
        assert list(part) == ["state", "why", "seconds", "figures"]
        assert part["state"] in {"measured", "failed", "not measured"}
        assert bool(part["why"]) == (part["state"] != "measured")


def test_without_time_every_part_is_said_to_be_unmeasured(tmp_path: Path, gpu: Any) -> None:
    report, said = run(tmp_path, "--seconds", 0)
    check_form(report, list(gpu.SHARES))
    assert {(p["state"], p["why"]) for p in report["parts"].values()} == {
        ("not measured", "no time left")
    }
    assert report["machine"] == {}
    assert "laws               not measured: no time left" in said


@pytest.mark.slow
def test_chosen_parts_are_measured_and_what_needs_a_gpu_says_so(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--quick", "--only", "laws", "synchronizations")
    report, _ = run(tmp_path, *words)
    check_form(report, ["laws", "synchronizations"])
    assert report["machine"]["torch"] == torch.__version__
    laws = report["parts"]["laws"]["figures"]
    assert laws["methods"] == dict.fromkeys(
        ("fedavg", "fedlog"), dict.fromkeys(("1", "3", "7"), "pass")
    )
    assert laws["laws"]["3"] == "3 padding changes nothing"
    assert report["parts"]["synchronizations"]["why"] == "only a GPU is waited for"


@pytest.mark.slow
@pytest.mark.environment
def test_all_parts_in_tiny_sizes(tmp_path: Path, gpu: Any) -> None:
    report, _ = run(tmp_path, "--device", "cpu", "--quick")
    check_form(report, list(gpu.SHARES))
    parts = report["parts"]
    measured = {name for name, part in parts.items() if part["state"] == "measured"}
    assert measured >= {"W1", "W2", "W3", "laws", "flesd", "resume"}
    for name in ("W1", "W2", "W3", "flesd"):
        figures = parts[name]["figures"]
        best = {who: times["best"] for who, times in figures["seconds"].items()}
        bare = min(seconds for who, seconds in best.items() if who.startswith("bare"))
        assert figures["ratio"] == pytest.approx(bare / best["fedgist"])
        assert set(figures["peak_mb"]) == set(best)
        assert math.isfinite(figures["median_ratio"])
    for found in parts["resume"]["figures"].values():
        assert found["resumed"] == {"same bits": True, "largest difference": 0.0}
    if parts["autocast"]["state"] == "not measured":  # this CPU has no units for it
        assert "needs a GPU or a CPU with AMX" in parts["autocast"]["why"]


@NO_GPU
@pytest.mark.slow
def test_a_machine_without_a_gpu_ends_with_what_to_do(tmp_path: Path) -> None:
    report, said = run(tmp_path, "--only", "W3", code=1)
    check_form(report, ["W3"])
    assert said.endswith("torch sees no GPU on this machine; try --device cpu --quick\n")


def test_missing_and_old_packages_are_named(gpu: Any) -> None:
    have = {"torch": "2.11.0+cu130", "numpy": "1.9", "rich": "13.7"}
    needed = ["torch>=2.6", "numpy>=1.26", "rich>=13.7", "pydantic>=2.7"]
    lacking = gpu.missing(needed, have.get)
    assert lacking == ["numpy>=1.26", "pydantic>=2.7"]
    says = "packages are missing: numpy>=1.26 pydantic>=2.7. Give a folder of their wheels: "
    assert gpu.refusal(lacking, None) == says + "--wheels FOLDER"
    assert gpu.refusal([], None) == gpu.refusal(lacking, ROOT) == ""
    assert gpu.refusal(lacking, Path("nowhere")) == "--wheels nowhere is not a folder"
    assert gpu.refusal(["torch>=2.6"], ROOT).startswith("torch is missing or too old")


def test_what_is_needed_is_installed_here(gpu: Any) -> None:
    needed = gpu.requirements()
    assert {"torch>=2.6", "tomli-w>=1.0"} <= set(needed)
    assert not {line for line in needed if line.startswith(gpu.UNUSED)}
    assert gpu.missing(needed, gpu.installed_version) == []


def test_a_part_gets_its_share_of_the_time_that_is_left(gpu: Any) -> None:
    names = list(gpu.SHARES)
    whole = sum(gpu.SHARES.values())
    assert gpu.share_of(names, 540) == pytest.approx(540 * gpu.SHARES[names[0]] / whole)
    assert gpu.share_of(names[-1:], 100) == 100


def test_the_figures_of_a_part_that_was_killed_are_kept(gpu: Any) -> None:
    lines = '{"figures": {"a": {"b": 1}}}\n{"figures": {"a": {"c": 2}, "d": 3}}\n{"figures": {"e'
    part = gpu.part_of(lines, "", in_time=False)
    assert (part.state, part.why) == ("not measured", "no time left")
    assert part.figures == {"a": {"b": 1, "c": 2}, "d": 3}
    died = gpu.part_of(lines, "out of memory\nKilled\n", in_time=True)
    assert (died.state, died.why, died.figures) == ("failed", "Killed", part.figures)
    whole = gpu.part_of('{"state": "measured", "why": ""}\n', "a warning\n", in_time=True)
    assert (whole.state, whole.why) == ("measured", "")


def test_a_part_that_hangs_is_killed(gpu: Any, tmp_path: Path) -> None:
    begin = time.monotonic()
    with (tmp_path / "said").open("wb") as stream:
        assert not gpu._waited(["sleep", "900"], 0.1, {"PATH": "/usr/bin:/bin"}, stream)
    assert time.monotonic() - begin < 800


def test_metadata_of_a_checkout_that_is_not_installed(gpu: Any, tmp_path: Path) -> None:
    gpu.write_metadata(tmp_path)
    (found,) = importlib.import_module("importlib.metadata").distributions(path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("fedgist", "0.1.0")


@pytest.mark.slow
@pytest.mark.environment
def test_packages_come_from_the_folder_of_wheels(gpu: Any, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "tinypart-1.2.dist-info"
    with zipfile.ZipFile(wheels / "tinypart-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinypart.py", "NUMBER = 7\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinypart\nVersion: 1.2\n")
        tags = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    python = gpu.make_environment(tmp_path / "made", wheels, ["tinypart>=1"])
    code = (
        "import tinypart, importlib.util as u; print(tinypart.NUMBER, bool(u.find_spec('torch')))"
    )
    assert call([python, "-c", code], tmp_path).stdout == "7 True\n"
    with pytest.raises(SystemExit, match=r"not be installed from .*: absentpart>=1"):
        gpu.make_environment(tmp_path / "made", wheels, ["absentpart>=1"])


def test_turns_end_early_but_one_of_each_counts(bench: Any) -> None:
    setting = bench("gpu_setting")
    late = setting.Setting("cpu", quick=True, deadline=time.monotonic() - 1)
    numbers = iter(range(9))
    (seconds,) = setting.in_turns({"fedgist": lambda: [next(numbers) + 1.0]}, 5, late)
    assert seconds == {"fedgist": [2.0]}
    ample = setting.Setting("cpu", quick=True, deadline=math.inf)
    *_, seconds = setting.in_turns({"fedgist": lambda: [1.0]}, 5, ample)
    assert len(seconds["fedgist"]) == 5
    times = {"fedgist": [2.0, 4.0], "bare": [8.0, 8.0], "bare, fused": [6.0, 10.0]}
    assert setting.ratios(times) == {"ratio": 3.0, "median_ratio": 8.0 / 3.0}


def test_waits_are_counted_by_the_line_of_fedgist(bench: Any) -> None:
    checks = bench("gpu_checks")

    def work() -> None:
        for _ in range(3):
            warnings.warn(checks.SYNCHRONIZING, stacklevel=1)
        warnings.warn("another warning", stacklevel=1)

    found = checks.synchronizing(work)
    assert (found["count"], found["distinct"]) == (3, 1)
    assert found["lines"][0]["line"].startswith(Path(__file__).name)
    inside = traceback.FrameSummary(str(checks.PACKAGE / "core" / "a.py"), 7, "f", line="x.item()")
    outside = traceback.FrameSummary("torch/_tensor.py", 9, "item", line="...")
    assert checks.line_of([outside, inside, outside]) == ("core/a.py:7", "x.item()")
