"""The models, one file per family: plain ``nn.Module`` whose last layer is linear.

A builder takes the input's shape, the number of classes and its own options. A user's own model is
``"package.module:factory"`` with the same signature.
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
