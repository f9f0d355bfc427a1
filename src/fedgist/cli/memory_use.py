"""The most memory that this process and its workers have used."""

from __future__ import annotations

from fedgist.report.formatting import bytes_text


def peak_memory(of_actors: int = 0) -> str:
    """Return the peak memory of this process, and of the largest worker that has ended.

    ``of_actors`` is that of the largest process on a cluster, if there were any.
    """
    from fedgist.engines.process_control import peak_bytes

    text = f"peak memory: {bytes_text(peak_bytes())}"
    largest = {"worker": peak_bytes(of_ended=True), "actor": of_actors}
    named = [f"the largest {kind}: {bytes_text(size)}" for kind, size in largest.items() if size]
    return "; ".join([text, *named])
