"""Residual nets for 32x32 images, with batch or group norm.

He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition". ResNet18 has the 3x3 stem
without max-pooling that is usual for small images; ResNet9 is the shallow variant (two residual
blocks between plain stages).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

Norm = Literal["batch", "group"]


def resnet9(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    norm: Norm = "batch",
    width: int = 64,
    features: int = 128,
) -> nn.Module:
    """ResNet9; with the default width and features about 2.5 million parameters."""

    def stage(c_in: int, c_out: int, *, pool: bool) -> list[nn.Module]:
        return [*_conv(c_in, c_out, norm), *([nn.MaxPool2d(2)] if pool else [])]

    w = width
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(*stage(input_shape[0], w, pool=False), *stage(w, 2 * w, pool=True)),
            res1=_Residual(
                nn.Sequential(*stage(2 * w, 2 * w, pool=False), *stage(2 * w, 2 * w, pool=False))
            ),
            down=nn.Sequential(*stage(2 * w, 4 * w, pool=True), *stage(4 * w, 4 * w, pool=True)),
            res2=_Residual(
                nn.Sequential(*stage(4 * w, 4 * w, pool=False), *stage(4 * w, 4 * w, pool=False))
            ),
            pool=nn.AdaptiveMaxPool2d(1),
            flatten=nn.Flatten(),
            fc1=nn.Linear(4 * w, features),
            act=nn.Tanh(),
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
) -> nn.Module:
    """ResNet18 with a 3x3 stem.

    ``features`` adds a linear layer and tanh before the head (256: repshare's, 11.3 M).
    """
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
        layers += [("fc1", nn.Linear(channels, features)), ("act", nn.Tanh())]
        channels = features
    return nn.Sequential(OrderedDict([*layers, ("fc", nn.Linear(channels, num_classes))]))


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(min(8, channels), channels)
    msg = f"model.norm must be 'batch' or 'group', not {kind!r}"
    raise ValueError(msg)


def _conv(c_in: int, c_out: int, norm: Norm, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False), _norm(norm, c_out), nn.ReLU()]


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

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
