"""Makes the table of all methods in which-method.md: python docs/scripts/methods_table.py.

Every cell but a method's family is read from the code: messages have the forms that an engine would
expect, for FedLog's network for MNIST and a thousand public rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fedgist.core import random
from fedgist.core.message import Form, reduction
from fedgist.core.method import Context, Method, Order
from fedgist.core.objectives.metrics import OBJECTIVES
from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.engines.message_form import asks_clients, upload_form
from fedgist.errors import InputError
from fedgist.methods import METHODS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.report.formatting import bytes_text
from fedgist.testing.small_worlds import law_world, world_of
from fedgist.world.world import World

PAGE = Path(__file__).parents[1] / "which-method.md"
BEGIN, END = "<!-- made by docs/scripts/methods_table.py -->\n", "<!-- end -->"
OWN = "own"  # the target of an objective of a user's own
TASKS: Mapping[str, str] = MappingProxyType(
    {
        "classes": "classes",
        "text_classes": "texts",
        "next_word": "next word",
        "regression": "numbers",
        "multilabel": "several labels",
        "segmentation": "pixels",
        "simclr": "encoders",
        OWN: "your own",
    }
)
#: Settings without which a method refuses a task.
WITH: Mapping[tuple[str, str], str] = MappingProxyType(
    {("fedproto", "multilabel"): 'with `inference = "logits"`'}
)
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reference": ("centralized", "local"),
        "summaries": (
            *("fedlog", "fedlog_c", "analytic", "lg_fedavg", "fedproto", "fedgh", "fedtgp"),
            *("fedgen", "fd", "repshare"),
        ),
        "a small model beside": ("fml", "fedkd"),
        "public rows": ("fedmd", "feddf", "periodic_codist", "merged_codist", "flesd"),
        "one model": (
            *("fedavg", "fedprox", "fedadam", "scaffold", "moon", "feddyn", "fednova", "cs_fl"),
        ),
        "personal models": (
            *("fedper", "fedrep", "fedbn", "feddbe", "fedbabu", "ditto", "apfl", "pfedme"),
            *("per_fedavg", "fedala", "fedrod"),
        ),
    }
)
COLUMNS = ("method", "family", "unlike models", "up", "down", "the server sees", "tasks")
PUBLIC_ROWS = 1000
WIDTHS = {
    "wide": {"model": "mlp", "hidden": [7, 6], "share": 0.4},
    "flat": {"model": "mlp", "hidden": [6, 5], "share": 0.6},
}
NET = {"model": "fedlog_mnist"}
MOST_MISSING = 2  # tasks that are named where a method serves all others


def target_of(objective: str) -> Target:
    """Return what the models of an objective predict."""
    made: Any = None if objective == OWN else OBJECTIVES[objective]
    target: Target = "own" if made is None else made.target
    return target


def task_of(method: str, objective: str) -> str:
    """Return the words for a task that a method serves, with the setting it takes if any, or ""."""
    if target_of(objective) not in METHODS[method].targets:
        return ""
    return " ".join(filter(None, [TASKS[objective], WITH.get((method, objective))]))


def _tasks(method: str) -> str:
    served = {task: task_of(method, task) for task in TASKS}
    missing = [TASKS[task] for task, words in served.items() if not words]
    if not missing:
        return "all"
    shown = [words for words in served.values() if words]
    return f"all but {', '.join(missing)}" if len(missing) <= MOST_MISSING else ", ".join(shown)


def messages(small: World) -> Iterator[tuple[str, Form, Form]]:
    """Yield the architecture, and the forms of upload and download, of each stage of round 1."""
    side, key = small.server, random.key(0)
    server = side.method.init_server(Context(key, side.task, 0, "init"))
    for stage in side.method.stages(Context(key, side.task, 1, "")):
        ctx = Context(key, side.task, 1, stage)
        for name in side.task.architectures:
            client = next(c.id for c in side.clients if name in c.architectures)
            if asks_clients(side.method, ctx, order := Order(client, name)):
                down = side.method.download(server, order, ctx)
                yield name, upload_form(side.method, ctx, name, down), Form.of(down)


def unlike(method: Method) -> str:
    """Return whether clients with unlike models learn together: if all send one form."""
    if method.merges_clients:
        return "no"
    if not _in_one_form(law_world(method)):
        return "apart"
    try:
        return "yes" if _in_one_form(law_world(method, architectures=WIDTHS)) else "one width"
    except InputError:  # it says that features need one width
        return "one width"


def _in_one_form(small: World) -> bool:
    forms: dict[str, list[object]] = {}
    for name, form, _ in messages(small):
        forms.setdefault(name, []).append(sorted(form.arrays.items()))
    first, *others = forms.values()
    return all(other == first for other in others)


def sizes(method: Method) -> tuple[int, int, str]:
    """Return the bytes of a client's messages up and down in a round, and what the server sees.

    They are the most that messages of this form can have.
    """
    found = list(messages(_images(method)))
    mine = [(up, down) for name, up, down in found if name == found[0][0]]
    kinds = {reduction(up.kind) for up, _ in mine if up.payload_bytes}
    sees = "each message" if "each" in kinds else "totals" if kinds else "nothing"
    sizes_up, sizes_down = (sum(pair[i].payload_bytes for pair in mine) for i in (0, 1))
    return sizes_up, sizes_down, "everything" if method.merges_clients else sees


def _images(method: Method) -> World:
    """Return a world of two clients with FedLog's network for MNIST, in two pools if need be."""
    x, y = torch.zeros(40, 1, 28, 28), torch.arange(40) % 10
    given = Overrides(
        method=method,
        data=Dataset("images", x, y, x[:10], y[:10], 10),
        clients=list(torch.split(torch.arange(40), 20)),
        clients_test=list(torch.split(torch.arange(10), 5)),
        public=torch.zeros(PUBLIC_ROWS, 1, 28, 28),
    )
    pools = {"pools": {"small": NET, "large": {**NET, "clients": 1}}}
    needs_pools = "codist" in type(method).__name__.lower()
    model = {} if needs_pools else {"model": {"name": NET["model"]}}
    clients = {"num_clients": 2, **(pools if needs_pools else {})}
    return world_of(make({"clients": clients, "train": {"optimizer": "sgd"}, **model}), given)


def lines() -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table, by family."""
    for family, names in FAMILIES.items():
        for name in names:
            method = METHODS[name]()
            up, down, sees = sizes(method)
            both = (
                ("its rows", "-") if method.merges_clients else (bytes_text(up), bytes_text(down))
            )
            link = f"[`{name}`](methods/{name}.md)"
            yield (link, family, unlike(method), *both, sees, _tasks(name))


def with_table(page: str) -> str:
    """Return the page on which method to choose, with the table of all methods."""
    before, _, rest = page.partition(BEGIN)
    table = [COLUMNS, ("---",) * len(COLUMNS), *lines()]
    texts = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([before + BEGIN, *texts, END]) + rest.partition(END)[2]


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
