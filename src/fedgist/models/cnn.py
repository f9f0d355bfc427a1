"""Small convolutional networks of the papers.

If a paper has ReLU before max-pooling, pooling comes first here: the result is the same, and ReLU
has a quarter of the values to process.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedgist.models.last_activation import Last, last_activation

POOLED = 8  # smallest side, in pixels, that can be pooled by 2 three times


def fedlog_mnist(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    dropout: float = 0.5,
    last: Last = "relu",
    last_bound: float | None = None,
) -> nn.Module:
    """Return FedLog's MNIST network, for images of 28x28 pixels.

    It has two 5x5 convolutions (10 and 20 channels) and a hidden layer of 50.

    Yu, Zhang, Poupart, "FedLog: Personalized federated classification with less communication and
    more flexibility", table A.1.

    Parameters
    ----------
    dropout
        Dropout rate after the second convolution and before the last layer.
    last
        Activation at the end of the body, before the head. ``clamp`` cuts features to
        [-``last_bound``, ``last_bound``] without ReLU.
    last_bound
        Bound of ``clamp``. The default is 2.
    """
    _check_size(input_shape, 28)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(input_shape[0], 10, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, 5),
            drop2=nn.Dropout2d(dropout),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(320, 50),
            last=last_activation(last, last_bound),
            drop3=nn.Dropout(dropout),
            fc2=nn.Linear(50, num_classes),
        )
    )


def fedlog_cifar(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    hidden: Sequence[int] = (120, 100),
    dropout: float = 0.5,
    last: Last = "relu",
    last_bound: float | None = None,
) -> nn.Module:
    """Return FedLog's CIFAR network, for images of 32x32 pixels.

    It has two 5x5 convolutions (6 and 16 channels) and hidden layers of 120 and 100 (table A.1).
    ``hidden = [100]`` gives the smaller network of the paper's experiment with two architectures.

    Parameters
    ----------
    hidden
        Widths of the hidden layers.
    dropout
        Dropout rate before the last layer.
    last
        Activation at the end of the body, before the head. ``clamp`` cuts features to
        [-``last_bound``, ``last_bound``] without ReLU.
    last_bound
        Bound of ``clamp``. The default is 2.
    """
    _check_size(input_shape, 32)
    if not hidden or any(isinstance(width, bool) or width < 1 for width in hidden):
        raise ValueError(
            f"model.hidden must hold widths of at least 1, and at least one, not {list(hidden)}"
        )
    widths = (400, *hidden)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(input_shape[0], 6, 5)),
        ("pool1", nn.MaxPool2d(2)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(6, 16, 5)),
        ("pool2", nn.MaxPool2d(2)),
        ("relu2", nn.ReLU()),
        ("flatten", nn.Flatten()),
    ]
    for place, (width, out) in enumerate(itertools.pairwise(widths), 1):
        end = last_activation(last, last_bound) if place == len(hidden) else nn.ReLU()
        layers += [(f"fc{place}", nn.Linear(width, out)), (f"relu{place + 2}", end)]
    drop = ("drop", nn.Dropout(dropout))
    head = (f"fc{len(widths)}", nn.Linear(widths[-1], num_classes))
    return nn.Sequential(OrderedDict([*layers, drop, head]))


def lenet5(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    last: Last = "tanh",
    last_bound: float | None = None,
) -> nn.Module:
    """Return a variant of LeNet5 with about 30,000 parameters, for images of at least 4x4 pixels.

    It has 84 features before its last layer, in (-1, 1) with ``tanh``.

    Berdoz, Singh, Jaggi, Raskar 2022, "Scalable collaborative learning via representation sharing",
    section 4.

    Parameters
    ----------
    last
        Activation at the end of the body, before the head. ``clamp`` cuts features to
        [-``last_bound``, ``last_bound``] without ReLU.
    last_bound
        Bound of ``clamp``. The default is 2.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(input_shape[0], 6, 5, padding=2),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(6, 16, 5, padding=2),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(16, 120, 3, padding=1),
            relu3=nn.ReLU(),
            pool3=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc1=nn.Linear(120, 84),
            last=last_activation(last, last_bound),
            fc2=nn.Linear(84, num_classes),
        )
    )


def codist_cnn(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    channels: Sequence[int] = (16, 32, 32),
    hidden: Sequence[int] = (64, 128),
    last: Last = "relu",
    last_bound: float | None = None,
) -> nn.Module:
    """Return codistillation's CNN, for images of 32x32 pixels.

    It has three 3x3 convolutions and two hidden layers. With 100 classes it has the paper's 109,348
    parameters. The paper's large network, with 410,084 parameters, has
    ``channels = [32, 64, 64]`` and ``hidden = [128, 256]``.

    Lichtarge, Amid, Kumar, Yang, Anil, Mathews, "Heterogeneous federated learning using knowledge
    codistillation", appendix E. The paper does not state padding and pooling. Here the first two
    convolutions are unpadded and pooled by 2, and the third is padded, so maps of 6x6 enter the
    first hidden layer.

    Parameters
    ----------
    channels
        Numbers of channels of the convolutions.
    hidden
        Widths of the hidden layers.
    last
        Activation at the end of the body, before the head. ``clamp`` cuts features to
        [-``last_bound``, ``last_bound``] without ReLU.
    last_bound
        Bound of ``clamp``. The default is 2.
    """
    _check_size(input_shape, 32)
    _check_widths("channels", channels, 3)
    _check_widths("hidden", hidden, 2)
    first, second, third = channels
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(input_shape[0], first, 3),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(first, second, 3),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(second, third, 3, padding=1),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(36 * third, hidden[0]),
            relu4=nn.ReLU(),
            fc2=nn.Linear(hidden[0], hidden[1]),
            last=last_activation(last, last_bound),
            fc3=nn.Linear(hidden[1], num_classes),
        )
    )


def conv4(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    channels: Sequence[int] = (16, 32, 64, 64),
) -> nn.Module:
    """Return a small encoder with four convolutions, for images of at least 8x8 pixels.

    Each convolution is 3x3 and padded, with batch norm and ReLU. The first three are pooled by 2,
    the last over the whole map. With the default ``channels`` and three colours it has 60,688
    parameters before its last layer.

    Parameters
    ----------
    channels
        Numbers of channels of the convolutions.
    """
    _check_widths("channels", channels, 4)
    if min(input_shape[1:]) < POOLED:
        raise ValueError(
            f"this net takes images of at least 8x8, not {'x'.join(map(str, input_shape[1:]))}"
        )
    layers: list[tuple[str, nn.Module]] = []
    for place, (width, out) in enumerate(itertools.pairwise((input_shape[0], *channels)), 1):
        layers += [
            (f"conv{place}", nn.Conv2d(width, out, 3, padding=1, bias=False)),
            (f"norm{place}", nn.BatchNorm2d(out)),
            (f"relu{place}", nn.ReLU()),
        ]
        pool = nn.MaxPool2d(2) if place < len(channels) else nn.AdaptiveAvgPool2d(1)
        layers.append((f"pool{place}", pool))
    end = [("flatten", nn.Flatten()), ("fc", nn.Linear(channels[-1], num_classes))]
    return nn.Sequential(OrderedDict([*layers, *end]))


def _check_widths(name: str, widths: Sequence[int], count: int) -> None:
    if len(widths) != count or any(isinstance(width, bool) or width < 1 for width in widths):
        raise ValueError(f"model.{name} must hold {count} widths of at least 1, not {list(widths)}")


def _check_size(input_shape: Sequence[int], size: int) -> None:
    if tuple(input_shape[1:]) != (size, size):
        raise ValueError(
            f"this net takes images of {size}x{size}, not "
            f"{'x'.join(str(n) for n in input_shape[1:])}"
        )
