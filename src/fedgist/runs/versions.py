"""Versions that a run's numbers depend on: its method's, the shared arithmetic's, and the code's.

Runs of different versions are never in one row of a table. ``fedgist reproduce`` repeats archived
runs of earlier versions, and a stopped run goes on only with its own version.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from fedgist.methods import METHODS, base_name

if TYPE_CHECKING:  # it loads torch, which reports do without
    from fedgist.core.method import Method

# raised by a change of an optimizer, a layer or a kernel that moves the numbers of runs
ARITHMETIC = 1
PACKAGE = Path(__file__).parents[1]
GIT_S = 5  # seconds after which git is not waited for
COMMIT_LETTERS = 12
VERSION_OF = "the version of the "  # begins the name of a checkpoint's input


@dataclass(frozen=True, order=True)
class Computed:
    """The versions of the method and of the shared arithmetic that computed a run."""

    method: int = 1
    arithmetic: int = 1

    @classmethod
    def of_result(cls, result: Mapping[str, object]) -> Computed:
        """Return the versions in a run's result; 0 stands for a version that it does not state."""
        table = result.get("versions")
        names = ("method", "arithmetic")
        values = [table.get(name) if isinstance(table, Mapping) else None for name in names]
        return cls(*(value if type(value) is int else 0 for value in values))

    @classmethod
    def now(cls, method: Method | type[Method]) -> Computed:
        """Return the versions by which this fedgist computes a method."""
        return cls(method.version, ARITHMETIC)

    @property
    def inputs(self) -> dict[str, str]:
        """What a checkpoint is bound to."""
        named = {"method": self.method, "shared arithmetic": self.arithmetic}
        return {f"{VERSION_OF}{k}": str(v) for k, v in named.items()}


def is_current(method: str, result: Mapping[str, object]) -> bool:
    """Return whether this fedgist computes a finished run as its result says; loads the method.

    A user's own method, which is not registered, is current.
    """
    name = base_name(method)
    return name not in METHODS or Computed.of_result(result) == Computed.now(METHODS[name])


def goes_on(method: str, inputs: Mapping[str, object]) -> bool:
    """Return whether this fedgist can go on with a run that was begun with these inputs."""
    name = base_name(method)
    now = Computed.now(METHODS[name]).inputs if name in METHODS else {}
    begun = {key: value for key, value in inputs.items() if key.startswith(VERSION_OF)}
    return name not in METHODS or begun == now


def versions(method: Method) -> dict[str, str | int]:
    """Return what computes a run: versions, commit if known, and the number of cores."""
    packages = {name: metadata.version(name) for name in ("fedgist", "torch", "numpy")}
    now = Computed.now(method)
    return {
        "python": platform.python_version(),
        **packages,
        **({"commit": commit()} if commit() else {}),
        "method": now.method,
        "arithmetic": now.arithmetic,
        "cores": str(os.cpu_count()),
    }


@functools.cache
def commit() -> str:
    """Return the commit of a checkout, "+" if its code was changed since; else an empty text."""
    root, git = PACKAGE.parents[1], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""  # an installed package, perhaps below another project's checkout
    code = str(PACKAGE.relative_to(root))
    head = _output(git, root, "rev-parse", f"--short={COMMIT_LETTERS}", "HEAD")
    changed = _output(git, root, "status", "--porcelain", "--", code)
    return f"{head}{'+' if changed else ''}" if head else ""


def _output(git: str, root: Path, *words: str) -> str:
    """Return what a command of git prints; an empty text if it fails."""
    line = [git, "-C", str(root), *words]
    try:
        done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
