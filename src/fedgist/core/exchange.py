"""The interface of an exchange: download, upload and server update, shared by several methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fedgist.core.message import Nothing
from fedgist.core.nets.net import Net
from fedgist.core.replies import Order, Replies
from fedgist.core.task import Context
from fedgist.core.tree import Tree


class Exchange(Protocol):
    """The messages of a stage and the server's update, as one value that methods share.

    A method that does not define one of these functions uses the function of its ``exchange``.
    Averaging methods, for instance, differ in their local training and share an exchange.
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
    """The exchange of methods without messages."""

    def init_server(self, ctx: Context) -> Tree:
        """Return an empty state."""
        return Nothing()

    def download(self, server: Tree, order: Order, ctx: Context) -> Tree:
        """Return an empty message."""
        return Nothing()

    def receive(self, net: Net, own: Tree, down: Tree, ctx: Context) -> tuple[Net, Tree]:
        """Return net and state unchanged."""
        return net, own

    def upload(
        self, net: Net, own: Tree, sums: Tree, down: Tree, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return an empty message."""
        return Nothing(), own

    def server_update(self, server: Tree, replies: Replies, ctx: Context) -> Tree:
        """Return the state unchanged."""
        return server

    def models(self, server: Tree, ctx: Context) -> Mapping[str, Net]:
        """Return no model."""
        return {}
