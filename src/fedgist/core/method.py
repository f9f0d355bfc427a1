"""The whole vocabulary of a method: its functions, and when each is called.

A method is a frozen dataclass of hyper-parameters with small pure functions, written for ONE
client; engines stack clients. A round is a sequence of *stages* (one, for most methods). In a stage
the server orders clients and makes their downloads; each client receives, learns in phases,
summarizes its rows and uploads; the server takes the replies.

Federated averaging, whole (McMahan et al. 2017, algorithm 1), on five clients and three rounds:

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
...         return net.having(down.arrays), own
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

What a function is given:

``server``
    The server's state, a tree of tensors: what ``init_server`` or ``server_update`` returned last.
``net``
    The client's model as a value (:class:`~fedgist.core.net.Net`): parameters and buffers by name.
``own``
    What a client keeps beside its net, a tree: what ``init_client``, ``receive`` or ``upload``
    returned last. It never leaves the client.
``down``
    The message that this client was sent in this stage.
``sums``
    The sum over a client's batches of what ``summarize`` returned.

=============  ======  ====  ==========  ========  ====================  ===========================
function       where   vmap  net's mode  ctx.key   how often             shapes; what it returns
=============  ======  ====  ==========  ========  ====================  ===========================
check          server  no    -           -         once                  raises if it does not fit
check_client   server  no    -           -         once for some         raises if they do not fit
stages         both    no    -           -         once a round          names; ``()``: no round
init_server    server  no    -           init's    once                  the first server state
select         server  no    -           stage's   once a round          orders, of those online
orders         server  no    -           stage's   once a stage          some of them; None: nobody
download       server  no    -           stage's   order and evaluation  a message
server_update  server  no    -           stage's   once a stage          the next server state
forget         server  no    -           -         when asked to         the state without a client
kept_of        server  no    -           -         once a round          a message, or None
models         server  no    -           stage's   at evaluation         nets by name
report         server  no    -           stage's   once a round          numbers by name
init_client    client  no    -           client's  once a client         own
receive        client  yes   evaluation  client's  stage and evaluation  (net, own)
phases         client  no    -           -         once a stage          what learns, how long
loss           client  yes   training    step's    once a step           scalar; x (batch, ...)
pick           client  yes   -           client's  once a stage          (rows, choices)
summarize      client  yes   evaluation  client's  every batch of rows   sums; x (batch, ...)
upload         client  yes   evaluation  client's  once a stage          (a message, own)
before_test    client  no    -           -         before a test         phases on a copy
measure        client  yes   evaluation  client's  every batch           (batch,) by metric
predict        client  yes   evaluation  client's  every batch           logits (batch, classes)
=============  ======  ====  ==========  ========  ====================  ===========================

A client's key is its own, another one for every round and stage; a stage's is the same for all.
``ctx.stage`` is one of the method's stages, ``"init"`` where a state is made, or ``"evaluate"``.
Functions under ``torch.func.vmap`` may branch on stage and round, never on a tensor: use masks.
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
from fedgist.core.metrics import Metric
from fedgist.core.net import Net
from fedgist.core.optimizer import Optimizer
from fedgist.core.parts import Part
from fedgist.core.replies import ClientInfo, Count, Order, Replies, Reply
from fedgist.core.sampling import drawn_clients
from fedgist.core.task import Context, Settings, Task
from fedgist.core.training import Life, Training
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
    """A piece of local training: what learns, for how long, and by which loss.

    ``learns`` names parts of the net, or tensors of the client's own state (``"own.bias"``).
    It takes ``epochs`` passes over the client's rows or, if given, ``steps`` batches. ``loss=None``
    is the method's, ``optimizer=None`` the recipe's, and so is ``remembers=None``, which says how
    long the optimizer's state lives.
    """

    learns: tuple[str, ...] = ("all",)
    epochs: int = 1
    steps: int | None = None
    loss: Callable[[Net, Batch, Any, Any, Context], Tensor] | None = None
    optimizer: Optimizer | None = None
    remembers: Life | None = None


class Method:
    """A federated method: its hyper-parameters are fields, its mathematics these functions."""

    merges_clients: ClassVar[bool] = False  # one client that holds everybody's rows
    needs_classes: ClassVar[bool] = False  # one for each row: texts have none
    own_settings: ClassVar[type | None] = None  # of each client, a dataclass: in ctx.settings
    among_peers: ClassVar[bool] = False  # whether downloads can be of those alone that one hears

    @property
    def keeps(self) -> Part:
        """The part of the net that stays with the client between rounds.

        A method says it as a constant, or as a property where its hyper-parameters decide.
        """
        return "all"

    @property
    def accepts_late(self) -> bool:
        """Whether a reply to an earlier round is used: a constant or a property, as ``keeps``."""
        return False

    @property
    def record_terms(self) -> int:
        """How many sums an upload holds of one term a row, 1 and its bounded features; 0: others.

        A term is added at the row's label, and does not depend on other rows.
        """
        return 0

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What :meth:`measure` returns, beside the metrics of the task."""
        return ()

    @property
    def exchange(self) -> Exchange:
        """What crosses in a stage: a constant or a property, as ``keeps``."""
        return Silence()

    def __post_init__(self) -> None:
        """Check the bounds that the types of the hyper-parameters declare."""
        check_bounds(self)

    def check(self, task: Task) -> None:
        """Raise ValueError if the method cannot work on this task."""

    def check_client(self, client: int, settings: Settings, task: Task) -> None:
        """Raise MethodError if a client's own settings do not fit the method or the task."""

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return the stages of round ``ctx.round``; round 0 comes before training."""
        return ("train",) if ctx.round > 0 else ()

    def init_server(self, ctx: Context) -> Tree:
        """Return the server's state."""
        return self.exchange.init_server(ctx)

    def init_client(self, net: Net, ctx: Context) -> Tree:
        """Return what the client keeps beside its net: a tree."""
        return Nothing()

    def select(self, server: Tree, online: Sequence[ClientInfo], ctx: Context) -> list[Order]:
        """Return who takes part in this round: by default ``fraction_train`` of all clients.

        Called once a round, with the context of its first stage; ``online`` holds the clients that
        are online in this round.
        """
        key, privacy = ctx.draw("select", ctx.stage), ctx.task.privacy
        source = "seed" if privacy is None else privacy.source
        return drawn_clients(online, ctx.task.training, ctx.task.num_clients, key, source)

    def orders(
        self, server: Tree, selected: Sequence[Order], ctx: Context
    ) -> Sequence[Order] | None:
        """Return whom a stage asks: by default all selected clients that failed no earlier stage.

        None means that nobody is asked: the stage is the server's own work.
        """
        return selected

    def download(self, server: Tree, order: Order, ctx: Context) -> Tree:
        """Return the message for one client; the same tensors for several are one broadcast."""
        return self.exchange.download(server, order, ctx)

    def receive(self, net: Net, own: Tree, down: Tree, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with the download installed, and the client's own state."""
        return self.exchange.receive(net, own, down, ctx)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return the local training of a stage."""
        return (Phase(epochs=ctx.task.training.local_epochs),)

    def loss(self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tensor:
        """Return the loss of one batch, a scalar averaged over the rows present: the task's."""
        return ctx.task.objective.loss(net(batch.x), batch)

    def pick(self, rows: Labels, own: Tree, ctx: Context) -> Tensor:
        """Return what a client chooses of its rows, (rows, choices): ``picks`` of its batches.

        Batches depend on the stack; this is decided once, by the labels of all rows.
        """
        return torch.zeros(len(rows.y), 0)

    def summarize(self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tree:
        """Return sums over one batch, in the order of the rows; the engine adds them up."""
        return Count(batch.mask.sum().to(torch.float32))

    def upload(
        self, net: Net, own: Tree, sums: Tree, down: Tree, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the message to the server, and the client's own state."""
        return self.exchange.upload(net, own, sums, down, ctx)

    def server_update(self, server: Tree, replies: Replies, ctx: Context) -> Tree:
        """Return the server's new state; any non-empty subset of those asked may have answered."""
        return self.exchange.server_update(server, replies, ctx)

    def objection(self, message: Tree, ctx: Context) -> str:
        """Return why a client's message cannot be used, though it has the right form; else "".

        The server asks it of each message that is not summed; the client is refused then, and the
        others count. By default nothing is objected to.
        """
        return ""

    def forget(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Return the server's state without what it keeps of one client: by default as it is."""
        return server

    def kept_of(self, server: Tree, client: int) -> Tree | None:
        """Return the message of one client that the server keeps: what its peers are sent."""
        return None

    def models(self, server: Tree, ctx: Context) -> Mapping[str, Net]:
        """Return the server's own models by name: each is scored on the server's test sets."""
        return self.exchange.models(server, ctx)

    def report(self, server: Tree, ctx: Context) -> Mapping[str, float]:
        """Return numbers for the record of this round: ``server/<name>``."""
        return {}

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        """Return phases that a copy of the client's model goes through before a second test."""
        return ()

    def measure(
        self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context
    ) -> Mapping[str, Tensor]:
        """Return further numbers of each row at evaluation, (batch,) by metric; NaN: none."""
        return {}

    def predict(self, net: Net, own: Tree, down: Tree, x: Tensor, ctx: Context) -> Tensor:
        """Return logits (batch, classes) of ``x``, ``(batch, *input)``."""
        return net(x)
