"""Images that are decoded when they are used, against bare loops over torch's ``DataLoader``."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.prepare import prepare_run
from fedgist.runs.round import ServerRun
from fedgist.world.models import module_group

COUNT, SIDE, CLASSES, CLIENTS, BATCH = 2000, 224, 10, 4, 50
PASSES = 25
LOADERS = (0, 1, 2)  # processes of a DataLoader
RATIO, LAZY_PEAK = "lazy: ratio", "lazy: peak memory, MB"


def lazy(repeats: int) -> dict[str, float]:
    """Compare passes over 2,000 image files, taken in turns; ``repeats`` does not count here."""
    del repeats
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        with fedgist_passes(Path(folder)) as (one_pass, start):
            start()
            peak = _peak(one_pass)
            bare = {f"{n} loaders": best_threads(Path(folder), n) for n in LOADERS}
            seconds: dict[str, list[float]] = {name: [] for name in ("fedgist", *bare)}
            for _ in range(PASSES):
                for name, do_pass in {"fedgist": one_pass, **bare}.items():
                    seconds[name].append(do_pass())
    totals = {name: sum(values) for name, values in seconds.items()}
    figures = {f"lazy: {name}, s for {PASSES} passes": value for name, value in totals.items()}
    best = min(totals[name] for name in bare)
    return figures | {RATIO: best / totals["fedgist"], LAZY_PEAK: peak / 1e6}


def write_images(folder: Path) -> None:
    """Write distinct JPEG files in folders of classes: smooth pictures with noise."""
    for row in range(COUNT):
        draw = np.random.default_rng(row)
        coarse = Image.fromarray(draw.integers(0, 256, (14, 14, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = (smooth + draw.integers(-8, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
        place = folder / str(row % CLASSES)
        place.mkdir(exist_ok=True)
        Image.fromarray(noisy).save(place / f"{row:04d}.jpg", quality=90)


def net() -> nn.Module:
    """Return a small net for the images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


@contextmanager
def fedgist_passes(folder: Path) -> Iterator[tuple[Callable[[], float], Callable[[], object]]]:
    """Yield a function that trains on all images once and returns its seconds, and a start."""
    recipe = make(
        {
            "data": {"name": "folder", "path": str(folder), "read": "lazy", "test_fraction": 0.0}
            | {"mean": [0.5], "std": [0.25]},
            "method": {"name": "fedavg"},
            "partition": {"name": "iid"},
            "clients": {"num_clients": CLIENTS},
            "evaluate": {"every": 10**6},
            "train": {"num_rounds": 10**6, "batch_size": BATCH, "optimizer": "sgd", "lr": 0.01},
        }
    )
    group = module_group(net(), own_start=False)
    world, server, engine = prepare_run(resolve(recipe, Overrides(groups={"model": group})))
    federation = ServerRun(world.server, engine, server)

    def one_pass() -> float:
        begin = time.perf_counter()
        federation.advance()
        return time.perf_counter() - begin

    start: Any = getattr(engine, "start", lambda: None)
    try:
        yield one_pass, start
    finally:
        engine.close()


class Files(Dataset[Any]):
    """The images and their classes, as a user of torch alone would read them."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[row]) as image:
            pixels = torch.from_numpy(np.array(image))
        return pixels.permute(2, 0, 1), int(self.files[row].parent.name)


def best_threads(folder: Path, workers: int) -> Callable[[], float]:
    """Return the bare loop with one thread or all of them, whichever does a pass faster."""
    counts = sorted({1, torch.get_num_threads()})
    loops = [bare_passes(folder, workers, threads) for threads in counts]
    seconds = [loop() for loop in loops]
    return loops[seconds.index(min(seconds))]


def bare_passes(folder: Path, workers: int, threads: int) -> Callable[[], float]:
    """Return a function that does the same in a bare loop over a DataLoader."""
    loader = DataLoader(
        Files(folder),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    module = net()
    steps = torch.optim.SGD(module.parameters(), lr=0.01)

    def one_pass() -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        for x, y in loader:
            steps.zero_grad()
            loss = F.cross_entropy(module((x.float() / 255 - 0.5) / 0.25), y)
            torch.autograd.backward(loss)
            steps.step()
        return time.perf_counter() - begin

    return one_pass


def _peak(one_pass: Callable[[], float]) -> float:
    """Return the most bytes of all processes during two passes, shared pages counted once."""
    ended, most = threading.Event(), 0
    root = psutil.Process()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.05):
            held = 0
            for member in (root, *root.children(recursive=True)):
                try:
                    held += member.memory_full_info().pss
                except (psutil.Error, AttributeError):
                    held += 0
            most = max(most, held)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(2):
            one_pass()
    finally:
        ended.set()
        watcher.join()
    return float(most) if most else math.nan
