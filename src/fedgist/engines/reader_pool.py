"""Forked processes that read rows for the workers while these compute.

Each worker has its own readers, and a pipe to each of them. A batch is divided among the readers of
the worker. Every row is read with its own seed, so the number of readers does not change a result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from torch import Tensor

from fedgist.data.lazy_rows import RowSource
from fedgist.engines.process_control import begin_forked, start_forked
from fedgist.errors import DataError, WorkerError

MOST_AHEAD = 1024  # rows that a reader is asked for ahead: a longer request could fill its pipe
_HEAD = 3  # numbers before the rows of a request: its number, its source, its count of rows


class ReaderPool:
    """Readers of lazy rows: ``each`` processes for every worker."""

    def __init__(self, sources: Sequence[RowSource], each: int) -> None:
        self.sources, self.each = tuple(sources), each
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        self.own: list[Connection] = []  # those of this worker
        self.sent = self.received = 0

    def start(self, workers: int) -> None:
        """Fork the readers of all workers. Call this before the workers are forked."""
        if self.processes or not self.each or not self.sources:
            return
        fork = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            # Python warns that a forked child could hang on a lock of another thread
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(workers * self.each):
                own_end, reader_end = fork.Pipe()
                process = fork.Process(
                    target=_serve,
                    args=(self.sources, reader_end, [*self.connections, own_end]),
                    daemon=True,
                )
                start_forked(process)
                reader_end.close()
                self.processes.append(process)
                self.connections.append(own_end)

    def use(self, worker: int) -> None:
        """Read with the readers of this worker from now on."""
        self.own = self.connections[worker * self.each : (worker + 1) * self.each]

    def request(self, source: RowSource, numbers: Tensor, seeds: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows by their numbers (rows,) at the source, each with its seed.

        Return a function that waits for the rows ``(rows, *input)``. Without readers of this worker
        the rows are read by the function itself. Requests are waited for in their order.
        """
        if not self.own:
            return lambda: source.read(numbers, seeds)
        most = MOST_AHEAD * len(self.own)
        if len(numbers) <= most:
            waiting = self._sent(source, numbers, seeds)
            return lambda: self._received(source, waiting)

        def in_turn() -> Tensor:
            pieces = zip(torch.split(numbers, most), torch.split(seeds, most), strict=True)
            return torch.cat([self._received(source, self._sent(source, *p)) for p in pieces])

        return in_turn

    def close(self) -> None:
        """End the readers."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()  # a reader keeps nothing
            process.join()
        self.processes, self.connections, self.own = [], [], []

    def _sent(self, source: RowSource, numbers: Tensor, seeds: Tensor) -> tuple[int, list[int]]:
        """Send the readers their parts; return the request's number and each reader's rows."""
        self.sent += 1
        place = next(i for i, own in enumerate(self.sources) if own is source)
        parts = _divided(len(numbers), len(self.own))
        begin = 0
        for connection, count in zip(self.own, parts, strict=True):
            cut = slice(begin, begin + count)
            head = torch.tensor([self.sent, place, count])
            message = torch.cat([head, numbers[cut], seeds[cut]])
            if count:
                with _alive():
                    connection.send_bytes(message.numpy().tobytes())
            begin += count
        return self.sent, parts

    def _received(self, source: RowSource, waiting: tuple[int, list[int]]) -> Tensor:
        number, parts = waiting
        assert number > self.received, "requests are waited for in their order"
        self.received = number
        out = torch.empty(sum(parts), *source.input_shape, dtype=source.dtype)
        flat: memoryview = out.view(-1).view(torch.uint8).numpy().data
        begin, problems = 0, list[str]()
        for connection, count in zip(self.own, parts, strict=True):
            if count:
                end = begin + count * source.row_bytes
                problems += _answer(connection, number, flat[begin:end])
                begin = end
        if problems:
            raise DataError(problems[0])
        return out


def _divided(count: int, parts: int) -> list[int]:
    """Return ``count`` as a sum of ``parts`` almost equal numbers."""
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


def _answer(connection: Connection, number: int, out: memoryview) -> list[str]:
    """Put the answer to a request into ``out``; return the message if there is an error.

    Answers to earlier requests, for which nobody waited, are dropped.
    """
    with _alive():
        while True:
            answered, good = np.frombuffer(connection.recv_bytes(), dtype=np.int64).tolist()
            if answered == number and good:
                connection.recv_bytes_into(out)
                return []
            content = connection.recv_bytes()
            if answered == number:
                return [content.decode()]


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Turn the end of a reader into an error for the user."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise WorkerError(
            "a process that reads rows died; if memory ran out, lower engine.readers"
        ) from error


def _serve(
    sources: Sequence[RowSource], connection: Connection, parents_ends: Sequence[Connection]
) -> None:
    """Read rows until the other end is closed."""
    begin_forked(parents_ends)
    while True:
        try:
            request = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.int64)
            number, place, count = request[:_HEAD].tolist()
            good, content = _read(sources[place], *torch.split(request[_HEAD:], count))
            connection.send_bytes(np.array([number, good], dtype=np.int64).tobytes())
            connection.send_bytes(content)
        except (EOFError, OSError):
            os._exit(0)


def _read(source: RowSource, numbers: Tensor, seeds: Tensor) -> tuple[bool, memoryview | bytes]:
    """Return whether all rows could be read, and their bytes or the error's message."""
    try:
        rows = source.read(numbers, seeds)
    except DataError as error:
        return False, str(error).encode()
    content: memoryview = rows.view(-1).view(torch.uint8).numpy().data
    return True, content
