"""Checks of a user's module before it is split: what cannot be trained is named as its own part.

They run the module once on made-up rows, in training mode and with torch's own layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedgist.core.random import torch_draws

#: What a user's code may raise, besides the ends of a process.
FAILURES = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError),
)
ONE_VALUE = "more than 1 value per channel"  # of torch's batch norm, about a batch of one row
REPLICAS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
#: Activations that a module must not have after its last layer, in the order of their trial.
ENDINGS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "Softmax": lambda z: z.softmax(-1),
        "LogSoftmax": lambda z: z.log_softmax(-1),
        "Sigmoid": torch.sigmoid,
        "LogSigmoid": nn.functional.logsigmoid,
        "Tanh": torch.tanh,
        "ReLU": torch.relu,
        "Softplus": nn.functional.softplus,
        "exp": torch.exp,
    }
)


def tensor_of(output: object) -> Tensor:
    """Return the tensor that a module returned, of any shape, or the ``logits`` of its output.

    Raises
    ------
    TypeError
        If the output is no tensor and has no ``logits``, as those of Hugging Face's models do.
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(output, Mapping):
        logits = output.get("logits", logits)
    if isinstance(logits, Tensor):
        return logits
    kind = type(output).__name__
    size = f" of {len(output)}" if isinstance(output, tuple | list | Mapping) else ""
    raise TypeError(
        f"the model must return one tensor, it returns a {kind}{size}: return the logits alone, or "
        "an object with a field logits"
    )


def check_parts(module: nn.Module, name: str) -> nn.Module:
    """Return the module.

    Raises
    ------
    ValueError
        If it is wrapped for several devices, holds NaN, or has a layer without a size, a gradient
        hook, or batch norm with a cumulative mean.
    """
    if any(isinstance(layer, REPLICAS) for layer in module.modules()):
        raise ValueError(
            f"{name} is wrapped in DataParallel: give the module inside it, model.module; fedgist "
            "itself trains clients in parallel"
        )
    for path, parameter in module.named_parameters():
        lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        if lazy:
            raise ValueError(
                f"the layer {path.rpartition('.')[0]!r} of {name} has no size before its first "
                "input (a lazy layer, such as LazyLinear): state its sizes, or call the model once "
                "before you give it"
            )
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise ValueError(
                f"the parameter {path!r} of {name} is not finite at the start: give {name} finite "
                "weights"
            )
    check_gradients(module)
    for path, layer in module.named_modules():
        if isinstance(layer, NORMS) and layer.momentum is None:
            raise ValueError(
                f"layer {path!r} of {name} ({type(layer).__name__}) has momentum = None, a mean "
                "over all batches, which clients cannot keep: give it a number, such as 0.1"
            )
    return module


def check_gradients(module: nn.Module) -> None:
    """Raise ValueError if a parameter has a gradient hook, which a copy of the module loses."""
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks:
            raise ValueError(
                f"the parameter {path!r} has a gradient hook, which stacked clients do not call: "
                "remove it; requires_grad = False fixes a parameter"
            )


def check_pass(module: nn.Module, x: Tensor, name: str, *, trains: bool) -> int:
    """Try a module on made-up rows ``x`` (2, ...); return the fewest rows of a batch, 1 or 2.

    ``trains`` says whether the body will be in training mode. Two rows are needed if torch's batch
    norm would see one value per channel. A module that fails on ``x`` needs 1: its first use says
    how it fails.

    Raises
    ------
    TypeError
        If the module returns no tensor.
    ValueError
        If a layer changes a buffer in place, or assigns it anew.
    """
    module = copy.deepcopy(module).train(trains)
    versions = {path: (buffer, buffer._version) for path, buffer in _watched(module).items()}
    output = attempt(lambda: module(x))
    if not isinstance(output, Exception):
        tensor_of(output)
        for path, (buffer, version) in versions.items():
            new = module.get_buffer(path)
            anew = new is not buffer and not torch.equal(new, buffer)
            if anew or buffer._version != version:
                raise ValueError(_in_place(module, path, name))
    if not trains or not any(isinstance(layer, NORMS) for layer in module.modules()):
        return 1
    return 2 if ONE_VALUE in str(attempt(lambda: module(x[:1]))) else 1


def check_head(module: nn.Module, head: str, name: str) -> None:
    """Raise ValueError if a head, which stands apart from the body here, is more than its arrays.

    It has a forward of its own or hooks, or its weight is that of another layer, too.
    """
    layer = module.get_submodule(head)
    if has_own_forward(layer) or is_hooked(layer):
        raise ValueError(
            f"the head {head!r} of {name} ({type(layer).__name__}) has a forward of its own or "
            "hooks, and methods use its weight and bias alone: let a plain nn.Linear be the last"
        )
    mine = {f"{head}.{leaf}": p for leaf, p in layer.named_parameters()}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        tied = [leaf for leaf, p in mine.items() if p is parameter]
        if tied and path not in mine:
            raise ValueError(
                f"{tied[0]!r} of {name} is also {path!r} (tied weights), and methods treat the "
                "head apart from the body: give the head weights of its own"
            )


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer computes by code that is not torch's own."""
    return type(layer).forward.__module__.partition(".")[0] != "torch"


def is_hooked(layer: nn.Module) -> bool:
    """Return whether hooks are called around a layer's forward or backward pass."""
    hooks = {name: value for name, value in vars(layer).items() if name.endswith("_hooks")}
    return any(value for name, value in hooks.items() if "state_dict" not in name)


def fixed_in(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that a user fixed with ``requires_grad = False``."""
    parameters = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in parameters if not parameter.requires_grad)


def activation_after(module: nn.Module, head: str, x: Tensor, expected: Tensor) -> str:
    """Return the name of the activation between the head and the output, or an empty text.

    ``expected`` (2, ...) is the module's output on ``x``, in evaluation.
    """
    seen: list[Tensor] = []
    hook = module.get_submodule(head).register_forward_hook(
        lambda _, __, output: seen.append(output)
    )
    try:
        attempt(lambda: module(x))
    finally:
        hook.remove()
    if not seen or seen[-1].shape != expected.shape:
        return ""
    fits = (name for name, f in ENDINGS.items() if torch.allclose(f(seen[-1]), expected))
    return "" if torch.equal(seen[-1], expected) else next(fits, "")


def attempt(function: Callable[[], object]) -> object:
    """Return the output of a user's module, or the exception that the module raised."""
    try:
        # a module with random draws gets the same ones whole and as a body
        with torch.no_grad(), torch_draws(0):
            return function()
    except FAILURES as error:
        return error


def _watched(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module by name, except those of batch norm, which is replaced."""
    layers = module.named_modules()
    return {
        f"{path}.{leaf}".removeprefix("."): buffer
        for path, layer in layers
        if not isinstance(layer, NORMS) or has_own_forward(layer)
        for leaf, buffer in layer.named_buffers(recurse=False)
    }


def _in_place(module: nn.Module, path: str, name: str) -> str:
    """Return what is wrong with the layer of a buffer that changes in place, and the cure."""
    owner, _, leaf = path.rpartition(".")
    place, parametrized, _ = owner.partition(".parametrizations.")
    layer = module.get_submodule(place)
    cure = "use a layer without such a buffer"
    if isinstance(layer, INSTANCE_NORMS):
        cure = "use track_running_stats=False"
    elif parametrized or leaf in {"weight_u", "weight_v"}:
        cure = "leave out spectral_norm; weight_norm has no such buffer"
    kind = type(layer).__name__
    return (
        f"layer {place or kind!r} of {name} ({kind}) changes its buffer {leaf!r} in training; "
        f"such layers cannot be used: {cure}"
    )
