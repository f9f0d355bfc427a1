"""The shapes of inputs and outputs that every model of a task has."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedgist.core.objective import Objective
from fedgist.data.facts import DataFacts


@dataclass(frozen=True)
class Sizes:
    """The shapes of inputs and outputs of every model of a task.

    ``projects`` says whether outputs are embeddings, which need a hidden layer before the last
    layer. ``classes`` holds the names of the classes, or the vocabulary of texts.
    """

    input_shape: tuple[int, ...]
    outputs: int
    text: bool
    projects: bool
    classes: tuple[str, ...] = field(default=(), repr=False)

    @staticmethod
    def of(data: DataFacts, objective: Objective) -> Sizes:
        """Return the sizes that models need for this data and this objective."""
        shape, projects = data.input_shape, objective.views > 1
        return Sizes(shape, objective.outputs, data.text, projects, data.names)
