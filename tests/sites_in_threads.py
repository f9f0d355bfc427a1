"""A federation in one process: a server in the test's thread, and sites in others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedgist.federation.keys import provision
from fedgist.federation.keys.kits import read_kit
from fedgist.federation.network.frames import Note
from fedgist.federation.network.grpc_site import Connection
from fedgist.federation.server.serving import serve
from fedgist.federation.site.agent import SiteAgent
from fedgist.federation.site.file import read_site_file
from fedgist.runs.round import Observer
from real_federation import free_port
from three_sites import NAMES, parsed


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


@dataclass(frozen=True)
class Kits:
    """The kits of a federation on this machine, and the server's port."""

    folder: Path
    port: int

    @staticmethod
    def make(folder: Path) -> Kits:
        """Make the kits of three sites."""
        port = free_port()
        table = f'name = "t"\nserver = "localhost:{port}"\nadministrators = ["anna"]\n'
        table += f'keys = "central"\nsites = {list(NAMES)}\n'
        (folder / "federation.toml").write_text(table)
        provision.provision(folder / "federation.toml", folder / "kits")
        return Kits(folder / "kits", port)

    def serve(
        self,
        raw: dict[str, Any],
        folder: Path,
        names: Iterable[str] = NAMES,
        source: str = 'name = "npz"\npath = "{name}.npz"',
    ) -> None:
        """Run a recipe's federation to its end, with sites whose rows are in the folder.

        ``source`` is the section ``[data]`` of a site's file.
        """
        connections = []
        for name in names:
            text = f'state = "{name}"\n[data]\n{source.format(name=name)}\n'
            (folder / f"{name}.toml").write_text(text + '[public]\npath = "public.npz"\n')
            agent = OneAtATime(SiteAgent(read_site_file(folder / f"{name}.toml")))
            connections.append(Connection(read_kit(self.folder / "sites" / name), agent))
        kit, address = read_kit(self.folder / "server"), f"127.0.0.1:{self.port}"
        with Sites(connections) as sites:
            serve(kit, parsed(raw), folder / "run", Observer(), address, stop=sites.stop)
