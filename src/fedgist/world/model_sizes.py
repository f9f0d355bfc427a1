"""The shapes of inputs and outputs that every model of a task has."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedgist.core.objectives.objective import Objective
from fedgist.core.objectives.target import Target
from fedgist.data.facts import DataFacts


@dataclass(frozen=True)
class Sizes:
    """The shapes of inputs and outputs of every model of a task.

    ``words`` is the number of words if inputs are texts, else 0. ``projects`` says whether outputs
    are embeddings, which need a hidden layer before the last layer. ``classes`` holds the names of
    the classes, or of whatever else is predicted.
    """

    input_shape: tuple[int, ...]
    outputs: int
    words: int
    target: Target
    projects: bool
    classes: tuple[str, ...] = field(default=(), repr=False)

    @staticmethod
    def of(data: DataFacts, objective: Objective) -> Sizes:
        """Return the sizes that models need for this data and this objective."""
        shape, projects = data.input_shape, objective.views > 1
        predicted = objective.outputs, data.words, objective.target
        return Sizes(shape, *predicted, projects, data.names)
