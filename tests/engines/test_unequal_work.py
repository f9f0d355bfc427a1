"""Unequal work: a number of local steps for all clients, and lengths of training of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgist
from counted_steps import CountsSteps, batches
from drifting_clients import DECAY, LR, Clients, Floats, shared, start_of
from fedgist.core.method import Phase
from fedgist.core.privacy import Privacy, PrivateSteps
from fedgist.core.training import Work
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.testing.small_worlds import ALONE, SIZES, trace, world
from fedgist.world.client_settings import works_in
from fedgist.world.privacy_budget import _private_steps

Tables = Mapping[str, Mapping[str, Any]]


def taken(tables: Tables, train: Mapping[str, Any], plan: Plan) -> list[float]:
    """Return each client's steps of one round."""
    about = {"train": {"lr": 0.5, **train}, "clients": {"settings": tables}}
    state = trace(world(CountsSteps(), **about), plan, rounds=1).state
    steps = state["clients/mlp/own/so_far"] / 0.5
    assert torch.equal(steps, state["clients/mlp/own/expected"])
    return [float(one) for one in steps]


@pytest.mark.parametrize("plan", [ALONE, Plan(2), Plan(5)])
def test_all_clients_take_as_many_steps_whatever_their_rows_are(plan: Plan) -> None:
    assert taken({}, {"local_steps": 3, "local_epochs": 1}, plan) == [3.0] * len(SIZES)
    assert taken({}, {"local_epochs": 2}, plan) == [2.0 * batches(size) for size in SIZES]


lengths = st.one_of(
    st.fixed_dictionaries({"local_steps": st.integers(1, 9)}),
    st.fixed_dictionaries({"local_epochs": st.integers(1, 3)}),
)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.none() | lengths, min_size=5, max_size=5), lengths, st.sampled_from([1, 2, 5]))
def test_some_clients_train_as_long_as_their_table_says(
    each: list[dict[str, int] | None], common: dict[str, int], size: int
) -> None:
    tables = {
        f"t{i}": {"clients": [i], "train": own} for i, own in enumerate(each) if own is not None
    }
    expected = [
        float(length.get("local_steps", length.get("local_epochs", 0) * batches(rows)))
        for rows, own in zip(SIZES, each, strict=True)
        for length in [own or common]
    ]
    train = {"local_epochs": 1, **common}
    assert taken(tables, train, Plan(size)) == expected


def test_fednova_divides_by_each_clients_own_steps() -> None:
    """Full batches and plain steps beside NumPy, with unlike numbers of steps."""
    clients, steps = Clients.drawn(9, 14, 20), (4, 1, 6)
    data, rows = clients.data()
    recipe: dict[str, Any] = {
        "method": {"name": "fednova"},
        "model": {"name": "logistic"},
        "data": {"normalize": "none"},
        "clients": {
            "settings": {
                "slow": {"clients": [1], "train": {"local_steps": 1}},
                "fast": {"clients": [2], "train": {"local_epochs": 6}},
            }
        },
        "train": {"num_rounds": 3, "lr": LR, "optimizer": "sgd", "weight_decay": DECAY}
        | {"batch_size": 20, "local_steps": 4},
        "evaluate": {"every": 3},
        "engine": {"workers": 1, "cohort_size": 3},
    }
    tests = [torch.arange(6)] * 3
    done = fedgist.run(recipe, data=data, clients=rows, clients_test=tests)
    shares = np.array([len(x) for x in clients.x]) / sum(map(len, clients.x))

    def update(i: int, w: Floats) -> Floats:
        y = w
        for _ in range(steps[i]):
            y = y - LR * clients.gradient(i, y)
        return y - w

    w = start_of(done)
    for _ in range(3):
        divided = sum(p * update(i, w) / steps[i] for i, p in enumerate(shares))
        w = w + float(shares @ np.array(steps)) * divided
    np.testing.assert_allclose(shared(done), w, atol=5e-6)


def test_the_budget_charges_the_longest_training() -> None:
    tables = {"fast": {"clients": [1], "train": {"local_steps": 9}}}
    small = world("fedlog", train={"local_epochs": 2})
    steps = PrivateSteps(0.5, 1.0, 1.0)
    task = replace(small.server.task, privacy=Privacy("record", "central", 1.0, 0.0, steps))
    charged = _private_steps(small.server.method, task, works_in(tables))
    assert charged == (0, 9, 9, 9)
    slow = {"slow": {"clients": [1], "train": {"local_steps": 1}}}
    assert _private_steps(small.server.method, task, works_in(slow))[1] == steps.count(2)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"local_steps": 3}}, "train.*local_epochs or train.local_steps, not both"),
        ({"train": {"local_steps": 0}}, "train.local_steps"),
        ({"a": {"clients": [0], "train": {}}}, "settings.a.train: give local_epochs or local_ste"),
        (
            {"a": {"clients": [0], "train": {"local_epochs": 1, "local_steps": 2}}},
            "settings.a.train: give local_epochs or local_steps",
        ),
        ({"a": {"clients": [0], "train": {"epochs": 1}}}, "settings.a.train.epochs: unknown key"),
        ({"a": {"clients": [0], "train": {"local_steps": -1}}}, "settings.a.train.local_steps"),
        ({"a": {"clients": [0], "train": 3}}, "settings.a.train"),
        ({"a": {"train": {"local_steps": 1}}}, "settings.a: give share or clients"),
    ],
)
def test_impossible_lengths_are_refused(sections: dict[str, Any], words: str) -> None:
    given = sections if "train" in sections else {"clients": {"settings": sections}}
    with pytest.raises(RecipeError, match=words):
        world("fedavg", **given)


def test_a_length_is_that_of_the_phase_if_it_states_one() -> None:
    work = Work(steps=7)
    assert Phase().length(work) == work
    assert Phase(epochs=2).length(work) == Work(2)
    assert Phase(steps=3).length(work) == Work(1, 3)
