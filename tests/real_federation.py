"""A federation of real processes on this machine: started, killed and watched by tests."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import faulty_process as faulty
from commands import Command, lines_so_far, wait_until
from fedgist.federation.keys import provision
from three_sites import NAMES, write_rows


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
    host: str = "127.0.0.1"  # where the server listens
    spaces: Mapping[str, str] = field(default_factory=dict)  # network namespaces by process
    images: bool = False
    processes: dict[str, Command] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = free_port()
        table = {
            "name": "test",
            "server": f"{self.host}:{self.port}",
            "administrators": ["anna"],
            "sites": list(self.names),
            "keys": "central",
        }
        (self.folder / "federation.toml").write_text(tomli_w.dumps(table))
        provision.provision(self.folder / "federation.toml", self.folder / "kits")
        write_rows(self.folder, images=self.images)
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
        listen = f"{self.host}:{self.port}"
        self._start("server", dies, "server", kit, recipe, "--out", self.run, "--listen", listen)

    def start_site(self, name: str, *, dies: tuple[str, int] | None = None, **env: str) -> None:
        """Start a site; ``dies`` says where it kills itself."""
        kit, table = self.folder / "kits/sites" / name, self.folder / f"{name}.toml"
        self._start(name, dies, "site", kit, "--config", table, **env)

    def _start(self, label: str, dies: tuple[str, int] | None, *what: object, **env: str) -> None:
        point, number = dies or ("", 0)
        words = [point, number, self.folder / f"{label}-died", *what]
        texts = [str(word) for word in words]
        env = {"NO_COLOR": "1", faulty.NAMESPACE: self.spaces.get(label, ""), **env}
        self.processes[label] = Command(texts, self.folder, env, faulty.run)

    def kill(self, label: str) -> None:
        """Kill a process as by ``kill -9``."""
        self.processes[label].signal(signal.SIGKILL)
        self.wait_killed(label)

    def wait_killed(self, label: str) -> None:
        """Wait until a process has been killed."""
        self.wait_end(label, -signal.SIGKILL)

    def wait_end(self, label: str, code: int = 0) -> str:
        """Wait until a process has ended with this exit code; return what it printed."""
        process = self.processes[label]
        self.wait_for(lambda: not process.runs, but=label)
        done = self.processes.pop(label).end()
        assert done.returncode == code, f"{label}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def output(self, label: str) -> str:
        """Return what a running process has printed."""
        return self.processes[label].printed()

    def rounds(self) -> list[dict[str, Any]]:
        """Return the lines of the rounds so far."""
        return [json.loads(line) for line in lines_so_far(self.run / "rounds.jsonl")]

    def status(self) -> dict[str, Any]:
        """Return the state of the federation that the server wrote last."""
        path = self.run / "status.json"
        table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sites": []}
        return table

    def participants(self) -> dict[int, set[int]]:
        """Return who took part in each round."""
        out: dict[int, set[int]] = {}
        path = self.run / "participants.csv"
        text = path.read_text() if path.exists() else ""
        for row in csv.DictReader(text.splitlines()):
            out.setdefault(int(row["round"]), set()).add(int(row["client"]))
        return out

    def wait_for(self, condition: Callable[[], bool], *, but: str = "") -> None:
        """Wait until a condition holds; no process may fail meanwhile, but the one named."""

        def holds() -> bool:
            ended = [label for label, p in self.processes.items() if label != but and not p.runs]
            dead = [label for label in ended if self.processes[label].code]
            assert condition() or not dead, {label: self.output(label) for label in dead}
            return condition()

        wait_until(holds)

    def wait_round(self, number: int) -> None:
        """Wait until a round is in the record."""
        self.wait_for(lambda: any(line["round"] >= number for line in self.rounds()))

    def close(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            process.signal(signal.SIGKILL)
        for process in self.processes.values():
            process.end()


@contextlib.contextmanager
def real_federation(folder: Path, **how: Any) -> Iterator[RealFederation]:
    """A federation of real processes, none of which is left behind."""
    made = RealFederation(folder, **how)
    try:
        yield made
    finally:
        made.close()


def compare(
    lines: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    *,
    loss: float = 1e-4,
    columns: tuple[str, ...] = ("eval/client", "train/", "comm/", "server/"),
) -> None:
    """Compare the columns that a federation and a simulation share: each round once."""
    assert [line["round"] for line in lines] == [line["round"] for line in expected]
    for ours, theirs in zip(lines, expected, strict=True):
        shared = [n for n in theirs if n.startswith(columns)]
        # probes need the server's rows
        shared = [n for n in shared if "probe" not in n and not isinstance(theirs[n], list)]
        assert shared
        for name in shared:
            tolerance = loss if "loss" in name else 1e-5
            assert ours[name] == pytest.approx(theirs[name], abs=tolerance), (name, ours["round"])
