"""LG-FedAvg, FedPer and FedRep against torch.optim on plain modules, one for each client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedgist
from fedgist.core.method import Context, Method, Part, Phase, Task, Training
from fedgist.core.nets.net import split_head
from fedgist.core.objectives.classes import Classes
from fedgist.errors import InputError, MethodError, RecipeError
from fedgist.methods import METHODS
from fedgist.methods.fedper import FedPer
from fedgist.methods.fedrep import FedRep
from fedgist.methods.lg_fedavg import LGFedAvg
from fedgist.recipe.reading import make
from fedgist.testing import check_laws
from fedgist.testing.small_worlds import (
    SIZES,
    blobs,
    federation,
    rows,
    trace,
    with_method,
    world,
    world_of,
)
from plain_clients import EPOCHS, EVERYBODY, HIDDEN, Groups, Plain, held, layers_of, two_models


@pytest.mark.parametrize("layers", [1, 2])
def test_lg_fedavg_is_sgd_with_the_last_layers_averaged_over_all_architectures(layers: int) -> None:
    subject, last = two_models("lg_fedavg", global_layers=layers), slice(-layers, None)

    def result(groups: Callable[[Plain], Groups]) -> Plain:
        plain, first = Plain(subject), layers_of(subject, next(iter(HIDDEN)))
        for client in EVERYBODY:  # one start for all: the first architecture's
            for mine, start in zip(plain.layers[client][last], first[last], strict=True):
                mine.load_state_dict(start.state_dict())
        return plain.rounds(lambda k: plain.learn(k, slice(None), EPOCHS), last, groups(plain))

    found = held(subject)
    assert result(lambda _: [EVERYBODY]).agrees(found)
    # rejects an average within each architecture
    assert not result(Plain.within).agrees(found)


@pytest.mark.parametrize("layers", [1, 2])
def test_fedper_is_sgd_with_the_lower_layers_averaged_within_an_architecture(layers: int) -> None:
    subject = two_models("fedper", local_layers=layers)
    plain, lower = Plain(subject), slice(None, -layers)
    plain.rounds(lambda k: plain.learn(k, slice(None), EPOCHS), lower, plain.within())
    assert plain.agrees(held(subject))


@pytest.mark.parametrize("layers", [1, 2])
def test_fedrep_fits_the_head_first_and_the_body_under_it(layers: int) -> None:
    subject = two_models("fedrep", local_layers=layers, head_epochs=4)
    body, head, found = slice(None, -layers), slice(-layers, None), held(subject)

    def result(*work: tuple[slice, int]) -> Plain:
        plain = Plain(subject)

        def learn(client: int) -> None:
            for which, epochs in work:
                plain.learn(client, which, epochs)

        return plain.rounds(learn, body, plain.within())

    assert result((head, 4), (body, EPOCHS)).agrees(found)
    # rejects the body first, and both at once
    assert not result((body, EPOCHS), (head, 4)).agrees(found)
    assert not result((slice(None), EPOCHS)).agrees(found)


def test_lg_fedavg_that_shares_all_layers_is_fedavg() -> None:
    shared = trace(world("lg_fedavg", options={"global_layers": 2})).state
    averaged = trace(world("fedavg")).state
    places = {"1.weight": "2.weight", "1.bias": "2.bias", "4.weight": "1.weight"}
    for name, place in places.items():
        mine, theirs = (
            shared[f"server/arrays/{place}"],
            averaged[f"server/weights/mlp/arrays/{name}"],
        )
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "options", "numbers"),
    [
        ("lg_fedavg", {}, 3 * 5 + 3),
        ("lg_fedavg", {"global_layers": 2}, 3 * 5 + 3 + 5 * 6 + 5),
        ("fedper", {"local_layers": 1}, 5 * 6 + 5),
        ("fedrep", {"local_layers": 1}, 5 * 6 + 5),
    ],
)
def test_what_is_sent_is_the_shared_part_alone(
    method: str, options: dict[str, Any], numbers: int
) -> None:
    line, _ = federation(world(method, options=options)).advance()
    assert line["comm/down_bytes"] == 4 * numbers * len(SIZES)
    assert line["comm/up_bytes"] == 4 * (numbers + 1) * len(SIZES)  # and the number of rows


REFUSED: list[tuple[str, dict[str, Any], dict[str, list[int]], str]] = [
    ("lg_fedavg", {}, {"a": [5], "b": [4]}, r"_layers = 1 needs last layers of the same shapes; "),
    ("lg_fedavg", {}, {"a": [5], "b": [4]}, r"; '1.weight' is \[3, 5\] in a, \[3, 4\] in b$"),
    ("lg_fedavg", {"global_layers": 2}, {"a": [5, 5], "b": [6, 5]}, r"'2.weight' is \[5, 5\] in a"),
    ("lg_fedavg", {"global_layers": 3}, {"a": [5, 5], "b": [5]}, r"= 3, but b has 2 layers$"),
    (
        "fedper",
        {"local_layers": 2},
        {"a": [5, 5], "b": [5]},
        r"local_layers = 2 leaves nothing to share: b has 2 ",
    ),
    ("fedper", {"local_layers": 9}, {"a": [5]}, r"method.local_layers = 9, but a has 2 layers$"),
    (
        "fedrep",
        {"local_layers": 2},
        {"a": [5]},
        r"local_layers = 2 leaves nothing to share: a has 2 layers$",
    ),
    ("fedrep", {"head_epochs": 0}, {"a": [5, 5]}, r"method.head_epochs = 0: must be at least 1"),
    (
        "lg_fedavg",
        {"global_layers": 0},
        {"a": [5]},
        r"method.global_layers = 0: must be at least 1",
    ),
]


@pytest.mark.parametrize(("method", "options", "hidden", "says"), REFUSED)
def test_nets_that_do_not_fit_are_refused_in_one_line(
    method: str, options: dict[str, Any], hidden: dict[str, list[int]], says: str
) -> None:
    models = {name: {"model": "mlp", "hidden": sizes, "share": 1} for name, sizes in hidden.items()}
    with pytest.raises(RecipeError, match=says) as caught:
        world(method, options=options, architectures=models)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [{"name": "mlp", "frozen": True}, {"name": "logistic"}])
@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu"])
def test_a_model_of_which_nothing_is_shared_is_refused(method: str, model: dict[str, Any]) -> None:
    # seen: such a run ended in a KeyError when it was resumed, or its models used
    raw = {"method": {"name": method}, "model": model, "engine": {"workers": 1, "cohort_size": 2}}
    with pytest.raises(InputError, match=r"has no weights that the method shares|nothing to share"):
        fedgist.run(raw, data=blobs(), clients=rows())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_of_frozen_bodies_goes_on_or_is_refused(method: str, tmp_path: Path) -> None:
    raw = {
        "method": {"name": method},
        "model": {"name": "mlp", "hidden": [5], "frozen": True},
        "train": {"num_rounds": 1, "optimizer": "sgd"},
        "data": {"public": {"client": 0}} if method in {"feddf", "fedmd"} else {},
        "engine": {"workers": 1, "cohort_size": 3, "checkpoint_every": 1},
    }
    given: dict[str, Any] = {"data": blobs(), "clients": rows(), "out": tmp_path / "run"}
    with contextlib.suppress(InputError):
        fedgist.run(raw, **given)
        fedgist.run(**given, resume=True, rounds=2)


def test_a_layer_with_a_bias_and_one_without_are_not_averaged() -> None:
    nets = {"full": nn.Linear(4, 3), "bare": nn.Linear(4, 3, bias=False)}
    archs = {name: split_head(partial(nn.Sequential, net), (4,), 3) for name, net in nets.items()}
    starts = {name: arch.start(0) for name, arch in archs.items()}
    training = Training(num_rounds=1, batch_size=8)
    task = Task((4,), 3, 2, archs, starts, training, Classes(3))
    with pytest.raises(MethodError, match=r"'1\.bias' is \[3\] in full, missing in bare$"):
        LGFedAvg().check(task)


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.parametrize(
    "method",
    [LGFedAvg(2), FedPer(1), FedRep(1, head_epochs=1)],
    ids=["lg_fedavg@2", "fedper@1", "fedrep@1"],
)
def test_the_other_number_of_layers_obeys_the_laws_too(method: Method) -> None:
    check_laws(method)


def test_a_phase_and_what_is_kept_may_count_layers() -> None:
    @dataclass(frozen=True)
    class Mine(Method):
        keeps: ClassVar[Part] = "last:2"

        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(("but_last:1",)),)

    subject = with_method(world("local"), Mine())
    state, start = trace(subject, rounds=1).state, subject.server.task.starts["mlp"].params
    kept = {name: array[0] for name, array in state.items() if "/net/" in name}
    changed = {n.removeprefix("clients/mlp/net/"): a for n, a in kept.items()}
    assert {n: not torch.equal(a, start[n]) for n, a in changed.items()} == {
        "1.weight": True,
        "1.bias": True,
        "4.weight": False,
        "4.bias": False,
    }


def test_a_part_that_the_net_does_not_have_is_refused_before_the_first_round() -> None:
    @dataclass(frozen=True)
    class Mine(Method):
        keeps: ClassVar[Part] = "last:3"

    recipe = {"clients": {"num_clients": 2}, "train": {"num_rounds": 1}, "engine": {"workers": 1}}
    with pytest.raises(MethodError, match=r"'last:3' counts 3 layers, but the net has 2"):
        fedgist.run(recipe, method=Mine())


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_the_default_goes_with_the_default_model(method: str) -> None:
    # seen: two local layers, of the default model's two
    world_of(make({"method": {"name": method}}))
