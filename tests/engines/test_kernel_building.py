"""Compiled kernels are built by the first run that can have them, once on a machine, or refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedgist
from commands import begin_script
from fedgist.core import hadamard
from fedgist.core.nets.compiled import compiled_convolution, kernel_library
from fedgist.core.nets.compiled.compiled_convolution import Settings, convolve
from fedgist.engines.plans.kernel_building import have_kernels
from fedgist.engines.plans.plan import Plan
from fedgist.engines.process_control import as_workers_do
from fedgist.errors import InputError, OutputError, RecipeError
from fedgist.recipe.overrides import ClientGroup
from fedgist.runs.prepare import hosting_of
from fedgist.runs.ray_engine import HostRecipe, ShardHost
from fedgist.testing.small_worlds import world

SCRIPT = """
from fedgist.core.nets.compiled import kernel_library
from fedgist.engines.plans.kernel_building import have_kernels
have_kernels(print)
print(kernel_library.library() is not None)
"""


@pytest.fixture
def cache(own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache in which nothing has been built."""
    del own_cache  # it must come first
    if kernel_library.compiler() is None:
        pytest.skip("no C compiler is here: the kernels cannot be compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_library.library.cache_clear()
    yield tmp_path
    kernel_library.library.cache_clear()


def built(cache: Path) -> list[Path]:
    return list(cache.rglob("*.so"))


def run(**engine: Any) -> list[str]:
    """Return the layers that are compiled in a run of a small convolutional net."""
    images = np.random.default_rng(0).normal(size=(40, 3, 16, 16)).astype("float32")
    recipe = {
        "model": {"name": "conv4"},
        "clients": {"num_clients": 2},
        "partition": {"name": "iid"},
        "method": {"name": "fedavg"},
        "train": {"num_rounds": 1, "batch_size": 8},
        "engine": {"workers": 1, "server_threads": 1, **engine},
    }
    result = fedgist.run(recipe, data=(images, np.arange(40) % 10, images[:10], np.arange(10)))
    return list(result.server_run.side.plans["conv4"].kernels)


@pytest.mark.filterwarnings("ignore:.*fewer rows")
def test_the_first_run_that_can_have_kernels_builds_them(cache: Path) -> None:
    run()
    (library,) = built(cache)
    before = library.stat().st_mtime_ns
    run()
    assert library.stat().st_mtime_ns == before


def test_a_run_whose_plan_has_kernels_builds_them(cache: Path) -> None:
    # as a run that is resumed, or repeated from its recipe, on another machine
    plan = {"cohort_size": 2, "kernels": {"conv1": "compiled"}}
    assert run(plans={"conv4": plan}) == ["conv1"]
    assert len(built(cache)) == 1


def pictures() -> nn.Sequential:
    body = nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 6), nn.ReLU()
    return nn.Sequential(*body, nn.Linear(6, 3))


def test_each_machine_of_a_cluster_builds_the_kernels_of_a_plan(cache: Path) -> None:
    small_world = world(given={"groups": {"mine": ClientGroup(pictures)}})
    plans, setup = {"mine": Plan(2, kernels={"1": "compiled"})}, small_world.server.setup
    about = HostRecipe(setup.recipe, setup.given, hosting_of(small_world), plans, shards=1)
    with as_workers_do():
        ShardHost(about, 0)
    assert len(built(cache)) == 1


def test_torchs_kernels_are_kept_where_the_recipe_says_so(cache: Path) -> None:
    # rejects a switch that only hides a library which is built all the same, or is there already
    assert run(kernels="torch") == []
    assert not built(cache)
    kernel_library.build()
    assert run(kernels="torch") == []
    plan = {"cohort_size": 2, "kernels": {"conv1": "compiled"}}
    with pytest.raises(RecipeError, match=r"engine\.kernels = 'torch' refuses .*plans\.conv4"):
        run(kernels="torch", plans={"conv4": plan})


def test_a_plan_that_can_have_no_kernels_builds_none(cache: Path) -> None:
    run(plans={"conv4": {"cohort_size": 2}})
    assert not built(cache)


def test_processes_that_begin_together_build_once_and_miss_what_is_gone(cache: Path) -> None:
    script = cache / "script.py"
    script.write_text(SCRIPT)
    ends = [begun.end() for begun in [begin_script(script, cache) for _ in range(3)]]
    texts = [end.stdout + end.stderr for end in ends]
    assert all(text.endswith("True\n") for text in texts)
    assert sum("compiling faster convolutions" in text for text in texts) == 1
    kernel_library.library_path().unlink()
    later = begin_script(script, cache).end()
    assert "the compiled kernels of before are gone" in later.stdout
    assert "compiling" not in later.stdout


@pytest.mark.parametrize("command", ["no-such-compiler", "false"])
def test_a_compiler_that_fails_is_tried_once_and_said_in_each_run(
    command: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    lines: list[list[str]] = [[], []]
    for each in lines:
        have_kernels(each.append)
    assert "compiling" in lines[0][0]
    assert lines[0][1:] == lines[1]
    assert command in lines[1][0]
    assert "convolutions are torch's, until `fedgist compile`" in lines[1][0]
    monkeypatch.delenv("CC")
    have_kernels(lines[0].append)  # another compiler is tried
    assert len(built(cache)) == 1


def test_a_plan_with_kernels_that_cannot_be_built_is_an_error_that_says_how(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    plan = {"cohort_size": 2, "kernels": {"conv1": "compiled"}}
    with pytest.raises(RecipeError, match=r"engine\.plans\.conv4: .*run `fedgist compile`"):
        run(plans={"conv4": plan})
    assert not built(cache)


def negative(x: Tensor, weight: Tensor, bias: Tensor, settings: Settings) -> Tensor:
    return convolve(x, weight, -bias, settings)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("no-such-compiler", "the C compiler 'no-such-compiler' was not found"),
        ("false", "false cannot compile the kernels"),
    ],
)
def test_a_compiler_that_is_missing_or_fails_is_an_error(
    command: str, says: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(InputError, match=says):
        kernel_library.build()
    assert not list(cache.rglob("*.so"))


def test_without_a_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "compiler", lambda: None)
    with pytest.raises(InputError, match=r"pip install 'fedgist\[compiler\]'"):
        kernel_library.build()


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (compiled_convolution, "convolve", negative),
        (hadamard, "_transformed", lambda x: x + 1),
    ],
)
def test_kernels_that_compute_wrongly_are_refused_and_deleted(
    module: ModuleType, name: str, wrong: object, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel_library.build() == kernel_library.library_path()
    module.check()
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(InputError, match="the compiled kernels give wrong results"):
        module.check()
    assert not built(cache)


def test_kernels_that_cannot_be_loaded_are_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where the cache's disk may hold no programs
    monkeypatch.setenv("CC", f"{sys.executable} {cache / 'compiler.py'}")
    text = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('no library')"
    (cache / "compiler.py").write_text(text)
    with pytest.raises(OutputError, match="were built, but cannot be loaded from"):
        kernel_library.build()
