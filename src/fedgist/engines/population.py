"""The clients of one machine, and their rows."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedgist.core.method import ClientInfo, Settings
from fedgist.core.training import Work
from fedgist.data.client_rows import Rows
from fedgist.data.examples import Examples
from fedgist.data.lazy_rows import LazyRows, RowService, RowSource
from fedgist.data.sources.file_sizes import usable_memory
from fedgist.engines.engine import Split


@dataclass(frozen=True, eq=False)
class Population:
    """Clients and their rows: entry i of ``train``, ``validation``, ``test`` is ``clients[i]``'s.

    A method that merges clients has one client, but every client's test rows. ``whole_test`` are
    the test rows as the server sees them, if clients see their own rows differently.
    """

    clients: tuple[ClientInfo, ...]
    examples: Examples
    test_examples: Examples
    train: Rows
    validation: Rows
    test: Rows
    whole_test: Examples | None = None

    @functools.cached_property
    def place(self) -> Mapping[int, int]:
        """The index of each client in ``clients``, by id."""
        return {client.id: i for i, client in enumerate(self.clients)}

    def rows(self, split: Split) -> Rows:
        """Return each client's rows of a split."""
        return {"client": self.test, "train": self.train, "validation": self.validation}[split]

    def examples_of(self, split: Split) -> Examples:
        """Return the examples that the row numbers of a split refer to."""
        if split == "test" and self.whole_test is not None:
            return self.whole_test
        return self.test_examples if split in {"client", "test"} else self.examples

    @property
    def sources(self) -> tuple[RowSource, ...]:
        """The sources of lazy rows; none if all rows are in memory."""
        parts = self.examples, self.test_examples, self.whole_test
        inputs = [part.x for part in parts if part is not None]
        lazy = [x.source for x in inputs if isinstance(x, LazyRows)]
        return tuple({id(source): source for source in lazy}.values())

    def served(self, service: RowService) -> Population:
        """Return the same clients, whose lazy rows are read by a service."""

        def served(part: Examples) -> Examples:
            x = part.x
            return part if isinstance(x, Tensor) else replace(part, x=replace(x, service=service))

        whole = None if self.whole_test is None else served(self.whole_test)
        train, test = served(self.examples), served(self.test_examples)
        return replace(self, examples=train, test_examples=test, whole_test=whole)

    def table(self, split: Split, ids: Sequence[int]) -> Tensor:
        """Return these clients' rows of a split: (clients, rows), -1 for absent rows."""
        if split == "test":
            return torch.arange(len(self.test_examples.y)).expand(len(ids), -1)
        return self.rows(split).table([self.place[client] for client in ids])


#: Where the features of a frozen body come from: memory or a file, the body again, no body at all
#: (a method reads the rows), or nowhere, for steps that are only timed.
Features = Literal["kept", "anew", "raw", "blank"]


StepsKey = tuple[int, str, int, str]  # a round, a stage, a client, an architecture


@dataclass(frozen=True)
class OwnSettings:
    """A client's own settings of the method, and how long it trains; None is as all others."""

    method: Settings = None
    work: Work | None = None


@dataclass(frozen=True)
class HostSettings:
    """Settings of a host of clients; only ``seed`` and ``own`` change results."""

    seed: int
    workers: int | None = None
    readers: int | None = None  # processes of each worker that read lazy rows; None: chosen
    device: str = "cpu"
    share_measurements: bool = True  # losses and scores leave the clients
    # number of rounds between tests of copies after one more local training; 0: never
    trained_every: int = 0
    features: Features = "kept"
    feature_memory: int | None = None  # bytes; None: a quarter of the usable memory
    memory_limit: int | None = None  # bytes; None: the usable memory
    # clients' own settings, if they have any
    own: Mapping[int, OwnSettings] = field(default_factory=dict)
    # the steps of each phase in the federation that a simulation repeats, if it does
    steps: Mapping[StepsKey, tuple[int, ...]] | None = None

    def keeps_in_file(self, size: int) -> bool:
        """Return whether clients' state of so many bytes is kept in a file: over half the limit."""
        limit = self.memory_limit or usable_memory()
        on_linux = sys.platform.startswith("linux")  # elsewhere files cannot be kept out of memory
        return on_linux and self.device == "cpu" and size > limit // 2

    def work(self, client: int) -> Work | None:
        """Return how long a client trains, if it has a length of its own."""
        own = self.own.get(client)
        return None if own is None else own.work

    def length(self, key: StepsKey, usual: Work) -> Work | None:
        """Return how long a client trains in a stage, if it differs from the usual length."""
        work = self.work(key[2])
        if self.steps is None:
            return work
        return replace(work or usual, most=self.steps.get(key, ()))
