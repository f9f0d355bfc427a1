"""Metrics: what they are called, in which unit they are, and which end is better.

Reports read these, and never guess them from the name of a column. How metrics are computed is in
``objective.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from fedgist.registry import Registry

if TYPE_CHECKING:  # it loads torch
    from fedgist.core.objective import Objective

Unit = Literal["fraction", "nats", "bytes", "seconds", ""]
Direction = Literal["higher", "lower"]
ALL_ROWS, HELD_OUT = "all", "validation"  # sets of rows that the server has by itself


@dataclass(frozen=True)
class Metric:
    """A number by which models are judged: what it is called, its unit, and which end is better.

    A score of a site that is below ``least`` or above ``most`` is refused. Losses and R2 have no
    such bounds.
    """

    name: str
    title: str
    unit: Unit
    better: Direction
    least: float | None = None
    most: float | None = None

    def allows(self, value: float) -> bool:
        """Return whether a model can have this score."""
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


def share(name: str, title: str) -> Metric:
    """Return a metric that is a share of rows, from 0 to 1; more is better."""
    return Metric(name, title, "fraction", "higher", least=0.0, most=1.0)


LOSS = Metric("loss", "Log loss", "nats", "lower")  # every objective has one

# what features of one client and means of another say of each other, at least
INFORMATION = Metric("information_bound", "Mutual information, at least", "nats", "higher")

#: The metrics of classification, by name.
CLASS_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        name: share(name, title)
        for name, title in (
            ("accuracy", "Accuracy"),
            ("balanced_accuracy", "Balanced accuracy"),
            ("macro_f1", "Macro F1"),
            ("auroc", "AUROC"),
        )
    }
)
#: The metrics of the next word, by name.
WORD_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": CLASS_METRICS["accuracy"],
        "perplexity": Metric("perplexity", "Perplexity", "", "lower", least=0.0),
    }
)
#: What a probe of a model's features finds.
PROBE = share("probe", "Linear probe")
#: What further probes find, by the names of their columns.
PROBES_BESIDE: Mapping[str, Metric] = MappingProxyType(
    {
        f"{PROBE.name}_{kind}": share(f"{PROBE.name}_{kind}", title)
        for kind, title in (
            ("sgd", "Linear probe by SGD"),
            ("logistic", "Linear probe by logistic regression"),
            ("knn", "Nearest neighbours"),
        )
    }
)
#: The metrics of each objective, by their names.
METRICS_OF: Mapping[str, Mapping[str, Metric]] = MappingProxyType(
    {"classes": CLASS_METRICS, "next_word": WORD_METRICS, "simclr": {PROBE.name: PROBE}}
)
#: All metrics that a recipe can choose, by name.
CHOSEN_METRICS: Mapping[str, Metric] = MappingProxyType(
    {**CLASS_METRICS, **WORD_METRICS, PROBE.name: PROBE}
)
#: Every metric there is, by name.
METRICS: Mapping[str, Metric] = MappingProxyType(
    {LOSS.name: LOSS, **CHOSEN_METRICS, **PROBES_BESIDE, INFORMATION.name: INFORMATION}
)
#: Objectives by name: each is made for a number of classes, the metrics chosen, how much labels are
#: smoothed, and options of its own.
OBJECTIVES: Registry[Callable[..., Objective]] = Registry(
    {
        "classes": "fedgist.core.objective:Classes",
        "next_word": "fedgist.core.next_word:NextWord",
        "simclr": "fedgist.core.simclr:SimCLR",
    }
)
