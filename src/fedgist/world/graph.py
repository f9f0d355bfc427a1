"""Graphs of peers: each client's neighbors in each round, by a rule or from a file."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from fedgist.core import random
from fedgist.core.method import Method, Task
from fedgist.core.peer_method import PeerMethod
from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.errors import RecipeError
from fedgist.recipe.graph_section import GraphSection

Neighbors = tuple[tuple[int, ...], ...]  # for each client, the clients it receives from
ATTEMPTS = 1000  # at a random graph in which every client has the same number of neighbors
_BYTES_OF_A_LINE = 60  # of memory, for each byte of the shortest line
_LEAST = 2


def neighbors_of(
    section: GraphSection, method: Method, task: Task, key: Tensor
) -> Callable[[int], Neighbors] | None:
    """Return a function from a round to each client's neighbors; None without a graph.

    ``key`` () draws random graphs.

    Raises
    ------
    RecipeError
        If the method does not work among peers, or a client has no neighbor in some round.
    """
    if section.name == "relay":
        return None
    if not (isinstance(method, PeerMethod) and method.among_peers):
        raise RecipeError(
            f"clients.graph: {type(method).__name__} does not work among peers; use 'relay'"
        )
    graph = _graph(section, task.num_clients, key)
    for number in range(task.training.num_rounds + 1):
        isolated = [client for client, heard in enumerate(graph(number)) if not heard]
        if isolated:
            when = f" in round {number}" if section.changes or section.name == "file" else ""
            raise RecipeError(
                f"clients.graph: client {isolated[0]} hears nobody{when}; every client needs a "
                "neighbor"
            )
    return graph


def _graph(section: GraphSection, count: int, key: Tensor) -> Callable[[int], Neighbors]:
    if section.path is not None:
        return _from_file(Path(section.path).expanduser(), count)
    if count < _LEAST:
        raise RecipeError(
            f"clients.graph: {count} client has nobody to hear; peers are at least two"
        )

    @functools.lru_cache(maxsize=2)
    def at(draw: int) -> Neighbors:
        drawn = random.fold(key, draw)
        if section.degree is not None:
            return _regular(section.degree, count, drawn)
        if section.chance is not None:
            return _by_chance(section.chance, count, drawn)
        steps = range(1, count) if section.name == "full" else {1, count - 1}
        return tuple(tuple(sorted((c + s) % count for s in steps)) for c in range(count))

    return lambda number: at(number if section.changes else 0)


def _by_chance(chance: float, count: int, key: Tensor) -> Neighbors:
    """Draw each pair of clients independently (Erdos and Renyi 1959, Gilbert)."""
    draws = random.uniform(key, (count, count)) < chance
    pairs = draws.triu(1)
    both = pairs | pairs.T
    return tuple(tuple(line.nonzero().flatten().tolist()) for line in both)


def _regular(degree: int, count: int, key: Tensor) -> Neighbors:
    """Draw a graph in which all clients have ``degree`` neighbors (Steger and Wormald 1999).

    Ends of edges are paired at random as long as any pair makes a new edge. If ends remain that
    cannot be paired, the draw starts again.
    """
    if degree >= count or degree * count % 2:
        why = "fewer than the clients" if degree >= count else "even, times the clients"
        raise RecipeError(
            f"clients.graph.degree = {degree}: it must be {why}, of whom there are {count}"
        )
    for attempt in range(ATTEMPTS):
        edges: set[tuple[int, int]] = set()
        ends = [client for client in range(count) for _ in range(degree)]
        turn = 0
        while ends:
            order = random.permutation(random.fold(key, attempt, turn), len(ends)).tolist()
            left, before = [], len(ends)
            for a, b in zip(order[::2], order[1::2], strict=True):
                edge = (min(ends[a], ends[b]), max(ends[a], ends[b]))
                if edge[0] == edge[1] or edge in edges:
                    left += [ends[a], ends[b]]
                else:
                    edges.add(edge)
            ends, turn = left, turn + 1
            if len(ends) == before and turn > ATTEMPTS // 50:
                break
        if not ends:
            return _of_edges(edges, count)
    raise RecipeError(
        f"clients.graph: no graph of {count} clients with {degree} neighbors each was found"
    )


def _of_edges(edges: set[tuple[int, int]], count: int) -> Neighbors:
    heard: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        heard[a].append(b)
        heard[b].append(a)
    return tuple(tuple(sorted(of)) for of in heard)


def _from_file(path: Path, count: int) -> Callable[[int], Neighbors]:
    """Read graphs from a file. The lines of a round form the graph until the next round listed.

    Rounds before the first listed round have its graph. Lines without a round count as round 0.
    """
    try:
        check_memory(_BYTES_OF_A_LINE * regular(path).stat().st_size, str(path))
        with path.open(newline="", encoding="utf-8") as file:
            lines = [
                (int(line.get("round") or 0), int(line["client"]), int(line["hears"]))
                for line in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise RecipeError(
            f"clients.graph: {path} is not a file of 'client,hears' lines ({error})"
        ) from error
    if strange := [c for _, *pair in lines for c in pair if not 0 <= c < count]:
        raise RecipeError(
            f"clients.graph: {path} names client {strange[0]}, outside 0..{count - 1}"
        )
    by_round: dict[int, list[set[int]]] = {}
    for number, client, hears in lines:
        if client == hears:
            raise RecipeError(f"clients.graph: {path} lets client {client} hear itself")
        by_round.setdefault(number, [set() for _ in range(count)])[client].add(hears)
    graphs = {n: tuple(tuple(sorted(of)) for of in heard) for n, heard in by_round.items()}
    nobody: Neighbors = ((),) * count

    def at(number: int) -> Neighbors:
        begun = [start for start in graphs if start <= max(number, min(graphs))]
        return graphs[max(begun)] if begun else nobody

    return at if graphs else lambda _: nobody
