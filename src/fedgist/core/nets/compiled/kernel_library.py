"""The library of compiled kernels: it is built by this machine's C compiler, and loaded if present.

Where none has been built, that of a wheel for this machine is loaded, if there is one.

The library's file name holds a digest of the source, the compiler's flags and the processor. So a
library is never loaded on another kind of processor, or with another version of fedgist.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_path

from fedgist.core.nets.compiled import wheel_kernels
from fedgist.core.nets.compiled.wheel_kernels import SOURCE
from fedgist.errors import InputError, OutputError

#: How a convolution of stacked clients runs: one by one, as one grouped convolution, or compiled.
Kernel = Literal["each", "grouped", "compiled"]
Compiled = Literal["compiled"]  # what a plan may say of a layer
KernelChoice = Literal["auto", "torch"]  # the compiled ones wherever they are faster, or none
# without -ffast-math: NaN must stay NaN
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
)
COMPILERS = ("cc", "gcc", "clang")
HOW = "run `fedgist compile` to build them (a C compiler is needed)"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if this machine has none."""
    path = library_file()
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError:
        return None


def library_file() -> Path | None:
    """Return the library that is used: the one built here, else that of the wheel, or None."""
    path = library_path()
    return path if path.exists() else next(iter(wheel_kernels.runnable()), None)


def compiler() -> list[str] | None:
    """Return the command of the C compiler: ``$CC``, the first of ``COMPILERS``, zig's, or None."""
    if named := os.environ.get("CC"):
        return shlex.split(named)
    if present := next((name for name in COMPILERS if shutil.which(name)), None):
        return [present]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else None


def library_path() -> Path:
    """Return the file of the library on this machine, whether it exists or not."""
    text = "\0".join([SOURCE.read_text("utf-8"), *FLAGS, platform.machine(), _processor()])
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return user_cache_path("fedgist") / "kernels" / f"{name}.so"


def build() -> Path:
    """Compile the kernels, and return the library's file. It takes a few seconds.

    Raises
    ------
    InputError
        If there is no C compiler, or it fails.
    OutputError
        If the user's cache cannot be written, or nothing can be loaded from there.
    """
    command, path = compiler(), library_path()
    if command is None:
        raise InputError(
            "no C compiler was found: install one (`pip install 'fedgist[compiler]'` does), or "
            "name its command in the variable CC"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder, path.name)
            if not _with_threads(command, part):
                _run([*command, *FLAGS, "-shared", str(SOURCE), "-o", str(part)])
            part.replace(path)
    except OSError as error:
        raise OutputError(f"the kernels cannot be written to {path.parent}: {error}") from error
    library.cache_clear()
    if library() is None:
        raise OutputError(f"the kernels were built, but cannot be loaded from {path}")
    return path


def remove() -> None:
    """Delete the library of this machine, so that nothing uses it."""
    library_path().unlink(missing_ok=True)
    library.cache_clear()


def _with_threads(command: list[str], part: Path) -> bool:
    """Try to compile the kernels so that they share torch's threads; return whether it worked.

    They are linked without OpenMP's library, so that they take the one that torch has loaded.
    """
    compiled = part.with_suffix(".o")
    try:
        _run([*command, *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)])
        _run([*command, "-shared", str(compiled), "-o", str(part)])
        importlib.import_module("torch")  # it loads OpenMP's library
        ctypes.CDLL(str(part))
    except (InputError, OSError):
        return False
    return True


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603  # the user names the compiler
    except FileNotFoundError as error:
        raise InputError(f"the C compiler {words[0]!r} was not found") from error
    if done.returncode:
        why = (done.stderr + done.stdout).strip() or f"exit code {done.returncode}"
        raise InputError(f"{words[0]} cannot compile the kernels: {why.splitlines()[0]}")


def _processor() -> str:
    """Return what distinguishes kinds of processors, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    keys = "flags", "Features", "model name"
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))
