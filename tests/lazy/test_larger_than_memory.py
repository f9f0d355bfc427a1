"""A folder of 16-bit images larger than the memory of the process, by Python and by the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import call

ROOT = Path(__file__).parents[2]
COUNT, SIDE = 360, 512  # float32 rows of 377 MB together
ALLOWED = 220 << 20  # bytes that a process may take beyond what it has when fedgist is loaded
MODULE = """
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset


class Slides(Dataset):
    def __init__(self, folder):
        self.samples = [(p, int(p.stem[-1])) for p in sorted(Path(folder).glob("*.png"))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, row):
        path, label = self.samples[row]
        return np.array(Image.open(path))[None], label


def slides(*, path):
    return Slides(path)
"""
RECIPE = """
[data]
name = "slides:slides"
path = "{folder}"
test_fraction = 0.25
read = "{read}"
mean = [30000.0]
std = [10000.0]
[clients]
num_clients = 2
[model]
name = "slides_net:net"
[method]
name = "fedavg"
[train]
num_rounds = 1
batch_size = 4
[engine]
workers = 1
readers = {readers}
cohort_size = 1
server_threads = 1
"""
NET = """
from torch import nn


def net(input_shape, num_classes):
    return nn.Sequential(nn.AvgPool2d(64), nn.Flatten(), nn.Linear(64, num_classes))
"""
LIMITED = """
import resource
import sys

import fedgist.cli.main
import fedgist.api.run
import fedgist.cli.seeded_runs
import torch

torch.set_num_threads(1)
pages = int(open("/proc/self/statm").read().split()[5])  # data and stack
limit = pages * resource.getpagesize() + {allowed}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
{action}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    (folder / "images").mkdir()
    for row in range(COUNT):
        draw = np.random.default_rng(row)
        image = np.full((SIDE, SIDE), 20000 + 10000 * (row % 3) + draw.integers(999), np.uint16)
        image[::2] += 500
        Image.fromarray(image).save(folder / "images" / f"{row:03d}-{row % 3}.png")
    (folder / "slides.py").write_text(MODULE)
    (folder / "slides_net.py").write_text(NET)
    return folder


def run_limited(place: Path, action: str) -> subprocess.CompletedProcess[str]:
    code = LIMITED.format(action=action, allowed=ALLOWED)
    paths = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    words = [sys.executable, "-c", code]
    return call(words, place, code=None, PYTHONPATH=paths, OMP_NUM_THREADS="1")


def recipe(place: Path, read: str, readers: int = 0) -> Path:
    file = place / f"{read}-{readers}.toml"
    file.write_text(RECIPE.format(folder=place / "images", read=read, readers=readers))
    return file


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a limit of memory is the kernel's")
@pytest.mark.parametrize(("read", "readers"), [("lazy", 0), ("lazy", 1), ("auto", 0)])
def test_the_command_runs_in_less_memory_than_the_rows(
    place: Path, read: str, readers: int
) -> None:
    file = recipe(place, read, readers)
    arguments = ["run", str(file), "--out", str(place / f"run-{read}-{readers}")]
    done = run_limited(place, f"sys.argv = ['fedgist', *{arguments!r}]\nfedgist.cli.main.main()")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows are read when they are used" in " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a limit of memory is the kernel's")
def test_python_runs_in_less_memory_than_the_rows_which_do_not_fit(place: Path) -> None:
    action = f"""
from slides import slides
raw = fedgist.recipe.reading.read(__import__("pathlib").Path({str(recipe(place, "lazy"))!r}))
section = {{"read": READ, "test_fraction": 0.25, "mean": [30000.0], "std": [10000.0]}}
result = fedgist.run(
    {{
        "data": section,
        "clients": {{"num_clients": 2}},
        "method": {{"name": "fedavg"}},
        "train": {{"num_rounds": 1, "batch_size": 4}},
        "engine": {{"workers": 1, "cohort_size": 1, "server_threads": 1}},
    }},
    data=slides(path={str(place / "images")!r}),
    model=__import__("slides_net").net((1, 512, 512), 3),
)
print("rows", len(result.world.data.y))
"""
    done = run_limited(place, action.replace("READ", "'lazy'"))
    assert done.stdout.strip() == "rows 270", done.stderr
    whole = run_limited(place, action.replace("READ", "'once'"))
    assert whole.returncode != 0
    assert "memory" in whole.stderr
