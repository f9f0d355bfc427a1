"""What every engine is: one verb between a server and its clients, and one to score them.

A whole engine, whose clients are entries of a list and only count their rows:

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

**Life.** An engine is made with all it needs, asked stage after stage from one thread, and closed
once, whether or not an error occurred. It may start processes or connections when first asked.

**Deadlines** are the engine's own: ``ask`` and ``score`` return when everybody has answered or the
time is up. A client that has not answered by then is *absent*. What arrives afterwards is part of a
later answer and names the round it belongs to: the round loop, not the engine, decides whether it
is *late*.

**Failures** of clients are part of an answer: a client is absent with a reason, or its upload is
*refused* with a reason; the other uploads are kept. What concerns all clients (a worker process
that died, a wire that broke) is an exception, and the run ends with its checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgist.core.message import Nothing, message, payload_bytes
from fedgist.core.method import Context, Method, Order, Reply, Task
from fedgist.core.metrics import LOSS, Metric
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
    "TrainingLoss",
    "collect",
    "metrics_of",
    "upload_bytes",
]

EVALUATE = "evaluate"  # the stage in which models are downloaded to be tested
# a client's own test rows, the whole test set, its training rows, those held out from them
Split = Literal["client", "test", "train", "validation"]
TESTS: tuple[Split, ...] = ("client", "test")  # before these, models are fine-tuned
# the names of copies that are tested beside the models: fine-tuned by the method, or trained as in
# the next round
FINETUNED, TRAINED = "finetuned", "trained"


@message(reduce="each")
class TrainingLoss:
    """A client's mean training loss over a stage: a measurement, which it may keep to itself."""

    loss: Tensor


@message(reduce="each")
class Score:
    """How good one client's model is on its rows: a measurement, which it may keep to itself.

    ``values`` holds the metrics that are defined for this client; ``confusion`` (true class,
    predicted class) counts, where they are asked for.
    """

    rows: Tensor
    values: dict[str, Tensor]
    confusion: Tensor | None = None


@tree
class ScoreTable:
    """How good clients' models are: one row per client, NaN where a metric is not defined for it.

    ``rows`` (clients,) counts the rows predicted; ``values`` holds (clients,) for each metric;
    ``confusion`` is summed over the clients.
    """

    clients: tuple[int, ...] = field(metadata=STATIC)
    rows: Tensor
    values: dict[str, Tensor]
    confusion: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """Scores of the clients that answered, by name of the model (``""``, ``"finetuned"``).

    ``whole`` holds the metrics of the one model that serves all clients on the whole test set,
    where there is such a model and the engine has that set.
    """

    models: Mapping[str, ScoreTable]
    whole: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Answer:
    """What came back in a stage.

    ``subtotals`` of messages that sum, ``each`` message of those that do not; clients whose message
    was ``refused`` and clients that were ``absent``, each with the reason; the mean training
    ``losses`` of the clients that share them; the payload of all uploads accepted, by
    architecture; and, where there is a wire, the bytes that crossed it, up and down.
    """

    subtotals: tuple[Subtotal, ...] = ()
    each: tuple[Reply, ...] = ()
    refused: tuple[tuple[Asked, str], ...] = ()
    absent: tuple[tuple[Asked, str], ...] = ()
    losses: Mapping[Asked, float] = field(default_factory=dict)
    upload_bytes: Mapping[str, int] = field(default_factory=dict)
    wire_bytes: tuple[int, int] | None = None


class Engine(Protocol):
    """What a server asks its clients through: all that differs between simulation and reality."""

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Send each order with its download; return what came back in time."""

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Evaluate what each client would hold after this download; some may not answer."""

    def close(self) -> None:
        """Stop; leave no process and no connection behind."""


@runtime_checkable
class Simulation(Protocol):
    """What only an engine can do that hosts all clients itself: look into them, save them."""

    def client(self, ctx: Context, order: Order, down: Tree) -> Any:
        """Return what one client holds after this download: a value with ``net`` and ``own``."""

    def state(self) -> dict[str, Tensor]:
        """Return what all clients keep, by name, for a checkpoint."""

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's state back."""


def metrics_of(method: Method, task: Task) -> tuple[Metric, ...]:
    """Return all metrics by which models are looked at: the task's, the method's, and the loss."""
    return (*task.objective.metrics, *method.metrics, LOSS)


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
    """Return the payload of messages that came back, by architecture."""
    sizes: Counter[str] = Counter()
    for part in parts:
        sizes[part.asked[0].architecture] += payload_bytes(part.message)
    return sizes
