"""LG-FedAvg, FedPer and FedRep against torch.optim on plain modules, one for each client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedgist
from fedgist.core.method import Context, Method, Part, Phase, Task, Training
from fedgist.core.net import split
from fedgist.core.objective import Classes
from fedgist.core.optimizer import Optimizer
from fedgist.engines.stacking_plan import Plan
from fedgist.errors import MethodError, RecipeError
from fedgist.federation.round_loop import Federation, start_server
from fedgist.federation.world import World
from fedgist.methods.fedper import FedPer
from fedgist.methods.fedrep import FedRep
from fedgist.methods.lg_fedavg import LGFedAvg
from fedgist.testing import check_laws
from fedgist.testing.small_worlds import SIZES, federation, local_engine, trace, with_method, world

HIDDEN = {"wide": [7, 6, 5], "flat": [6, 5]}
MODELS = {name: {"model": "mlp", "hidden": sizes, "share": 1} for name, sizes in HIDDEN.items()}
ROUNDS, EPOCHS, LR = 2, 3, 0.2
Layers = list[nn.Linear]
Groups = Sequence[Sequence[int]]  # clients whose layers are averaged together


def small_world(method: str, **options: Any) -> World:
    """Return a world of two architectures, in which an epoch is one step over all rows."""
    train = {"local_epochs": EPOCHS, "batch_size": max(SIZES), "lr": LR, "optimizer": "momentum"}
    return world(method, options=options, architectures=MODELS, train=train)


class Plain:
    """The clients of a world as plain modules: their architectures, layers and rows."""

    def __init__(self, small_world: World) -> None:
        self.names = [client.architectures[0] for client in small_world.server.clients]
        self.layers = [self._layers(small_world, name) for name in self.names]
        self.first = self._layers(small_world, next(iter(HIDDEN)))
        x = (small_world.data.x - 0.5) / 2.0
        lines = [small_world.population.train[client] for client in range(len(SIZES))]
        self.rows = [(x[rows], small_world.data.y[rows]) for rows in lines]

    def _layers(self, small_world: World, name: str) -> Layers:
        params = small_world.server.task.starts[name].params
        weights = [n for n in params if n.endswith("weight")]
        layers = []
        for weight in weights:
            layer = nn.Linear(params[weight].shape[1], params[weight].shape[0])
            bias = weight.replace("weight", "bias")
            layer.load_state_dict({"weight": params[weight], "bias": params[bias]})
            layers.append(layer)
        return layers

    def learn(self, client: int, which: slice, epochs: int) -> None:
        """Let some of a client's layers learn with SGD and momentum, from a fresh start of both."""
        (x, y), layers = self.rows[client], self.layers[client]
        optimizer = torch.optim.SGD(nn.ModuleList(layers[which]).parameters(), LR, momentum=0.9)
        for _ in range(epochs):
            z = x
            for layer in layers[:-1]:
                z = torch.relu(layer(z))
            nn.ModuleList(layers).zero_grad()
            torch.autograd.backward(F.cross_entropy(layers[-1](z), y))
            optimizer.step()

    def average(self, which: slice, groups: Groups) -> None:
        """Average these layers over each group of clients, by rows."""
        for group in groups:
            weights = torch.tensor([float(SIZES[k]) for k in group])
            for same in zip(*(self.layers[k][which] for k in group), strict=True):
                for name in ("weight", "bias"):
                    values = torch.stack([getattr(layer, name).detach() for layer in same])
                    mean = torch.einsum("k,k...->...", weights / weights.sum(), values)
                    for layer in same:
                        getattr(layer, name).data.copy_(mean)

    def within(self) -> Groups:
        """The clients of each architecture."""
        return [[k for k, n in enumerate(self.names) if n == name] for name in HIDDEN]

    def arrays(self, client: int) -> list[Tensor]:
        """Return a client's weights and biases, in the order of its layers."""
        return [p.detach() for layer in self.layers[client] for p in (layer.weight, layer.bias)]


def held(small_world: World) -> list[list[Tensor]]:
    """Return what each client holds after the rounds and the next download."""
    engine, server = local_engine(small_world, Plan(2)), start_server(small_world.server)
    fed = Federation(small_world.server, engine, server)
    for _ in range(ROUNDS):
        fed.advance()
    orders, downs, ctx = fed.downloads(ROUNDS)
    return [
        list(engine.client(ctx, order, down).net.params.values())
        for order, down in zip(orders, downs, strict=True)
    ]


def agree(small_world: World, plain: Plain, clients: Sequence[int]) -> bool:
    found = held(small_world)
    return all(
        torch.allclose(a, b, atol=2e-5)
        for k in clients
        for a, b in zip(found[k], plain.arrays(k), strict=True)
    )


EVERYBODY = range(len(SIZES))


def rounds(plain: Plain, work: Callable[[int], None], shared: slice, groups: Groups) -> Plain:
    for _ in range(ROUNDS):
        for client in EVERYBODY:
            work(client)
        plain.average(shared, groups)
    return plain


@pytest.mark.parametrize("layers", [1, 2])
def test_lg_fedavg_is_sgd_with_the_last_layers_averaged_over_all_architectures(layers: int) -> None:
    subject, last = small_world("lg_fedavg", global_layers=layers), slice(-layers, None)

    def result(groups: Callable[[Plain], Groups]) -> Plain:
        plain = Plain(subject)
        for client in EVERYBODY:  # one start for all: the first architecture's
            for mine, first in zip(plain.layers[client][last], plain.first[last], strict=True):
                mine.load_state_dict(first.state_dict())
        return rounds(plain, lambda k: plain.learn(k, slice(None), EPOCHS), last, groups(plain))

    assert agree(subject, result(lambda _: [EVERYBODY]), EVERYBODY)
    # rejects an average within each architecture
    assert not agree(subject, result(Plain.within), EVERYBODY)


@pytest.mark.parametrize("layers", [1, 2])
def test_fedper_is_sgd_with_the_lower_layers_averaged_within_an_architecture(layers: int) -> None:
    subject = small_world("fedper", local_layers=layers)
    plain = Plain(subject)
    lower = slice(None, -layers)
    rounds(plain, lambda k: plain.learn(k, slice(None), EPOCHS), lower, plain.within())
    assert agree(subject, plain, EVERYBODY)


@pytest.mark.parametrize("layers", [1, 2])
def test_fedrep_fits_the_head_first_and_the_body_under_it(layers: int) -> None:
    subject = small_world("fedrep", local_layers=layers, head_epochs=4)
    body, head = slice(None, -layers), slice(-layers, None)

    def result(*work: tuple[slice, int]) -> Plain:
        plain = Plain(subject)

        def learn(client: int) -> None:
            for which, epochs in work:
                plain.learn(client, which, epochs)

        return rounds(plain, learn, body, plain.within())

    assert agree(subject, result((head, 4), (body, EPOCHS)), EVERYBODY)
    # rejects the body first, and both at once
    assert not agree(subject, result((body, EPOCHS), (head, 4)), EVERYBODY)
    assert not agree(subject, result((slice(None), EPOCHS)), EVERYBODY)


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
    ("fedper", {}, {"a": [5, 5], "b": [5]}, r"local_layers = 2 leaves nothing to share: b has 2 "),
    ("fedper", {"local_layers": 9}, {"a": [5]}, r"method.local_layers = 9, but a has 2 layers$"),
    ("fedrep", {}, {"a": [5]}, r"local_layers = 2 leaves nothing to share: a has 2 layers$"),
    ("fedrep", {"head_epochs": 0}, {"a": [5, 5]}, r"method.head_epochs must be at least 1, not 0"),
    ("lg_fedavg", {"global_layers": 0}, {"a": [5]}, r"method.global_layers must be at least 1, "),
]


@pytest.mark.parametrize(("method", "options", "hidden", "says"), REFUSED)
def test_nets_that_do_not_fit_are_refused_in_one_line(
    method: str, options: dict[str, Any], hidden: dict[str, list[int]], says: str
) -> None:
    models = {name: {"model": "mlp", "hidden": sizes, "share": 1} for name, sizes in hidden.items()}
    with pytest.raises(RecipeError, match=says) as caught:
        world(method, options=options, architectures=models)
    assert "\n" not in str(caught.value)


def test_a_layer_with_a_bias_and_one_without_are_not_averaged() -> None:
    nets = {"full": nn.Linear(4, 3), "bare": nn.Linear(4, 3, bias=False)}
    archs = {name: split(partial(nn.Sequential, net), (4,), 3) for name, net in nets.items()}
    starts = {name: arch.start(0) for name, arch in archs.items()}
    training = Training(1, 1.0, 1, 8, Optimizer())
    task = Task((4,), 3, 2, archs, starts, training, Classes(3))
    with pytest.raises(MethodError, match=r"'1\.bias' is \[3\] in full, missing in bare$"):
        LGFedAvg().check(task)


@pytest.mark.slow
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
