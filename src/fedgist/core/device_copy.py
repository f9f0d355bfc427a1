"""Copies of tensors from the CPU to a device, without a wait of the CPU for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor of any shape on ``device``; on a CPU it is the tensor itself."""
    if device.type != "cuda":
        return tensor.to(device)
    # a copy from memory that is not pinned would block the CPU
    return tensor.pin_memory().to(device, non_blocking=True)
