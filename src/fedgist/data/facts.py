"""Facts about data that a server knows without its rows: shapes, types, classes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fedgist.core.objectives.target import Target
from fedgist.data.table_columns import Column
from fedgist.errors import listed, printable

_KINDS: Mapping[Target, str] = MappingProxyType({"numbers": "number", "labels": "label"})
_SHOWN, _WIDEST = 30, 40  # names in a summary, and characters of each
ELEMENTS = ("float32", "uint8", "int32")  # numbers, images of bytes, words of texts
PRECISE = "float64"  # numbers that a site keeps in 64 bits: others see no difference


@dataclass(frozen=True)
class DataFacts:
    """The form of all rows of a task, which server and sites must agree on.

    ``element`` is the type of one number of an example. ``target`` and ``num_classes`` say what is
    predicted. ``words`` is the number of words in the vocabulary of texts, and 0 for other data.
    ``scale``, ``mean``, ``std``, ``columns`` and ``classes`` are those of
    :class:`~fedgist.data.dataset.Dataset`. ``annotations`` holds the smallest and largest value of
    each annotation. ``label_moments`` are mean and standard deviation of each predicted number over
    the training rows, or empty.
    """

    name: str
    input_shape: tuple[int, ...]
    num_classes: int
    element: str = "float32"
    target: Target = "class"
    words: int = 0
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    classes: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    annotations: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    label_moments: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    @property
    def text(self) -> bool:
        """Whether examples are texts: numbers of words."""
        return self.words > 0

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each class, or its number if classes have no names."""
        return self.classes or tuple(str(label) for label in range(self.num_classes))

    @property
    def summary(self) -> str:
        """The inputs and the classes in one line, for people.

        >>> columns = (Column("age"), Column("sex", ("f", "m")))
        >>> DataFacts("t", (3,), 2, columns=columns, classes=("ill", "well")).summary
        '2 inputs: age, sex (2 categories); 2 classes: ill, well'
        >>> DataFacts("arrays", (3,), 2).summary
        'inputs of shape [3]; 2 classes: 0, 1'
        """
        inputs = f"inputs of shape {list(self.input_shape)}"
        if self.text:
            inputs = f"texts of {self.input_shape[0]} tokens"
        if self.target == "words":
            return f"{inputs}; {len(self.names):,} words"
        if self.columns:
            names = listed(map(column_text, self.columns), _SHOWN)
            inputs = f"{len(self.columns)} input{'s' * (len(self.columns) != 1)}: {names}"
        classes = listed((printable(name[:_WIDEST]) for name in self.names), _SHOWN)
        count, kind = len(self.names), _KINDS.get(self.target, "class")
        kinds = kind if count == 1 else f"{kind}{'es' if kind.endswith('s') else 's'}"
        return f"{inputs}; {count} {kinds}: {classes}"


def column_text(column: Column) -> str:
    """Return the name of a column, with the number of its categories."""
    name = printable(column.name[:_WIDEST])
    return f"{name} ({len(column.categories)} categories)" if column.categories else name
