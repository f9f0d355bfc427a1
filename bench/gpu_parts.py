"""One part of the GPU benchmark, in a process of its own: gpu.py starts it and reads its lines."""

from __future__ import annotations

import argparse
import functools
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_checks import laws, machine, resume, synchronizations
from gpu_flesd import flesd
from gpu_rounds import autocast, rounds
from gpu_setting import Measured, NotHereError, Setting

from fedgist.errors import first_line

PARTS: Mapping[str, Callable[[Setting], Measured]] = {
    "machine": machine,
    **{name: functools.partial(rounds, name) for name in ("W1", "W2", "W3")},
    "laws": laws,
    "flesd": flesd,
    "synchronizations": synchronizations,
    "resume": resume,
    "autocast": autocast,
}


def main() -> None:
    """Measure one part, and write its figures as they come, and its state at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    setting = Setting(args.device, args.quick, time.monotonic() + args.seconds)

    def write(**entry: Any) -> None:
        with args.lines.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")

    measure(args.part, setting, write)


def measure(part: str, setting: Setting, write: Callable[..., None]) -> None:
    """Measure a part; ``write`` gets its figures, and its state."""
    try:
        for figures in PARTS[part](setting):
            write(figures=figures)
    except NotHereError as error:
        write(state="not measured", why=str(error))
    except Exception as error:  # noqa: BLE001  # whatever fails is written
        traceback.print_exc()
        write(state="failed", why=f"{type(error).__name__}: {first_line(error)}")
    else:
        write(state="measured", why="")


if __name__ == "__main__":
    main()
