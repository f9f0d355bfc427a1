"""Processes in tests: how they are called, and how long one is waited for before it has hung."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HANG_S = 600.0  # far above what anything takes on a busy machine: it only ends what hangs


def call(
    words: Sequence[object], cwd: Path, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``code`` is the exit code it must have, None for any."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120", **env},
        timeout=HANG_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert code is None or done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
    return done


def fedgist(
    *words: object, cwd: Path, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run one of fedgist's commands to its end."""
    return call([sys.executable, "-m", "fedgist.cli", *words], cwd, code, **env)


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """Begin one of fedgist's commands."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedgist.cli", *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < end, "hung"
        time.sleep(0.005)
