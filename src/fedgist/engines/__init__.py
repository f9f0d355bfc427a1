"""Engines run clients. They depend on the ``Method`` interface, never on a concrete method."""

from typing import Literal

from fedgist.registry import Registry

EngineName = Literal["local", "loopback", "ray"]
#: Engines that keep the clients' state in the same way: a run may go on with another of these.
ALIKE = frozenset({"local", "ray"})
#: What each engine of a simulation does with the clients, by name.
ENGINES: Registry[type] = Registry(
    {
        "local": "fedgist.engines.local_engine:LocalEngine",
        "loopback": "fedgist.wire.loopback_engine:LoopbackEngine",
        "ray": "fedgist.engines.ray_cluster:RayCluster",
    }
)
