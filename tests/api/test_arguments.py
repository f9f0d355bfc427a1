"""What fedgist.run is given from Python: each argument that cannot be used is named in a line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedgist
from fedgist.methods.fedavg import FedAvg
from fedgist.testing.small_worlds import SIZES, blobs, rows

QUICK: dict[str, Any] = {
    "model": {"hidden": [5]},
    "train": {"num_rounds": 1, "batch_size": 5},
    "engine": {"workers": 1, "cohort_size": 3},
}
COUNT = sum(SIZES)


def refused(says: str, **change: Any) -> None:
    arguments: dict[str, Any] = {"recipe": QUICK, "data": blobs(), "clients": rows()} | change
    with pytest.raises(ValueError, match=says) as error:
        fedgist.run(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        (5, "clients is a int; it must be a list with each client's rows"),
        ("abc", "clients is a str; it must be"),
        ({}, "clients is empty"),
        ({1: [0], "1": [1]}, "clients names one client twice"),
        ({"north": [0, 1], "south": []}, r"clients\['south'\] has no rows"),
        ({"north": [0, 1], "south": [0.5]}, r"clients\['south'\]: rows are float64"),
        (np.array(3), "clients is a ndarray; it must be"),
        ([], "clients is empty"),
        ([[0, 1], []], "clients: client 1 has no rows"),
        ([[0, 1], np.zeros(COUNT, bool)], "clients: client 1 has no rows"),
        ([[0, 1], [2.5]], "clients: client 1: rows are float64; a list of whole numbers"),
        ([[0, 1], [2.0]], "clients: client 1: rows are float64; a list of whole numbers"),
        ([[0, 1], None], "clients: client 1 is None, not an array"),
        ([0, 1], "clients: client 0 is a int, not an array"),
        ([["a"]], "clients: client 0: rows are object"),
        ([[[0], [1]]], r"clients: client 0: rows are of shape \[2, 1\]"),
        ([[[0], [1, 2]]], "clients: client 0 cannot be read as an array"),
        ([[0, -1]], "clients: client 0 names row -1, but there are rows 0..31"),
        ([[0, 32]], "clients: client 0 names row 32, but there are rows 0..31"),
        ([[0], [5, 1, 5]], "clients: client 1 lists row 5 twice"),
        ([np.ones(7, bool)], "clients: client 0: a mask of 7 rows, but there are 32"),
    ],
)
def test_rows_of_clients(clients: Any, says: str) -> None:
    refused(says, clients=clients)


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([[0], [99], [], [], []], "clients_test: client 1 names row 99, .* rows 0..29"),
        ([[0.5], [1], [], [], []], "clients_test: client 0: rows are float64"),
        ([[0]], "clients has 5 clients, clients_test has 1"),
        (7, "clients_test is a int"),
        ({"north": [0]}, "clients_test and clients must name the same clients; 'north' is in one"),
    ],
)
def test_test_rows_of_clients(tests: Any, says: str) -> None:
    refused(says, clients_test=tests)


def test_test_rows_need_training_rows() -> None:
    # seen: clients_test was ignored
    refused("clients_test is given without clients", clients=None, clients_test=[[0]])


def test_clients_may_share_rows_and_have_no_test_rows() -> None:
    clients = ([*range(10)], [*range(5, COUNT)])
    with pytest.warns(UserWarning, match=r"in no mean of the result \(no test rows\): client 1"):
        result = fedgist.run(
            QUICK, data=blobs(), clients=(r for r in clients), clients_test=[[0, 1, 2], []]
        )
    assert [line["rows"] for line in result.clients] == [3, 0]
    assert result.world.partition.train[1].tolist() == clients[1]


def test_clients_have_the_names_that_they_are_given() -> None:
    tests = {"south": [7], "north": range(5)}
    result = fedgist.run(
        QUICK, data=blobs(), clients={"north": [0, 20], "south": [1, 2]}, clients_test=tests
    )
    parts = result.world.partition
    assert (parts.names, parts.test[0].tolist()) == (("north", "south"), [0, 1, 2, 3, 4])
    x = blobs().x_test
    assert torch.equal(result.model("south")(x), result.model(1)(x))
    model: dict[str, Any] = {"a": (nn.Linear(6, 3), ["south"]), "b": (nn.Linear(6, 3), [0])}
    recipe = {section: QUICK[section] for section in ("train", "engine")}
    result = fedgist.run(
        recipe, data=blobs(), clients={"north": [0, 20], "south": [1, 2]}, model=model
    )
    assert [c.architectures[0] for c in result.world.population.clients] == ["b", "a"]
    with pytest.raises(ValueError, match=r"there is no client east; .* called north, south"):
        result.model("east")


def test_validation_rows_are_held_out_of_ones_own_clients() -> None:
    # seen: data.validation was ignored beside clients
    with pytest.warns(UserWarning, match="holds out no row of 1 of 5 clients"):
        result = fedgist.run(QUICK | {"data": {"validation": 0.25}}, data=blobs(), clients=rows())
    parts = result.world.partition
    assert parts.validation.counts.tolist() == [int(0.25 * size) for size in SIZES]
    for client, part in enumerate(rows()):
        both = torch.cat([parts.train[client], parts.validation[client]])
        assert torch.equal(both.sort().values, part)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {}}, "model is an empty mapping"),
        ({"model": 5}, "model is a int; it must be a torch.nn.Module or a factory"),
        ({"model": "mlp"}, "model is the text 'mlp': give a module, or name it in the recipe"),
        ({"model": {"a": nn.Linear(6, 3)}}, r"model\['a'\] is a Linear; it must be \(module or"),
        ({"model": {"a": (5, [0])}}, r"model\['a'\] is a int; it must be a torch.nn.Module"),
        ({"model": {"a": (nn.Linear(6, 3), 0)}}, r"model\['a'\]: its clients is a int"),
        ({"model": {"a": (nn.Linear(6, 3), [True])}}, r"model\['a'\]: its clients are \[True\]"),
        ({"model": {"a": (nn.Linear(6, 3), [0.5])}}, r"model\['a'\]: its clients are \[0.5\]"),
        ({"model": {"a": (nn.Linear(6, 3), ["north"])}}, r"clients are \['north'\]; .* numbers is"),
        (
            {"model": {"a": (nn.Linear(6, 3), ["west"])}, "clients": {"north": [0]}},
            r"clients are \['west'\]; a list of their numbers or names: north is needed",
        ),
        ({"recipe": 5}, "recipe is a int; it must be a mapping, a file or a Recipe"),
        ({"recipe": [("seed", 1)]}, "recipe is a list; it must be"),
        ({"out": 5}, "out is 5; it must be the path of a folder"),
        ({"out": ""}, "out is ''; it must be the path of a folder"),
        ({"out": "a\0b"}, "out is .*; it must be the path of a folder"),
        ({"data_root": 5.0}, "data_root is 5.0; it must be the path"),
        ({"resume": "yes"}, "resume is 'yes'; it must be True or False"),
        ({"overwrite": 1}, "overwrite is 1; it must be True or False"),
        ({"resume": True, "overwrite": True}, "resume and overwrite are both True"),
        ({"observer": print}, "observer is a builtin_function_or_method without 'began'"),
        ({"test_sets": [1]}, "test_sets is a list; it must be {'name': "),
        ({"test_sets": {"all": (1, 2)}}, "test_sets has the name 'all'; a text other than"),
        ({"test_sets": {3: (1, 2)}}, "test_sets has the name 3"),
        ({"test_sets": {"rare": 1}}, r"test_sets\['rare'\] must be a pair"),
        ({"test_sets": {"rare": (np.ones((2, 6)), [0, 0.5])}}, r"test_sets\['rare'\]: y must be"),
        ({"test_sets": {"rare": (np.ones((2, 5)), [0, 1])}}, r"\['rare'\]: x: examples have shape"),
        ({"test_sets": {"rare": (np.ones((2, 6)), [0, 3])}}, "y: unknown label '3'"),
        ({"method": "fedavg"}, "method is the text 'fedavg'"),
        ({"method": 5}, "method int is not a method"),
    ],
)
def test_other_arguments(change: dict[str, Any], says: str) -> None:
    refused(says, **change)


def test_a_frame_with_names_of_classes_runs_and_predicts() -> None:
    rng = np.random.default_rng(0)
    ill = rng.random(60) < 0.5
    frame = pd.DataFrame(
        {"age": 40 + 20 * ill + rng.normal(size=60), "town": rng.choice(["Ulm", "Rom"], 60)}
    )
    names = np.where(ill, "ill", "well")
    recipe = QUICK | {"train": {"num_rounds": 8, "batch_size": 5, "lr": 0.05}}
    result = fedgist.run(
        recipe,
        data=(frame[:40], names[:40], frame[40:], names[40:]),
        clients=np.array_split(np.arange(40), 4),
        test_sets={"rare": (frame[:9], pd.Series(names[:9]))},
        method=FedAvg(),
    )
    assert result.world.data.classes == ("ill", "well")
    assert result.rounds[-1]["eval/client/accuracy_mean"] > 0.9
    assert result.rounds[-1]["eval/global/mlp/rare/accuracy"] > 0.7
