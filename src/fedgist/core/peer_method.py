"""The interface of a method whose clients receive each other's messages.

A method that needs any of these functions derives from :class:`PeerMethod`. All have a default.

=============  ======  ====  ==========  ========  ====================  ===========================
function       where   vmap  net's mode  ctx.key   how often             shapes; what it returns
=============  ======  ====  ==========  ========  ====================  ===========================
check_client   server  no    -           -         once per settings     raises on a misfit
kept_of        server  no    -           -         once a round          a message, or None
pick           client  yes   -           client's  once a stage          (rows, choices)
measure        client  yes   evaluation  client's  every batch           (batch,) by metric
=============  ======  ====  ==========  ========  ====================  ===========================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.batch import Batch, Labels
from fedgist.core.method import Method
from fedgist.core.nets.net import Net
from fedgist.core.objectives.metrics import Metric
from fedgist.core.task import Context, Settings, Task
from fedgist.core.tree import Tree


class PeerMethod(Method):
    """A method whose downloads hold messages of other clients, each with settings of its own."""

    own_settings: ClassVar[type | None] = None  # dataclass of a client's own ctx.settings
    among_peers: ClassVar[bool] = False  # whether a download can be made from neighbors only

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics that :meth:`measure` returns in addition to the metrics of the task."""
        return ()

    def check_client(self, client: int, settings: Settings, task: Task) -> None:
        """Raise MethodError if a client's own settings do not fit the method or the task."""

    def kept_of(self, server: Tree, client: int) -> Tree | None:
        """Return the stored message of one client, which its neighbors download, or None."""
        return None

    def pick(self, rows: Labels, own: Tree, ctx: Context) -> Tensor:
        """Return the client's choices among its rows, (rows, choices): ``picks`` of its batches.

        Batches depend on the stack. The choice is made once, from the labels of all rows.
        """
        return torch.zeros(len(rows.y), 0)

    def measure(
        self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context
    ) -> Mapping[str, Tensor]:
        """Return further numbers of each row at evaluation, (batch,) by metric; NaN: undefined."""
        return {}
