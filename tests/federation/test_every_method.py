"""Every method runs over the network as in the simulation: a server, and sites in threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from fedgist.federation import provision
from fedgist.federation.federation_server import serve
from fedgist.federation.frames import Note
from fedgist.federation.grpc_site import Connection
from fedgist.federation.kits import read_kit
from fedgist.federation.site_agent import SiteAgent
from fedgist.federation.site_file import read_site_file
from fedgist.methods import METHODS
from fedgist.runs.record import read_lines
from real_federation import compare, free_port
from three_sites import NAMES, parsed, recipe_of, simulated, write_rows

PORT = "{port}"


class Quiet:
    def began(self, server: Any, folder: str, done: int) -> None: ...
    def finished_round(self, line: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder, port = tmp_path_factory.mktemp("kits"), free_port()
    table = (
        f'name = "t"\nserver = "localhost:{port}"\nadministrators = ["anna"]\nkeys = "central"\n'
    )
    (folder / "federation.toml").write_text(f"{table}sites = {list(NAMES)}\n")
    provision.provision(folder / "federation.toml", folder / "kits")
    return folder / "kits", port


class OneAtATime:
    """An agent that works alone: torch's generator, with which models start, is the process's."""

    lock = threading.Lock()

    def __init__(self, agent: SiteAgent) -> None:
        self.agent, self.largest, self.saw = agent, agent.largest, agent.saw

    def prepare(self, plan: Note) -> Note:
        with self.lock:
            return self.agent.prepare(plan)

    def answer(self, envelope: bytes) -> bytes:
        with self.lock:
            return self.agent.answer(envelope)


class Sites:
    """Sites in threads; if one fails, the server is stopped, and the error is raised here."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections, self.stop = connections, threading.Event()
        self.errors: list[Exception] = []
        self.threads = [threading.Thread(target=self._run, args=(c,)) for c in connections]

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        except Exception as error:  # noqa: BLE001  # it is raised again in the test's thread
            self.errors.append(error)
            self.stop.set()

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *about: object) -> None:
        for connection in self.connections:
            connection.stop.set()
        for thread in self.threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", [n for n in METHODS if not METHODS[n]().merges_clients])
def test_over_the_network_a_method_gives_the_simulations_numbers(
    method: str, kits: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, port = kits
    images = method == "flesd"
    write_rows(tmp_path, images=images)
    monkeypatch.chdir(tmp_path)  # the server's public rows are beside it
    connections = []
    for name in NAMES:
        text = f'state = "{name}"\n[data]\nname = "npz"\npath = "{name}.npz"\n'
        (tmp_path / f"{name}.toml").write_text(text + '[public]\npath = "public.npz"\n')
        agent = SiteAgent(read_site_file(tmp_path / f"{name}.toml"))
        connections.append(Connection(read_kit(folder / "sites" / name), OneAtATime(agent)))
    raw, address = recipe_of(method), f"127.0.0.1:{port}"
    with Sites(connections) as sites:
        kit = read_kit(folder / "server")
        serve(kit, parsed(raw), tmp_path / "run", Quiet(), address, stop=sites.stop)
    loss = 2e-4 if images else 1e-4  # one encoder alone against a stack of them
    lines = read_lines(tmp_path / "run/rounds.jsonl")
    compare(lines, simulated(raw, images=images).rounds, loss=loss)
