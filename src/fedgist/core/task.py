"""The task that server and clients share, and the context in which a method's function runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch, RowSet, fake_rows
from fedgist.core.counts import MOST_ROWS
from fedgist.core.local_steps import steps_of
from fedgist.core.nets.net import Architecture, Net
from fedgist.core.objectives.objective import Objective
from fedgist.core.objectives.target import places
from fedgist.core.privacy import Privacy
from fedgist.core.training import Pool, Training, Work
from fedgist.core.tree import STATIC, tree
from fedgist.errors import MethodError

#: A client's own settings: a dataclass that the method declares, or None.
Settings: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Task:
    """The shared task: the classes, the architectures and the training settings.

    ``num_classes`` counts classes, or whatever else is predicted: numbers, labels, or words.
    ``words`` is the number of words of texts, and 0 if inputs are numbers. ``missing_labels`` says
    whether single numbers or labels of a row may be missing (NaN).

    ``starts`` holds the common initial net of each architecture. ``test_sets`` are the server's own
    rows by name, for scoring the server's models; a site has none. ``privacy`` is the protection of
    releases, or None. ``annotations`` are the names of the training rows' annotations, with the
    smallest and largest value. ``public`` are the public rows, if there are any; ``public_labels``
    says whether their labels are public as well. ``public_client`` is the client whose rows are
    public, if they belong to one. ``public_digest`` is a digest of the public rows in order, as
    models see them. ``main`` is the architecture that is named first; a site of another
    architecture has only its start. ``clients_with`` are the numbers of clients of each
    architecture that may train. ``common_starts`` says that the clients of an architecture begin
    with ``starts`` (``clients.init = "shared"``), not with weights of their own. ``newcomers`` are
    clients that never train and are scored apart, ``left_out`` those with too few rows to train.
    ``pools`` by name, if there are any, set the clients per round in place of
    ``training.fraction_train``. Totals of fewer than ``min_replies`` clients are withheld from the
    server. The server refuses a message with a norm above ``max_norm`` or with more than
    ``max_rows`` rows.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    num_clients: int
    architectures: Mapping[str, Architecture]
    starts: Mapping[str, Net] = field(repr=False)
    training: Training
    objective: Objective
    test_sets: Mapping[str, RowSet] = field(default_factory=dict, repr=False)
    privacy: Privacy | None = None
    annotations: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    public: RowSet | None = field(default=None, repr=False)
    public_labels: bool = False
    public_client: int | None = None
    public_digest: int = 0
    main: str = ""
    clients_with: Mapping[str, int] = field(default_factory=dict)
    common_starts: bool = True
    newcomers: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()
    pools: Mapping[str, Pool] = field(default_factory=dict)
    min_replies: int = 1
    max_norm: float = math.inf
    max_rows: int = MOST_ROWS
    words: int = 0
    missing_labels: bool = False

    @property
    def num_trainers(self) -> int:
        """The number of clients that may train."""
        return self.num_clients - len(self.newcomers | self.left_out)

    @property
    def pools_overlap(self) -> bool:
        """Whether a client is in several pools: each is in one at least."""
        return sum(pool.size for pool in self.pools.values()) > self.num_clients

    @property
    def places(self) -> tuple[int, ...]:
        """The shape of the places of a row at which something is predicted; () for a row."""
        return places(self.objective.target, self.input_shape)

    def least_rows(self, architecture: str) -> int:
        """Return the fewest rows of a batch that a model can be trained on, 1 or 2.

        Several views of a row are as many rows of a batch.
        """
        return 1 if self.objective.views > 1 else self.architectures[architecture].least_rows

    def steps_of(self, rows: Tensor, architecture: str, work: Work, batches: int = 1) -> Tensor:
        """Return the number of steps of clients with so many ``rows``, in their shape.

        A step has so many independent ``batches``. A client without rows enough for a step takes
        none. Private steps do not depend on rows.
        """
        if self.privacy is not None and self.privacy.steps is not None:
            steps = self.privacy.steps.count(work.epochs) if work.steps is None else work.steps
            return torch.full_like(rows, steps)
        size, least = batches * self.training.batch_size, batches * self.least_rows(architecture)
        return steps_of(rows, size, work.epochs, work.steps, least)

    @property
    def public_rows(self) -> RowSet:
        """The public rows.

        Raises
        ------
        MethodError
            If there are none.
        """
        if self.public is None:
            raise MethodError("the method reads public rows: give [data.public] rows or a name")
        return self.public


def fake_batch(task: Task, key: Tensor, rows: int) -> Batch:
    """Return random rows in the form of the task's, all of them present: ``x`` (rows, *input)."""
    sizes = task.input_shape, task.num_classes
    x, y = fake_rows(key, rows, *sizes, words=task.words, target=task.objective.labels)
    beside = {name: torch.ones(rows, device=x.device) for name in task.annotations}
    return Batch(x, y, torch.ones(rows, dtype=torch.bool, device=x.device), annotations=beside)


@tree
class Context:
    """The context of a call: the key, the task, the round and the stage.

    ``key`` is the source of all randomness. It differs between rounds and stages, and between
    clients in a client's functions. ``round`` is 0 before training. ``stage`` is one of the
    method's stages, ``"init"`` when a state is made, or ``"evaluate"`` when a model is downloaded
    for a test, a prediction or an export. ``settings`` are a client's own settings
    (``PeerMethod.own_settings``) when its state is made; None means the defaults. ``architecture``
    is that of the client in a client's functions, ``phases`` and ``init_client`` among them; at the
    server it is empty. ``work`` is how long a client trains that has a length of its own.
    """

    key: Tensor
    task: Task = field(metadata=STATIC)
    round: int = field(metadata=STATIC)
    stage: str = field(metadata=STATIC)
    settings: Settings = field(default=None, metadata=STATIC)
    architecture: str = field(default="", metadata=STATIC)
    work: Work | None = field(default=None, metadata=STATIC)

    @property
    def start(self) -> Net:
        """The common initial net of the client's architecture, which also tells its structure.

        Raises
        ------
        MethodError
            If a function of the server asks: ``task.starts`` has the nets of all architectures.
        """
        if not self.architecture:
            raise MethodError("ctx.start is a client's; the server has ctx.task.starts")
        return self.task.starts[self.architecture]

    def local_steps(self, rows: Tensor) -> Tensor:
        """Return how many steps a client with so many ``rows`` takes in a phase without a count.

        The result has the shape of ``rows``. A client without enough rows for a batch takes none.
        If its time was over before, these are the steps that its first phase took.
        """
        work = self.work or self.task.training.work
        steps = self.task.steps_of(rows, self.architecture, work)
        return steps.clamp(max=work.most[0]) if work.most else steps

    @property
    def rate(self) -> float:
        """The learning rate of this round: ``train.lr`` on its schedule."""
        training = self.task.training
        return training.lr * training.lr_schedule.factor(self.round, training.num_rounds)

    def draw(self, *purpose: random.Word) -> Tensor:
        """Return a key for one purpose, (), for use with :mod:`fedgist.core.random`."""
        return random.fold(self.key, *purpose)
