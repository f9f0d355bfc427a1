"""What crosses in a stage, as one value that several methods delegate to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fedgist.core.message import Nothing
from fedgist.core.net import Net
from fedgist.core.replies import Order, Replies
from fedgist.core.task import Context
from fedgist.core.tree import Tree


class Exchange(Protocol):
    """What crosses in a stage, as one value that several methods delegate to.

    Where a method does not define a function of these names, that of its ``exchange`` is called:
    averaging methods differ in what learns, not in what crosses.
    """

    def init_server(self, ctx: Context) -> Tree:
        """Return the server's first state."""

    def download(self, server: Tree, order: Order, ctx: Context) -> Tree:
        """Return the message for one client."""

    def receive(self, net: Net, own: Tree, down: Tree, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with the download installed, and the client's own state."""

    def upload(
        self, net: Net, own: Tree, sums: Tree, down: Tree, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the message to the server, and the client's own state."""

    def server_update(self, server: Tree, replies: Replies, ctx: Context) -> Tree:
        """Return the server's new state."""

    def models(self, server: Tree, ctx: Context) -> Mapping[str, Net]:
        """Return the server's models by name."""


class Silence:
    """The exchange of methods in which nothing crosses."""

    def init_server(self, ctx: Context) -> Tree:
        """Keep nothing."""
        return Nothing()

    def download(self, server: Tree, order: Order, ctx: Context) -> Tree:
        """Send nothing."""
        return Nothing()

    def receive(self, net: Net, own: Tree, down: Tree, ctx: Context) -> tuple[Net, Tree]:
        """Change nothing."""
        return net, own

    def upload(
        self, net: Net, own: Tree, sums: Tree, down: Tree, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Send nothing."""
        return Nothing(), own

    def server_update(self, server: Tree, replies: Replies, ctx: Context) -> Tree:
        """Change nothing."""
        return server

    def models(self, server: Tree, ctx: Context) -> Mapping[str, Net]:
        """Return nothing: the server has no model."""
        return {}
