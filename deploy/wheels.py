"""Make wheels with compiled kernels, for Linux on x86-64 and on aarch64.

    python deploy/wheels.py dist

Zig compiles the kernels for each level of processors, whatever machine this is. The libraries for
this processor are compared with torch's operations; the others are not tried. It takes a minute.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fedgist.core.nets.compiled.kernel_library import FLAGS
from fedgist.core.nets.compiled.wheel_kernels import LEVELS, SOURCE, file_name

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.17"
INSIDE = Path("fedgist/core/nets/compiled/libraries")
TRIAL = """
import platform
from fedgist.core import hadamard
from fedgist.core.nets.compiled import compiled_convolution, kernel_library, wheel_kernels
assert platform.machine() == {machine!r}, "for another machine"
assert not wheel_kernels.why_none(), wheel_kernels.why_none()
assert kernel_library.library_file() == wheel_kernels.runnable()[0], "another library comes first"
for library in wheel_kernels.runnable():
    kernel_library.library_file = lambda: library
    kernel_library.library.cache_clear()
    assert kernel_library.library(), "it cannot be loaded"
    compiled_convolution.check()
    hadamard.check()
    print(library.name)
"""


def main() -> None:
    """Make a wheel for each kind of machine, and try the one for this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the wheels go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        plain = ("pip", "--disable-pip-version-check", "-q", "wheel", "--no-deps", "-w", place)
        _python(*plain, str(ROOT))
        (wheel,) = Path(place).glob("fedgist-*.whl")
        for machine in dict.fromkeys(level.machine for level in LEVELS.values()):
            made = _with_kernels(wheel, machine, Path(place, machine), folder)
            print(f"{made}: {_tried(machine, Path(place, machine))}")


def _with_kernels(wheel: Path, machine: str, place: Path, folder: Path) -> Path:
    """Make a wheel of a plain one and the kernels for a kind of machine."""
    _python("wheel", "unpack", str(wheel), "--dest", str(place))
    (inside,) = place.iterdir()
    libraries = inside / INSIDE
    libraries.mkdir()
    for name, level in LEVELS.items():
        if level.machine == machine:
            _compile(machine, level.cpu, libraries / file_name(name))
    (about,) = inside.glob("*.dist-info/WHEEL")
    about.write_text(about.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))
    _python("wheel", "pack", str(inside), "--dest-dir", str(place))
    (packed,) = place.glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    _python("wheel", "tags", "--remove", "--platform-tag", tag, str(packed))
    (tagged,) = place.glob("*.whl")
    return tagged.replace(folder / tagged.name)


def _compile(machine: str, cpu: str, library: Path) -> None:
    flags = [flag for flag in FLAGS if not flag.startswith("-march")]
    target = ("-target", f"{machine}-linux-gnu.{GLIBC}", f"-mcpu={cpu}")
    _python("ziglang", "cc", *target, *flags, "-s", "-shared", str(SOURCE), "-o", str(library))


def _tried(machine: str, place: Path) -> str:
    """Return which libraries of an unpacked wheel compute what torch does, or why none is tried."""
    (inside,) = (path for path in place.iterdir() if path.is_dir())
    empty = {"PYTHONPATH": str(inside), "XDG_CACHE_HOME": str(place / "cache")}
    command = [sys.executable, "-c", TRIAL.format(machine=machine)]
    done = subprocess.run(
        command, env=os.environ | empty, cwd=place, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"not tried ({done.stderr.strip().splitlines()[-1]})"
    return f"tried {', '.join(done.stdout.split())}"


def _python(*words: str) -> None:
    """Run a module of Python, and end with what it says if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{words[0]} failed: {(done.stderr + done.stdout).strip()}")


if __name__ == "__main__":
    main()
