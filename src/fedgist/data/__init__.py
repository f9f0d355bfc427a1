"""Data sources, partitions over clients, augmentation, and the order of batches.

This module holds the names that recipes use, and is cheap to import. A new partition is a function
in ``partition_rules.py`` and a line below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from fedgist.registry import Registry

if TYPE_CHECKING:  # the import loads torch
    from fedgist.data.partition_rules import Divided

Augmentation = Literal[
    "crop",
    "flip",
    "flip_vertical",
    "batch_crop",
    "batch_flip",
    "resized_crop",
    "color_jitter",
    "grayscale",
]

PARTITIONS: Registry[Callable[..., Divided]] = Registry(
    {
        name: f"fedgist.data.partition_rules:{name}"
        for name in ("iid", "dirichlet", "size", "shards", "pathological", "natural")
    }
    | {"pachinko": "fedgist.data.pachinko:pachinko"}
)
