"""What server and clients both know, and where and when a function of a method runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import RowSet
from fedgist.core.counts import MOST_ROWS
from fedgist.core.net import Architecture, Net
from fedgist.core.objective import Objective
from fedgist.core.privacy import Privacy
from fedgist.core.training import Training
from fedgist.core.tree import STATIC, tree

#: A client's own settings: a dataclass that the method declares, or None.
Settings: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Task:
    """What server and clients both know: the classes, the architectures, the plan of training.

    ``starts`` holds each architecture's common start. ``test_sets`` are the server's own rows, by
    name, on which its models are scored; a site has none of them. ``privacy`` says how releases are
    protected, if they are. ``annotations`` are what training rows are annotated with, by name, and
    the least and the most of it. ``public`` are rows that all may see, if there are any, and
    ``public_labels`` says whether their labels may be seen as well. ``public_client`` is
    the client whose rows they are, if they are one's, and ``public_digest`` is made of all of them
    as models see them, in their order. ``main`` is the architecture that is named first, which a
    site of another one does not have. What comes from fewer clients than ``min_replies`` is
    withheld from the server, and a message of a norm above ``max_norm``, or one that counts more
    rows than ``max_rows``, is refused.
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
    min_replies: int = 1
    max_norm: float = math.inf
    max_rows: int = MOST_ROWS

    @property
    def public_rows(self) -> RowSet:
        """The public rows, which a method's ``check`` has found to be there."""
        assert self.public is not None
        return self.public


@tree
class Context:
    """Where and when a function runs.

    ``key`` is the source of all randomness: a different one for every round and stage, and in a
    client's functions for every client. ``round`` is 0 before training.
    ``stage`` is one of the method's stages, or ``"init"`` where a state is made, or ``"evaluate"``
    where a model is downloaded to be tested, predicted with or exported. ``settings`` are a
    client's own (``Method.own_settings``), where it makes what it keeps; None: the defaults.
    """

    key: Tensor
    task: Task = field(metadata=STATIC)
    round: int = field(metadata=STATIC)
    stage: str = field(metadata=STATIC)
    settings: Settings = field(default=None, metadata=STATIC)

    def draw(self, *purpose: random.Word) -> Tensor:
        """Return a key for one purpose, to be used with :mod:`fedgist.core.random`."""
        return random.fold(self.key, *purpose)
