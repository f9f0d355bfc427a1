"""Ditto: the shared model is FedAvg's, the personal one is local training with a pull."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drifting_clients import LR, Clients, personal, run, shared
from fedgist.engines.plans.plan import Plan
from fedgist.methods.ditto import Ditto
from fedgist.methods.fedavg import FedAvg
from fedgist.testing import check_reduces_to
from fedgist.testing.small_worlds import SIZES, trace, world

NORMS = {"normed": {"model": "drifting_clients:batch_normed", "share": 1}}


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_the_shared_model_is_fedavgs_bit_for_bit(lam: float) -> None:
    check_reduces_to(Ditto(lam=lam, personal_epochs=3), FedAvg())


def own_models(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


@pytest.mark.parametrize("model", ["mlp", "normed"])
def test_without_a_pull_personal_models_are_those_of_local_training(model: str) -> None:
    """With running statistics; to rounding, in whole batches: each phase draws its own order."""
    sections: dict[str, Any] = {} if model == "mlp" else {"architectures": NORMS}
    sections["train"] = {"batch_size": max(SIZES)}
    ours = trace(world("ditto", options={"lam": 0.0}, **sections), Plan(5), rounds=3).state
    alone = trace(world("local", **sections), Plan(5), rounds=3).state
    (name,) = {key.split("/")[1] for key in ours if key.startswith("clients/")}
    second = f"clients/{name}/own/v/"
    local = own_models(alone, f"clients/{name}/net/")
    found = own_models(ours, f"{second}params/") | own_models(ours, f"{second}buffers/")
    assert found.keys() == local.keys()
    for key, array in local.items():
        torch.testing.assert_close(found[key], array, atol=2e-6, rtol=1e-5)
    assert ("2.running_mean" in found) == (model == "normed")


def test_personal_models_stand_still_where_the_pull_meets_the_loss() -> None:
    # rejects a pull without the half's factor, and toward the average after the round
    clients, lam = Clients.drawn(10, 13, seed=2), 0.7
    done = run({"name": "ditto", "lam": lam, "personal_epochs": 120}, clients, 6)
    before = run({"name": "fedavg"}, clients, 5)
    w = shared(before)  # what the last round sent
    for client in range(2):
        v = personal(done, client)
        np.testing.assert_allclose(clients.gradient(client, v), lam * (w - v), atol=2e-5)
        assert abs(v - w).max() > 0.05
    np.testing.assert_allclose(shared(done), shared(run({"name": "fedavg"}, clients, 6)), atol=0)
    assert LR * lam < 2
