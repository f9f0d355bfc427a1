"""The models, one file per family: functions that return a plain ``nn.Module``.

Each takes the shape of one input, the number of classes and its own options. The module maps
(batch, *input) to logits (batch, classes), and its last layer is linear. A user's own model is
``"package.module:function"``, a function with the same signature.
"""

from collections.abc import Callable
from types import MappingProxyType

from torch import nn

from fedgist.models import cnn, dense, resnet

MODELS: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "logistic": dense.logistic,
        "mlp": dense.mlp,
        "fedlog_mnist": cnn.fedlog_mnist,
        "fedlog_cifar": cnn.fedlog_cifar,
        "lenet5": cnn.lenet5,
        "resnet9": resnet.resnet9,
        "resnet18": resnet.resnet18,
    }
)
