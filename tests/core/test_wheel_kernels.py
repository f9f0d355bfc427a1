"""Kernels of a wheel: the processor's flags choose the library, or it is told what it lacks."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core.nets.compiled import kernel_library, wheel_kernels
from fedgist.core.nets.compiled.wheel_kernels import LEVELS, file_name, runnable, why_none
from fedgist.engines.plans.kernel_building import have_kernels

V3, V4 = LEVELS["x86-64-v3"].flags, LEVELS["x86-64-v4"].flags
MACHINES = ("x86_64", "aarch64")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's libraries of a machine, which tests name, and no compiler or library built here."""
    monkeypatch.setattr(wheel_kernels, "FOLDER", tmp_path / "libraries")
    monkeypatch.setattr(wheel_kernels, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(kernel_library, "library_path", lambda: tmp_path / "built.so")
    monkeypatch.setattr(kernel_library, "compiler", lambda: None)
    (tmp_path / "libraries").mkdir()
    return tmp_path


def wheel(folder: Path, machine: str) -> None:
    for name, level in LEVELS.items():
        if level.machine == machine:
            (folder / "libraries" / file_name(name)).write_bytes(b"")


def processor(
    folder: Path, patch: pytest.MonkeyPatch, flags: frozenset[str], machine: str = "x86_64"
) -> None:
    key = "Features" if machine == "aarch64" else "flags"
    text = f"processor\t: 0\nmodel name\t: any\n{key}\t\t: {' '.join(sorted(flags))}\n\n"
    (folder / "cpuinfo").write_text(2 * text)
    patch.setattr(platform, "machine", lambda: machine)


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", V4 | {"fpu"}, ["x86-64-v4", "x86-64-v3"]),
        ("x86_64", V3, ["x86-64-v3"]),
        ("x86_64", V4 - {"avx512bw"}, ["x86-64-v3"]),
        ("x86_64", V4 - {"fma"}, []),
        ("aarch64", frozenset({"fp", "asimd"}), ["aarch64"]),
        ("aarch64", frozenset({"fp"}), []),
        ("riscv64", V4, []),
    ],
)
def test_a_processor_runs_the_levels_whose_flags_it_has(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    flags: frozenset[str],
    expected: list[str],
) -> None:
    for each in MACHINES:
        wheel(folder, each)
    processor(folder, monkeypatch, flags, machine)
    assert [path.name for path in runnable()] == [file_name(level) for level in expected]
    assert bool(why_none()) == (not expected)


@given(lacks=st.sets(st.sampled_from(sorted(V3)), min_size=1))
def test_a_processor_is_told_what_it_lacks(lacks: set[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel_kernels, "levels", lambda: ["x86-64-v4", "x86-64-v3"])
        patch.setattr(wheel_kernels, "_flags", lambda: V4 - lacks)
        patch.setattr(platform, "machine", lambda: "x86_64")
        said: list[str] = []
        patch.setattr(kernel_library, "compiler", lambda: None)
        have_kernels(said.append)
    (line,) = said
    assert line == (
        "this wheel has kernels for x86-64-v4 and x86-64-v3, and this processor lacks "
        f"{', '.join(sorted(lacks))}: convolutions are torch's"
    )


def test_a_wheel_without_kernels_says_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(folder, monkeypatch, frozenset())
    said: list[str] = []
    have_kernels(said.append)
    assert (runnable(), why_none(), said) == ([], "", [])


def test_a_library_of_another_version_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(folder, "x86_64")
    processor(folder, monkeypatch, V4)
    assert runnable()
    (folder / "kernels.c").write_text("another version")
    monkeypatch.setattr(wheel_kernels, "SOURCE", folder / "kernels.c")
    assert runnable() == []


def test_what_was_built_here_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(folder, "x86_64")
    processor(folder, monkeypatch, V3)
    assert kernel_library.library_file() == runnable()[0]
    (folder / "built.so").write_bytes(b"")
    assert kernel_library.library_file() == folder / "built.so"


def test_a_machine_without_cpuinfo_runs_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(folder, "x86_64")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert runnable() == []
    assert "this processor lacks abm, avx, avx2" in why_none()
