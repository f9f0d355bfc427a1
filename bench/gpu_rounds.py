"""Rounds on a GPU: the workloads against bare loops, and bfloat16 against float32."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from gpu_setting import Figures, Measured, NotHereError, Setting, in_turns, ratios, summary
from turns import turn
from workloads import W2, WORKLOADS, Workload, bare_rounds, opened

from fedgist.engines.device_choice import check_precision
from fedgist.errors import RecipeError
from fedgist.runs.round import ServerRun

REPEATS = 5
ROUNDS = 10  # of each precision
#: A larger net, as bfloat16 is meant for.
RESNET = replace(
    W2,
    name="ResNet18",
    clients=6,
    sampled=6,
    rows=512,
    model={"name": "resnet18"},
    batch_size=128,
)


def sized(work: Workload, setting: Setting) -> Workload:
    """Return the workload; with tiny sizes, if these are asked for."""
    if not setting.quick:
        return work
    tiny = replace(work, clients=4, sampled=2, rows=6, batch_size=4, epochs=1)
    return tiny if work.model["name"] != "resnet18" else replace(tiny, model={"name": "mlp"})


@contextmanager
def federation_of(work: Workload, setting: Setting, **train: Any) -> Iterator[ServerRun]:
    """Yield the federation of a workload on the device, before its first round."""
    engine: dict[str, Any] = {"device": setting.device}
    if setting.quick:  # nothing is timed to choose a plan
        engine["plans"] = {str(work.model["name"]): {"cohort_size": 2}}
    world, server, clients = opened(work, 1, engine, train={**work.training(), **train})
    federation = ServerRun(world.server, clients, server)
    with contextlib.closing(federation.engine):
        yield federation


def kinds(work: Workload, setting: Setting) -> dict[str, dict[str, bool]]:
    """Return the bare loops: torch's optimizer as it is by default, fused, and capturable."""
    both = {"bare": {"fused": False}, "bare, fused": {"fused": True}}
    if work.optimizer != "adam" or not setting.on_gpu:
        return both
    capturable = {"capturable": True}
    return {
        **both,
        "bare, capturable": {"fused": False, **capturable},
        "bare, fused and capturable": {"fused": True, **capturable},
    }


def rounds(name: str, setting: Setting) -> Measured:
    """Yield the figures of a workload: its plan, memory, seconds per round, and their ratios."""
    work = sized(WORKLOADS[name], setting)
    before, begin = setting.held(), time.perf_counter()
    with federation_of(work, setting) as federation:
        plans = federation.side.recipe.model_dump(mode="json")["engine"]["plans"]
        yield {"plans": plans, "opening_s": time.perf_counter() - begin}
        ours = setting.timed(federation.advance)
        contenders = {"fedgist": functools.partial(turn, ours)}
        yield {"peak_mb": {"fedgist": _peak_of(ours, before, setting)}}
        for kind, options in kinds(work, setting).items():
            before = setting.held()
            threads = torch.get_num_threads()
            bare = bare_rounds(work, threads=threads, device=setting.device, **options)
            theirs = setting.timed(bare)
            yield {"peak_mb": {kind: _peak_of(theirs, before, setting)}}
            contenders[kind] = functools.partial(turn, theirs)
        for seconds in in_turns(contenders, 1 if setting.quick else REPEATS, setting):
            yield {"seconds": summary(seconds), **ratios(seconds)}


def _peak_of(round_of: Callable[[], float], before: int, setting: Setting) -> float | None:
    """Do a round; return the memory in MB that its contender needs, data included."""
    setting.held()
    round_of()
    return setting.peak_mb(before)


def autocast(setting: Setting) -> Measured:
    """Yield seconds per round and training losses in bfloat16 and in float32, by workload."""
    try:
        check_precision("bfloat16", setting.device)
    except RecipeError as error:
        raise NotHereError(str(error)) from error
    for work in (W2, RESNET):
        yield {work.name: _precisions(sized(replace(work, learnable=True), setting), setting)}


def _precisions(work: Workload, setting: Setting) -> Figures:
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    memory: Figures = {}
    with contextlib.ExitStack() as stack:
        doers: dict[str, ServerRun] = {}
        for name in ("float32", "bfloat16"):
            before = setting.held()
            doers[name] = stack.enter_context(federation_of(work, setting, precision=name))
            losses[name] = []
            first = setting.timed(functools.partial(_advance, doers[name], losses[name]))
            memory[name] = _peak_of(first, before, setting)
        for _ in range(2 if setting.quick else ROUNDS - 1):
            for name, federation in doers.items():
                advance = functools.partial(_advance, federation, losses[name])
                seconds.setdefault(name, []).append(setting.timed(advance)())
            if setting.left < 0:
                break
    return {
        "seconds": summary(seconds),
        **ratios(seconds, "bfloat16"),
        "rounds": len(losses["float32"]),
        "loss": {name: values[-1] for name, values in losses.items()},
        "first_loss": {name: values[0] for name, values in losses.items()},
        "peak_mb": memory,
    }


def _advance(federation: ServerRun, losses: list[float]) -> None:
    line, _ = federation.advance()
    losses.append(float(line["train/loss"]))
