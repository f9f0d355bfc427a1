"""Rounds of every method on a GPU, which is pretended: nothing mixes its tensors with the CPU's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from commands import call
from fedgist.methods import METHODS

TESTS = Path(__file__).parents[1]
TELLS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_rounds_are_those_on_the_cpu() -> None:
    done = call([sys.executable, TESTS / "pretended_gpu.py"], TESTS)
    assert len(done.stdout.split()) > len(METHODS)


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_what_mixes_devices_fails() -> None:
    mixed = """
import torch, pretended_gpu
with pretended_gpu.pretended_gpu():
    there, here = torch.ones(2, device="cuda"), torch.ones(2)
    assert (there + there.new_ones(2)).tolist() == [2.0, 2.0]
    there + here
"""
    done = call([sys.executable, "-c", mixed], TESTS, code=1)
    assert "aten.add.Tensor of tensors on the GPU and on the CPU" in done.stderr
