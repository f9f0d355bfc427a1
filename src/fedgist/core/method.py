"""The interface of a federated method: its functions, and when an engine calls each of them.

A method is a frozen dataclass of hyper-parameters with small pure functions, written for ONE
client; engines stack clients. A round is a sequence of *stages* (one, for most methods). In a stage
the server selects clients and makes their downloads. Each client receives its download, trains in
phases, summarizes its rows and uploads a message. The server then aggregates the replies.

Federated averaging in full (McMahan et al. 2017, algorithm 1), on five clients for three rounds:

>>> from dataclasses import dataclass
>>> from typing import ClassVar
>>> import fedgist
>>> from fedgist.core.message import message
>>> @message(reduce="sum")
... class Weights:
...     arrays: dict[str, torch.Tensor]
...     rows: torch.Tensor
>>> @dataclass(frozen=True)
... class Average(fedgist.Method):
...     keeps: ClassVar = "none"  # the server sends all weights in every round
...
...     def init_server(self, ctx):  # w_0
...         (start,) = ctx.task.starts.values()
...         return Weights(start.state(), torch.ones(()))
...
...     def download(self, server, order, ctx):
...         return server
...
...     def receive(self, net, own, down, ctx):
...         return net.with_arrays(down.arrays), own
...
...     def upload(self, net, own, sums, down, ctx):  # n_k w_k and n_k
...         return Weights({k: sums.rows * v for k, v in net.state().items()}, sums.rows), own
...
...     def server_update(self, server, replies, ctx):  # sum_k n_k w_k / n
...         total = replies.total()
...         mean = {k: v / total.rows for k, v in total.arrays.items()}
...         return Weights(mean, torch.ones(()))
>>> recipe = {"clients": {"num_clients": 5}, "partition": {"name": "iid"}, "seed": 1,
...           "train": {"num_rounds": 3, "lr": 0.01},
...           "engine": {"workers": 1, "plans": {"mlp": {"cohort_size": 5}}}}
>>> result = fedgist.run(recipe, method=Average())
>>> for line in result.rounds:
...     print(line["round"], round(line["eval/client/accuracy_mean"], 2), line["comm/up_bytes"])
1 0.92 96220
2 0.94 96220
3 0.95 96220

Arguments of these functions:

``server``
    The server's state, a tree of tensors: the last result of ``init_server`` or ``server_update``.
``net``
    The client's model as a value (:class:`~fedgist.core.nets.net.Net`): parameters and buffers by
    name.
``own``
    The client's state beside its net, a tree: the last result of ``init_client``, ``receive`` or
    ``upload``. This state never leaves the client.
``down``
    The download: the message that the server sent to this client in this stage.
``sums``
    The sum of the results of ``summarize`` over the client's batches.

=============  ======  ====  ==========  ========  ====================  ===========================
function       where   vmap  net's mode  ctx.key   how often             shapes; what it returns
=============  ======  ====  ==========  ========  ====================  ===========================
check          server  no    -           -         once                  raises on a misfit
notes          server  no    -           -         once                  sentences for the user
stages         both    no    -           -         once a round          stage names; ``()``: skip
init_server    server  no    -           init's    once                  the first server state
select         server  no    -           stage's   once a round          orders to online clients
orders         server  no    -           stage's   once a stage          a subset; None: server only
download       server  no    -           stage's   order and evaluation  a message
server_update  server  no    -           stage's   once a stage          the next server state
forget         server  no    -           -         on request            the state without a client
sent_in        server  no    -           -         on request            a stage, or None
without        server  no    -           stage's   on request            the state without a message
models         server  no    -           stage's   at evaluation         nets by name
report         server  no    -           stage's   once a round          numbers by name
init_client    client  no    -           client's  once a client         own
receive        client  yes   evaluation  client's  stage and evaluation  (net, own)
phases         client  no    -           -         once a stage          the phases of training
loss           client  yes   training    step's    once a step           scalar; x (batch, ...)
summarize      client  yes   evaluation  client's  every batch of rows   sums; x (batch, ...)
upload         client  yes   evaluation  client's  once a stage          (message, own)
before_test    client  no    -           -         before a test         phases on a copy
predict        client  yes   evaluation  client's  every batch           logits (batch, classes)
=============  ======  ====  ==========  ========  ====================  ===========================

A client's key differs between clients, rounds and stages. A stage's key is the same for all
clients. ``ctx.stage`` is one of the method's stages, ``"init"`` when a state is made, or
``"evaluate"``. In a client's functions ``ctx.architecture`` names its architecture. Functions under
``torch.func.vmap`` may branch on stage and round, never on a tensor: use masks. Methods whose
clients receive each other's messages have further functions:
:class:`~fedgist.core.peer_method.PeerMethod`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgist.core.batch import Batch, Labels, RowSet
from fedgist.core.bounds import check_bounds
from fedgist.core.exchange import Exchange, Silence
from fedgist.core.message import Nothing, message
from fedgist.core.nets.net import Net
from fedgist.core.nets.parts import Part
from fedgist.core.objectives.target import EVERY_TARGET, Target
from fedgist.core.replies import ClientInfo, Count, Order, Replies, Reply
from fedgist.core.sampling import drawn_clients
from fedgist.core.task import Context, Settings, Task
from fedgist.core.training import Life, Optimizer, Training, Work
from fedgist.core.tree import Tree

__all__ = [
    "Batch",
    "ClientInfo",
    "Context",
    "Count",
    "Exchange",
    "Labels",
    "Life",
    "Method",
    "Net",
    "Nothing",
    "Order",
    "Part",
    "Phase",
    "Replies",
    "Reply",
    "RowSet",
    "Settings",
    "Task",
    "Training",
    "message",
]


@dataclass(frozen=True)
class Phase:
    """One phase of local training: the parameters that learn, the duration and the loss.

    ``learns`` names parts of the net, or tensors of the client's own state: ``"own.bias"`` is one
    tensor, or all tensors of a tree or dictionary in that field, such as a second model. The
    phase takes ``epochs`` passes over the client's rows, whole or not, or ``steps`` steps if given.
    What is None is the recipe's: ``epochs`` (``train.local_epochs`` or ``train.local_steps``, or
    what a client has of its own), ``optimizer``, and
    ``remembers``, which says when optimizer state is reset. ``loss=None`` is the method's loss. A
    step whose loss needs several independent batches has as many ``batches`` in one, which
    ``dealt`` takes apart.
    """

    learns: tuple[str, ...] = ("all",)
    epochs: float | None = None
    steps: int | None = None
    loss: Callable[[Net, Batch, Any, Any, Context], Tensor] | None = None
    optimizer: Optimizer | None = None
    remembers: Life | None = None
    batches: int = 1

    def length(self, work: Work) -> Work:
        """Return the length of the phase, for a client that otherwise trains so long."""
        stated = self.epochs is not None or self.steps is not None
        return Work(1 if self.epochs is None else self.epochs, self.steps) if stated else work

    def least_rows(self, task: Task, architecture: str) -> int:
        """Return the fewest rows of a step."""
        return self.batches * task.least_rows(architecture)

    def steps_of(
        self, rows: Tensor, task: Task, architecture: str, work: Work | None = None
    ) -> Tensor:
        """Return the number of steps of clients with so many ``rows``, (clients,).

        ``work`` is how long these clients train; None is the recipe's. Private steps do not depend
        on rows.
        """
        length = self.length(work or task.training.work)
        return task.steps_of(rows, architecture, length, self.batches)


class Method:
    """A federated method: its fields are hyper-parameters, its functions are its mathematics."""

    #: Raised by a change that moves the numbers of the method's runs; a result records it.
    version: ClassVar[int] = 1
    merges_clients: ClassVar[bool] = False  # whether one client holds all clients' rows
    #: Whether client functions read or change ``batch.x`` themselves, beside ``net(batch.x)``. Over
    #: a frozen body, other methods get features that are made once in place of the rows.
    alters_inputs: ClassVar[bool] = False
    #: Whether clients also train a model of ``ctx.task.main``, the architecture named first.
    trains_main: ClassVar[bool] = False
    #: Whether losses read ``batch.class_counts``: rows of each class, for one class per row.
    counts_classes: ClassVar[bool] = False
    #: Whether what clients keep is right only if the server uses each of their uploads.
    needs_every_upload: ClassVar[bool] = False
    #: The targets that the method is defined for: all, unless it reads labels or row features.
    targets: ClassVar[frozenset[Target]] = EVERY_TARGET

    @property
    def keeps(self) -> Part:
        """The part of the net that stays with the client between rounds.

        A method declares a constant, or a property if its hyper-parameters decide.
        """
        return "all"

    @property
    def accepts_late(self) -> bool:
        """Whether the server uses a reply to an earlier round: a constant or a property."""
        return False

    @property
    def batches(self) -> int:
        """Independent batches of a local step, as its phase has them: a constant or a property."""
        return 1

    @property
    def record_terms(self) -> int:
        """Number of per-row sums in an upload (1 and bounded features); 0 if it is no sum of rows.

        Each term is added at its row's label and does not depend on other rows.
        """
        return 0

    @property
    def release_digits(self) -> int:
        """Bits in which totals of private terms are exact: 24 are those of float32."""
        return 24

    @property
    def exchange(self) -> Exchange:
        """The messages that cross in a stage: a constant or a property."""
        return Silence()

    def __post_init__(self) -> None:
        """Check the bounds that the types of the hyper-parameters declare."""
        check_bounds(self)

    def check(self, task: Task) -> None:
        """Raise ValueError if the method cannot work on this task."""

    def notes(self, task: Task) -> Sequence[str]:
        """Return what a user should know before round 1, a sentence each."""
        return ()

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return the stages of round ``ctx.round``; round 0 comes before training."""
        return ("train",) if ctx.round > 0 else ()

    def init_server(self, ctx: Context) -> Tree:
        """Return the first state of the server, a tree."""
        return self.exchange.init_server(ctx)

    def init_client(self, net: Net, ctx: Context) -> Tree:
        """Return the client's state beside its net, a tree."""
        return Nothing()

    def select(self, server: Tree, online: Sequence[ClientInfo], ctx: Context) -> list[Order]:
        """Return the orders of this round: by default ``fraction_train`` of all clients.

        The engine calls it once a round, with the context of the first stage. ``online`` holds the
        clients that are online in this round.
        """
        key, privacy = ctx.draw("select", ctx.stage), ctx.task.privacy
        source = "seed" if privacy is None else privacy.source
        return drawn_clients(online, ctx.task, key, source)

    def orders(
        self, server: Tree, selected: Sequence[Order], ctx: Context
    ) -> Sequence[Order] | None:
        """Return the clients of a stage: by default all selected clients with no earlier failure.

        None means that no client takes part: the stage is the server's own work.
        """
        return selected

    def download(self, server: Tree, order: Order, ctx: Context) -> Tree:
        """Return the message for one client; tensors shared by clients are one broadcast."""
        return self.exchange.download(server, order, ctx)

    def receive(self, net: Net, own: Tree, down: Tree, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with the download installed, and the client's own state."""
        return self.exchange.receive(net, own, down, ctx)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return the phases of local training in a stage."""
        return (Phase(),)

    def loss(self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tensor:
        """Return the loss of one batch, a scalar (): by default the task's mean over present rows.

        ``batch.x`` is ``(batch, *input)``.
        """
        return ctx.task.objective.loss(net(batch.x), batch)

    def summarize(self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tree:
        """Return sums over one batch in the order of its rows; the engine adds the sums up."""
        return Count(batch.mask.sum().to(torch.float32))

    def upload(
        self, net: Net, own: Tree, sums: Tree, down: Tree, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the message to the server, and the client's own state."""
        return self.exchange.upload(net, own, sums, down, ctx)

    def server_update(self, server: Tree, replies: Replies, ctx: Context) -> Tree:
        """Return the server's new state after a non-empty set of replies."""
        return self.exchange.server_update(server, replies, ctx)

    def objection(self, message: Tree, ctx: Context) -> str:
        """Return why a well-formed client message cannot be used, or "" if it can.

        The server checks each message that is not summed. It refuses the message after an objection
        and keeps the other clients' messages. By default there is no objection.
        """
        return ""

    def forget(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Return the server's state without the data of one client: by default unchanged."""
        return server

    def sent_in(self, server: Tree, client: int) -> tuple[int, str] | None:
        """Return the round and the stage in which a client sent its part of a total, if it did.

        To be forgotten, the client then sends the same message again, for :meth:`without`.
        """
        return None

    def without(self, server: Tree, reply: Reply, ctx: Context) -> Tree:
        """Return the server's state without a message that is a part of its totals."""
        return server

    def models(self, server: Tree, ctx: Context) -> Mapping[str, Net]:
        """Return the server's own models by name; each is scored on the server's test sets."""
        return self.exchange.models(server, ctx)

    def report(self, server: Tree, ctx: Context) -> Mapping[str, float]:
        """Return numbers for the record of this round, shown as ``server/<name>``."""
        return {}

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        """Return the phases that fine-tune a copy of the client's model before a second test."""
        return ()

    def predict(self, net: Net, own: Tree, down: Tree, x: Tensor, ctx: Context) -> Tensor:
        """Return logits (batch, classes) of ``x``, ``(batch, *input)``."""
        return net(x)
