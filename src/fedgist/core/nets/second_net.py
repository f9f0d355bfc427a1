"""A second model of a client, beside its net: what it is between rounds."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedgist.core.nets.net import Net
from fedgist.core.tree import tree


@tree
class SecondNet:
    """Parameters and buffers, such as running statistics, by name.

    The structure is the net's, or that of another net, which :meth:`beside` then has to know.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @staticmethod
    def of(net: Net) -> SecondNet:
        """Return a second model with a net's numbers."""
        return SecondNet(dict(net.params), dict(net.buffers))

    def beside(self, net: Net, place: str, like: Net | None = None) -> Net:
        """Return the second model as a net, of the structure of ``net`` or of ``like``.

        In training it runs aside: the client's own net keeps its statistics and draws. Its new
        running statistics are kept in the client's own state at ``place``, the field that holds
        this model, if the phase learns ``"own.PLACE.params"``.
        """
        if like is None or like.arch.name == net.arch.name:
            other = net.with_arrays(self.params | self.buffers)
        else:
            run = None if net.run is None else net.run.aside()
            other = replace(like, params=self.params, buffers=self.buffers, run=run)
        if net.run is not None and other.run is not None and other.run is not net.run:
            net.run.kept[f"own.{place}.buffers"] = other.run
        return other
