"""Colour and marker of each method in figures and tables; other methods get one by their name.

The colours are Okabe and Ito's (2008) and others around them. Methods that are often compared also
differ for colour-blind readers. All but the ink are visible on white and on black.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

INK = "#010101"  # of texts, too; the page of a report replaces it by its own ink

LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "local": (INK, "X"),
        "centralized": ("#aa3300", "*"),
        "fedlog": ("#0072b2", "o"),
        "fedlog_c": ("#56b4e9", "D"),
        "fedgh": ("#1166aa", "<"),
        "fedproto": ("#e69f00", "^"),
        "fedtgp": ("#cc9900", ">"),
        "fml": ("#cc3377", "h"),
        "fedkd": ("#8899cc", "X"),
        "fedgen": ("#55aa88", "s"),
        "fd": ("#cc79a7", "D"),
        "repshare": ("#009e73", "v"),
        "fedavg": ("#d55e00", "s"),
        "fedprox": ("#bb99cc", "P"),
        "fedadam": ("#4488ff", "d"),
        "scaffold": ("#99aa00", "<"),
        "feddyn": ("#995500", "D"),
        "fednova": ("#448800", "P"),
        "moon": ("#7799ff", "^"),
        "cs_fl": ("#775544", "p"),
        "ditto": ("#dd5588", "s"),
        "apfl": ("#cc6644", "o"),
        "pfedme": ("#227788", "d"),
        "per_fedavg": ("#ff8877", "v"),
        "fedala": ("#4477cc", "p"),
        "fedrod": ("#aa7711", "h"),
        "fedbn": ("#5566aa", "v"),
        "lg_fedavg": ("#aa00ff", "v"),
        "fedper": ("#cc99ff", ">"),
        "fedrep": ("#884466", "P"),
        "fedbabu": ("#22cc55", "p"),
        "analytic": ("#006633", "h"),
        "feddbe": ("#aa8888", "<"),
        "periodic_codist": ("#cc55ff", ">"),
        "merged_codist": ("#88bb88", "D"),
        "fedmd": ("#bb55aa", "h"),
        "feddf": ("#774400", "*"),
        "flesd": ("#7733cc", "^"),
    }
)
