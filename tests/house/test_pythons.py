"""The command that tests every Python of the machine: what it finds, and what it says is absent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import call

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout with the script alone, and a path with the few tools that it calls."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "pythons", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "env", "cat", "chmod", "mkdir"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)


def run(place: Path, code: int) -> str:
    env = {"PATH": str(place / "bin"), "PYENV_ROOT": str(place / "pyenv")}
    return call([place / ".ci" / "pythons", "-x"], place, code, **env).stdout


@pytest.mark.environment
def test_pythons_that_are_absent_are_said(place: Path) -> None:
    lines = run(place, 1).splitlines()
    assert lines[:3] == [f"Python 3.{minor}: not on this machine" for minor in (11, 12, 13)]
    assert lines[-1] == "tested: none; failed: none"


@pytest.mark.environment
@pytest.mark.parametrize(("fails", "code"), [("3.99", 0), ("3.13", 1)])
def test_each_python_gets_an_environment_and_the_arguments(
    place: Path, fails: str, code: int
) -> None:
    script(place / "bin" / "python3.11", "echo 3.11")
    script(place / "bin" / "python3.12", "exit 1")  # a name of pyenv's that leads nowhere
    script(place / "pyenv" / "versions" / "3.13.0" / "bin" / "python", "echo 3.13")
    script(  # instead of an installation, a Python that says how it was called
        place / "bin" / "make",
        'venv="${3#VENV=}"',
        'mkdir -p "$venv/bin"',
        'echo "#!/bin/bash" > "$venv/bin/python"',
        f"""echo 'echo "$0 $*"; [[ "$0" != *{fails}* ]]' >> "$venv/bin/python" """,
        'chmod +x "$venv/bin/python"',
    )
    lines = run(place, code).splitlines()
    calls = [line for line in lines if line.startswith(".venv")]
    assert calls == [
        f".venv-{version}/bin/python -m pytest -n 3 --dist worksteal -q -x"
        for version in ("3.11", "3.13")
    ]
    assert "Python 3.12: not on this machine" in lines
    failed = fails if code else "none"
    assert lines[-1] == f"tested: 3.11 3.13; failed: {failed}"
