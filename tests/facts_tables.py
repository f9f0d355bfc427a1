"""Tables of several sites with gaps, categories and rare classes, and what numpy says of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

TOWNS, CLASSES = ("Bonn", "Lyon", "Ulm"), ("ill", "well")
EDGES = {"age": (20.0, 40.0, 60.0, 80.0)}
NUMBERS = ("age", "dose", "level")


def tables(seed: int, sites: int) -> list[pd.DataFrame]:
    """Return a table for each site: numbers of several sizes, some missing."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(sites):
        rows = int(rng.integers(8, 40))
        table = pd.DataFrame(
            {
                "age": rng.normal(55, 18, rows).round(1),
                "dose": rng.lognormal(8, 1.5, rows).round(3),
                "level": (rng.normal(0, 1, rows) * 1e-4 + 2e-4).round(8),
                "town": rng.choice(TOWNS, rows),
                "state": rng.choice(CLASSES, rows),
                "test": np.zeros(rows, int),
            }
        )
        table.loc[rng.random(rows) < 0.2, "dose"] = np.nan
        table.loc[0, "test"] = 1  # one row is no training row
        table.loc[1:2, "state"] = CLASSES  # each site has both classes
        out.append(table)
    return out


@dataclass(frozen=True)
class Oracle:
    """Facts about the training rows of all tables, by pandas and numpy."""

    rows: pd.DataFrame

    @staticmethod
    def of(all_tables: list[pd.DataFrame]) -> Oracle:
        """Put the training rows of all sites together."""
        return Oracle(pd.concat([t[t["test"] == 0] for t in all_tables], ignore_index=True))

    def moments(self, name: str) -> tuple[int, float, float]:
        """Return the number of values, their mean and their deviation."""
        values = self.rows[name].dropna().to_numpy(np.float64)
        return len(values), float(values.mean()), float(values.std())

    def bins(self, name: str) -> list[int]:
        """Return the counts of a histogram with open ends."""
        values = self.rows[name].dropna().to_numpy(np.float64)
        ends = [-np.inf, *EDGES[name], np.inf]
        return [int(((values >= a) & (values < b)).sum()) for a, b in itertools.pairwise(ends)]

    def correlations(self) -> Any:
        """Return the correlations over rows that have all numbers."""
        whole = self.rows[[*NUMBERS]].dropna().to_numpy(np.float64)
        return np.corrcoef(whole, rowvar=False)


def write_tables(folder: Path, names: tuple[str, ...], all_tables: list[pd.DataFrame]) -> None:
    """Write each site's table into a file NAME.csv."""
    for name, table in zip(names, all_tables, strict=True):
        table.to_csv(folder / f"{name}.csv", index=False)


def data_of(path: Path | str) -> dict[str, Any]:
    """Return the section [data] of a site's file."""
    return {"name": "table", "path": str(path), "label": "state", "test": "test"}


def question(**changes: Any) -> dict[str, Any]:
    """Return a question about the tables."""
    table: dict[str, Any] = {
        "classes": [*CLASSES],
        "correlations": True,
        "columns": {
            "age": {"edges": [*EDGES["age"]]},
            "dose": "number",
            "level": "number",
            "town": [*TOWNS],
        },
    }
    return table | changes


def as_toml(about: dict[str, Any]) -> str:
    """Return a question as a file, with its columns in order: tables in TOML's lists come last."""
    rest = {key: value for key, value in about.items() if key != "columns"}
    lines = [f"{name} = {_inline(kind)}" for name, kind in about["columns"].items()]
    return "\n".join([tomli_w.dumps(rest), "[columns]", *lines, ""])


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {each}" for key, each in value.items()) + " }"
    return json.dumps(value)
