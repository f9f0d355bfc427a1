"""The registry of methods, one file each. A new method is a file and a line in :data:`METHODS`.

A recipe may hold variants of a method, such as ``fedprox@strong``: the same method under another
name with other settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedgist.registry import Registry

if TYPE_CHECKING:  # it loads torch
    from fedgist.core.method import Method

DEFAULT_METHOD = "fedlog"  # the method of a recipe that names none

METHODS: Registry[type[Method]] = Registry(
    {
        "centralized": "fedgist.methods.centralized:Centralized",
        "local": "fedgist.methods.local:Local",
        "fedavg": "fedgist.methods.fedavg:FedAvg",
        "fedprox": "fedgist.methods.fedprox:FedProx",
        "fedadam": "fedgist.methods.fedadam:FedAdam",
        "scaffold": "fedgist.methods.scaffold:Scaffold",
        "feddyn": "fedgist.methods.feddyn:FedDyn",
        "fednova": "fedgist.methods.fednova:FedNova",
        "moon": "fedgist.methods.moon:Moon",
        "ditto": "fedgist.methods.ditto:Ditto",
        "apfl": "fedgist.methods.apfl:APFL",
        "pfedme": "fedgist.methods.pfedme:PFedMe",
        "per_fedavg": "fedgist.methods.per_fedavg:PerFedAvg",
        "fedala": "fedgist.methods.fedala:FedALA",
        "fedrod": "fedgist.methods.fedrod:FedROD",
        "fedbn": "fedgist.methods.fedbn:FedBN",
        "lg_fedavg": "fedgist.methods.lg_fedavg:LGFedAvg",
        "fedper": "fedgist.methods.fedper:FedPer",
        "fedrep": "fedgist.methods.fedrep:FedRep",
        "cs_fl": "fedgist.methods.cs_fl:CSFL",
        "fedproto": "fedgist.methods.fedproto:FedProto",
        "fedtgp": "fedgist.methods.fedtgp:FedTGP",
        "fml": "fedgist.methods.fml:FML",
        "fedkd": "fedgist.methods.fedkd:FedKD",
        "fedgen": "fedgist.methods.fedgen:FedGen",
        "fd": "fedgist.methods.fd:FD",
        "repshare": "fedgist.methods.repshare:RepShare",
        "fedbabu": "fedgist.methods.fedbabu:FedBABU",
        "feddbe": "fedgist.methods.feddbe:FedDBE",
        "periodic_codist": "fedgist.methods.periodic_codist:PeriodicCodist",
        "merged_codist": "fedgist.methods.merged_codist:MergedCodist",
        "fedmd": "fedgist.methods.fedmd:FedMD",
        "feddf": "fedgist.methods.feddf:FedDF",
        "flesd": "fedgist.methods.flesd:FLESD",
        "fedlog": "fedgist.methods.fedlog:FedLog",
        "fedlog_c": "fedgist.methods.fedlog_c:FedLogC",
        "fedgh": "fedgist.methods.fedgh:FedGH",
        "analytic": "fedgist.methods.analytic:Analytic",
    }
)


def base_name(name: str) -> str:
    """Return the method's name of a variant, ``NAME@VARIANT``; other names are unchanged.

    >>> base_name("lg_fedavg@2"), base_name("fedlog")
    ('lg_fedavg', 'fedlog')
    """
    return name.partition("@")[0]
