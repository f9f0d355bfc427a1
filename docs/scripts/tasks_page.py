"""Makes the table of methods and tasks in which-method.md: python docs/scripts/tasks_page.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedgist.core.objectives.metrics import OBJECTIVES
from fedgist.core.objectives.target import Target
from fedgist.methods import METHODS

PAGE = Path(__file__).parents[1] / "which-method.md"
BEGIN, END = "<!-- made by docs/scripts/tasks_page.py -->\n", "<!-- end -->"
OWN = "own"  # the target of an objective of a user's own
HEADS: Mapping[str, str] = MappingProxyType(
    {
        "classes": "classes",
        "text_classes": "[classes of texts](tasks/text-classes.md)",
        "next_word": "[next word](recipes.md#texts)",
        "regression": "[numbers](tasks/regression.md)",
        "multilabel": "[several labels](tasks/multilabel.md)",
        "segmentation": "[pixels](tasks/segmentation.md)",
        "simclr": "[encoders](methods/flesd.md)",
        OWN: "[your own](own-objective.md)",
    }
)
#: Settings without which a method refuses a task.
WITH: Mapping[tuple[str, str], str] = MappingProxyType(
    {("fedproto", "multilabel"): 'with `inference = "logits"`'}
)


def target_of(objective: str) -> Target:
    """Return what the models of an objective predict."""
    made: Any = None if objective == OWN else OBJECTIVES[objective]
    target: Target = "own" if made is None else made.target
    return target


def cell(method: str, objective: str) -> str:
    """Return ``yes``, with the setting that it takes if any, or ``no``."""
    targets = METHODS[method].targets
    if target_of(objective) in targets:
        return " ".join(filter(None, ["yes", WITH.get((method, objective))]))
    return "no"


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the lines: methods with the same cells are in one line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for method in METHODS:
        lines.setdefault(tuple(cell(method, task) for task in HEADS), []).append(method)
    for cells, methods in sorted(lines.items(), key=lambda line: -len(line[1])):
        yield (", ".join(f"[`{name}`](methods/{name}.md)" for name in methods), *cells)


def with_table(page: str) -> str:
    """Return the page on which method to choose, with the table of methods and tasks."""
    before, _, rest = page.partition(BEGIN)
    table = [("method", *HEADS.values()), ("---",) * (len(HEADS) + 1), *rows()]
    lines = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2]


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
