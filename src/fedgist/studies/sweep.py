"""Grids: every combination of the given settings, with several seeds."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fedgist.errors import RecipeError
from fedgist.recipe.reading import check_parts, read
from fedgist.runs.files.run_directory import as_folder
from fedgist.studies.job import Job, jobs_of_seeds


def axis(text: str) -> tuple[str, list[str]]:
    """Return the key and the values of ``section.key=value,value,...``: TOML or bare words.

    >>> axis("method.name=fedavg,fedlog")
    ('method.name', ['fedavg', 'fedlog'])
    """
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise RecipeError(f"--grid {text}: expected section.key=value,value,...")
    try:
        count = len(tomllib.loads(f"v = [{values}]")["v"])
    except tomllib.TOMLDecodeError:
        count = None  # bare words
    parts = _split(values)
    if key.strip() == "seed":
        raise RecipeError(f"--grid {text}: the seeds of a cell are given by --seeds")
    if key.strip() == "data.division":
        raise RecipeError(
            f"--grid {text}: all divisions of data.folds and data.repeats are run in each cell"
        )
    if count is not None and count != len(parts):
        raise RecipeError(
            f"--grid {text}: this is {count} values as TOML, but {len(parts)} when split at commas;"
            " quote strings that hold commas"
        )
    if re.search(r",\s*(,|$)", values):
        raise RecipeError(f"--grid {text}: a value is empty")
    if len(set(parts)) < len(parts):
        raise RecipeError(f"--grid {text}: a value is given twice")
    return key.strip(), parts


def _split(values: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|\"[^\"]*\"|'[^']*'|[^,])+", values)
    return [part.strip() for part in parts]


def grid(
    path: Path, settings: Sequence[str], axes: Sequence[str], seeds: int, out: Path
) -> list[Job]:
    """Return a job per cell, seed and division with a checked recipe; a cell's are adjacent."""
    read_axes = [axis(text) for text in axes]
    keys = [key for key, _ in read_axes]
    if len(set(keys)) < len(keys):
        raise RecipeError(
            f"--grid: {next(key for key in keys if keys.count(key) > 1)} is given twice"
        )
    jobs = []
    for values in itertools.product(*(values for _, values in read_axes)):
        cell = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        try:
            recipe = read(path, [*settings, *cell])
            check_parts(recipe)  # a mistake in a cell is found before any run
        except RecipeError as error:
            raise RecipeError(f"{' '.join(cell) or 'the recipe'}: {error}") from error
        name = " ".join(cell) or recipe.method.name
        folder = out / (as_folder(",".join(cell) or recipe.method.name))
        jobs += jobs_of_seeds(name, recipe, seeds, folder)
    first: dict[str, Job] = {}
    for job in jobs:
        twin = first.setdefault(job.recipe.model_dump_json(), job)
        if twin is not job:
            raise RecipeError(f"--grid: {twin.name} and {job.name} are the same run")
    return jobs
