"""Compiled kernels are built before the first plans that can have them, once on a machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgist.core import hadamard
from fedgist.core.nets.compiled import compiled_convolution, kernel_library, wheel_kernels
from fedgist.engines.plans.plan import remembered
from fedgist.errors import InputError, OutputError


def build_kernels() -> Path:
    """Compile the kernels, compare them with torch's operations, and return the library's file.

    Raises
    ------
    InputError
        If there is no C compiler, it fails, or what it made computes wrongly.
    OutputError
        If the user's cache cannot be written, or nothing can be loaded from there.
    """
    path = kernel_library.build()
    compiled_convolution.check()
    hadamard.check()
    return path


def have_kernels(say: Callable[[str], None]) -> None:
    """Build the kernels if they are not here and there is a C compiler. It takes a few seconds.

    One process at a time builds them. If that fails, ``say`` tells the user why in this run and in
    each later one, and it is not tried again with the same compiler.
    """
    command = kernel_library.compiler()
    if command is None and (why := wheel_kernels.why_none()):
        say(f"{why}: convolutions are torch's")
    if command is None or _are_built():
        return

    def build() -> dict[str, Any]:
        kernel_library.library.cache_clear()
        if not _are_built():  # no other process has built them meanwhile
            say("compiling faster convolutions for this machine (once, a few seconds)")
            try:
                build_kernels()
            except (InputError, OutputError) as error:
                return {"failed": str(error)}
        return {"failed": ""}

    about = {"library": kernel_library.library_path().name, "compiler": command}
    failed = remembered(about, build)["failed"]
    kernel_library.library.cache_clear()
    if not _are_built():
        why = failed or "the compiled kernels of before are gone"
        instead = "torch's" if kernel_library.library() is None else "those of the wheel"
        say(f"{why}: convolutions are {instead}, until `fedgist compile` has built faster ones")


def _are_built() -> bool:
    """Return whether this machine has kernels of its own, which can be loaded."""
    path = kernel_library.library_path()
    return kernel_library.library() is not None and kernel_library.library_file() == path
