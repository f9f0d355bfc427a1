"""What a command loads before it works: help, lists and refusals come without torch."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import get_args

import pytest

import commands
from commands import call
from fedgist.cli import main
from fedgist.data import PARTITIONS
from fedgist.data.sources import SOURCES
from fedgist.engines import ENGINES, EngineName
from fedgist.methods import METHODS
from fedgist.models import MODELS
from fedgist.registry import Registry

PROGRAM = """
import json
import sys
from fedgist.cli.main import main
HEAVY = {"torch", "scipy", "sklearn", "matplotlib", "pandas"}
ends = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["fedgist", *command.split()]
    try:
        main()
    except SystemExit as end:
        ends[command] = [end.code or 0, *sorted(HEAVY & set(sys.modules))]
print()
print(json.dumps(ends))
"""
LIGHT = {
    "--help": 0,
    "--version": 0,
    "run --help": 0,
    "compare --help": 0,
    "tune --help": 0,
    "list methods": 0,
    "list datasets": 0,
    "list models": 0,
    "list partitions": 0,
    "list engines": 0,
    "list recipes": 0,
    "run /no/such/recipe.toml": 2,
    "run --set trian.lr=1": 2,
    "run --set train.lr=fast": 2,
    "run --set method.name=fedavgg": 2,
    "sweep demo --grid train.lr=nan,1": 2,
    "show /no/such/run": 2,
}


def test_nothing_heavy_is_loaded_before_there_is_work(tmp_path: Path) -> None:
    done = call([sys.executable, "-c", PROGRAM, json.dumps([*LIGHT])], tmp_path, 0)
    ends = json.loads(done.stdout.splitlines()[-1])
    assert ends == {command: [code] for command, code in LIGHT.items()}


@pytest.mark.parametrize(
    "registry", [METHODS, MODELS, SOURCES, PARTITIONS], ids=lambda r: next(iter(r))
)
def test_what_is_named_is_there_and_described(registry: Registry[object]) -> None:
    assert all(callable(registry[name]) for name in registry)
    assert all(text and not text.endswith(":") for text in registry.summaries().values())
    assert "nothing" not in registry
    with pytest.raises(KeyError):
        _ = registry["nothing"]


def test_every_engine_is_described() -> None:
    assert set(ENGINES) == set(get_args(EngineName))
    assert all(text and not text.endswith(":") for text in ENGINES.summaries().values())


OWN = """
import functools
import json
import os
from dataclasses import dataclass
from fedgist.methods.fedavg import FedAvg
open(os.environ["TRACE"], "a").write("imported\\n")

@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


@pytest.mark.slow
def test_own_code_is_told_before_it_runs_and_can_be_refused(tmp_path: Path) -> None:
    (tmp_path / "own_method.py").write_text(OWN)
    trace, out = tmp_path / "trace", tmp_path / "out"
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    fedgist = functools.partial(commands.fedgist, cwd=tmp_path, TRACE=str(trace), PYTHONPATH=path)
    mine = ["run", "--set", "method.name=own_method:Mine", "--set", "train.num_rounds=1"]
    refused = fedgist(*mine, "--out", out, "--no-code", code=2)
    assert "method.name = 'own_method:Mine' names code to be run, which --no-code" in refused.stderr
    assert not trace.exists()
    assert not out.exists()
    done = fedgist(*mine, "--out", out, "-q")
    assert done.stderr.count("method.name = 'own_method:Mine': importing this module runs") == 1
    again = fedgist("export", out, "--client=0", "-o", tmp_path / "m.pt2", "--no-code", code=2)
    assert "names code to be run" in again.stderr
    assert not fedgist("show", out, "--no-code").stderr  # reads, and imports nothing


@pytest.mark.slow
def test_what_a_changed_name_leaves_over_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[model]\nname = "mlp"\nhidden = [7]\n[train]\nnum_rounds = 1\n[engine]\nworkers = 1\n'
    )
    says = "model.hidden = [7] is dropped: logistic does not read it"
    one = commands.fedgist("run", "mine.toml", "--set", "model.name=logistic", cwd=tmp_path)
    assert says in one.stdout
    assert "hidden" not in (tmp_path / "runs/mine-fedlog/recipe.toml").read_text()
    many = commands.fedgist(
        "sweep", "mine.toml", "--grid", "model.name=mlp,logistic", "--jobs=1", cwd=tmp_path
    )
    assert many.stderr.count(says) == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "error: this machine has not enough memory; a run needs less with"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "has not enough memory; a run",
        ),
        (RuntimeError("CUDA out of memory. Tried to"), "has not enough memory; a run"),
        (RecursionError("maximum"), "error: values or models are nested too deeply\n"),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    says: str,
) -> None:
    def fail(arguments: list[str]) -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr(sys, "argv", ["fedgist", "run"])
    with pytest.raises(SystemExit) as end:
        main.main()
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert says in said
    assert said.count("\n") == 1


def test_another_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr(sys, "argv", ["fedgist", "run"])
    with pytest.raises(RuntimeError, match="of ours"):
        main.main()


def test_threads_are_told_not_to_spin_before_torch_starts_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, sys, fedgist.cli; "
    program += "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    for _ in range(2):
        done = call([sys.executable, "-c", program], tmp_path)
        assert done.stdout.split() == [os.environ.get("GOMP_SPINCOUNT", "1000"), "False"]
        monkeypatch.setenv("GOMP_SPINCOUNT", "7")
