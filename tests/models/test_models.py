"""The models: sizes that the papers give, shapes, and that every one splits into body and head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.batch import fake_rows
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import Net, split_head
from fedgist.core.objectives.target import Target
from fedgist.core.tree import map_leaves, stack
from fedgist.errors import RecipeError
from fedgist.models import MODELS
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of

GRAY, COLOR, TEXT = (1, 28, 28), (3, 32, 32), (9,)

CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("logistic", (7,), {}),
    ("logistic", GRAY, {}),
    ("mlp", (7,), {}),
    ("mlp", GRAY, {"hidden": [12, 8], "dropout": 0.2}),
    ("mlp", (7,), {"hidden": []}),
    ("fedlog_mnist", GRAY, {}),
    ("fedlog_cifar", COLOR, {}),
    ("fedlog_cifar", COLOR, {"hidden": [100]}),
    ("codist_cnn", COLOR, {}),
    ("codist_cnn", COLOR, {"channels": [4, 6, 5], "hidden": [9, 7], "last": "tanh"}),
    ("conv4", COLOR, {}),
    ("conv4", GRAY, {"channels": [3, 4, 5, 6]}),
    ("lenet5", GRAY, {}),
    ("lenet5", COLOR, {}),
    ("resnet9", COLOR, {"width": 8, "features": 16}),
    ("resnet9", COLOR, {"width": 8, "norm": "group"}),
    ("resnet18", COLOR, {"width": 4}),
    ("resnet18", GRAY, {"width": 4, "features": 6, "norm": "group"}),
    ("resnet50", COLOR, {"width": 2}),
    ("mobilenetv2", COLOR, {"width": 0.25}),
    ("word_lstm", TEXT, {"embedding": 5, "hidden": 4, "layers": 2}),
    ("text_mean", TEXT, {"embedding": 5, "hidden": 4, "words": 6}),
    ("unet", GRAY, {"channels": 3}),
    ("unet", COLOR, {"channels": 2, "levels": 3}),
]


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("name", "shape", "options"), CASES, ids=str)
def test_every_model_splits_and_gives_logits(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    per_place: dict[str, Target] = {"word_lstm": "words", "unet": "pixels"}
    target = per_place.get(name, "class")
    words = 6 if shape == TEXT else 0
    net = split_head(
        lambda: MODELS[name](shape, 6, **options), shape, 6, words=words, target=target
    ).start(0)
    x, _ = fake_rows(random.key(0), 3, shape, 6, words=words, target=target)
    assert net(x).shape == (3, *net.arch.places, 6)
    assert net.features(x).shape == (3, *net.arch.places, net.arch.feature_width)
    assert bool(torch.isfinite(net(x)).all())


def test_every_model_is_tried_here() -> None:
    assert {name for name, _, _ in CASES} == set(MODELS)


def conv(c_in: int, c_out: int, kernel: int, *, bias: bool = True) -> int:
    return c_out * (c_in * kernel**2 + bias)


def linear(c_in: int, c_out: int) -> int:
    return c_out * (c_in + 1)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fedlog_mnist", GRAY, conv(1, 10, 5) + conv(10, 20, 5) + linear(320, 50) + linear(50, 10)),
        (
            "fedlog_cifar",
            COLOR,
            conv(3, 6, 5) + conv(6, 16, 5) + linear(400, 120) + linear(120, 100) + linear(100, 10),
        ),
        (
            "lenet5",
            GRAY,
            conv(1, 6, 5) + conv(6, 16, 5) + conv(16, 120, 3) + linear(120, 84) + linear(84, 10),
        ),
        ("logistic", GRAY, linear(784, 10)),
        ("mlp", GRAY, linear(784, 64) + linear(64, 10)),
    ],
)
def test_small_models_have_the_papers_layers(
    name: str, shape: tuple[int, ...], expected: int
) -> None:
    assert size(MODELS[name](shape, 10)) == expected


@pytest.mark.parametrize(
    ("name", "shape", "options", "low", "high"),
    [
        ("fedlog_mnist", GRAY, {}, 21_840, 21_840),  # the FedLog paper's count
        ("lenet5", GRAY, {}, 29_000, 32_000),
        ("resnet9", COLOR, {}, 2.3e6, 2.5e6),
        ("resnet18", COLOR, {"features": 256}, 11.25e6, 11.35e6),
        # torchvision's net for ImageNet has 3,504,872, 1,281,000 of them in its last layer
        ("mobilenetv2", COLOR, {}, 3_504_872 - 1_281_000 + 12_810, 2_236_682),
    ],
)
def test_models_have_the_documented_size(
    name: str, shape: tuple[int, ...], options: dict[str, Any], low: float, high: float
) -> None:
    with torch.device("meta"):
        assert low <= size(MODELS[name](shape, 10, **options)) <= high


def test_resnet50_has_the_names_and_strides_of_imagenets() -> None:
    # torchvision's has 25,557,032 parameters; a stride in a block's first convolution, 14x14 maps
    # made of an eighth of the pixels, would be another net
    with torch.device("meta"):
        net = MODELS["resnet50"]((3, 224, 224), 1000)
        assert size(net) == 25_557_032
        assert isinstance(net, nn.Sequential)
        maps = net[:8](torch.empty(1, 3, 224, 224))
    assert maps.shape == (1, 2048, 7, 7)
    layers = dict(net.named_modules())
    assert layers["layer2.0.conv2"].stride == (2, 2)
    assert layers["layer2.0.conv1"].stride == layers["layer1.0.conv2"].stride == (1, 1)
    expected = {"conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight"}
    expected |= {"layer4.2.bn3.bias", "layer3.5.conv3.weight", "fc.bias"}
    assert expected <= set(net.state_dict())


@pytest.mark.parametrize("name", ["resnet9", "resnet18"])
def test_group_norm_keeps_no_running_statistics(name: str) -> None:
    grouped = MODELS[name](COLOR, 6, width=8, norm="group")
    assert not list(grouped.buffers())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in grouped.modules())
    assert {m.num_groups for m in grouped.modules() if isinstance(m, nn.GroupNorm)} == {8}
    assert any("running_mean" in n for n, _ in MODELS[name](COLOR, 6, width=8).named_buffers())
    assert size(grouped) == size(MODELS[name](COLOR, 6, width=8))
    with pytest.raises(ValueError, match=r"model\.norm must be 'batch' or 'group', not 'layer'"):
        MODELS[name](COLOR, 6, width=8, norm="layer")


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("fedlog_mnist", COLOR, "images of 28x28, not 32x32"),
        ("fedlog_cifar", GRAY, "images of 32x32, not 28x28"),
        ("fedlog_mnist", (7,), "images of 28x28, not"),
        ("lenet5", (7,), "does not accept input of shape"),
        ("resnet18", (7,), "does not accept input of shape"),
    ],
)
def test_images_of_another_size_are_a_clear_error(
    name: str, shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        split_head(lambda: MODELS[name](shape, 10), shape, 10)


WITH_LAST: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("mlp", (7,), {"hidden": [12, 8], "dropout": 0.2}),
    ("fedlog_mnist", GRAY, {}),
    ("fedlog_cifar", COLOR, {}),
    ("lenet5", GRAY, {}),
    ("resnet9", COLOR, {"width": 8, "features": 16}),
    ("resnet18", COLOR, {"width": 4, "features": 6}),
]


@pytest.mark.parametrize(("name", "shape", "options"), WITH_LAST, ids=str)
def test_the_last_activation_alone_decides_the_range_of_features(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    def features(**last: Any) -> Tensor:
        net = split_head(lambda: MODELS[name](shape, 6, **options, **last), shape, 6).start(0)
        x = 30 * torch.randn(16, *shape, generator=torch.Generator().manual_seed(0))
        return net.features(x)

    small, large = features(last="clamp", last_bound=1e-3), features(last="clamp", last_bound=1e6)
    assert large.min() < 0 < large.max()  # no ReLU before it
    assert float(small.abs().max()) == pytest.approx(1e-3)
    torch.testing.assert_close(small, large.clamp(-1e-3, 1e-3))
    torch.testing.assert_close(features(last="clamp"), large.clamp(-2, 2))
    torch.testing.assert_close(features(last="relu"), large.relu())
    torch.testing.assert_close(features(last="tanh"), large.tanh())
    torch.testing.assert_close(features(last="none"), large)
    default = "tanh" if name in {"lenet5", "resnet9", "resnet18"} else "relu"
    torch.testing.assert_close(features(), features(last=default), rtol=0, atol=0)


def test_a_clamp_stacks() -> None:
    arch = split_head(lambda: MODELS["mlp"]((7,), 6, last="clamp", last_bound=0.1), (7,), 6)
    nets, x = [arch.start(0), arch.start(1)], torch.randn(2, 5, 7)
    both = torch.func.vmap(lambda net, rows: net.features(rows))(stack(nets), x)
    alone = [net.features(rows) for net, rows in zip(nets, x, strict=True)]
    torch.testing.assert_close(both, torch.stack(alone))


@pytest.mark.slow
def test_mobilenet_stacks() -> None:
    # in double precision: its batch norms enlarge what float32 rounds away
    arch = split_head(lambda: MODELS["mobilenetv2"](COLOR, 2, width=0.25), COLOR, 2)
    nets = [map_leaves(lambda leaf: leaf.double(), arch.start(seed)) for seed in (0, 1)]
    x = torch.randn(2, 5, *COLOR, dtype=torch.float64)

    def logits(net: Net, rows: Tensor) -> Tensor:
        run = Pass(torch.ones(5, dtype=torch.bool), random.key(0))
        return replace(net, run=run)(rows)

    alone = [logits(net, rows) for net, rows in zip(nets, x, strict=True)]
    torch.testing.assert_close(torch.func.vmap(logits)(stack(nets), x), torch.stack(alone))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            {"name": "mlp", "last": "sigmoid"},
            "model.last = 'sigmoid': must be 'relu', 'tanh', 'clamp' or 'none'",
        ),
        ({"name": "mlp", "last": "clamp", "last_bound": 0}, "model.last_bound must be above 0"),
        ({"name": "mlp", "last": "clamp", "last_bound": "x"}, "model.last_bound = 'x': must be a"),
        (
            {"name": "mlp", "last_bound": 1.0},
            "model.last_bound = 1.0: model.last = 'relu' does not read it, 'clamp' does",
        ),
        (
            {"name": "mlp", "hidden": [], "last": "tanh"},
            "model.last = 'tanh' needs a hidden layer",
        ),
        ({"name": "resnet18", "last": "clamp"}, "model.last = 'clamp' applies to the layer of"),
        ({"name": "logistic", "last": "tanh"}, "model.last: unknown key of logistic"),
    ],
)
def test_a_last_activation_that_cannot_be_is_named(model: dict[str, Any], says: str) -> None:
    digits = {"data": {"train_rows": 100}, "train": {"num_rounds": 1}, "model": model}
    with pytest.raises(RecipeError, match=says) as caught:
        world_of(make(digits))
    assert "\n" not in str(caught.value)


def test_codistillations_nets_have_the_papers_counts() -> None:
    assert size(MODELS["codist_cnn"](COLOR, 100)) == 109_348
    large = {"channels": [32, 64, 64], "hidden": [128, 256]}
    assert size(MODELS["codist_cnn"](COLOR, 100, **large)) == 410_084
    with pytest.raises(ValueError, match=r"model\.channels must hold 3 widths .*not \[4, 0, 4\]"):
        MODELS["codist_cnn"](COLOR, 100, channels=[4, 0, 4])


def test_the_smaller_net_of_two_lacks_the_layer_before_the_last() -> None:
    # the paper's flexible architectures: both heads are 100 wide, so that all can share one
    small, large = (MODELS["fedlog_cifar"](COLOR, 100, hidden=h) for h in ([100], [120, 100]))
    assert size(small) == size(large) - linear(400, 120) - linear(120, 100) + linear(400, 100)
    names = [name for name, layer in small.named_children() if isinstance(layer, nn.Linear)]
    assert names == ["fc1", "fc2"]
    with pytest.raises(
        ValueError, match=r"model\.hidden must hold widths of at least 1, .*not \[\]"
    ):
        MODELS["fedlog_cifar"](COLOR, 100, hidden=[])


def test_mobilenet_narrows_its_images_by_32_and_its_channels_by_width() -> None:
    net = MODELS["mobilenetv2"]((3, 84, 84), 2, width=0.5)
    x = torch.randn(2, 3, 84, 84, generator=torch.Generator().manual_seed(0))
    shapes = {}
    for name, layer in net.eval().named_children():
        x = layer(x)
        shapes[name] = tuple(x.shape[1:])
    assert shapes["stem"] == (16, 42, 42)
    assert shapes["block3"] == (16, 21, 21)  # 24 / 2 is 12, rounded up to a multiple of 8
    assert shapes["last"] == (1280, 3, 3)
    assert [n for n in shapes if n.startswith("block")][-1] == "block17"
    with pytest.raises(ValueError, match="width must be above 0, not 0"):
        MODELS["mobilenetv2"](COLOR, 2, width=0)


def test_pooling_before_relu_is_relu_before_pooling() -> None:
    # the papers' order: ReLU, then max-pooling
    module = MODELS["lenet5"](GRAY, 10)
    x = torch.randn(2, *GRAY, generator=torch.Generator().manual_seed(0))
    z = x
    layers = "conv1 relu1 pool1 conv2 relu2 pool2 conv3 relu3 pool3 flatten fc1 last fc2"
    for name in layers.split():
        z = module.get_submodule(name)(z)
    torch.testing.assert_close(module(x), z)
