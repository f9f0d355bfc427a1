"""A federation of real processes on this machine: started, killed and watched by tests."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgist.federation import provision
from three_sites import NAMES, write_rows

HUNG_S = 120.0  # a busy machine needs a multiple of a quiet one's time
FAULTY = Path(__file__).with_name("faulty_process.py")


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RealFederation:
    """A folder with kits, rows and recipe of a federation, and its running processes."""

    folder: Path
    names: Sequence[str] = NAMES
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = free_port()
        table = {
            "name": "test",
            "server": f"localhost:{self.port}",
            "administrators": ["anna"],
            "sites": list(self.names),
            "keys": "central",
        }
        (self.folder / "federation.toml").write_text(tomli_w.dumps(table))
        provision.provision(self.folder / "federation.toml", self.folder / "kits")
        write_rows(self.folder)
        for name in self.names:
            self.write_site(name)

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    def write_site(self, name: str, **table: Any) -> None:
        """Write a site's site.toml."""
        given = {"state": f"state-{name}", "data": {"name": "npz", "path": f"{name}.npz"}} | table
        (self.folder / f"{name}.toml").write_text(tomli_w.dumps(given))

    def write_recipe(self, raw: Mapping[str, Any]) -> None:
        """Write the recipe."""
        (self.folder / "recipe.toml").write_text(tomli_w.dumps(dict(raw)))

    def start_server(self, *, dies: tuple[str, int] | None = None) -> None:
        """Start the server; ``dies`` says where it kills itself."""
        kit, recipe = self.folder / "kits/server", self.folder / "recipe.toml"
        listen = f"127.0.0.1:{self.port}"
        self._start("server", dies, "server", kit, recipe, "--out", self.run, "--listen", listen)

    def start_site(self, name: str, *, dies: tuple[str, int] | None = None, **env: str) -> None:
        """Start a site; ``dies`` says where it kills itself."""
        kit, table = self.folder / "kits/sites" / name, self.folder / f"{name}.toml"
        self._start(name, dies, "site", kit, "--config", table, **env)

    def _start(self, label: str, dies: tuple[str, int] | None, *what: object, **env: str) -> None:
        marker = self.folder / f"{label}-died"
        program = ["-m", "fedgist.cli"]
        if dies is not None:
            program = [str(FAULTY), dies[0], str(dies[1]), str(marker)]
        with (self.folder / f"{label}.out").open("ab") as out:
            self.processes[label] = subprocess.Popen(
                [sys.executable, *program, *map(str, what)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"} | env,
                start_new_session=True,
            )

    def kill(self, label: str) -> None:
        """Kill a process as by ``kill -9``."""
        self.processes[label].kill()
        self.processes[label].wait(HUNG_S)

    def wait_killed(self, label: str) -> None:
        """Wait until a process has killed itself."""
        assert self.processes[label].wait(HUNG_S) == -signal.SIGKILL, self.output(label)

    def wait_end(self, label: str, code: int = 0) -> None:
        """Wait until a process has ended with this exit code."""
        assert self.processes[label].wait(HUNG_S) == code, self.output(label)

    def output(self, label: str) -> str:
        """Return what a process has printed."""
        return (self.folder / f"{label}.out").read_text(errors="replace")

    def rounds(self) -> list[dict[str, Any]]:
        """Return the lines of the rounds so far."""
        path = self.run / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def status(self) -> dict[str, Any]:
        """Return the state of the federation that the server wrote last."""
        path = self.run / "federation.json"
        table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sites": []}
        return table

    def participants(self) -> dict[int, set[int]]:
        """Return who took part in each round."""
        out: dict[int, set[int]] = {}
        with (self.run / "participants.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                out.setdefault(int(row["round"]), set()).add(int(row["client"]))
        return out

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + HUNG_S
        while not condition():
            if time.monotonic() > end:
                outputs = {label: self.output(label)[-2000:] for label in self.processes}
                raise AssertionError(f"waited in vain until {what}: {outputs}")
            time.sleep(0.05)

    def wait_round(self, number: int) -> None:
        """Wait until a round is in the record."""
        self.wait_for(lambda: any(r["round"] >= number for r in self.rounds()), f"round {number}")

    def close(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(HUNG_S)


@contextlib.contextmanager
def real_federation(folder: Path) -> Iterator[RealFederation]:
    """A federation of real processes, none of which is left behind."""
    made = RealFederation(folder)
    try:
        yield made
    finally:
        made.close()


def compare(lines: list[dict[str, Any]], expected: list[dict[str, Any]], **far: float) -> None:
    """Compare the columns that a federation and a simulation share: each round once."""
    assert [line["round"] for line in lines] == [line["round"] for line in expected]
    for ours, theirs in zip(lines, expected, strict=True):
        shared = [n for n in theirs if n.startswith(("eval/client", "train/", "comm/", "server/"))]
        # probes need the server's rows
        shared = [n for n in shared if "probe" not in n and not isinstance(theirs[n], list)]
        assert shared
        for name in shared:
            tolerance = far.get("loss", 1e-4) if "loss" in name else far.get("other", 1e-5)
            assert ours[name] == pytest.approx(theirs[name], abs=tolerance), (name, ours["round"])
