"""Workers and what stands in for them compute alike: one thread, the smallest numbers as zero."""

from __future__ import annotations

import pytest
import torch

from fedgist.engines.process_control import as_workers_do
from fedgist.engines.worker_pool import WorkerPool

SMALLEST = 1e-40  # of float32 below its normal numbers


def mode(_: object) -> tuple[int, bool]:
    return torch.get_num_threads(), bool(torch.tensor(SMALLEST) * 1.0)


@pytest.mark.parametrize("size", [1, 2])
def test_every_worker_computes_on_one_thread_and_without_denormal_numbers(size: int) -> None:
    pool = WorkerPool(mode, size)
    try:
        assert pool.run([None, None]) == [(1, False), (1, False)]
    finally:
        pool.close()


@pytest.mark.parametrize("flushed", [False, True])
def test_a_users_own_mode_comes_back(*, flushed: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_flush_denormal(flushed)
    try:
        with as_workers_do():
            assert mode(None) == (1, False)
        assert mode(None) == (threads, not flushed)
    finally:
        torch.set_flush_denormal(False)
