"""The methods, one file each. A new one is a file here and a line in :data:`METHODS`."""

from types import MappingProxyType

from fedgist.core.method import Method
from fedgist.methods.centralized import Centralized
from fedgist.methods.fedavg import FedAvg
from fedgist.methods.fedlog import FedLog
from fedgist.methods.fedprox import FedProx
from fedgist.methods.local import Local

DEFAULT_METHOD = "fedlog"  # of recipes that name no method

METHODS: MappingProxyType[str, type[Method]] = MappingProxyType(
    {
        "centralized": Centralized,
        "local": Local,
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "fedlog": FedLog,
    }
)
