"""A Ray cluster of two nodes with one core each, on this machine.

Ray is loaded only by a test that uses it: it brings a gRPC of its own into the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from fedgist.engines.ray_cluster import RayCluster

ONE_CORE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 200 << 20}


class Nodes:
    """The nodes: a head, which stays, and a second one, which can be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True, head_node_args={**ONE_CORE, "include_dashboard": False}
        )
        self.second: Any = None
        self.add()
        self.address: str = self.cluster.address

    def add(self) -> None:
        self.second = self.cluster.add_node(**ONE_CORE)

    def close(self) -> None:
        self.cluster.shutdown()

    def actors(self, name: str = "ShardActor") -> list[psutil.Process]:
        raylets = [
            node.all_processes["raylet"][0].process.pid for node in self.cluster.list_all_nodes()
        ]
        children = [child for pid in raylets for child in psutil.Process(pid).children()]
        return [child for child in children if is_actor(child, name)]


def is_actor(process: psutil.Process, name: str) -> bool:
    try:
        return name in "".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def cluster_of(address: str, make: Callable[[int], object], shards: int) -> RayCluster:
    from fedgist.engines.ray_cluster import Connection, RayCluster

    return RayCluster(Connection(address), make, shards)
