"""Checks on a GPU: laws of every method, bits of a resumed run, and waits for the GPU."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from gpu_flesd import PAPER, TINY, distillation_stage
from gpu_rounds import federation_of, sized
from gpu_setting import Figures, Measured, NotHereError, Setting
from torch import Tensor
from workloads import W1, W3, Workload

import fedgist
from fedgist.core.method import Method
from fedgist.errors import first_line
from fedgist.methods import METHODS
from fedgist.methods.common.codistillation import Distillation
from fedgist.methods.common.server_training import STEPS_AT_ONCE
from fedgist.methods.fedrep import FedRep
from fedgist.methods.flesd import FLESD, SimilarityDistillation
from fedgist.methods.merged_codist import MergedCodist
from fedgist.runs.files.record import Line
from fedgist.testing import LAWS, Law, LawError, MethodUnderTest
from fedgist.testing.laws import try_law
from fedgist.testing.small_worlds import without_times

TRIED = ("1", "3", "7")  # the laws in which a device's arithmetic shows
NO_TIME = "not measured: no time left"
DETERMINISTIC = "deterministic algorithms"
PACKAGE = Path(fedgist.__file__).parent
SYNCHRONIZING = "called a synchronizing CUDA operation"
#: What takes long by default, or makes rounding large, with fewer steps.
SHORTER: Mapping[str, Method] = MappingProxyType(
    {
        "fedrep": FedRep(head_epochs=2),
        "merged_codist": MergedCodist(distillation=Distillation(steps=4)),
        "flesd": FLESD(
            distillation=SimilarityDistillation(epochs=2, batch_size=32, momentum=0.5, queue=40)
        ),
    }
)


def laws(setting: Setting) -> Measured:
    """Yield ``pass``, or the first line of the error, of each law for every registered method.

    A law that fails is tried again with torch's deterministic algorithms.
    """
    names = ("fedavg", "fedlog") if setting.quick else tuple(METHODS)
    chosen = [law for law in LAWS if law.name.split()[0] in TRIED]
    yield {"laws": {law.name.split()[0]: law.name for law in chosen}}
    for name in names:
        if setting.left <= 0:
            yield {"methods": {name: dict.fromkeys(TRIED, NO_TIME)}}
            continue
        yield {"methods": {name: verdicts(SHORTER.get(name) or METHODS[name](), chosen, setting)}}


def verdicts(method: Method, chosen: Sequence[Law], setting: Setting) -> dict[str, str]:
    """Return the verdict on each law, by its number."""
    sections = {"engine": {"device": setting.device}}
    found = {}
    subject = MethodUnderTest(method, sections)
    for law in chosen:
        number = law.name.split()[0]
        found[number] = verdict(law, subject)
        if found[number] != "pass" and setting.left > 0:
            with deterministic():
                again = verdict(law, MethodUnderTest(method, sections))
            found[f"{number}, {DETERMINISTIC}"] = again
    return found


def verdict(law: Law, subject: MethodUnderTest) -> str:
    """Return ``pass``, or the first line of the error; an error of the GPU itself is raised."""
    try:
        try_law(law, subject)
    except LawError as error:
        if "CUDA error" in str(error):  # nothing more can be done in this process
            raise
        return first_line(error)
    return "pass"


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch use deterministic algorithms alone."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class StoppedHereError(Exception):
    """A run is stopped after a round, as a test of resuming it."""


@dataclass(frozen=True)
class Bits:
    """The arrays of a run's checkpoint, and its record without times."""

    arrays: Mapping[str, Tensor]
    rounds: Sequence[Line]

    @staticmethod
    def of(result: Any) -> Bits:
        """Return the bits of a finished run."""
        arrays = result.server_run.checkpoint().copied().arrays()
        return Bits(arrays, [without_times(line) for line in result.rounds])

    def compared(self, other: Bits) -> Figures:
        """Return whether both are equal, and the largest difference of any number."""
        pairs = [(self.arrays[name].double(), a.double()) for name, a in other.arrays.items()]
        same = self.arrays.keys() == other.arrays.keys()
        same = same and all(torch.equal(a, b) for a, b in pairs) and self.rounds == other.rounds
        far = max(float((a - b).abs().max()) for a, b in pairs if a.numel())
        return {"same bits": same, "largest difference": far}


def resume(setting: Setting) -> Measured:
    """Yield whether resumed runs of two methods have the bits of uninterrupted ones."""
    for name in ("fedavg", "fedlog"):
        found = _resumed(name, setting)
        yield {name: found}
        if not found["resumed"]["same bits"] and setting.left > 0:
            with deterministic():
                yield {f"{name}, {DETERMINISTIC}": _resumed(name, setting)}


def _resumed(name: str, setting: Setting) -> Figures:
    """Compare a run with the same run again, and with one that was stopped and resumed."""
    rounds, work = (2 if setting.quick else 6), sized(W1, setting)
    model = {"name": "fedlog_mnist", "dropout": 0.5}
    recipe = {
        "model": model,
        "method": {"name": name},
        "clients": {"num_clients": work.clients},
        "partition": {"name": "iid"},
        "train": {**work.training(), "num_rounds": rounds, "optimizer_memory": "run"},
        "evaluate": {"every": rounds},
        "engine": {
            "device": setting.device,
            "workers": 1,
            "plans": {"fedlog_mnist": {"cohort_size": max(2, work.clients // 2)}},
        },
    }

    def stop(line: Line) -> None:
        if line["round"] == rounds // 2:
            raise StoppedHereError

    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"data": work.data(), "progress": False}
        whole, again = (
            Bits.of(fedgist.run(recipe, out=f"{folder}/{out}", **given)) for out in ("one", "two")
        )
        with contextlib.suppress(StoppedHereError):
            fedgist.run(recipe, out=f"{folder}/cut", callback=stop, **given)
        cut = Bits.of(fedgist.run(recipe, out=f"{folder}/cut", resume=True, **given))
    return {
        "rounds": rounds,
        "stopped after": rounds // 2,
        "resumed": whole.compared(cut),
        "run again": whole.compared(again),
    }


def synchronizations(setting: Setting) -> Measured:
    """Yield where the CPU waits for the GPU in a round of workloads and in FLESD's stage."""
    if not setting.on_gpu:
        raise NotHereError("only a GPU is waited for")
    for work in (W1, W3):
        yield {work.name: _of_round(sized(work, setting), setting)}
    stage = distillation_stage(TINY if setting.quick else PAPER, setting.device, augmented=True)
    stage()
    with waits_shown():
        found = synchronizing(stage)
    yield {"a stage of FLESD's distillation": {**found, "steps": STEPS_AT_ONCE}}


def _of_round(work: Workload, setting: Setting) -> Figures:
    with federation_of(work, setting) as federation:
        federation.advance()
        with waits_shown():
            found = synchronizing(federation.advance)
        cohorts = [plan.cohort_size for plan in federation.side.plans.values()]
    return {**found, "steps": work.epochs * -(-work.rows // work.batch_size), "cohorts": cohorts}


@contextmanager
def waits_shown() -> Iterator[None]:
    """Let torch warn of each wait of the CPU for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronizing(work: Callable[[], object]) -> Figures:
    """Return the number of waits in some work, and how often each line of fedgist waits."""
    lines: Counter[tuple[str, str]] = Counter()

    def noted(message: Warning | str, *_: object, **__: object) -> None:
        if SYNCHRONIZING in str(message):
            stack = traceback.extract_stack()[:-1]
            lines[line_of([f for f in stack if f.filename != warnings.__file__])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        work()
    counted = [
        {"line": line, "code": code, "count": count} for (line, code), count in lines.most_common()
    ]
    return {"count": lines.total(), "distinct": len(counted), "lines": counted}


def line_of(frames: Sequence[traceback.FrameSummary]) -> tuple[str, str]:
    """Return the innermost line of fedgist in a stack, and its code; else the innermost of all."""
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    frame = (ours or list(frames))[-1]
    path = Path(frame.filename)
    name = path.relative_to(PACKAGE) if ours else path.name
    return f"{name}:{frame.lineno}", frame.line or ""


def machine(setting: Setting) -> Measured:
    """Yield what this machine is; fail if the device is not there."""
    figures: Figures = {"torch": torch.__version__, "cores": os.cpu_count(), "gpu": None}
    if setting.on_gpu:
        if not torch.cuda.is_available():
            raise NotHereError("torch sees no GPU on this machine; try --device cpu --quick")
        held = torch.cuda.get_device_properties(setting.device)
        figures |= {"gpu": held.name, "gpu_mb": held.total_memory / 1e6, "cuda": torch.version.cuda}
        torch.zeros(1, device=setting.device)
    yield figures
