"""Residual networks with batch or group norm: two for 32x32 pixels, one for larger images.

He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", table 1. As is usual for
small images, ResNet18 begins with a 3x3 convolution without max-pooling. ResNet9 is a common
shallow variant: two residual blocks among plain convolutions. ResNet50 is for images of about
224x224 pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from fedgist.models.last_activation import Last, last_activation

Norm = Literal["batch", "group"]
RESNET50_BLOCKS = (3, 4, 6, 3)
EXPANSION = 4  # ratio of a bottleneck's output channels to its inner channels


def resnet9(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    norm: Norm = "batch",
    width: int = 64,
    features: int = 128,
    last: Last = "tanh",
    last_bound: float | None = None,
) -> nn.Module:
    """Return ResNet9, with about 2.5 million parameters at the default width and features.

    Parameters
    ----------
    norm
        Normalization layers. Use ``group`` if batches are small or under private training steps.
    width
        Number of channels of the first convolution.
    features
        Number of features: width of the linear layer before the last.
    last
        Activation at the end of the body, before the head. ``clamp`` cuts features to
        [-``last_bound``, ``last_bound``] without ReLU.
    last_bound
        Bound of ``clamp``. The default is 2.
    """
    _check_widths(width=width, features=features)

    def conv(c_in: int, c_out: int) -> list[nn.Module]:
        return _conv(c_in, c_out, norm)

    def conv_and_pool(c_in: int, c_out: int) -> list[nn.Module]:
        return [*conv(c_in, c_out), nn.MaxPool2d(2)]

    w = width
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(*conv(input_shape[0], w), *conv_and_pool(w, 2 * w)),
            res1=_Residual(nn.Sequential(*conv(2 * w, 2 * w), *conv(2 * w, 2 * w))),
            down=nn.Sequential(*conv_and_pool(2 * w, 4 * w), *conv_and_pool(4 * w, 4 * w)),
            res2=_Residual(nn.Sequential(*conv(4 * w, 4 * w), *conv(4 * w, 4 * w))),
            pool=nn.AdaptiveMaxPool2d(1),
            flatten=nn.Flatten(),
            fc1=nn.Linear(4 * w, features),
            act=last_activation(last, last_bound),
            fc2=nn.Linear(features, num_classes),
        )
    )


def resnet18(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    norm: Norm = "batch",
    width: int = 64,
    features: int | None = None,
    last: Last = "tanh",
    last_bound: float | None = None,
) -> nn.Module:
    """Return ResNet18 with a 3x3 first convolution of ``width`` channels.

    With ``features = 256`` and tanh it is the network, with 11.3 million parameters, of
    Berdoz, Singh, Jaggi, Raskar 2022, "Scalable collaborative learning via representation sharing",
    section 4.

    Parameters
    ----------
    norm
        Normalization layers. Use ``group`` if batches are small or under private training steps.
    width
        Number of channels of the first convolution.
    features
        Width of an additional linear layer before the last. The default is no such layer.
    last
        Activation after that linear layer. ``clamp`` cuts features to
        [-``last_bound``, ``last_bound``] without ReLU.
    last_bound
        Bound of ``clamp``. The default is 2.
    """
    _check_widths(width=width, features=features)
    layers: list[tuple[str, nn.Module]] = [
        ("stem", nn.Sequential(*_conv(input_shape[0], width, norm)))
    ]
    channels = width
    for index in range(4):
        out = width * 2**index
        for block in range(2):
            stride = 2 if index > 0 and block == 0 else 1
            layers.append((f"layer{index + 1}_{block}", _Block(channels, out, stride, norm)))
            channels = out
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
    if features is not None:
        layers += [("fc1", nn.Linear(channels, features))]
        layers += [("act", last_activation(last, last_bound))]
        channels = features
    elif last != "tanh" or last_bound is not None:
        raise ValueError(
            f"model.last = {last!r} applies to the layer of model.features: set model.features"
        )
    return nn.Sequential(OrderedDict([*layers, ("fc", nn.Linear(channels, num_classes))]))


def resnet50(
    input_shape: Sequence[int], num_classes: int, *, norm: Norm = "batch", width: int = 64
) -> nn.Module:
    """Return ResNet50 for images of about 224x224 pixels: 25,557,032 parameters with 1000 classes.

    Its first convolution is 7x7 with stride 2 and ``width`` channels, followed by max-pooling. A
    block's stride is in its 3x3 convolution. Layers are named as in torchvision, so a file of
    torchvision's weights fits ``model.weights``.

    Parameters
    ----------
    norm
        Normalization layers. Use ``group`` if batches are small or under private training steps.
    width
        Number of channels of the first convolution.
    """
    _check_widths(width=width)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(input_shape[0], width, 7, 2, padding=3, bias=False)),
        ("bn1", _norm(norm, width)),
        ("relu", nn.ReLU()),
        ("maxpool", nn.MaxPool2d(3, 2, padding=1)),
    ]
    channels = width
    for index, blocks in enumerate(RESNET50_BLOCKS):
        inner, stride = width * 2**index, 1 if index == 0 else 2
        made = []
        for block in range(blocks):
            made.append(_Bottleneck(channels, inner, stride if block == 0 else 1, norm))
            channels = EXPANSION * inner
        layers.append((f"layer{index + 1}", nn.Sequential(*made)))
    layers += [("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
    return nn.Sequential(OrderedDict([*layers, ("fc", nn.Linear(channels, num_classes))]))


def _check_widths(**widths: int | None) -> None:
    for name, width in widths.items():
        if width is not None and (isinstance(width, bool) or width < 1):
            raise ValueError(f"{name} must be at least 1, not {width!r}")


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(min(8, channels), channels)
    raise ValueError(f"model.norm must be 'batch' or 'group', not {kind!r}")


def _conv(c_in: int, c_out: int, norm: Norm, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False), _norm(norm, c_out), nn.ReLU()]


class _Residual(nn.Module):
    """A module whose input is added to its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, c_in: int, c_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *_conv(c_in, c_out, norm, stride), *_conv(c_out, c_out, norm)[:-1]
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), _norm(norm, c_out)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.shortcut(x) + self.inner(x))
        return out


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, and a shortcut, a 1x1 convolution if the shape changes."""

    def __init__(self, c_in: int, inner: int, stride: int, norm: Norm) -> None:
        super().__init__()
        c_out = EXPANSION * inner
        self.conv1, self.bn1 = nn.Conv2d(c_in, inner, 1, bias=False), _norm(norm, inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = _norm(norm, inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, c_out, 1, bias=False), _norm(norm, c_out)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), _norm(norm, c_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        out: Tensor = self.relu(self.bn3(self.conv3(inner)) + self.downsample(x))
        return out
