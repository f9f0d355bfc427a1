"""Choice of a run's execution plans by timing its own first steps."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from fedgist.core.method import Context, Method, Order, Phase, Task
from fedgist.core.nets.compiled.kernel_library import (
    Compiled,
    KernelChoice,
    compiler,
    library,
    library_file,
)
from fedgist.core.nets.convolution import Conv2d
from fedgist.core.nets.kernel_choice import compilable
from fedgist.core.nets.net import Architecture
from fedgist.core.tree import Tree
from fedgist.data.sources.file_sizes import usable_memory
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.plans.kernel_building import have_kernels
from fedgist.engines.plans.kernel_timing import faster_layers
from fedgist.engines.plans.plan import (
    Convolutions,
    Plan,
    choose,
    remembered,
    sizes,
    why_alone,
)
from fedgist.engines.population import HostSettings, Population
from fedgist.engines.process_control import as_workers_do
from fedgist.engines.worker_pool import WorkerPool, default_workers
from fedgist.errors import RecipeError
from fedgist.training import local_training
from fedgist.training.cohort import Clients, Cohort

STEPS = 3  # timed steps of the real work for each candidate
LONG_S = 0.05  # if the first step takes so long, one more is enough
#: On a GPU a phase is timed as it runs, captures included, but with at most so many steps. One step
#: alone shows how fast the CPU starts kernels, and not how long a captured step takes.
STEPS_ON_GPU = 32
LONG_ON_GPU_S = 0.2
TRIES = 2  # measurements of each candidate; the fastest one counts


def choose_plans(
    method: Method,
    task: Task,
    population: Population,
    settings: HostSettings,
    server: Tree,
    fixed: Mapping[str, Plan],
    *,
    cohort_size: int | None = None,
    memory_limit: int | None = None,
    kernels: KernelChoice = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Plan]:
    """Return a plan for each architecture: the ``fixed`` one, or the fastest on this machine.

    Before a plan is timed, ``say`` is called with a line of text about it.

    Raises
    ------
    RecipeError
        If a plan has compiled kernels, and ``kernels`` refuses them.
    """
    _check_kernels(fixed, kernels)
    plans = dict(fixed)
    probe = _Probe(method, task, population, settings, server, memory_limit, kernels, say)
    timed = {name: arch for name, arch in task.architectures.items() if name not in plans}
    needed = any(plan.kernels for plan in fixed.values())
    if needed or any(probe.may_compile(name, arch) for name, arch in timed.items()):
        have_kernels(say)
    for name, arch in timed.items():
        plans[name] = probe.plan(name, arch, cohort_size)
    return plans


def _check_kernels(fixed: Mapping[str, Plan], kernels: KernelChoice) -> None:
    for name, plan in fixed.items():
        if kernels == "torch" and plan.kernels:
            raise RecipeError(
                f"engine.kernels = 'torch' refuses the compiled kernels of engine.plans.{name}: "
                "take them out of the plan, or use engine.kernels = 'auto'"
            )


class _Probe:
    """A measurement of a few steps of round 1 on copies of clients, by a candidate plan."""

    def __init__(
        self,
        method: Method,
        task: Task,
        population: Population,
        settings: HostSettings,
        server: Tree,
        memory_limit: int | None,
        kernels: KernelChoice,
        say: Callable[[str], None],
    ) -> None:
        self.kernels = kernels
        self.method, self.task, self.population, self.server = method, task, population, server
        # features of rows are not made: what takes time is what comes after them
        blank = settings.features if settings.features == "raw" else "blank"
        self.settings, self.say = replace(settings, workers=1, features=blank), say
        self.on_gpu = settings.device.startswith("cuda")
        free = torch.cuda.mem_get_info(settings.device)[0] if self.on_gpu else usable_memory()
        self.memory_limit = memory_limit or free
        self.first_phases = {name: self._first_phase(name) for name in task.architectures}

    def _first_phase(self, name: str) -> tuple[str, tuple[Phase, ...]]:
        """Return the first stage in which an architecture learns, and its first phase, if any."""
        ctx = Context(torch.zeros((), dtype=torch.int64), self.task, 1, "", architecture=name)
        stages = self.method.stages(replace(ctx, architecture=""))
        phases = {s: self.method.phases(replace(ctx, stage=s)) for s in stages}
        return next(((s, each[:1]) for s, each in phases.items() if each), ("", ()))

    def plan(self, name: str, arch: Architecture, fixed: int | None) -> Plan:
        """Return the execution plan for one architecture."""
        clients = [c for c in self.population.clients if name in c.architectures]
        if not self._trains(name):
            return Plan(fixed or 1)
        # the machine's cores, not engine.workers: the plan must not depend on how many workers run
        cores = default_workers(self.settings.device)
        training = self.task.training
        pool = self.task.pools.get(name)
        at_once = pool.per_round if pool else math.ceil(training.fraction_train * len(clients))
        most = max(1, self.memory_limit // cores // max(1, self._bytes(name)))
        candidates = [fixed] if fixed else sizes(at_once, cores, most)
        way = {
            "method": [type(self.method).__qualname__, repr(vars(self.method))],
            "code": _code_of([self.method, self.task.objective]),
            "kernels": self._library(name, arch),
        }
        net = self._description(name, arch)
        # which method trains changes what can be stacked, and hardly what is fastest
        tried = remembered({**net, **way}, lambda: self._tried(name, arch))
        if tried["note"]:
            return Plan(1, stack=False, note=tried["note"])
        compiled = bool(tried["compiled"])
        timed = {**net, "sizes": candidates, "kernels": way["kernels"] if compiled else ""}
        return Plan(
            **remembered(
                timed,
                lambda: asdict(self._measured(name, arch, candidates, cores, compiled=compiled)),
            )
        )

    def _library(self, name: str, arch: Architecture) -> str:
        """Return the name of the library of kernels that may train an architecture, or nothing."""
        file = library_file() if self.may_compile(name, arch) and library() else None
        return "" if file is None else file.name

    def _description(self, name: str, arch: Architecture) -> dict[str, object]:
        """Return what a step's time depends on: the net, its training, and the rows."""
        training = self.task.training
        return {
            "model": repr(arch.module),
            "arrays": {n: list(a.shape) for n, a in self.task.starts[name].params.items()},
            "input": arch.input_shape,
            "code": _code_of(arch.module.modules()),
            "training": [
                training.optimizer,
                training.batch_size,
                training.precision,
                bool(training.clip_norm),
            ],
            "private": self._private,
            "device": self.settings.device,
            "rows": min(training.batch_size, int(self.population.train.counts.max())),
            **({"frozen": True} if arch.frozen else {}),
            **({"steps": steps} if (steps := self._length(name, 0.0)[0]) != STEPS else {}),
        }

    @property
    def _private(self) -> bool:
        privacy = self.task.privacy
        return privacy is not None and privacy.steps is not None

    def _tried(self, name: str, arch: Architecture) -> dict[str, str | bool]:
        """Return why the method cannot be stacked, if so, and whether it can have the kernels."""
        note = why_alone(
            lambda plan: self._try(name, plan), "each" if _layouts(arch) else "stacked"
        )
        if note or not self.may_compile(name, arch) or library() is None:
            return {"note": note, "compiled": False}
        every: dict[str, Compiled] = dict.fromkeys(compilable(arch.module), "compiled")
        try:
            self._try(name, Plan(2, kernels=every))
        except (RuntimeError, ValueError, TypeError):  # the loss takes second derivatives, say
            return {"note": "", "compiled": False}
        return {"note": "", "compiled": True}

    def _trains(self, name: str) -> bool:
        """Return whether clients train an architecture."""
        able = any(name in client.architectures for client in self.population.clients)
        return able and bool(self.first_phases[name][1])

    def may_compile(self, name: str, arch: Architecture) -> bool:
        """Return whether compiled kernels, if they are built, can train this architecture."""
        plain = self.task.training.precision == "float32" and not self._private
        able = self.kernels == "auto" and self.settings.device == "cpu" and self._trains(name)
        return plain and able and not arch.frozen and bool(compilable(arch.module))

    def _kernels(self, arch: Architecture) -> Mapping[str, Compiled]:
        """Return the layers that the compiled kernels run faster than torch does."""
        training = self.task.training
        rows = min(training.batch_size, int(self.population.train.counts.max()))
        pool = WorkerPool(functools.partial(faster_layers, arch), 2)
        with contextlib.closing(pool):  # in a worker, as in a run
            kernels: dict[str, Compiled] = pool.run([rows])[0]
        return kernels

    def _measured(
        self,
        name: str,
        arch: Architecture,
        candidates: Sequence[int],
        cores: int,
        *,
        compiled: bool,
    ) -> Plan:
        self.say(
            f"measuring how many clients with {name} this machine trains fastest together (once "
            "for each model)"
        )
        if self.may_compile(name, arch) and library() is None and compiler() is None:
            self.say(
                "no C compiler is here: `pip install 'fedgist[compiler]'` installs one, with "
                "which fedgist makes faster convolutions"
            )
        kernels = self._kernels(arch) if compiled else {}
        pool = WorkerPool(lambda plan: self._seconds(name, plan), cores)
        with contextlib.closing(pool):
            return choose(
                # all cores at once, as in a run: caches and memory are shared
                lambda plan: max(pool.run([plan] * cores)),
                candidates,
                _layouts(arch) or ("stacked",),
                kernels,
            )

    def _prepare(self, name: str, plan: Plan) -> tuple[Cohort, Clients]:
        task = replace(self.task, architectures={name: self.task.architectures[name]})
        engine = LocalEngine(self.method, task, self.population, self.settings, {name: plan})
        ctx = Context(engine.host.key, self.task, 1, self.first_phases[name][0])
        clients = [c for c in self.population.clients if name in c.architectures]
        orders = [Order(c.id, name) for c in clients[: max(64, plan.cohort_size)]]
        downs = [self.method.download(self.server, o, ctx) for o in orders]
        return engine.trial(ctx, orders, downs)

    def _try(self, name: str, plan: Plan) -> None:
        """Do one step by a plan."""
        with as_workers_do():
            cohort, clients = self._prepare(name, plan)
            local_training.train(cohort, clients, _of_steps(self.first_phases[name][1], 1))

    def _seconds(self, name: str, plan: Plan) -> float:
        """Return a plan's seconds per client and step."""
        with as_workers_do():
            cohort, clients = self._prepare(name, plan)
            single = _of_steps(self.first_phases[name][1], 1)
            if self.on_gpu:
                _timed(cohort, clients, single)  # which loads its kernels
            first = _timed(cohort, clients, single)
            steps, tries = self._length(name, first)
            several = _of_steps(self.first_phases[name][1], steps)
            best = min(_timed(cohort, clients, several) for _ in range(tries))
        return best / (steps * len(cohort.ids))

    def _length(self, name: str, first: float) -> tuple[int, int]:
        """Return how many steps are timed, and how often, if one has taken ``first`` seconds.

        No more steps are timed than a client takes in a phase: the start of a phase, with its
        copies, counts more if there are few.
        """
        if first >= (LONG_ON_GPU_S if self.on_gpu else LONG_S):
            return 1, 1
        (phase,) = self.first_phases[name][1]
        most = int(phase.steps_of(self.population.train.counts, self.task, name).max())
        steps = max(1, min(STEPS_ON_GPU if self.on_gpu else STEPS, most))
        return steps, TRIES * max(1, STEPS // steps)

    def _bytes(self, name: str) -> int:
        """Return the memory in bytes for one more client in a stack.

        It covers parameters, gradient, two moments, and saved tensors of the backward pass.
        """
        held = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal held
            held += tensor.numel() * tensor.element_size()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with as_workers_do(), hooks:
            cohort, clients = self._prepare(name, Plan(1, stack=False))
            local_training.train(cohort, clients, _of_steps(self.first_phases[name][1], 1))
        numbers = sum(a.numel() for a in clients.net.params.values())
        return 16 * numbers + 2 * held


def _of_steps(phases: tuple[Phase, ...], steps: int) -> tuple[Phase, ...]:
    return tuple(replace(phase, steps=steps) for phase in phases)


def _timed(cohort: Cohort, clients: Clients, phases: tuple[Phase, ...]) -> float:
    """Return the seconds of the phases."""
    _finish(cohort.table.device)
    begin = time.perf_counter()
    local_training.train(cohort, clients, phases)
    _finish(cohort.table.device)
    return time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    """Wait until a GPU has done its work; the CPU that gave it the work may be far ahead."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _layouts(arch: Architecture) -> tuple[Convolutions, ...]:
    """Return the layouts of convolutions to choose from; none without convolutions."""
    has_some = any(isinstance(m, Conv2d) for m in arch.module.modules())
    return ("each", "stacked") if has_some else ()


def _code_of(values: Iterable[object]) -> str:
    """Return a digest of the functions of the values' classes, without torch's own.

    A class that the user has edited since the measurement may no longer be stackable, even under
    the same name.
    """
    digest = hashlib.sha256()
    bases = dict.fromkeys(base for value in values for base in type(value).__mro__)
    for base in bases:
        if base.__module__.partition(".")[0] in {"torch", "builtins"}:
            continue
        for name, function in sorted(vars(base).items()):
            if inspect.isfunction(function):
                code = function.__code__
                digest.update(f"{name} {code.co_names} ".encode() + code.co_code)
    return digest.hexdigest()
