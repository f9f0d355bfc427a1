"""Data sets of files and of draws, and recipes for runs on them: what tests of lazy rows share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import fedgist

RECIPE: dict[str, Any] = {
    "data": {"mean": [0.0], "std": [1.0], "read": "lazy"},
    "clients": {"num_clients": 4},
    "model": {"name": "mlp"},
    "train": {"num_rounds": 3, "batch_size": 8},
    "engine": {"workers": 1, "cohort_size": 2, "readers": 0},
}


class Blobs(Dataset[Any]):
    """Rows of three classes; ``noisy`` rows draw from the three global generators."""

    def __init__(self, count: int, *, noisy: bool = False) -> None:
        self.count, self.noisy = count, noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        draw = torch.Generator().manual_seed(row)
        x = torch.randn(1, 4, 4, generator=draw) + row % 3
        if self.noisy:
            x = x + 0.1 * torch.randn(1, 4, 4) + 0.1 * np.random.rand() + 0.1 * random.random()
        return x, row % 3


class Files(Dataset[Any]):
    """Rows in .npy files, a file each, called by row and class."""

    def __init__(self, folder: Path, *, noisy: bool = False) -> None:
        self.samples = [(str(p), int(p.stem[-1])) for p in sorted(folder.glob("*.npy"))]
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[row]
        x = torch.from_numpy(np.load(path))
        return (x + 0.1 * torch.randn(x.shape) if self.noisy else x), label


def write_rows(folder: Path, count: int = 60) -> Path:
    """Write rows of three classes into files."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in range(count):
        np.save(folder / f"{row:04d}-{row % 3}.npy", Blobs(count)[row][0].numpy())
    return folder


def with_engine(**engine: Any) -> dict[str, Any]:
    """Return the recipe with these settings of the engine."""
    return {**RECIPE, "engine": {**RECIPE["engine"], **engine}}


def with_data(**data: Any) -> dict[str, Any]:
    """Return the recipe with these settings of the data."""
    return {**RECIPE, "data": {**RECIPE["data"], **data}}


def record(recipe: dict[str, Any], data: object, **more: Any) -> list[dict[str, Any]]:
    """Run, and return the lines of the record without times."""
    result = fedgist.run(recipe, data=data, **more)  # type: ignore[arg-type]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in result.rounds]
