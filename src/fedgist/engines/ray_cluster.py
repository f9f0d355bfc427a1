"""Clients on the machines of a Ray cluster, where an actor hosts each shard.

Ray unpickles what reaches its ports, which is code: whoever reaches them and has the cluster's
token, if it has one, can do all that its user can. See docs/cluster.md.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from fedgist.core.tree import Tree
from fedgist.engines.process_control import keep_memory, set_up_torch
from fedgist.engines.sharded_engine import Call, Value
from fedgist.engines.stop_signals import handlers_kept
from fedgist.engines.worker_pool import attempt
from fedgist.errors import FedgistError, RecipeError, WorkerError, first_line

LOCAL = "local"  # address of a cluster that is started on this machine, and ends with the run
PATIENCE_S = 10.0  # for the first answer of a cluster's address
SILENT_S = 20.0  # seconds of waiting for the actors before the first word about it
SILENT = logging.CRITICAL + 1
HINT = (
    "; no cluster is there, or it wants a token: RAY_AUTH_MODE=token, and the cluster's token in "
    "~/.ray/auth_token or RAY_AUTH_TOKEN"
)
COLORS = re.compile(r"\x1b\[[0-9;]*m")  # in texts of Ray
DATA_FOLDER = "FEDGIST_DATA"  # the variable that actors need, too
Make = Callable[[int], object]  # the host of a shard, by its number


class Connection:
    """The connection of this process to a cluster, or to one that is started on this machine.

    The address is ``address``, or that of the variable ``RAY_ADDRESS``, or else ``local``. If this
    process is connected already, that cluster is used, and it stays.

    Raises
    ------
    RecipeError
        If no cluster answers at the address.
    """

    def __init__(self, address: str | None = None) -> None:
        self.ours = not ray.is_initialized()
        if not self.ours:
            send_tensors_as_arrays()
            return
        key = "engine.address" if address else "RAY_ADDRESS"
        target = address or os.environ.get("RAY_ADDRESS") or LOCAL
        options: dict[str, Value] = {"include_dashboard": False} if target == LOCAL else {}
        if DATA_FOLDER in os.environ:
            options["runtime_env"] = {"env_vars": {DATA_FOLDER: os.environ[DATA_FOLDER]}}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to Ray's makers
        try:
            _check_reachable(target)
            # what fails, an exception says
            with handlers_kept():
                ray.init(address=target, log_to_driver=False, logging_level=SILENT, **options)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            self.close()
            hint = "" if target == LOCAL else HINT
            raise RecipeError(f"{key} = {target!r}: {first_line(error)}{hint}") from error
        send_tensors_as_arrays()

    def slots(self, device: str) -> int:
        """Return the number of the cluster's cores, or of its GPUs if ``device`` is one."""
        resources: dict[str, float] = ray.cluster_resources()
        return int(resources.get("CPU" if device == "cpu" else "GPU", 0))

    def room(self, cores: int, gpus: float) -> int:
        """Return for how many processes with so many cores and GPUs the machines have room."""
        each = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        of_cores = [int(have.get("CPU", 0)) // cores for have in each]
        of_gpus = [int(have.get("GPU", 0) / gpus) if gpus else math.inf for have in each]
        return sum(int(min(pair)) for pair in zip(of_cores, of_gpus, strict=True))

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if not self.ours:
            return
        ray.shutdown()
        self.ours = False


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing answers at ``host:port``: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S).close()


class RayCluster:
    """All clients on the machines of a Ray cluster, in one process for each shard.

    The process is an actor, and ``make`` makes the host of a shard there, by its number.
    """

    def __init__(
        self,
        connection: Connection,
        make: Make,
        shards: int,
        device: str = "cpu",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare the actors. ``say`` is called with words about a long wait for them."""
        self.connection, self.make, self.shards = connection, make, shards
        self.device, self.say = device, say
        self.actors: list[Value] = []

    def start(self) -> None:
        """Make the hosts, and wait until all are ready.

        Raises
        ------
        FedgistError
            If a host cannot be made.
        RecipeError
            If the cluster has no core, or no GPU for a recipe that needs one.
        """
        make = ray.put(self.make)  # it crosses once
        slots = self._slots()
        answers = waiting = self._begin(make, slots)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=SILENT_S)
            if waiting and self._slots() < slots:  # a node has gone, and took cores with it
                self._kill()
                slots = self._slots()
                answers = waiting = self._begin(make, slots)
            elif waiting:
                ready = self.shards - len(waiting)
                self.say(
                    f"waiting for the cluster: {ready} of {self.shards} shards are ready; others "
                    "may be using its cores (`ray status` shows it)"
                )
        self._results(answers)

    def _slots(self) -> int:
        slots = self.connection.slots(self.device)
        if not slots:
            kind = "core" if self.device == "cpu" else "GPU"
            raise RecipeError(f"engine.device = {self.device!r}: the Ray cluster has no {kind}")
        return slots

    def _begin(self, make: Make | ray.ObjectRef[Make], slots: int) -> list[Value]:
        """Let actors make the hosts: each has a slot to itself, or shares one with few others."""
        share = 1 / -(-self.shards // slots)
        on_cpu = self.device == "cpu"
        needs = {"num_cpus": share} if on_cpu else {"num_cpus": 0, "num_gpus": share}
        actor_type = ray.remote(ShardActor).options(**needs)
        self.actors = [actor_type.remote() for _ in range(self.shards)]
        return [
            actor.begin.remote(make, number, versions(), Path.cwd())
            for number, actor in enumerate(self.actors)
        ]

    def run(self, calls: Sequence[Call]) -> list[Value]:
        """Call the hosts, all at once; return what they return, in the order of the calls."""
        if not self.actors:
            raise WorkerError("the actors of the Ray cluster have ended")
        sent = {id(down): down for call in calls for down in call.downs}
        sent = {name: ray.put(down) for name, down in sent.items()}
        answers = [
            self.actors[call.shard].call.remote(
                call.function, call.arguments, *(sent[id(d)] for d in call.downs)
            )
            for call in calls
        ]
        return self._results(answers)

    def close(self) -> None:
        """End the actors, and leave the cluster."""
        self._kill()
        self.connection.close()

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def _results(self, answers: Sequence[ray.ObjectRef[tuple[bool, object]]]) -> list[Value]:
        try:
            results = ray.get(list(answers))
        except RayTaskError as error:  # what crosses cannot be unpickled, say
            self.close()
            raise WorkerError(COLORS.sub("", str(error))) from error
        except RayError as error:
            self.close()
            raise WorkerError(
                f"an actor of the Ray cluster died ({first_line(error)}); if memory ran out, its "
                "machine needs more, or a new run a smaller engine.cohort_size"
            ) from error
        for good, value in results:
            if not good:
                self.close()
                raise value if isinstance(value, FedgistError) else WorkerError(value)
        return [value for _, value in results]


class ShardActor:
    """One process of the cluster, with the host of a shard. Every answer says whether it is one."""

    def __init__(self) -> None:
        set_up_torch()
        keep_memory()
        send_tensors_as_arrays()
        self.host: Value = None

    def begin(
        self, make: Make, number: int, driver: Mapping[str, str], folder: Path
    ) -> tuple[bool, object]:
        """Make the host, where relative paths start at the same folder, if it is here, too."""
        good, problem = attempt(check_versions, driver)
        if not good:
            return False, problem
        if folder.is_dir():
            os.chdir(folder)
        good, made = attempt(make, number)
        self.host = made if good else None
        return good, None if good else made

    def call(
        self, function: str, arguments: tuple[object, ...], *downs: Tree
    ) -> tuple[bool, object]:
        """Call a function of the host."""
        return attempt(getattr(self.host, function), *arguments, *downs)


def versions() -> dict[str, str]:
    """Return the versions here that must be the same on every machine of a cluster."""
    versions = {name: metadata.version(name) for name in ("fedgist", "torch", "ray")}
    return versions | {"fedgist": f"{versions['fedgist']} (code {_code()})"}


def _code() -> str:
    """Return a digest of fedgist's files: development changes them without a new version."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def check_versions(driver: Mapping[str, str]) -> None:
    """Raise WorkerError if this machine has other versions than the driver's."""
    here = versions()
    for name, version in driver.items():
        if here[name] != version:
            raise WorkerError(
                f"{platform.node()} has {name} {here[name]}, and the driver has {version}: they "
                "must be the same"
            )


def send_tensors_as_arrays() -> None:
    """Let this process send a tensor as its own numbers: pickled, a view would bring its storage.

    The receiver has a copy, which it may write to.
    """
    ray.util.register_serializer(
        Tensor,
        serializer=lambda tensor: tensor.detach().cpu().numpy(),
        deserializer=torch.tensor,
    )
