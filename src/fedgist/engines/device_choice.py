"""The device of a run: the choice of a usable device by its name in a recipe."""

from __future__ import annotations

import torch

from fedgist.core.training import Precision
from fedgist.errors import RecipeError, first_line


def usable_device(name: str) -> str:
    """Return the device to use; ``auto`` is the GPU, or the CPU of a machine without a GPU."""
    if name == "cpu":  # a GPU's driver is not loaded
        return name
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    present = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if name not in present:
        raise RecipeError(f"engine.device = {name!r}: this machine has {', '.join(present)}")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(
            f"engine.device = {name!r} cannot be used: {first_line(error)}"
        ) from error
    return name


def check_torch() -> None:
    """Raise RecipeError if the caller set torch to what a run cannot be computed with."""
    if (default := torch.get_default_dtype()) != torch.float32:
        raise RecipeError(
            f"torch's default type is {default}, and runs compute in float32: call "
            "torch.set_default_dtype(torch.float32) before"
        )
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise RecipeError("leave torch.autocast before a run: train.precision is for that")
    if torch.is_inference_mode_enabled():
        raise RecipeError("leave torch.inference_mode before a run: nothing can learn in it")


def check_precision(precision: Precision, device: str) -> None:
    """Raise RecipeError if a device has no units for a precision, which is then slower."""
    if precision == "bfloat16" and usable_device(device) == "cpu" and not _multiplies_bfloat16():
        raise RecipeError(
            "train.precision = 'bfloat16' needs a GPU or a CPU with AMX; "
            f"engine.device = {device!r} is a CPU without"
        )


def _multiplies_bfloat16() -> bool:
    """Return whether this machine's CPU has AMX units; False if torch cannot tell."""
    tell = getattr(torch.cpu, "get_capabilities", None)
    return tell is not None and bool(tell().get("amx_bf16"))
