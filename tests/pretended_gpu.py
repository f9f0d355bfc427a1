"""A GPU that is not there: tensors that say they are on it, with their numbers on the CPU.

What mixes devices fails as on a real one. Speed, kernels and streams are not shown. As a program,
it makes trials by name: ``python tests/pretended_gpu.py fedavg encoders``. It needs a process of
its own: torch must be told of the device before anything is trained, and does not forget it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import fedgist
from fedgist.core import random
from fedgist.data.dataset import Dataset
from fedgist.runs.files.record import Line
from fedgist.testing.small_worlds import law_world, trace, without_times
from method_objects import METHOD_OBJECTS

NAME = "pretended"
GPU = torch.device("privateuseone:0")  # which is its name until torch is told
CPU = torch.device("cpu")
ROUNDING = 1e-3  # sums are in another order
aten = torch.ops.aten
#: How often the CPU would have waited for a real GPU, by operation.
WAITS: Counter[str] = Counter()
# what takes tensors of both devices: a copy, and numbers of rows, which a GPU fetches by itself
MIXES = (aten.copy_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
# what gives the CPU a number, or makes a shape of numbers
READS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.is_nonzero, aten.masked_select)


class OnGPU(Tensor):
    """A tensor that says it is on the GPU; ``held`` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, held: Tensor) -> Self:
        """Return the tensor of the same form."""
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            held.stride(),
            held.storage_offset(),
            dtype=held.dtype,
            device=GPU,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do an operation that no mode sees."""
        return done(func, args, kwargs or {})


def changed(kind: Any, change: Callable[[Any], Any], thing: Any) -> Any:
    """Return nested arguments or results with those of a kind changed."""
    if isinstance(thing, kind):
        return change(thing)
    if isinstance(thing, list | tuple) and type(thing) in {list, tuple}:
        return type(thing)(changed(kind, change, part) for part in thing)
    if isinstance(thing, dict):
        return {name: changed(kind, change, part) for name, part in thing.items()}
    return thing


def done(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do an operation with the numbers, and say where its results are."""
    there: dict[int, OnGPU] = {}
    elsewhere: list[Tensor] = []

    def numbers(x: Tensor) -> Tensor:
        if isinstance(x, OnGPU):
            there[id(x.held)] = x
            return x.held
        elsewhere.extend([x] if x.ndim else [])
        return x

    asked = kwargs.get("device")
    given = changed(Tensor, numbers, tuple(args))
    named = changed(Tensor, numbers, kwargs | ({"device": CPU} if asked else {}))
    if there and elsewhere and func.overloadpacket not in MIXES:
        forms = [tuple(x.shape) for x in there.values()], [tuple(x.shape) for x in elsewhere]
        raise RuntimeError(f"{func} of tensors on the GPU and on the CPU: {forms}")
    found = func(*given, **named)
    if there and (func.overloadpacket in READS or (asked and asked.type == "cpu")):
        WAITS[str(func)] += 1
    if there and func.overloadpacket == aten.index and _by_mask(args[1]):
        WAITS[str(func)] += 1
    if func.overloadpacket == aten.copy_:
        return args[0]
    if asked.type != NAME if asked else not there:
        return found
    return changed(Tensor, lambda x: there[id(x)] if id(x) in there else OnGPU(x), found)


def _by_mask(indices: Sequence[Any]) -> bool:
    return any(isinstance(i, OnGPU) and i.dtype == torch.bool for i in indices)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return done(func, args, kwargs or {})


class _Names(TorchFunctionMode):
    """What is asked for on "cuda" is made on the pretended GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = changed(str | torch.device, renamed, (args, kwargs or {}))
        if func is Tensor.tolist and isinstance(args[0], OnGPU):
            args = (args[0].cpu(),)
        if func in {Tensor.__getitem__, Tensor.__setitem__}:
            args = (args[0], changed(list, torch.tensor, args[1]), *args[2:])
        if func is torch.tensor and "device" in kwargs:  # its copy would ask no mode
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def renamed(name: str | torch.device) -> str | torch.device:
    """Return the pretended GPU for "cuda"."""
    return GPU if str(name) in {"cuda", "cuda:0"} else name


def tell_torch() -> None:
    """Tell torch of the device, once: from now on gradients are made by threads, so no forks."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let torch's "cuda" be the pretended GPU."""
    tell_torch()
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.is_available", lambda: True))
        stack.enter_context(patch("torch.cuda.device_count", lambda: 1))
        stack.enter_context(patch("torch.cuda.mem_get_info", lambda _: (1 << 30, 1 << 30)))
        stack.enter_context(_Names())
        stack.enter_context(_Dispatch())  # type: ignore[no-untyped-call]
        yield


def round_of(name: str, device: str) -> list[Line]:
    """Return the lines of a method's first round on a device, and of round 0 if it has one."""
    small = {"train": {"local_epochs": 1}, "engine": {"device": device}}
    return trace(law_world(METHOD_OBJECTS[name], **small), rounds=1).rounds


def encoders(device: str) -> list[Line]:
    """Return the lines of a run of FLESD on images, from files and back to files."""
    x, y = random.integers(random.key(0), (30, 3, 8, 8), 256).to(torch.uint8), torch.arange(30) % 3
    changes = ["resized_crop", "flip", "color_jitter", "grayscale"]
    recipe = {
        "data": {"augment": changes, "public": {"rows": 6, "augment": changes}},
        "objective": {"name": "simclr", "projection": 4},
        "clients": {"num_clients": 3},
        "model": {"name": "conv4", "channels": [4, 4, 4, 4]},
        "method": {"name": "flesd", "distillation": {"epochs": 1, "batch_size": 4, "queue": 5}},
        "train": {
            "num_rounds": 1,
            "local_epochs": 1,
            "batch_size": 4,
            "optimizer": "sgd",
            "lr": 0.01,
        },
        "evaluate": {"probe": "knn"},
        "engine": {"device": device, "workers": 1, "plans": {"conv4": {"cohort_size": 2}}},
    }
    data = Dataset("noise", x, y, x[:9], y[:9], 3, scale=255.0)
    with TemporaryDirectory() as folder:
        return list(fedgist.run(recipe, data=data, out=Path(folder) / "run").rounds)


def adapters(device: str) -> list[Line]:
    """Return the lines of a round of adapters in a frozen body."""
    model = {"share": 1.0, "hidden": [6, 5], "adapters": {"rank": 2}}
    small: dict[str, Any] = {"architectures": {"mlp": model}, "engine": {"device": device}}
    return trace(law_world(METHOD_OBJECTS["fedavg"], **small), rounds=1).rounds


TRIALS: dict[str, Callable[[str], list[Line]]] = {
    name: partial(round_of, name) for name in METHOD_OBJECTS
} | {"encoders": encoders, "adapters": adapters}


def main(names: Sequence[str]) -> None:
    """Make trials, by default all, and name each."""
    tell_torch()
    for name in names or TRIALS:
        sys.stdout.write(f"{name}\n")
        expected = TRIALS[name]("cpu")
        with pretended_gpu():
            found = TRIALS[name]("cuda")
        for line, wanted in zip(found, expected, strict=True):
            for column, value in without_times(wanted).items():
                if isinstance(value, float):
                    assert abs(line[column] - value) < ROUNDING, (column, line[column], value)


if __name__ == "__main__":
    main(sys.argv[1:])
