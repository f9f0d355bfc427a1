"""Recipes: files that are broken in form or in meaning, and --set with any key and any value."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import tomli_w

import fedgist
from fedgist.cli.recipe_files import folder, shipped
from fedgist.recipe.reading import Recipe, flat, make, read
from fuzz.mutations import SMALL, nasty, spoil_bytes, spoil_tree

RECIPES = [folder() / f"{name}.toml" for name in shipped() if not name.endswith("table1")]
EXTRA: dict[str, dict[str, Any]] = {
    "data": {"path": "x.npz", "label": "y", "mean": [0.0], "std": [1.0], "classes": ["a", "b"]},
    "partition": {"alpha": 0.1, "classes_per_client": 2, "min_size": 3, "name": "shards"},
    "model": {"name": "mlp", "hidden": [8], "dropout": 0.1},
    "method": {"name": "fedprox", "mu": 0.1},
    "methods": {"fedlog": {"nu": 1.0, "train": {"lr": 0.1}}, "local": {}},
    "evaluate": {"on": "global", "sets": {"rare": {"classes": [1]}}},
    "clients": {"architectures": {"a": {"model": "mlp", "share": 0.5, "hidden": [4]}}},
    "engine": {"workers": 1, "cohort_size": 2, "plans": {"mlp": {"cohort_size": 2}}},
}
QUICK = [
    *("data.train_rows=60", "train.num_rounds=1", "train.local_epochs=1", "evaluate.every=1"),
    *("engine.workers=1", "engine.cohort_size=2", "clients.num_clients=3"),
]


def known_keys() -> list[str]:
    """Return the keys of all typed sections, and those that other names bring along."""
    keys = [*flat(EXTRA), "seed", "nothing", "train", "train.nothing", "", "a.b.c"]
    for section, field in Recipe.model_fields.items():
        fields = getattr(field.annotation, "model_fields", {})
        keys += [f"{section}.{key}" for key in fields]
    return keys


KEYS = known_keys()
VALUES: dict[str, Any] = flat(make({}).model_dump()) | flat(EXTRA)


def likely(random: Random) -> Any:
    """Return a value that many keys take, or that none does."""
    names = ("fedavg", "local", "sgd", "iid", "own", "mlp", "test", "cosine", "balanced", "pooled")
    return random.choice(
        (random.choice(names), random.random(), random.randint(0, 9), nasty(random))
    )


def document(random: Random) -> dict[str, Any]:
    raw = tomllib.loads(random.choice(RECIPES).read_text("utf-8"))
    for section in random.sample(list(EXTRA), random.randrange(3)):
        raw[section] = raw.get(section, {}) | EXTRA[section]
    return raw


def recipe_file(random: Random, place: Path) -> None:
    """A file; what is accepted is written and read again as the same."""
    raw = document(random)
    for _ in range(random.randint(1, 3)):
        raw = spoil_tree(random, raw)
        raw = raw if isinstance(raw, dict) else {}
    try:
        text = tomli_w.dumps(raw).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError):  # TOML has no such value
        text = tomli_w.dumps(document(random)).encode()
    if random.random() < 0.2:
        text = spoil_bytes(random, text)
    (place / "recipe.toml").write_bytes(text)
    recipe = read(place / "recipe.toml")
    assert make(tomllib.loads(recipe.to_toml())).settings() == recipe.settings()
    if random.random() < 0.1 and is_small(recipe):
        fedgist.run(read(place / "recipe.toml", QUICK))


def setting(random: Random, place: Path) -> None:
    """Some settings; a recipe that is accepted is run for a round."""
    settings = list(QUICK)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        key = random.choice(KEYS)
        value = spoil_tree(random, VALUES.get(key)) if random.random() < 0.6 else likely(random)
        text = value if isinstance(value, str) and random.random() < 0.5 else json.dumps(value)
        settings.append(text if random.random() < 0.05 else f"{key}={text}")
    path = random.choice([None, folder() / "demo.toml", random.choice(RECIPES)])  # most are large
    (place / "settings.json").write_text(json.dumps([str(path), settings]))
    recipe = read(path, settings)
    if is_small(recipe):
        fedgist.run(recipe, data_root=place)


def is_small(recipe: Recipe) -> bool:
    """Whether a run of it takes a moment: nobody forbids much work that was asked for."""
    numbers = [v for v in leaves(recipe.model_dump()) if isinstance(v, int | float)]
    much = [v for v in numbers if not math.isfinite(v) or abs(v) > SMALL]
    return not much and recipe.engine.workers == 1 and recipe.data.name != "huggingface"


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
