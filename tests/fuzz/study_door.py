"""What studies read: spaces of a search, papers' tables, axes of a grid."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random

import tomli_w

from fedgist.cli.recipe_files import find_recipe, folder
from fedgist.recipe.reading import read
from fedgist.studies.paper_table import Scale, cells, is_table, read_paper_table
from fedgist.studies.search_space import extremes, read_space
from fedgist.studies.sweep import grid
from fuzz.mutations import nasty, spoil_bytes, spoil_tree
from fuzz.recipe_doors import KEYS

SPACE = {
    "train.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "train.batch_size": {"low": 5, "high": 20, "step": 5},
    "method.nu": {"choices": [0.0, 1.0]},
}
DEMO = folder() / "demo.toml"


def study_file(random: Random, place: Path) -> None:
    random.choice((space, table, axes))(random, place)


def written(random: Random, path: Path, document: object) -> Path:
    """Write a spoilt document; now and then one that is nested too deeply."""
    spoilt = spoil_tree(random, document)
    try:
        data = tomli_w.dumps(spoilt).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, AttributeError):  # TOML has no such value
        data = b"a = " + b"[" * 5000
    path.write_bytes(spoil_bytes(random, data) if random.random() < 0.2 else data)
    return path


def space(random: Random, place: Path) -> None:
    for parameters in extremes(read_space(written(random, place / "space.toml", SPACE))):
        read(DEMO, [f"{key}={value}" for key, value in parameters.items()])


def table(random: Random, place: Path) -> None:
    document = tomllib.loads((folder() / "fedlog" / "table1.toml").read_text("utf-8"))
    path = written(random, place / "table.toml", document)
    if is_table(path):
        scale: Scale = random.choice(("small", "paper"))
        cells(read_paper_table(path), scale, find_recipe, place / "out")


def axes(random: Random, place: Path) -> None:
    texts = [
        f"{random.choice(KEYS)}={nasty(random)},{random.choice(('', '1', '[', '{a=1}'))}"
        for _ in range(random.randint(1, 2))
    ]
    (place / "axes.txt").write_text("\n".join(texts), "utf-8", "replace")
    grid(DEMO, [], texts, random.choice((1, 2)), place / "out")
