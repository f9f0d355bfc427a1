"""What many tests need: a small world, and a user's cache of their own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

import fedgist  # noqa: F401  # once, before doctests import its modules a second time
from fedgist.core.nets.compiled import kernel_library
from fedgist.engines import worker_pool

if TYPE_CHECKING:
    from ray_nodes import Nodes

# the same examples in every run, however long one takes on a busy machine
PATIENT = [HealthCheck.too_slow]
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=PATIENT)
settings.load_profile("fixed")
torch.set_num_threads(1)  # test workers and their forks share the cores

DATA = os.environ.get("FEDGIST_DATA")
LONGER = Path(__file__).with_name("longer.txt")  # made by tests/longer.py


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the quick gate."""
    parser.addoption("--quick", action="store_true", help=f"without the tests of {LONGER.name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the longer tests if asked to; pytest says how many."""
    if not config.getoption("--quick"):
        return
    longer = set(LONGER.read_text("utf-8").split())
    left_out = [item for item in items if item.nodeid.partition("[")[0] in longer]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Let a run use one worker and one thread, unless the test asks for more.

    Several tests run at once: threads that wait for each other would wait for other tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "usable_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measured plans out of the user's cache, and the tests apart from what is in it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # by all workers
    given = os.environ.get("FEDGIST_TEST_CACHE")  # with compiled kernels, by test_processors.py
    monkeypatch.setenv("XDG_CACHE_HOME", given or str(shared / "cache"))


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Two nodes of a Ray cluster, which end with the tests of this process.

    Where Ray cannot start any, for lack of shared memory or of a network, the test is skipped.
    """
    ray_nodes = importlib.import_module("ray_nodes")  # Ray takes half a second
    try:
        cluster = ray_nodes.Nodes()
    except Exception as error:  # noqa: BLE001  # Ray has many
        pytest.skip(f"no Ray cluster can be started here: {type(error).__name__}: {error}")
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache with compiled kernels; without a C compiler the test is skipped."""
    if kernel_library.compiler() is None:
        pytest.skip("no C compiler is here: the kernels cannot be compiled")
    cache = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        kernel_library.build()
    return cache


@pytest.fixture
def compiled(
    compiled_cache: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let the test have compiled kernels, and no other."""
    del own_cache  # it must come first
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    kernel_library.library.cache_clear()
    yield
    kernel_library.library.cache_clear()


@pytest.fixture
def data_sets() -> Path:
    """The folder of the real data sets; without it the test is skipped."""
    if DATA is None:
        pytest.skip("FEDGIST_DATA is not set: the real data sets are not here")
    return Path(DATA)
