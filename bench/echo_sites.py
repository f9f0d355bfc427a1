"""Sites without rows, as threads of one process: each answers every request at once.

    python bench/echo_sites.py SITES.json NAME...

The file names the folder of kits, what a site says in its hello, and a file with the upload that
it sends. Without an upload, it sends each request back as it came.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.federation.keys.kits import read_kit
from fedgist.federation.network.frames import Note
from fedgist.federation.network.grpc_site import Connection
from fedgist.wire.envelope import Enclosed, Packed, digest, header_of, seal

LARGEST = 1 << 30
FROM_PLAN = ("run", "digest", "number")


@dataclass(frozen=True)
class EchoAgent:
    """A site that trains nothing."""

    hello: dict[str, Any]
    upload: Packed | None

    def prepare(self, plan: Note) -> Note:
        """Return the hello that the server expects."""
        return self.hello | {key: plan[key] for key in FROM_PLAN if key in plan}

    def largest(self) -> int:
        """Accept any envelope."""
        return LARGEST

    def answer(self, envelope: bytes) -> bytes:
        """Return the upload, or the request itself."""
        if self.upload is None:
            return envelope
        request = header_of(envelope)
        header = request.model_copy(update={"purpose": "reply"})
        return seal(header, {"upload": self.upload} if request.purpose == "train" else {})

    def saw(self, text: str) -> None:
        """Show nothing."""


def main() -> None:
    """Connect all named sites, each from a thread of its own, until the run has ended."""
    table, names = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    upload = None
    if table["upload"] is not None:
        blob = Path(table["upload"]).read_bytes()
        about = Enclosed(type=table["type"], size=len(blob), digest=digest(blob))
        upload = Packed(about, blob)
    agent, kits = EchoAgent(table["hello"], upload), Path(table["kits"])
    connections = [Connection(read_kit(kits / "sites" / name), agent) for name in names]
    threads = [threading.Thread(target=connection.run) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
