"""The tests of core and methods on three instruction sets, two of them with compiled kernels.

Each kind of processor adds numbers in another order. A machine can pretend to be an older one. Its
own set without compiled kernels is what ``make test`` has.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from commands import call
from fedgist.core.nets.compiled import kernel_library

ROOT = Path(__file__).parents[2]
OWN = "the machine's own"
#: What torch, MKL and oneDNN are told for each instruction set.
SETS: dict[str, tuple[str, str, str] | None] = {
    "default": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    OWN: None,
}
NAMES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
X86 = platform.machine() in {"x86_64", "AMD64"}


@pytest.mark.environment
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"), [("default", "none"), ("avx2", "compiled"), (OWN, "compiled")]
)
def test_core_and_methods_hold_on_every_processor(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETS[name]
    if settings is not None and not X86:
        pytest.skip(f"{name} is an instruction set of x86, and this is {platform.machine()}")
    if kernels == "compiled" and kernel_library.compiler() is None:
        pytest.skip("no C compiler is here: the kernels cannot be compiled")
    environment = {} if settings is None else dict(zip(NAMES, settings, strict=True))
    environment["FEDGIST_TEST_CACHE"] = str(tmp_path / "cache")
    if kernels == "compiled":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        kernel_library.build()
    quick = ["-m", "not slow and not environment", "-q", "-p", "no:cacheprovider"]
    alone = ["env", "-u", "PYTEST_XDIST_WORKER"]  # else it would be taken for a worker of this run
    command = [*alone, sys.executable, "-m", "pytest", *quick, "tests/core", "tests/methods"]
    call(command, ROOT, 0, **environment)
