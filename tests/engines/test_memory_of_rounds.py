"""What a round used is free when it ends, without waiting until Python looks for cycles."""

from __future__ import annotations

import gc

import pytest
import torch

from fedgist.runs.round import ServerRun
from fedgist.testing.small_worlds import federation, law_world, loopback, world
from method_objects import METHOD_OBJECTS, each


def held_by_cycles(fed: ServerRun) -> list[torch.Size]:
    """The shapes of the tensors of the second round that only a search for cycles frees."""
    if fed.method.stages(fed.context("", 0)):
        fed.do_round(0)
    fed.advance()  # the first round imports what torch needs, which leaves cycles
    gc.disable()
    gc.freeze()  # what was there before is not looked at
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        fed.advance()
        gc.collect()
        return [thing.shape for thing in gc.garbage if isinstance(thing, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("name", each())
def test_no_cycle_holds_what_a_round_used(name: str) -> None:
    assert held_by_cycles(federation(law_world(METHOD_OBJECTS[name]))) == []


@pytest.mark.slow
def test_nor_at_sites_of_their_own() -> None:
    fed = federation(law_world(METHOD_OBJECTS["fedlog"]), make_engine=loopback)
    assert held_by_cycles(fed) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:privacy:UserWarning", "ignore:losses:UserWarning")
def test_nor_in_private_steps() -> None:
    promise = {"unit": "record", "epsilon": 2.0, "delta": 0.01, "clip": 3.0}
    steps = {"bodies": "dp_sgd", "sampling_rate": 0.5, "gradient_clip": 1.0}
    assert held_by_cycles(federation(world("fedlog", privacy=promise | steps))) == []
