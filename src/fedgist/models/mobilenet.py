"""MobileNetV2, a network of inverted residual blocks for devices with little memory.

Sandler, Howard, Zhu, Zhmoginov, Chen 2018, "MobileNetV2: inverted residuals and linear
bottlenecks".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

# expansion factor, channels, number of blocks, stride of the first block (table 2)
_BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_FIRST, _LAST = 32, 1280  # channels of the first and the last convolution


def mobilenetv2(
    input_shape: Sequence[int], num_classes: int, *, width: float = 1.0, dropout: float = 0.2
) -> nn.Module:
    """Return MobileNetV2, with 2.2 million parameters before its last layer, and 1,280 features.

    Each side of an image shrinks by a factor of 32.

    Parameters
    ----------
    width
        Factor of all channel numbers, rounded to multiples of 8. The last convolution is never
        narrowed.
    dropout
        Dropout rate before the last layer.
    """
    if isinstance(width, bool) or not width > 0:
        raise ValueError(f"width must be above 0, not {width!r}")
    channels, last = _rounded(_FIRST * width), _rounded(_LAST * max(1.0, width))
    layers: list[tuple[str, nn.Module]] = [
        ("stem", nn.Sequential(*_conv(input_shape[0], channels, 3, stride=2)))
    ]
    for times, out, count, stride in _BLOCKS:
        for place in range(count):
            block = _Block(channels, _rounded(out * width), times, 1 if place else stride)
            layers.append((f"block{len(layers)}", block))
            channels = _rounded(out * width)
    layers += [
        ("last", nn.Sequential(*_conv(channels, last, 1))),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("drop", nn.Dropout(dropout)),
        ("fc", nn.Linear(last, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))


def _rounded(channels: float, step: int = 8) -> int:
    """Round to a multiple of ``step``, to at least 90 % of ``channels``."""
    out = max(step, int(channels + step / 2) // step * step)
    return out if out >= 0.9 * channels else out + step


def _conv(c_in: int, c_out: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(c_in, c_out, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(c_out), nn.ReLU6()]


class _Block(nn.Module):
    """Inverted residual block: widen, convolve depthwise, narrow linearly; shortcut if it fits."""

    def __init__(self, c_in: int, c_out: int, times: int, stride: int) -> None:
        super().__init__()
        inner = times * c_in
        widen = _conv(c_in, inner, 1) if times > 1 else []
        self.inner = nn.Sequential(
            *widen, *_conv(inner, inner, 3, stride, groups=inner), *_conv(inner, c_out, 1)[:-1]
        )
        self.shortcut = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return x + out if self.shortcut else out
