"""What a network costs: real processes on this machine, over gRPC with mutual TLS.

    python bench/network.py PART REPEATS

does one part in this process, which is the server's, and prints its figures as JSON. ``federation``
does all parts, each in a process of its own, so that its peak memory is that part's.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from fedgist.core import random
from fedgist.core.message import pack, total, type_name
from fedgist.core.method import Context, Order
from fedgist.core.tree import build
from fedgist.data.partition import partition
from fedgist.data.sources.digits import digits
from fedgist.engines.message_form import upload_form
from fedgist.federation.agreement.server_setup import server_context
from fedgist.federation.keys import provision
from fedgist.federation.keys.certificates import Identity
from fedgist.federation.keys.kits import Kit, read_kit
from fedgist.federation.network.frames import Note
from fedgist.federation.network.grpc_server import GrpcServer
from fedgist.federation.network.invitation import outlines
from fedgist.federation.network.wire import SiteWire
from fedgist.federation.server.serving import serve
from fedgist.methods.common.averaging import Weights
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe, make
from fedgist.recipe.resolve import resolve
from fedgist.runs.files.record import read_lines
from fedgist.runs.round import Observer
from fedgist.wire.envelope import Header, Packed, in_parts, unseal

FEW, MANY = 3, 50
SMALL, LARGE = 2_000, 50_000_000  # bytes of a message
WARM, EXCHANGES, LARGE_EXCHANGES, ROUNDS = 20, 200, 5, 10
PROCESSES, PATIENCE_S = 5, 300.0
ANY_SIZE = 1 << 30
BENCH = Path(__file__).parent
NEVER = 10**6  # rounds between evaluations
NAMES = ("berlin", "lyon", "ulm")
LEARNING_ROUNDS, STEADY = 20, 3  # the first rounds prepare

EXCHANGE = "federation: 2 kB x 3 sites, median s"
BOTH_WAYS = "federation: 50 MB both ways x 3 sites, median s"
PEAK = "federation: 50 sites x 50 MB, server's peak MB"
OVERHEAD = "federation: digits, beyond training, median s a round"
NETWORK_LIMITS = {EXCHANGE: 0.01, BOTH_WAYS: 3.0, PEAK: 2000.0, OVERHEAD: 0.1}


def federation(repeats: int) -> dict[str, float]:
    """Do all parts, each in a process of its own."""
    figures: dict[str, float] = {}
    for part in PARTS:
        command = [sys.executable, __file__, part, str(repeats)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        figures |= json.loads(done.stdout.splitlines()[-1])
    return figures


class OpenDesk:
    """A desk that refuses nobody."""

    def __init__(self, kit: Kit, names: Sequence[str]) -> None:
        self.certificate, self.names = kit.certificate.decode(), list(names)

    def why_refused(self, identity: Identity) -> str | None:
        """Accept every certificate."""

    def number_of(self, identity: Identity) -> int:
        """Return the place of the site's name."""
        return self.names.index(identity.name)

    def invitation(self, number: int, greeting: Note) -> Note:
        """Return the certificate with which the server signs."""
        del number, greeting
        return {"certificate": self.certificate}

    def judge(self, number: int, hello: Note) -> None:
        """Accept every hello."""

    def moved(self, number: int, *, sent: int = 0, received: int = 0) -> None:
        """Take no note of messages."""

    def saw(self, number: int, state: str, text: str = "") -> None:
        """Take no note."""

    def command(self, name: str, identity: Identity) -> Note:
        """Do nothing."""
        del name, identity
        return {}


@dataclass(frozen=True)
class Place:
    """A folder with the kits of a federation whose sites have these names."""

    folder: Path
    names: tuple[str, ...]
    port: int

    @staticmethod
    def of(folder: Path, names: Sequence[str]) -> Place:
        """Make the kits, with keys made centrally."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        table = {
            "name": "bench",
            "server": f"localhost:{port}",
            "sites": list(names),
            "keys": "central",
        }
        (folder / "federation.toml").write_text(tomli_w.dumps(table))
        provision.provision(folder / "federation.toml", folder / "kits")
        return Place(folder, tuple(names), port)

    @property
    def kit(self) -> Kit:
        """The server's kit."""
        return read_kit(self.folder / "kits/server")

    @property
    def listen(self) -> str:
        """The server's address."""
        return f"127.0.0.1:{self.port}"

    def start_sites(
        self, processes: int, hello: Note, upload: object = None
    ) -> list[subprocess.Popen[bytes]]:
        """Start echo sites in processes; ``upload`` is the message that each of them sends."""
        table = {"kits": str(self.folder / "kits"), "hello": hello, "upload": None}
        if upload is not None:
            blob = self.folder / "upload.safetensors"
            blob.write_bytes(pack(upload))
            table |= {"upload": str(blob), "type": type_name(type(upload))}
        file = self.folder / "sites.json"
        file.write_text(json.dumps(table))
        command = [sys.executable, str(BENCH / "echo_sites.py"), str(file)]
        groups = [self.names[i::processes] for i in range(processes)]
        return [subprocess.Popen([*command, *group]) for group in groups]


@contextlib.contextmanager
def ending(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End the processes on exit, if they have not ended by themselves."""
    try:
        yield
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.wait(PATIENCE_S)


def peak_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def small(repeats: int) -> dict[str, float]:
    """Time exchanges of 2 kB with three sites."""
    took = _exchanges(SMALL, WARM, EXCHANGES * repeats)
    name = EXCHANGE.removesuffix("median s")
    return {
        f"{name}best s": min(took),
        EXCHANGE: statistics.median(took),
        f"{name}max s": max(took),
    }


def large(repeats: int) -> dict[str, float]:
    """Time exchanges of 50 MB with three sites."""
    took = _exchanges(LARGE, 1, max(LARGE_EXCHANGES, repeats))
    name = BOTH_WAYS.removesuffix("median s")
    middle = statistics.median(took)
    return {
        f"{name}best s": min(took),
        BOTH_WAYS: middle,
        f"{name}max s": max(took),
        f"{name}server's peak MB": peak_mb(),
    }


def _exchanges(size: int, warm: int, count: int) -> list[float]:
    """Return the seconds of exchanges with three sites: pack, send, receive, check and add."""
    names = [f"site-{number}" for number in range(FEW)]
    with tempfile.TemporaryDirectory() as folder:
        place = Place.of(Path(folder), names)
        wire = SiteWire()
        server = GrpcServer(place.kit, place.listen, OpenDesk(place.kit, names), wire, Path(folder))
        server.start()
        processes = place.start_sites(FEW, {})
        with ending(processes), contextlib.closing(server):
            while len(wire.present()) < FEW:
                time.sleep(0.05)
            message = Weights({"w": torch.randn(size // 4)})
            took = [_exchange(wire, message) for _ in range(warm + count)]
            server.end("the measurement has ended")
            for process in processes:
                process.wait(PATIENCE_S)
    return took[warm:]


def _exchange(wire: SiteWire, message: Weights) -> float:
    begin = time.perf_counter()
    packed, header = (
        Packed.of(message),
        Header(purpose="train", run="bench", round=1, stage="train", client=0, architecture="a"),
    )
    envelopes = [
        (number, in_parts(header.model_copy(update={"client": number}), {"download": packed}))
        for number in range(FEW)
    ]
    summed = None
    for _, blob in wire.exchange(envelopes, PATIENCE_S, ANY_SIZE):
        download = unseal(blob, ANY_SIZE)[1]["download"]
        summed = download if summed is None else total([summed, download])
    return time.perf_counter() - begin


def many_large(repeats: int) -> dict[str, float]:
    """Do two rounds of FedAvg with 50 sites and 50 MB each way by a real server."""
    del repeats
    before = peak_mb()
    hidden = LARGE // 4 // (64 + 1 + 10)
    took = _rounds(hidden, 2)
    return {
        "federation: 50 sites x 50 MB, best s a round": min(took),
        "federation: 50 sites x 50 MB, worst s a round": max(took),
        PEAK: peak_mb(),
        f"{PEAK.removesuffix('peak MB')}MB before": before,
    }


def many(repeats: int) -> dict[str, float]:
    """Do rounds with 50 sites and small messages by a real server."""
    del repeats
    took = _rounds(8, ROUNDS)
    return {
        "federation: 50 sites, best s a round": min(took),
        "federation: 50 sites, median s a round": statistics.median(took),
        f"federation: 50 sites, {ROUNDS} rounds, s": sum(took),
    }


def _rounds(hidden: int, rounds: int) -> list[float]:
    """Return the seconds of each round of FedAvg with 50 sites that train nothing."""
    names = [f"site-{number}" for number in range(MANY)]
    recipe = _recipe(
        "fedavg",
        rounds,
        model={"name": "mlp", "hidden": [hidden]},
        evaluate={"every": NEVER},
        federation={"least_sites": MANY, "least_replies": MANY},
    )
    hello, upload = _hello_and_upload(recipe, names)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, ending(processes):
        place = Place.of(Path(folder), names)
        run = place.folder / "run"

        def start(_: int) -> None:
            processes.extend(place.start_sites(PROCESSES, hello, upload))

        serve(place.kit, recipe, run, Observer(), place.listen, ready=start)
        return [line["time/round_s"] for line in read_lines(run / "rounds.jsonl")]


def _hello_and_upload(recipe: Recipe, names: Sequence[str]) -> tuple[Note, object]:
    """Return what a site says when it is ready, and a valid upload of ones."""
    setup = resolve(recipe, Overrides())
    side = server_context(setup, names)
    task, key = side.task, random.key(0)
    order, ctx = Order(0, task.main), Context(key, task, 1, "train")
    down = setup.method.download(setup.method.init_server(ctx), order, ctx)
    form = upload_form(setup.method, ctx, task.main, down)
    arrays = {n: torch.ones(shape, dtype=dtype) for n, (dtype, shape) in form.arrays.items()}
    outlined = {n: o.model_dump(mode="json") for n, o in outlines(task).items()}
    return {"outlines": outlined}, build(form.kind, arrays)


def _recipe(method: str, rounds: int, **sections: Any) -> Recipe:
    train = {"num_rounds": rounds, "local_epochs": 1, "batch_size": 16, "lr": 0.05}
    return make(
        {
            "seed": 5,
            "data": {"classes": [str(n) for n in range(10)], "mean": [0.305], "std": [0.376]},
            "facts": {"input_shape": [64]},
            "method": {"name": method},
            "train": train | {"optimizer": "sgd"},
            "engine": {"workers": 1, "server_threads": 1},
            **sections,
        }
    )


def learning(repeats: int) -> dict[str, float]:
    """Compare rounds of FedLog on digits by four processes with the time that the sites train."""
    del repeats
    models = {
        "a": {"model": "mlp", "hidden": [24], "clients": ["berlin"]},
        "b": {"model": "mlp", "hidden": [40, 24], "clients": ["lyon"]},
        "c": {"model": "mlp", "hidden": [16, 32, 24], "clients": ["ulm"]},
    }
    recipe = _recipe(
        "fedlog",
        LEARNING_ROUNDS,
        clients={"architectures": models},
        federation={"least_sites": FEW, "least_replies": FEW},
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Place.of(Path(folder), NAMES)
        _write_rows(place)
        (place.folder / "recipe.toml").write_text(recipe.to_toml())
        _run_commands(place)
        lines = [x for x in read_lines(place.folder / "run/rounds.jsonl") if x["round"] >= STEADY]
        training = _slowest(place, lines, ("train",))
        working = _slowest(place, lines, ("train", "score"))
    seconds = [line["time/round_s"] for line in lines]
    beyond = [s - t for s, t in zip(seconds, training, strict=True)]
    return {
        "federation: digits, median s a round": statistics.median(seconds),
        "federation: digits, slowest site's training, median s": statistics.median(training),
        "federation: digits, beyond training, best s a round": min(beyond),
        OVERHEAD: statistics.median(beyond),
        "federation: digits, beyond training and scoring, median s": statistics.median(
            s - w for s, w in zip(seconds, working, strict=True)
        ),
    }


def _write_rows(place: Place) -> None:
    """Write each site's rows of the digits, and its ``site.toml``."""
    images = digits()
    x, x_test = (part.float().flatten(1).numpy() / 16 for part in (images.x, images.x_test))
    data = replace(images, x=torch.tensor(x), x_test=torch.tensor(x_test), scale=1.0)
    parts = partition(data, "dirichlet", FEW, random.key(5, "partition"), alpha=1.0)
    for number, name in enumerate(place.names):
        train, test = parts.train[number], parts.test[number]
        rows = {"x": x[train], "y": images.y[train].numpy()}
        rows |= {"x_test": x_test[test], "y_test": images.y_test[test].numpy()}
        np.savez(place.folder / f"{name}.npz", **rows)
        table = {"state": f"state-{name}", "data": {"name": "npz", "path": f"{name}.npz"}}
        (place.folder / f"{name}.toml").write_text(tomli_w.dumps(table))


def _run_commands(place: Place) -> None:
    """Run a server and its sites by their commands until the run has ended."""
    at = place.folder
    program = [sys.executable, "-m", "fedgist.cli", "server", str(at / "kits/server")]
    program += [str(at / "recipe.toml"), "--out", str(at / "run"), "--listen", place.listen, "-q"]
    commands = [program]
    for name in place.names:
        timed = [sys.executable, str(BENCH / "timed_site.py"), str(at / f"{name}.jsonl")]
        kit, table = at / "kits/sites" / name, at / f"{name}.toml"
        commands.append([*timed, "site", str(kit), "--config", str(table)])
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    with ending(processes):
        if processes[0].wait(PATIENCE_S):
            sys.exit("the server of the federation failed")


def _slowest(place: Place, lines: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[float]:
    """Return the seconds that the slowest site worked in each round."""
    seconds: dict[tuple[int, str], float] = {}
    for name in place.names:
        for text in (place.folder / f"{name}.jsonl").read_text().splitlines():
            entry = json.loads(text)
            if entry["work"] in kinds:
                key = entry["round"], name
                seconds[key] = seconds.get(key, 0.0) + entry["s"]
    return [max(seconds[line["round"], name] for name in place.names) for line in lines]


PARTS: dict[str, Callable[[int], dict[str, float]]] = {
    "small": small,
    "large": large,
    "many": many,
    "learning": learning,
    "many_large": many_large,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](int(sys.argv[2]))))
