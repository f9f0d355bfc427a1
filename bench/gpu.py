"""Measures fedgist on a GPU: one command, made-up data, no network, one JSON file.

    python bench/gpu.py [--wheels FOLDER] [--out bench-gpu.json] [--seconds 540] [--only W1 laws]

Torch must be installed. Other packages that fedgist needs can come from a folder of wheels. Parts
run in order of importance, each in a process of its own with a share of the time. The file is
written as a whole after every part, so a part that fails or hangs loses nothing of the others.
``--device cpu --quick`` does the same with tiny sizes, without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv-gpu"
FORMAT = 1
SECONDS = 540.0
NO_TIME = "no time left"
#: Dependencies of commands, report pages and probes, which no part uses.
UNUSED = ("typer", "jinja2", "scikit-learn", "scipy")
#: The parts by importance, with their shares of the time.
SHARES: Mapping[str, float] = {
    "W1": 5.0,
    "W2": 4.4,
    "W3": 1.8,
    "laws": 4.6,
    "flesd": 2.6,
    "synchronizations": 0.9,
    "resume": 1.4,
    "autocast": 2.4,
}
SHOWN = 40  # the most lines that are shown of what a failed part printed
WRAP_UP_S = 8.0  # a part is told to end this much sooner than it is killed
#: What CUDA's matrix products need in parts that use deterministic algorithms.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
COMPARES_BITS = ("laws", "resume")


@dataclass(frozen=True)
class Part:
    """The result of a part: ``measured``, ``failed`` or ``not measured``, and its figures."""

    state: str
    why: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything that is written to the file; ``machine`` is empty until it was looked at."""

    device: str
    quick: bool
    seconds: float
    machine: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    format: int = FORMAT


def main(words: Sequence[str] | None = None) -> None:
    """Measure all parts, or those asked for, and write the file."""
    args = _arguments(words)
    lacking = missing(requirements(), installed_version)
    if problem := refusal(lacking, args.wheels):
        sys.exit(problem)
    if lacking:
        python = make_environment(ENVIRONMENT, args.wheels, lacking)
        again = [str(python), __file__, *(sys.argv[1:] if words is None else words)]
        os.execv(python, again)  # noqa: S606  # this command again, in the environment
    report = Report(args.device, args.quick, args.seconds)
    with environment_of_parts() as env:
        report = measured(report, args.only, args.out, env)
    print(f"written to {args.out}")
    if not report.machine and args.seconds > 0:
        sys.exit(next(part.why for part in report.parts.values()))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=Path("bench-gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the command")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all parts")
    parser.add_argument("--only", nargs="*", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--wheels", type=Path, help="folder of wheels of packages not installed")
    return parser.parse_args(words)


def requirements(project: Path = ROOT / "pyproject.toml") -> list[str]:
    """Return the packages with their lowest versions that the parts use, such as ``torch>=2.6``."""
    needed: list[str] = tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"]
    return [line for line in needed if _name(line) not in UNUSED]


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(needed: Sequence[str], version_of: Callable[[str], str | None]) -> list[str]:
    """Return the requirements that are not installed, or only in an older version."""
    lacking = []
    for line in needed:
        name, _, lowest = line.partition(">=")
        version = version_of(name)
        if version is None or _numbers(version) < _numbers(lowest):
            lacking.append(line)
    return lacking


def _name(requirement: str) -> str:
    return requirement.partition(">=")[0]


def _numbers(version: str) -> list[int]:
    """Return the leading numbers of a version, for comparisons: 2.11.0+cu130 is [2, 11, 0]."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in matched[0].split(".")] if matched else []


def refusal(lacking: Sequence[str], wheels: Path | None) -> str:
    """Return why nothing can be measured, and what to do; empty if it can."""
    if "torch" in map(_name, lacking):
        return "torch is missing or too old: use a Python with the torch of this machine's GPU"
    if lacking and wheels is None:
        names = " ".join(lacking)
        return f"packages are missing: {names}. Give a folder of their wheels: --wheels FOLDER"
    if lacking and wheels is not None and not wheels.is_dir():
        return f"--wheels {wheels} is not a folder"
    return ""


def make_environment(place: Path, wheels: Path, lacking: Sequence[str]) -> Path:
    """Make a virtual environment that also sees this Python's packages; return its Python.

    The missing packages are installed from the wheels alone.
    """
    venv.create(place, system_site_packages=True, with_pip=False, clear=True)
    python = place / "bin" / "python"
    # if this Python is itself in an environment, its packages are not the system's
    scheme = {"base": str(place), "platbase": str(place)}
    own = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}
    site = Path(sysconfig.get_path("purelib", "venv", scheme))
    (site / "outer.pth").write_text("\n".join(sorted(own)) + "\n", "utf-8")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    found = ["--no-index", "--find-links", wheels, *lacking]
    done = subprocess.run(list(map(str, [*pip, *found])), check=False)
    if done.returncode:
        sys.exit(f"packages could not be installed from {wheels}: {' '.join(lacking)}")
    return python


@contextmanager
def environment_of_parts() -> Iterator[dict[str, str]]:
    """Yield the environment variables of the parts' processes.

    They import this checkout, and time execution plans anew instead of reading stored ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [ROOT / "src", ROOT / "bench", folder]
        if installed_version("fedgist") is None:
            write_metadata(Path(folder))
        given = os.environ.get("PYTHONPATH", "")
        joined = os.pathsep.join([*map(str, paths), *([given] if given else [])])
        yield {**os.environ, "PYTHONPATH": joined, "XDG_CACHE_HOME": f"{folder}/cache"}


def write_metadata(folder: Path) -> None:
    """Write the name and version of fedgist, which it reads, for a checkout not installed."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    place = folder / f"fedgist-{version}.dist-info"
    place.mkdir()
    text = f"Metadata-Version: 2.1\nName: fedgist\nVersion: {version}\n"
    (place / "METADATA").write_text(text, "utf-8")


def measured(report: Report, names: Sequence[str], out: Path, env: Mapping[str, str]) -> Report:
    """Look at the machine, run the parts, and write the file after each."""
    end = time.monotonic() + report.seconds
    look = run_part("machine", report, end - time.monotonic(), env)
    report = replace(report, machine=look.figures)
    for place, name in enumerate(names):
        if look.state == "measured":
            left = end - time.monotonic()
            part = run_part(name, report, share_of(names[place:], left), env)
        else:
            part = Part("not measured", look.why)
        report = replace(report, parts={**report.parts, name: part})
        write_whole(out, report)
        print(f"{name:18s} {part.state}{': ' if part.why else ''}{part.why}", flush=True)
    return report


def share_of(names: Sequence[str], left: float) -> float:
    """Return the seconds of the first of these parts, its share of the time that is left."""
    return left * SHARES[names[0]] / sum(SHARES[name] for name in names)


def run_part(name: str, report: Report, limit: float, env: Mapping[str, str]) -> Part:
    """Run a part in a process of its own, which is killed after ``limit`` seconds."""
    if limit <= 0:
        return Part("not measured", NO_TIME)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines, said = Path(folder, "lines"), Path(folder, "said")
        child = [sys.executable, ROOT / "bench" / "gpu_parts.py", name, "--lines", lines]
        how = ["--device", report.device, "--seconds", max(1.0, limit - WRAP_UP_S)]
        words = [*child, *how, *(["--quick"] if report.quick else [])]
        with said.open("wb") as stream:
            more = DETERMINISTIC if name in COMPARES_BITS else {}
            ended = _waited(list(map(str, words)), limit, {**env, **more}, stream)
        text = lines.read_text("utf-8") if lines.exists() else ""
        printed = said.read_text("utf-8", "replace")
        part = part_of(text, printed, in_time=ended)
        if part.state == "failed":  # with the traceback
            print("\n".join(printed.splitlines()[-SHOWN:]), file=sys.stderr, flush=True)
    return replace(part, seconds=round(time.monotonic() - begin, 2))


def _waited(words: list[str], limit: float, env: dict[str, str], stream: Any) -> bool:
    """Run a process for at most ``limit`` seconds; return whether it ended by itself."""
    process = subprocess.Popen(
        words, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True


def part_of(lines: str, said: str, *, in_time: bool) -> Part:
    """Return a part from the lines that its process wrote, and from what it printed.

    Each line is a JSON object: ``figures``, which are added to those before, or the ``state`` at
    the end. Without an end, the process was killed or died; its figures are kept.
    """
    part = Part("failed" if in_time else "not measured", NO_TIME)
    if in_time:
        part = replace(part, why=next(reversed(said.split("\n")[:-1]), "its process died"))
    for line in filter(lambda line: line.endswith("}"), lines.splitlines()):
        entry = json.loads(line)
        figures = joined(part.figures, entry.pop("figures", {}))
        part = replace(part, figures=figures, **entry)
    return part


def joined(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested tables as one; values of the other replace those of the first."""
    table = dict(first)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(table.get(key), Mapping)
        table[key] = joined(table[key], value) if both else value
    return table


def write_whole(path: Path, report: Report) -> None:
    """Write the file, so that nobody ever sees a part of it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")
    beside.replace(path)


if __name__ == "__main__":
    main()
