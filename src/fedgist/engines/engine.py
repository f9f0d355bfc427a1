"""The interface of engines: one function that runs a stage on clients, and one that scores them.

A complete toy engine, whose clients are entries of a list and only count their rows:

>>> from fedgist.core.method import Context, Count, Order
>>> from fedgist.core.replies import Subtotal, gather
>>> class ToyEngine:
...     def __init__(self, rows):
...         self.rows = rows  # how many each client has; None: it is not connected
...
...     def ask(self, ctx, orders, downs):
...         reached = [o for o in orders if self.rows[o.client] is not None]
...         absent = tuple((o.asked, "not connected") for o in orders if o not in reached)
...         uploads = [Count(torch.tensor(float(self.rows[o.client]))) for o in reached]
...         subtotals = tuple(
...             Subtotal(o.architecture, (o.client,), ctx.round, ctx.stage, upload)
...             for o, upload in zip(reached, uploads)
...         )
...         return Answer(subtotals, absent=absent, upload_bytes={"mlp": 4 * len(reached)})
...
...     def score(self, ctx, orders, downs, split):
...         return Scores({})  # it measures nothing
...
...     def close(self):
...         self.rows = []
>>> engine = ToyEngine([11, None, 7])
>>> ctx = Context(torch.tensor(0), task=None, round=1, stage="train")
>>> answer = engine.ask(ctx, [Order(client, "mlp") for client in range(3)], [Nothing()] * 3)
>>> answer.absent, answer.upload_bytes
(((Asked(client=1, architecture='mlp'), 'not connected'),), {'mlp': 8})
>>> gather(answer.subtotals, answer.each).total()
Count(rows=tensor(18.))
>>> engine.close()

**Life cycle.** An engine gets everything at construction, runs stage after stage from one thread,
and is closed once, with or without an error. The first stage may start processes or connections.

**Deadlines** belong to the engine: ``ask`` and ``score`` return when all clients have answered or
the time is up. A client without an answer by then is *absent*. A message that arrives afterwards is
part of a later answer and names its own round: the round loop, not the engine, decides whether the
message is *late*.

**Failures** of clients are part of an answer: a client is absent with a reason, or its upload is
*refused* with a reason. The other uploads are kept. A failure of all clients (a dead worker,
a broken connection) is an exception, and the run ends with its checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgist.core.message import Nothing, message, payload_bytes
from fedgist.core.method import Context, Method, Order, Reply, Task
from fedgist.core.objectives.metrics import Metric
from fedgist.core.peer_method import PeerMethod
from fedgist.core.replies import Asked, Subtotal
from fedgist.core.tree import STATIC, Tree, tree

__all__ = [
    "EVALUATE",
    "FINETUNED",
    "TESTS",
    "TRAINED",
    "Answer",
    "Engine",
    "Nothing",
    "Score",
    "ScoreTable",
    "Scores",
    "Simulation",
    "Split",
    "SpreadSimulation",
    "TrainingLoss",
    "collect",
    "metrics_of",
    "upload_bytes",
]

EVALUATE = "evaluate"  # the stage that downloads models for a test
# a client's own test rows, the whole test set, its training rows, its validation rows
Split = Literal["client", "test", "train", "validation"]
TESTS: tuple[Split, ...] = ("client", "test")  # before these, models are fine-tuned
# the names of further tested copies of the models: fine-tuned by the method, or trained as in the
# next round
FINETUNED, TRAINED = "finetuned", "trained"


@message(reduce="each")
class TrainingLoss:
    """A client's mean training loss over a stage, (): a measurement that it may keep private."""

    loss: Tensor


@message(reduce="each")
class Score:
    """The score of one client's model on the client's rows, which the client may keep private.

    ``rows`` () counts the rows. ``values`` holds () for each metric that is defined for this
    client. ``confusion`` (true class, predicted class) holds counts, if they are requested.
    """

    rows: Tensor
    values: dict[str, Tensor]
    confusion: Tensor | None = None


@tree
class ScoreTable:
    """The scores of clients' models: one row per client, NaN if a metric is undefined for it.

    ``rows`` (clients,) counts the rows predicted. ``values`` holds (clients,) for each metric.
    ``confusion`` (true class, predicted class) is summed over the clients.
    """

    clients: tuple[int, ...] = field(metadata=STATIC)
    rows: Tensor
    values: dict[str, Tensor]
    confusion: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """Scores of the clients that answered, by name of the model (``""``, ``"finetuned"``).

    ``whole`` holds the metrics of the single global model on the whole test set, if there is such a
    model and the engine has that set. ``missing`` are the clients without a score, each with the
    reason.
    """

    models: Mapping[str, ScoreTable]
    whole: Mapping[str, float] | None = None
    missing: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer of the clients to one stage.

    ``subtotals`` are sums of messages that are summed. ``each`` holds the other messages one by
    one. ``refused`` are clients whose message was rejected, and ``absent`` are clients without an
    answer, each with the reason. ``losses`` are the mean training losses of the clients that share
    them. ``upload_bytes`` is the payload of all accepted uploads, by architecture. ``wire_bytes``
    are the bytes on the network, up and down, if there is one. ``events`` are sentences for the
    record about requests that were repeated, and replies that were dropped. ``steps`` are those
    that each client took in the stage's phases, if its time was limited.
    """

    subtotals: tuple[Subtotal, ...] = ()
    each: tuple[Reply, ...] = ()
    refused: tuple[tuple[Asked, str], ...] = ()
    absent: tuple[tuple[Asked, str], ...] = ()
    losses: Mapping[Asked, float] = field(default_factory=dict)
    upload_bytes: Mapping[str, int] = field(default_factory=dict)
    wire_bytes: tuple[int, int] | None = None
    events: tuple[str, ...] = ()
    steps: Mapping[Asked, tuple[int, ...]] = field(default_factory=dict)


class Engine(Protocol):
    """The server's access to its clients: the only difference between simulation and network."""

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Send each order with its download; return the replies that arrive in time."""

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Evaluate each client's model after this download; some clients may not answer."""

    def close(self) -> None:
        """Stop; leave no process and no connection behind."""


@runtime_checkable
class Simulation(Protocol):
    """Access to the clients' state, for engines that host all clients themselves."""

    def client(self, ctx: Context, order: Order, down: Tree) -> Any:
        """Return one client's state after this download: a value with ``net`` and ``own``."""

    def state(self) -> dict[str, Tensor]:
        """Return the state of all clients, arrays of any shape by name, for a checkpoint."""

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the clients' state, arrays of any shape by name, from a checkpoint."""


@runtime_checkable
class SpreadSimulation(Protocol):
    """Access to the state of clients that are hosted in several places, such as a cluster's."""

    @property
    def state_bytes(self) -> int:
        """The size of the state of all clients."""

    def shares(self, folder: Path) -> bool:
        """Return whether all places can read what is written into ``folder`` here."""

    def save_parts(self, folder: Path) -> dict[str, str]:
        """Let each place write its clients' state into ``folder``; return digests by file name."""

    def restore_parts(self, folder: Path, files: Mapping[str, str]) -> None:
        """Let each place restore its clients' state from the file that it wrote."""


def metrics_of(method: Method, task: Task) -> tuple[Metric, ...]:
    """Return all metrics of evaluation: the task's, the method's, and the loss."""
    own = method.metrics if isinstance(method, PeerMethod) else ()
    return (*task.objective.metrics, *own, task.objective.loss_metric)


def collect(tables: Sequence[ScoreTable]) -> ScoreTable:
    """Join tables of different clients into one, ordered by client."""
    clients = [client for table in tables for client in table.clients]
    place = torch.tensor(clients, dtype=torch.int64).argsort()
    names = dict.fromkeys(name for table in tables for name in table.values)

    def column(name: str) -> Tensor:
        unknown = torch.tensor(torch.nan, dtype=torch.float64)
        parts = [t.values.get(name, unknown.expand(len(t.clients))).cpu() for t in tables]
        return torch.cat(parts)[place]

    counts = [table.confusion for table in tables if table.confusion is not None]
    return ScoreTable(
        tuple(sorted(clients)),
        torch.cat([table.rows.cpu() for table in tables])[place],
        {name: column(name) for name in names},
        torch.stack([c.cpu() for c in counts]).sum(0) if counts else None,
    )


def upload_bytes(parts: Iterable[Subtotal | Reply]) -> Counter[str]:
    """Return the payload of the messages received, by architecture."""
    sizes: Counter[str] = Counter()
    for part in parts:
        sizes[part.asked[0].architecture] += payload_bytes(part.message)
    return sizes
