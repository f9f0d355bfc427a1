"""Models, one file per family: functions that return a plain ``nn.Module``.

Each function takes the shape of one input, the number of classes and its own options. The module
maps (batch, *input) to logits (batch, classes), and its last layer is linear. A function may have a
parameter ``words``: it gets the number of words of texts. A user's own model is
``"package.module:function"``, a function with the same signature.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedgist.registry import Registry

if TYPE_CHECKING:
    from torch import nn

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    {
        "logistic": "fedgist.models.dense:logistic",
        "mlp": "fedgist.models.dense:mlp",
        "fedlog_mnist": "fedgist.models.cnn:fedlog_mnist",
        "fedlog_cifar": "fedgist.models.cnn:fedlog_cifar",
        "codist_cnn": "fedgist.models.cnn:codist_cnn",
        "conv4": "fedgist.models.cnn:conv4",
        "lenet5": "fedgist.models.cnn:lenet5",
        "resnet9": "fedgist.models.resnet:resnet9",
        "resnet18": "fedgist.models.resnet:resnet18",
        "resnet50": "fedgist.models.resnet:resnet50",
        "word_lstm": "fedgist.models.lstm:word_lstm",
        "text_mean": "fedgist.models.text_mean:text_mean",
        "unet": "fedgist.models.unet:unet",
        "mobilenetv2": "fedgist.models.mobilenet:mobilenetv2",
    }
)

#: How the name of a model begins that is an encoder of the library transformers.
PREFIX = "transformers:"


def architecture_of(name: str) -> str:
    """Return the name of the architecture of a model: the last part of its name.

    >>> architecture_of("transformers:facebook/dinov2-small"), architecture_of("own.nets:build")
    ('dinov2-small', 'build')
    """
    last = name.rpartition(":")[2]
    return re.sub(r"[^\w.-]", "-", Path(last).name) if name.startswith(PREFIX) else last
