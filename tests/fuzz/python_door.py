"""``fedgist.run`` with arguments of every kind, in any combination."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import fedgist
from fedgist.core.objectives.metrics import OBJECTIVES
from fedgist.methods import METHODS
from fuzz.mutations import nasty, spoil_tree

ROWS = 24
RECIPE = {
    "train": {"num_rounds": 1},
    "clients": {"num_clients": 3},
    "engine": {"workers": 1, "cohort_size": 2},
}


class Pairs(torch.utils.data.Dataset[Any]):
    """A map-style data set whose rows are not all alike."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@functools.cache
def arrays() -> Mapping[str, Sequence[Any]]:
    """Good and bad inputs, and good and bad labels."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, 4)).astype(np.float32)
    y = np.arange(ROWS) % 3
    table = pd.DataFrame({"a": x[:, 0], "b": list("xyz") * (ROWS // 3)})
    return {
        "x": (
            *(x, x.tolist(), torch.tensor(x), table, x.astype(np.float64), x[:, :0], x[:5]),
            *(x[0], np.float32(1), np.full_like(x, np.nan), x.astype(object), x.astype("U8")),
            *(x.astype(complex), x.reshape(ROWS, 1, 2, 2), np.zeros((ROWS, 3, 8, 8), np.uint8)),
            *([], None, "x", 3, {"a": [1]}, [[1], [1, 2]], torch.tensor(x).to_sparse()),
            *(x.astype("M8[s]"), pd.DataFrame(), table.rename(columns={"b": "a"})),
        ),
        "y": (
            *(y, y.tolist(), torch.tensor(y), pd.Series(y), pd.Series(list("abc") * (ROWS // 3))),
            *(
                [f"c{i}" for i in y],
                y.astype(np.float32),
                y + 0.5,
                y - 1,
                y * 10**6,
                y.astype(bool),
            ),
            *(y[:, None], y[:3], np.int64(1), [], None, "y", 3, [None] * ROWS, [[0]] * ROWS),
            *(y.astype(np.float32) * np.nan, [2**70] * ROWS, y.astype(complex), y.astype(object)),
        ),
    }


def some_data(random: Random) -> Any:
    x, y = (random.choice(arrays()[kind]) for kind in "xy")
    good_x, good_y = arrays()["x"][0], arrays()["y"][0]
    if random.random() < 0.6:
        return random.choice(((good_x, good_y), (good_x, good_y, good_x, good_y)))
    return random.choice(
        (
            *(None, (good_x, good_y), (x, good_y), (good_x, y), (x, y), (good_x, good_y, x, y)),
            *((good_x, good_y, good_x, good_y), [x, y], (x,), (x, y, x), x, nasty(random)),
            *(Pairs(*zip(good_x, good_y, strict=True)), Pairs(), Pairs((x, 1), (x, 2)), Pairs(3)),
            fedgist.Dataset("mine", x, y, x, y, 3),
        )
    )


def some_clients(random: Random) -> Any:
    parts = np.array_split(np.arange(ROWS), 3)
    masks = [np.isin(np.arange(ROWS), part) for part in parts]
    return random.choice(
        (
            *(
                None,
                parts,
                masks,
                dict(zip("abc", parts, strict=True)),
                [p.tolist() for p in parts],
            ),
            *([[]] * 3, [[0.5], [1], [2]], [[0, 0], [1], [2]], [[-1], [0]], [[10**12]], [["a"]]),
            *([np.array([True])], [masks[0][:5]], np.arange(ROWS), [None], {}, {1: [1]}, [[2**70]]),
            *(iter(parts), (part for part in parts), nasty(random), [parts], [torch.tensor(1.5)]),
        )
    )


def net(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *(nn.LazyLinear(size) for size in sizes[:-1])).append(
        nn.Linear(sizes[-2], sizes[-1]) if len(sizes) > 1 else nn.LazyLinear(sizes[-1])
    )


def some_model(random: Random) -> Any:
    good = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    others: tuple[Any, ...] = (
        *(nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.ReLU(), nn.Sequential()),
        *(net(5, 3), nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 3)), nn.LSTM(4, 3), good.double()),
        *(nn.Linear, lambda: good, lambda shape, classes: good, lambda *a: None, int, "mlp"),
        *({}, {"a": good}, {"a": (good, [0, 1, 2])}, {"a": (good, [0]), "b": (good, [1, 2])}),
        *({"a": (good, [0, 0])}, {"a": (good, [7])}, {"a": (good, "x")}, {"a": (None, [0])}),
        *({1: (good, [0, 1, 2])}, {"a/b": (good, [0, 1, 2])}, [good], nasty(random)),
    )
    return random.choice((None, None, good, *others))


def some_method(random: Random) -> Any:
    methods = [cls() for cls in METHODS.values()]
    return random.choice(
        (None, *methods, *METHODS.values(), "fedlog", fedgist.Method, nasty(random))
    )


class Squares:
    """An objective of a user's own; its parts may be spoiled."""

    labels: Any = "numbers"
    outputs: Any = 1
    metrics: Any = (lambda outputs, y: float(outputs.sum()),)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        mean: torch.Tensor = ((outputs - batch.y).square().sum(-1) * batch.mask).mean()
        return mean


def some_objective(random: Random) -> Any:
    own = Squares()
    for part in ("labels", "outputs", "metrics", "loss"):
        if random.random() < 0.3:
            values = (None, nasty(random), "class", "labels", 2, (), (len,), lambda *a: a[0])
            setattr(own, part, random.choice(values))
    return random.choice((None, own, own, Squares, "regression", nasty(random)))


def with_objective(random: Random, recipe: Any) -> Any:
    name = random.choice([*OBJECTIVES, "classes", "x:y"])
    error = {"error": "huber"} if random.random() < 0.2 else {}
    return {**recipe, "objective": {"name": name, **error}}


def wrong_arguments(random: Random, place: Path) -> None:
    makers: dict[str, Callable[[Random], Any]] = {
        "data": some_data,
        "clients": some_clients,
        "clients_test": some_clients,
        "model": some_model,
        "method": some_method,
        "objective": some_objective,
        "test_sets": lambda r: r.choice((None, {"rare": some_data(r)}, {"": ([], [])}, nasty(r))),
        "out": lambda r: r.choice((None, place / "run", str(place / "a\nb"), 3, b"x", "\0")),
        "resume": lambda r: r.choice((False, True, None, "yes")),
        "overwrite": lambda r: r.choice((False, True, 1)),
        "data_root": lambda r: r.choice((None, place, 3, "\0")),
        "progress": lambda r: r.choice((None, False, "bar")),
        "callback": lambda r: r.choice((None, print if r.random() < 0 else len, 3)),
    }
    recipe: Any = RECIPE if random.random() < 0.7 else spoil_tree(random, RECIPE)
    if random.random() < 0.3 and isinstance(recipe, dict):
        recipe = with_objective(random, recipe)
    given = {"data": some_data(random)} if random.random() < 0.8 else {}
    chosen = random.sample(list(makers), random.randint(1, 3))
    given |= {name: makers[name](random) for name in chosen if random.random() < 0.8}
    (place / "arguments.txt").write_text(repr((recipe, given))[:20_000], "utf-8", "replace")
    fedgist.run(recipe, **given)
