"""Frozen bodies and adapters of single nets, against torch's own layers with eq. 3 by hand."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.nets.adapters import Adapted, Adapters, adapted_layers, frozen, merged
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import Net, split_head, stacked
from fedgist.core.tree import map_leaves, take

RANK, ALPHA = 2, 6.0
SMALL = Adapters(RANK, ALPHA)
EVERY_ROW = torch.ones(4, dtype=torch.bool)


def dense() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            low=nn.Linear(6, 8), act=nn.Tanh(), up=nn.Linear(8, 5, bias=False), head=nn.Linear(5, 3)
        )
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 3, 3),
            norm=nn.BatchNorm2d(3),
            flat=nn.Flatten(),
            drop=nn.Dropout(0.5),
            fc=nn.Linear(48, 5),
            act=nn.Tanh(),
            head=nn.Linear(5, 3),
        )
    )


class Twice(nn.Module):
    """A layer that is used at two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.again = self.first
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.again(self.first(x).tanh()).tanh())
        return out


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x).tanh()).tanh())
        return out


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def moved(net: Net, seed: int = 5) -> Net:
    """Return the net with random numbers in every array that learns."""
    drawn = torch.Generator().manual_seed(seed)
    return net.with_arrays(
        {n: torch.randn(p.shape, generator=drawn) for n, p in net.params.items()}
    )


@pytest.mark.parametrize(
    ("build", "shape"), [(dense, (6,)), (convolutional, (1, 6, 6)), (Twice, (5,))]
)
@pytest.mark.parametrize("adapters", [None, SMALL])
def test_the_start_is_the_whole_model_and_only_what_learns_is_a_parameter(
    build: type[nn.Module], shape: tuple[int, ...], adapters: Adapters | None
) -> None:
    whole = split_head(build, shape, 3).start(7)
    net = frozen(whole, adapters).start(7)
    x = inputs(4, *shape)
    assert torch.equal(net(x), whole(x))  # B is zero: W x + 0
    assert net.buffers == {}
    own = {"head.weight", "head.bias"}
    names = {f"{n}.{part}" for n in adapted_layers(net.arch) for part in ("lora_a", "lora_b")}
    assert set(net.params) == own | names
    assert bool(names) == (adapters is not None)


def test_a_net_with_adapters_is_equation_3() -> None:
    whole = split_head(dense, (6,), 3).start(0)
    net, x = moved(frozen(whole, SMALL).start(0)), inputs(4, 6)
    p, w = net.params, whole.params
    assert p["low.lora_a"].shape == (RANK, 6)
    assert p["low.lora_b"].shape == (8, RANK)
    scale = ALPHA / RANK  # not alpha, and not 1 / rank
    z = x @ w["low.weight"].T + w["low.bias"] + scale * x @ p["low.lora_a"].T @ p["low.lora_b"].T
    z = z.tanh()
    z = z @ w["up.weight"].T + scale * z @ p["up.lora_a"].T @ p["up.lora_b"].T
    expected = z @ p["head.weight"].T + p["head.bias"]
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(merged(net)(x), expected)
    assert merged(net).arch is whole.arch
    assert merged(whole) is whole


@pytest.mark.parametrize(
    ("build", "shape"), [(convolutional, (1, 6, 6)), (Twice, (5,))], ids=["conv", "twice"]
)
def test_merged_models_compute_the_same(build: type[nn.Module], shape: tuple[int, ...]) -> None:
    net = moved(frozen(split_head(build, shape, 3).start(0), SMALL).start(0))
    x = inputs(4, *shape)
    torch.testing.assert_close(merged(net)(x), net(x))


def test_a_frozen_body_computes_in_training_as_in_evaluation() -> None:
    whole = split_head(convolutional, (1, 6, 6), 3).start(0)
    statistics = {"norm.running_mean": torch.ones(3), "norm.running_var": torch.full((3,), 2.0)}
    whole = whole.with_arrays(statistics)
    net, x = frozen(whole, SMALL).start(0), inputs(4, 1, 6, 6)
    run = Pass(EVERY_ROW, random.key(0))
    assert torch.equal(replace(net, run=run).features(x), whole.features(x))
    assert run.updates == {}
    # neither batch statistics nor dropout, which a whole model in training has
    assert not torch.allclose(replace(whole, run=run).features(x), whole.features(x))


def test_adapters_of_stacked_clients_are_each_clients_own() -> None:
    arch = frozen(split_head(convolutional, (1, 6, 6), 3).start(0), SMALL)
    nets = [moved(arch.start(0), seed) for seed in range(3)]
    stack = map_leaves(lambda *leaf: torch.stack(leaf), *nets)
    x = inputs(3, 4, 1, 6, 6)
    together = torch.func.vmap(lambda net, rows: net(rows))(stack, x)
    alone = torch.stack([net(rows) for net, rows in zip(nets, x, strict=True)])
    torch.testing.assert_close(together, alone)
    assert torch.equal(
        take(stacked(nets[0], 2), 1).params["fc.lora_a"], nets[0].params["fc.lora_a"]
    )


def test_gradients_are_those_of_torch_with_the_weights_fixed() -> None:
    whole = split_head(dense, (6,), 3).start(0)
    net, x = moved(frozen(whole, SMALL).start(0)), inputs(4, 6)
    live = {n: p.clone().requires_grad_() for n, p in net.params.items()}
    grads = torch.autograd.grad(net.with_arrays(live)(x).square().sum(), list(live.values()))
    by_name = dict(zip(live, grads, strict=True))
    weight = merged(net).params["up.weight"].clone().requires_grad_()
    dense_net = merged(net).with_arrays({"up.weight": weight})
    (g,) = torch.autograd.grad(dense_net(x).square().sum(), [weight])
    # the chain rule through W + s B A: dA = s B' G, dB = s G A'
    a, b, scale = net.params["up.lora_a"], net.params["up.lora_b"], ALPHA / RANK
    torch.testing.assert_close(by_name["up.lora_a"], scale * b.T @ g, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_name["up.lora_b"], scale * g @ a.T, rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in net.arch.module.parameters())


def test_starts_of_other_seeds_share_the_body_alone() -> None:
    arch = frozen(split_head(dense, (6,), 3).start(0), SMALL)
    one, other = arch.start(1), arch.start(2)
    x = inputs(4, 6)
    assert torch.equal(one.features(x), other.features(x))
    for name in ("low.lora_a", "head.weight"):
        assert not torch.equal(one.params[name], other.params[name])
        assert torch.equal(one.params[name], arch.start(1).params[name])
    # of standard deviation 1 / sqrt(inputs)
    wide = split_head(lambda: nn.Sequential(nn.Linear(400, 5), nn.Linear(5, 3)), (400,), 3).start(0)
    a = frozen(wide, Adapters(50, 1.0)).start(0).params["0.lora_a"]
    assert float(a.std()) == pytest.approx(1 / 20, rel=0.05)
    assert abs(float(a.mean())) < 0.002


def test_layers_keep_their_places_so_that_parts_mean_the_same() -> None:
    whole = split_head(convolutional, (1, 6, 6), 3).start(0)
    net = frozen(whole, SMALL).start(0)
    assert net.arch.layers.names == (
        (),
        ("fc.lora_a", "fc.lora_b"),
        ("head.weight", "head.bias"),
    )
    assert set(net.part("last:2")) == set(net.params)
    assert net.part("but_last:2") == {}
    assert set(net.part("body")) == {"fc.lora_a", "fc.lora_b"}


def test_patterns_choose_layers() -> None:
    whole = split_head(dense, (6,), 3).start(0)
    assert set(adapted_layers(frozen(whole, Adapters(1, 1.0, ("l*",))))) == {"low"}
    assert set(adapted_layers(frozen(whole, Adapters(1, 1.0, ("up", "low"))))) == {"low", "up"}
    twice = split_head(Twice, (5,), 3).start(0)
    assert set(adapted_layers(frozen(twice, Adapters(1, 1.0, ("again",))))) == {"first"}
    with pytest.raises(
        ValueError, match="'hed' matches no linear layer of the body; it has low, u"
    ):
        frozen(whole, Adapters(1, 1.0, ("low", "hed")))


def test_what_cannot_have_adapters_is_refused_by_name() -> None:
    bare = split_head(lambda: nn.Linear(6, 3), (6,), 3, name="bare").start(0)
    with pytest.raises(
        ValueError, match="body of bare has no linear layer for adapters: use model"
    ):
        frozen(bare, SMALL)
    tied = split_head(Tied, (5,), 3).start(0)
    with pytest.raises(ValueError, match="layer 'first' shares its weight with another one"):
        frozen(tied, SMALL)


def test_a_module_that_reads_a_layers_weight_gets_the_adapter_too() -> None:
    # torch's transformer layer does so in evaluation, past the layers' own functions
    def build() -> nn.Module:
        block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Unflatten(1, (3, 4)), block, nn.Flatten(), nn.Linear(12, 3))

    net = moved(frozen(split_head(build, (12,), 3).start(0), SMALL).start(0))
    x = inputs(4, 12)
    assert set(adapted_layers(net.arch)) == {"1.linear1", "1.linear2"}
    with torch.no_grad():
        torch.testing.assert_close(net(x), merged(net)(x))
    live = {n: p.clone().requires_grad_() for n, p in net.params.items()}
    slopes = torch.autograd.grad(net.with_arrays(live)(x).square().sum(), list(live.values()))
    assert all(bool(slope.any()) for slope in slopes)


def test_an_adapted_layer_shows_its_settings() -> None:
    layer = adapted_layers(frozen(split_head(dense, (6,), 3).start(0), SMALL))["low"]
    assert isinstance(layer, Adapted)
    assert (layer.in_features, layer.out_features) == (6, 8)
    assert repr(layer) == "Adapted(rank=2, alpha=6)"
