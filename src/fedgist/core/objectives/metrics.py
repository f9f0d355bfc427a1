"""Metrics: their names, their units, and whether higher or lower is better.

Reports read these values and never guess them from a column's name. ``objective.py`` computes the
metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from fedgist.registry import Registry

if TYPE_CHECKING:  # it loads torch
    from fedgist.core.objectives.objective import Objective

MetricUnit = Literal["fraction", "nats", "bytes", "seconds", ""]
Direction = Literal["higher", "lower"]
ROUNDING = 1e-6  # of float32 probabilities
SMALL = 1e-3  # below it four digits after the point tell too little
ALL_ROWS, HELD_OUT = "all", "validation"  # the server's own sets of rows


@dataclass(frozen=True)
class Metric:
    """A metric of models: its name, its unit, and whether higher or lower is better.

    The server refuses a site's score below ``least`` or above ``most``; None is no bound. A bound
    may be exceeded by rounding: a Brier score of 2 is computed as 2.00000000002.
    """

    name: str
    title: str
    unit: MetricUnit
    better: Direction
    least: float | None = None
    most: float | None = None

    def text(self, value: float) -> str:
        """Return a score with its unit: a fraction in percent, others with four digits.

        A number below 0.001 without a unit, such as a small error, has four significant digits.

        >>> LOSS.text(0.25), PROBE.text(0.25), NUMBER_LOSS.text(0.00001234)
        ('0.2500', '25.00 %', '1.234e-05')
        """
        if self.unit == "fraction":
            return f"{100 * value:.2f} %"
        return f"{value:.4g}" if not self.unit and 0 < abs(value) < SMALL else f"{value:.4f}"

    def allows(self, value: float) -> bool:
        """Return whether a score is possible."""
        return (self.least is None or value >= self.least - ROUNDING) and (
            self.most is None or value <= self.most + ROUNDING
        )


def name_in_columns(metric: str) -> str:
    """Return the name of a recipe's metric in columns: of ``package.module:function`` the last.

    >>> name_in_columns("costs:per_patient")
    'per_patient'
    """
    return metric.rpartition(":")[2].rpartition(".")[2]


def share(name: str, title: str) -> Metric:
    """Return a metric that is a fraction of rows, from 0 to 1; higher is better."""
    return Metric(name, title, "fraction", "higher", least=0.0, most=1.0)


# every objective has a loss; not all are a log loss, and a user's own may be negative
LOSS = Metric("loss", "Log loss", "nats", "lower", least=0.0)
NUMBER_LOSS = Metric("loss", "Loss", "", "lower", least=0.0)
OTHER_LOSS = Metric("loss", "Loss", "", "lower")

# lower bound on the mutual information between one client's features and another's class means
INFORMATION = Metric("information_bound", "Mutual information, at least", "nats", "higher")

#: The metrics of classification that are measured unless the recipe says otherwise, by name.
COMMON_METRICS: Mapping[str, Metric] = MappingProxyType(
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
#: The metrics of classification, by name.
CLASS_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        **COMMON_METRICS,
        "average_precision": share("average_precision", "Average precision"),
        "brier": Metric("brier", "Brier score", "", "lower", least=0.0, most=2.0),
        "calibration_error": Metric(
            "calibration_error", "Calibration error", "fraction", "lower", least=0.0, most=1.0
        ),
    }
)
#: The metrics of the next word, by name.
WORD_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": CLASS_METRICS["accuracy"],
        "perplexity": Metric("perplexity", "Perplexity", "", "lower", least=1.0),
    }
)
#: The metrics of numbers, by name; errors are in the numbers' own unit.
NUMBER_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "r2": Metric("r2", "R2", "", "higher", most=1.0),
        "mae": Metric("mae", "Mean absolute error", "", "lower", least=0.0),
        "rmse": Metric("rmse", "Root mean squared error", "", "lower", least=0.0),
    }
)
#: The metrics of several labels per row, by name: means over labels.
LABEL_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "auroc": CLASS_METRICS["auroc"],
        "average_precision": CLASS_METRICS["average_precision"],
        "macro_f1": CLASS_METRICS["macro_f1"],
        "micro_f1": share("micro_f1", "Micro F1"),
    }
)
#: The metrics of pixels, by name.
PIXEL_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "dice": share("dice", "Dice"),
        "iou": share("iou", "Intersection over union"),
        "accuracy": CLASS_METRICS["accuracy"],
    }
)
#: The accuracy of a linear probe of a model's features.
PROBE = share("probe", "Linear probe")
#: The metrics of further probes, by the names of their columns.
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
    {
        "classes": CLASS_METRICS,
        "text_classes": CLASS_METRICS,
        "next_word": WORD_METRICS,
        "regression": NUMBER_METRICS,
        "multilabel": LABEL_METRICS,
        "segmentation": PIXEL_METRICS,
        "simclr": {PROBE.name: PROBE},
    }
)
#: The metrics that each objective measures unless the recipe says otherwise.
DEFAULT_METRICS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(COMMON_METRICS if own is CLASS_METRICS else own)
        for name, own in METRICS_OF.items()
    }
)
#: All metrics that a recipe can choose, by name.
CHOSEN_METRICS: Mapping[str, Metric] = MappingProxyType(
    {name: metric for metrics in METRICS_OF.values() for name, metric in metrics.items()}
)
#: Every metric there is, by name.
METRICS: Mapping[str, Metric] = MappingProxyType(
    {LOSS.name: LOSS, **CHOSEN_METRICS, **PROBES_BESIDE, INFORMATION.name: INFORMATION}
)
#: Objectives by name. Each takes a number of classes, the chosen metrics, the label smoothing, and
#: its own options; if it has parameters ``name`` (its own), ``names`` (of what is predicted) and
#: ``label_moments`` (of numbers), these are facts that are passed to it as well.
OBJECTIVES: Registry[Callable[..., Objective]] = Registry(
    {
        "classes": "fedgist.core.objectives.classes:Classes",
        "text_classes": "fedgist.core.objectives.classes:Classes",
        "next_word": "fedgist.core.objectives.next_word:NextWord",
        "regression": "fedgist.core.objectives.regression:Regression",
        "multilabel": "fedgist.core.objectives.multilabel:Multilabel",
        "segmentation": "fedgist.core.objectives.segmentation:Segmentation",
        "simclr": "fedgist.core.objectives.simclr:SimCLR",
    }
)
