"""A metric of a user's own: a function of one client's probabilities and labels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import SupportsFloat

import torch
from torch import Tensor

from fedgist.core.objectives.metrics import METRICS, Direction, Metric, MetricUnit
from fedgist.errors import RecipeError, first_line, one_of, shown

Function = Callable[..., object]
NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
PARTS = re.compile(r".*_(mean|std|min)|(finetuned|trained)_.*")  # of columns' names
# other metrics, and the other keys of a line in clients.jsonl
TAKEN = frozenset({*METRICS, "confusion", "client", "name", "model", "split", "round", "rows"})


@dataclass(frozen=True)
class OwnMetric:
    """A user's function of predictions and labels, and its description.

    Of classes, it gets probabilities (rows, classes) and labels (rows,); of numbers, the predicted
    and the true ones, (rows, numbers) each; of labels, probabilities and truth, (rows, labels).

    The function returns one number. It gets the rows of one client, as tensors on the CPU. It may
    return NaN, or raise ValueError, if the metric is not defined for these rows; an infinite number
    counts as NaN.
    """

    function: Function
    describes: Metric

    @property
    def place(self) -> str:
        """The function as a recipe names it, ``package.module:function``."""
        function = self.function
        name = getattr(function, "__qualname__", self.describes.name)
        return f"{getattr(function, '__module__', '')}:{name}"

    def __call__(self, probabilities: Tensor, labels: Tensor) -> object:
        """Call the function."""
        return self.function(probabilities, labels)

    def measure(self, clients: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the metric of each client, (K,), of its predictions and labels."""
        values = [self._number(scores, y) if len(y) else math.nan for scores, y in clients]
        return torch.tensor(values, dtype=torch.float64)

    def check(self, scores: Tensor, y: Tensor) -> None:
        """Call the function on made-up predictions and labels, (rows, ...) each.

        Raises
        ------
        RecipeError
            If the function fails, or does not return a number.
        """
        self._number(scores, y, undefined=False)

    def _number(self, scores: Tensor, y: Tensor, *, undefined: bool = True) -> float:
        """Return the function's result; ``undefined`` says whether ValueError stands for NaN."""
        name = self.describes.name
        try:
            value = self.function(scores, y)
        except Exception as error:  # a user's function may fail in any way
            if undefined and isinstance(error, ValueError):
                return math.nan
            why = f"{type(error).__name__}: {first_line(error)}"
            raise RecipeError(f"metric {name} failed on {len(y)} rows: {why}") from error
        try:
            number = float(value) if isinstance(value, SupportsFloat) else float("one number")
        except (TypeError, ValueError, RuntimeError) as error:
            raise RecipeError(
                f"metric {name} returned a {type(value).__name__}; it must return one number"
            ) from error
        return number if math.isfinite(number) else math.nan  # an infinite one would be all means


def metric(
    *, better: Direction = "higher", unit: MetricUnit = "", title: str = ""
) -> Callable[[Function], OwnMetric]:
    """Say more of a metric than its function does: a decorator.

    Parameters
    ----------
    better
        Whether higher or lower values are better.
    unit
        ``"fraction"`` for numbers from 0 to 1 that reports show in percent, or no unit. A server
        refuses a site's fraction outside of this range.
    title
        The name in reports. The default is made from the function's name.

    >>> @metric(better="lower", unit="fraction")
    ... def miss_rate(probabilities, labels):
    ...     return (probabilities.argmax(1) != labels).double().mean()
    >>> miss_rate.describes.title
    'Miss rate'
    """
    one_of(better, ("higher", "lower"), "value of better=")
    one_of(unit, ("fraction", ""), "value of unit=")

    def of(function: Function) -> OwnMetric:
        own = own_metric(function)
        least, most = (0.0, 1.0) if unit == "fraction" else (None, None)
        described = replace(own.describes, better=better, unit=unit, least=least, most=most)
        return replace(own, describes=replace(described, title=title or described.title))

    return of


def measured_by(
    chosen: Iterable[str | OwnMetric], clients: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Return a user's metrics among the chosen ones, (K,) each, of each client's rows."""
    own = [metric for metric in chosen if isinstance(metric, OwnMetric)]
    rows = list(clients) if own else []
    return {metric.describes.name: metric.measure(rows) for metric in own}


def rows_of_each(predicted: Tensor, y: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each client's predictions (rows, ...) and labels (rows, ...), on the CPU.

    ``predicted``, ``y`` and ``mask`` are (K, rows, ...).
    """
    for scores, labels, present in zip(predicted, y, mask, strict=True):
        yield scores[present].cpu(), labels[present].cpu()


def own_metric(thing: object) -> OwnMetric:
    """Return the metric that a user's function, or a decorated one, is.

    Raises
    ------
    RecipeError
        If it is not a function, or its name cannot be a column of a record.
    """
    if isinstance(thing, OwnMetric):
        return thing
    if isinstance(thing, type) or not callable(thing):
        raise RecipeError(
            f"metric {thing!r:.80} must be a function of (probabilities, labels), not a "
            f"{type(thing).__name__}"
        )
    name = getattr(thing, "__name__", type(thing).__name__)
    if not NAME.fullmatch(name) or PARTS.fullmatch(name) or name in TAKEN:
        raise RecipeError(
            f"metric {shown(name)}: the function's name is a column's name: small letters, digits "
            "and _, not ending in _mean, _std or _min, and not the name of another column"
        )
    return OwnMetric(thing, Metric(name, name.replace("_", " ").capitalize(), "", "higher"))
