"""Parts of nets that count layers, against names written down by hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from fedgist.core.nets.net import Net, split_head
from fedgist.core.nets.parts import check_part, is_part
from fedgist.errors import MethodError
from fedgist.models import MODELS
from fedgist.wire.outline import Outline


def sequence(**layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


def normalized() -> nn.Module:
    """Normalizations of every kind: before the first layer, and behind layers."""
    return sequence(
        norm0=nn.GroupNorm(1, 1),
        conv=nn.Conv2d(1, 3, 3, bias=False),
        bn=nn.BatchNorm2d(3),
        norm1=nn.LayerNorm((3, 4, 4)),  # its weight has three dimensions
        act=nn.PReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(48, 5),
        norm2=nn.LayerNorm(5),
        fc2=nn.Linear(5, 4),
    )


class HeadFirst(nn.Module):
    """A head that is registered first, a parameter of the module's own, and a nested layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 6))
        self.out = nn.Linear(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(x)
        return out


LAYERS: list[tuple[Callable[[], nn.Module], str, tuple[int, ...], list[set[str]]]] = [
    (
        normalized,
        "fc2",
        (1, 6, 6),
        [
            {"conv.weight", "norm0.weight", "norm0.bias", "act.weight", "norm1.weight"}
            | {"norm1.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"},
            {"fc1.weight", "fc1.bias", "norm2.weight", "norm2.bias"},
            {"fc2.weight", "fc2.bias"},
        ],
    ),
    (
        HeadFirst,
        "out",
        (6,),
        [
            {"token", "blocks.0.weight", "blocks.0.bias"},
            {"blocks.1.0.weight", "blocks.1.0.bias"},
            {"out.weight", "out.bias"},
        ],
    ),
]


@pytest.mark.parametrize(
    ("build", "head", "shape", "layers"), LAYERS, ids=["normalized", "head-first"]
)
def test_the_last_layers_and_the_rest_divide_the_arrays(
    build: Callable[[], nn.Module], head: str, shape: tuple[int, ...], layers: list[set[str]]
) -> None:
    # rejects normalizations that count as layers, or go with the layer behind them
    net = split_head(build, shape, 4, head=head).start(0)
    assert [set(layer) for layer in net.arch.layers.names] == layers
    for k in range(1, len(layers) + 1):
        last = set().union(*layers[-k:])
        assert set(net.state(f"last:{k}")) == last
        assert set(net.state(f"but_last:{k}")) == set(net.state()) - last
    assert net.state("last:1").keys() == net.state("head").keys()
    assert net.state("but_last:1").keys() == net.state("body").keys()


@pytest.mark.parametrize(
    ("model", "shape", "last_two"),
    [
        ("fedlog_mnist", (1, 28, 28), {"fc1", "fc2"}),
        ("fedlog_cifar", (3, 32, 32), {"fc2", "fc3"}),
        ("lenet5", (1, 8, 8), {"fc1", "fc2"}),
        ("resnet9", (3, 32, 32), {"fc1", "fc2"}),
        ("logistic", (3,), {"1"}),
    ],
)
def test_the_last_two_layers_of_the_papers_nets(
    model: str, shape: Sequence[int], last_two: set[str]
) -> None:
    net = split_head(lambda: MODELS[model](shape, 10), shape, 10).start(0)
    names = net.arch.layers.names[-2:]
    assert {name.rpartition(".")[0] for layer in names for name in layer} == last_two


def test_names_by_place_do_not_depend_on_the_architecture() -> None:
    def flat() -> nn.Module:
        return sequence(a=nn.Linear(2, 5), b=nn.BatchNorm1d(5), c=nn.Linear(5, 3))

    def deep() -> nn.Module:
        return sequence(
            f=nn.Linear(2, 2), x=nn.Linear(2, 5), y=nn.BatchNorm1d(5), z=nn.Linear(5, 3)
        )

    nets: list[Net] = [split_head(build, (2,), 3).start(0) for build in (flat, deep)]
    first, second = (net.arch.layers.last(2) for net in nets)
    assert first.keys() == second.keys()
    assert first["1.weight"] == "c.weight"
    assert second["1.weight"] == "z.weight"
    assert first["2.1.running_mean"] == "b.running_mean"
    assert second["2.bias"] == "x.bias"


def test_a_part_that_counts_more_layers_than_there_are_is_refused() -> None:
    net = split_head(lambda: MODELS["logistic"]((3,), 2), (3,), 2).start(0)
    with pytest.raises(MethodError, match=r"^'last:2' counts 2 layers, but the net has 1$"):
        net.part("last:2")
    with pytest.raises(MethodError, match=r"^'last:2' counts 2 layers, but the net has 1$"):
        net.arch.layers.last(2)
    with pytest.raises(MethodError, match=r"^part = 'bodies'; did you mean 'body'\? known: all"):
        net.part("bodies")


@pytest.mark.parametrize("name", ["last", "last:", "last:0", "last:-1", "last:x", "first:2", "", 3])
def test_what_is_no_part_is_told_with_the_choices(name: str) -> None:
    with pytest.raises(MethodError, match=r"known: all, body, head, none, last:k, but_last:k"):
        check_part(name, "Mine.keeps")
    assert not isinstance(name, str) or not is_part(name)


def test_an_outline_has_the_layers_that_it_was_told_of() -> None:
    outline = Outline("x", (3,), 2, 5, head="c", shared={"a.weight": (5, 3), "a.bias": (5,)})
    net = outline.architecture().start(0)
    assert set(net.state("last:1")) == {"c.weight", "c.bias"}
    assert set(net.state("last:2")) == {"c.weight", "c.bias", "a.weight", "a.bias"}
