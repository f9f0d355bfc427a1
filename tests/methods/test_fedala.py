"""FedALA beside a loop in NumPy: what a client takes of the shared model, number by number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drifting_clients import DECAY, LR, Clients, Floats, personal, run, shared, start_of
from fedgist.core.method import Phase
from fedgist.errors import RecipeError
from fedgist.methods.fedala import FedALA
from fedgist.methods.fedavg import FedAvg
from fedgist.testing import check_reduces_to
from fedgist.testing.small_worlds import world

OPTIONS: dict[str, Any] = {"mix_rows": 1.0, "first_passes": 6, "mix_lr": 0.8}


def by_hand(
    clients: Clients, w: Floats, rounds: int, steps: int, *, cut: bool = True
) -> tuple[Floats, list[Floats], list[Floats]]:
    """Algorithm 1 with all clients and full batches: w, clients' models at test, mixtures."""
    count = len(clients.x)
    own, mixes = [w] * count, [np.ones_like(w)] * count
    for number in range(1, rounds + 1):
        local = []
        for i in range(count):
            mix, gap = mixes[i], w - own[i]
            for _ in range(0 if number == 1 else OPTIONS["first_passes"] if number == 2 else 1):
                at = own[i] + gap * mix
                slope = clients.gradient(i, at) - DECAY * at
                mix = mix - OPTIONS["mix_lr"] * slope * gap
                mix = np.clip(mix, 0, 1) if cut else mix
            v, mixes[i] = own[i] + gap * mix, mix
            for _ in range(steps):
                v = v - LR * clients.gradient(i, v)
            local.append(v)
        own = local
        sizes = [len(x) for x in clients.x]
        w = np.average(local, axis=0, weights=sizes)
    tests = [v + (w - v) * mix for v, mix in zip(own, mixes, strict=True)]
    return w, tests, mixes


@pytest.mark.parametrize("epochs", [1, 5])
def test_rounds_are_those_of_algorithm_1(epochs: int) -> None:
    # rejects mixtures that are not cut, and a first training of the mixture like the later ones
    clients = Clients.drawn(9, 14, 20)
    done = run({"name": "fedala"} | OPTIONS, clients, 4, local_epochs=epochs)
    w, tests, mixes = by_hand(clients, start_of(done), 4, epochs)
    np.testing.assert_allclose(shared(done), w, atol=1e-5)
    for client, expected in enumerate(tests):
        np.testing.assert_allclose(personal(done, client), expected, atol=1e-5)
    if epochs > 1:
        assert any((mix == 1).any() and (mix < 0.99).any() for mix in mixes)
        uncut, *_ = by_hand(clients, start_of(done), 4, epochs, cut=False)
        assert abs(uncut - w).max() > 1e-4


def test_a_mixture_that_does_not_learn_is_fedavg_bit_for_bit() -> None:
    check_reduces_to(FedALA(mix_lr=0.0), FedAvg())


@pytest.mark.parametrize(
    ("part", "steps"), [(0.8, [1, 4, 8, 9]), (0.7, [1, 4, 7, 8]), (2.5, [3, 13, 25, 28])]
)
def test_a_part_of_the_rows_is_a_part_of_the_batches(part: float, steps: list[int]) -> None:
    rows = torch.tensor([1, 17, 40, 41])  # 1, 5, 10 and 11 batches of 4
    assert Phase(epochs=part).steps_of(rows, world("fedala").server.task, "mlp").tolist() == steps


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"options": {"layers": 9}}, r"method\.layers = 9"),
        ({"train": {"clip_norm": 1.0}}, r"train\.clip_norm = 1\.0"),
    ],
)
def test_what_it_cannot_do_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        world("fedala", **sections)
