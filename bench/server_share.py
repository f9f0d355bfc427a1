"""How much of a round is spent at the server, for the methods of the four papers at their sizes.

The seconds of a round are divided into

- training: the work of the pool of workers in the stages of a round,
- distillation: the steps of training at the server,
- server: updates of its state (sums, heads, optimizers) and downloads; its part of the exchange
  with the workers, and checks; the evaluation of its own models; the record and the checkpoints,
- evaluation: the evaluation of the clients' models, and probes.

Evaluation counts as often as the recipe has it. If a recipe also tests models after one more local
training, this training counts as evaluation. FedLog's table: 50 clients x 60 images.
Representation sharing: 5 clients x 240 images. Codistillation: 20 clients of each pool x 100
images; of PeriodicCodist's distillation 25 of 200 steps are done, every second round, and counted
as one step a round. FLESD: the recipe flesd/small, with one local epoch and two epochs of
distillation, which are counted as often as the recipe has them.

All methods together take about eight minutes.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from paper_sizes import (
    CODISTILLATION_CIFAR,
    FEDLOG_MNIST,
    FLESD_SMALL,
    REPSHARE_MNIST,
    PaperSize,
)

import fedgist
from fedgist.core.method import Method
from fedgist.engines.engine import EVALUATE
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.worker_pool import WorkerPool
from fedgist.methods import METHODS, base_name
from fedgist.methods.common.server_training import is_server_stage
from fedgist.runs import runner
from fedgist.runs.files.record import Line
from fedgist.runs.finished.probes import probe_of

P = ParamSpec("P")
R = TypeVar("R")
WARM = 1  # number of the last round that does not count
MOST = 0.1  # of a round, at the server
EVALUATED = 5  # rounds between evaluations that are measured


@dataclass(frozen=True)
class Measured:
    """A paper's size, the variant of a method, and how many rounds are done.

    ``training`` and ``distilling`` are factors of seconds that the size has cut.
    """

    size: PaperSize
    variant: str = ""
    rounds: int = 12  # checkpoints are every tenth
    settings: tuple[str, ...] = ()
    training: float = 1.0
    distilling: float = 1.0


BRIEF = ("train.local_epochs=1", "evaluate.every=2")
DISTILLING = (*BRIEF, "method.distillation.epochs=2")
MEASURED = {
    **{
        name: Measured(FEDLOG_MNIST)
        for name in ("local", "fedavg", "fedper", "fedrep", "cs_fl", "fedproto", "fedbabu")
    },
    **{name: Measured(FEDLOG_MNIST) for name in ("feddbe", "fedlog", "fedlog_c")},
    "lg_fedavg": Measured(FEDLOG_MNIST, "lg_fedavg@2"),
    **{name: Measured(REPSHARE_MNIST) for name in ("centralized", "fd", "repshare")},
    **{name: Measured(CODISTILLATION_CIFAR) for name in ("fedadam", "merged_codist")},
    "periodic_codist": Measured(
        CODISTILLATION_CIFAR,
        settings=("method.period=2", "method.distillation.steps=25"),
        distilling=2 / 25,
    ),
    "fedprox": Measured(FLESD_SMALL, "", 4, BRIEF, training=5.0),
    "flesd": Measured(FLESD_SMALL, "", 4, DISTILLING, training=25.0, distilling=100.0),
}
AT_SERVER = ("updates", "downloads", "own evaluation", "exchange and checks", "record")
LIMITS_OF_SERVER = {f"server: {name}, share of a round": MOST for name in MEASURED}


def server(repeats: int) -> dict[str, float]:
    """Return the seconds of each part of a round, and the server's share, for every method."""
    del repeats  # a share is a mean over rounds
    figures: dict[str, float] = {}
    for name, measured in MEASURED.items():
        parts = parts_of(name, measured)
        whole = sum(parts.values())
        at_server = sum(parts[part] for part in AT_SERVER)
        figures |= {f"server: {name}, {part} s": seconds for part, seconds in parts.items()}
        figures[f"server: {name}, share of evaluation"] = parts["evaluation"] / whole
        figures[f"server: {name}, share of distillation"] = parts["distillation"] / whole
        figures[f"server: {name}, share of a round"] = at_server / whole
    return figures


def parts_of(name: str, measured: Measured) -> dict[str, float]:
    """Return the seconds of the parts of a mean round, evaluated as often as the recipe says."""
    method = measured.variant or name
    assert base_name(method) == name
    stated = measured.size.read(method).evaluate
    lines, by_part, wall = _run(measured, method)
    rounds = len(lines)
    tests = sum(any(key.startswith("eval/") for key in line) for line in lines)
    testing = sum(line["time/round_s"] - line["time/train_s"] for line in lines)
    stages = sum(line["time/train_s"] for line in lines)
    counted = ("training", "distillation", "updates", "downloads")
    of_stages = {part: by_part.get(part, 0.0) / rounds for part in counted}
    of_clients = by_part.get("evaluation", 0.0)
    training = of_stages["training"] * measured.training
    again = training / stated.trained_every if stated.trained_every else 0.0
    return {
        "training": training,
        "distillation": of_stages["distillation"] * measured.distilling,
        "evaluation": of_clients / max(tests, 1) / stated.every + again,
        "updates": of_stages["updates"],
        "downloads": of_stages["downloads"],
        "own evaluation": (testing - of_clients) / max(tests, 1) / stated.every,
        "exchange and checks": stages / rounds - sum(of_stages.values()),
        "record": (wall - stages - testing) / rounds,
    }


def _run(measured: Measured, method: str) -> tuple[list[Line], dict[str, float], float]:
    """Do the rounds; return the lines of those that count, their parts, and all their seconds.

    The last round does not count: it is always evaluated, and some methods then train once more.
    """
    size, clock, end = measured.size, Clock(), measured.rounds
    marks: list[tuple[float, dict[str, float]]] = []
    tests = (f"evaluate.every={EVALUATED}", "evaluate.trained_every=0")
    changes = (f"train.num_rounds={end}", *tests, *measured.settings)

    def ended(_: Line) -> None:
        marks.append((time.perf_counter(), dict(clock.seconds)))
        clock.seconds.clear()

    with tempfile.TemporaryDirectory() as folder, timed_parts(METHODS[base_name(method)], clock):
        recipe, out = size.read(method, *changes), f"{folder}/run"
        run = fedgist.run(recipe, data=size.data(), out=out, callback=ended, progress=False)
    numbers = [line["round"] for line in run.rounds]
    first, last = numbers.index(WARM), numbers.index(end - 1)
    parts = [seconds for _, seconds in marks[first + 1 : last + 1]]
    names = {name for seconds in parts for name in seconds}
    total = {name: sum(seconds.get(name, 0.0) for seconds in parts) for name in names}
    return run.rounds[first + 1 : last + 1], total, marks[last][0] - marks[first][0]


@dataclass
class Clock:
    """Seconds by the name of what was done; a call within another counts as part of it."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    running: bool = False

    def timing(self, function: Callable[P, R], name_of: Callable[P, str]) -> Callable[P, R]:
        """Return the function, with its seconds counted under a name made of its arguments."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            if self.running:
                return function(*args, **kwargs)
            self.running, begin = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.running = False
                self.seconds[name_of(*args, **kwargs)] += time.perf_counter() - begin

        return timed


@contextmanager
def timed_parts(method: type[Method], clock: Clock) -> Iterator[None]:
    """Count the seconds of the parts of every round of a run within the block."""

    def always(name: str) -> Callable[..., str]:
        return lambda *_, **__: name

    def of_stage(*args: Any) -> str:
        return "distillation" if is_server_stage(args[-1].stage) else "updates"

    def of_download(*args: Any) -> str:
        return "test downloads" if args[-1].stage == EVALUATE else "downloads"

    def probes(*args: Any) -> Any:
        probe = probe_of(*args)
        return probe and clock.timing(probe, always("evaluation"))

    names: list[tuple[Any, str, Callable[..., str]]] = [
        (WorkerPool, "run", always("training")),
        (LocalEngine, "score", always("evaluation")),
        (method, "server_update", of_stage),
        (method, "download", of_download),
    ]
    with ExitStack() as stack:
        for owner, name, name_of in names:
            timed = clock.timing(getattr(owner, name), name_of)
            stack.enter_context(patch.object(owner, name, timed))
        stack.enter_context(patch.object(runner, "probe_of", probes))
        yield
