"""Usual ranges at a site: the recipe's or its own, and under privacy never measured ones."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedgist.errors import InputError
from fedgist.federation.agreement.server_setup import server_context
from fedgist.federation.site.file import SiteFile, SiteTable
from fedgist.federation.site.model import _alone
from fedgist.federation.site.setup import site_part
from fedgist.recipe.resolve import resolve
from private_sites import PRIVATE
from three_sites import NAMES, parsed, recipe

COLUMNS = {"age": "number", "town": ["Bonn", "Ulm"]}
RECORD = PRIVATE["privacy"]
OWN, SHARED = {"age": (0.0, 110.0)}, {"age": (18.0, 90.0)}


def run_of(data: dict[str, Any], privacy: dict[str, Any]) -> Any:
    raw = recipe("fedlog", privacy=privacy) | {"facts": {"columns": COLUMNS}}
    stated = {"mean": [50.0], "std": [20.0], "classes": ["ill", "well"]}
    raw["clients"] = {"max_rows": 100} if privacy else {}
    return parsed(raw | {"data": stated | data, "evaluate": {}})


@pytest.mark.parametrize("privacy", [{}, RECORD])
@pytest.mark.parametrize("shared", [{}, {"ranges": SHARED}])
@pytest.mark.parametrize("own", [{}, {"ranges": OWN}])
def test_a_sites_model_has_its_own_range_or_the_recipes_and_under_privacy_no_other(
    tmp_path: Path, own: dict[str, Any], shared: dict[str, Any], privacy: dict[str, Any]
) -> None:
    draw = np.random.default_rng(0)
    table = {"age": draw.integers(18, 90, 60), "town": draw.choice(COLUMNS["town"], 60)}
    pd.DataFrame(table | {"y": ["ill", "well"] * 30}).to_csv(tmp_path / "x.csv", index=False)
    data = {"name": "table", "path": "x.csv", "label": "y", **own}
    site = SiteFile(tmp_path / "site.toml", SiteTable.model_validate({"data": data}))
    part = site_part(run_of(shared, privacy), NAMES, 0, site, secret=1)
    expected = own or shared or ({"ranges": {}} if privacy else {"ranges": None})
    written = tomllib.loads(_alone(part, site).to_toml())["data"]
    stated = {name: tuple(ends) for name, ends in written.get("ranges", {}).items()}
    assert (stated if "ranges" in written else None) == expected["ranges"]
    # the site's own range is in nothing that the server sees
    assert part.side.setup.recipe.data.ranges == shared.get("ranges")
    assert all(column.usual is None for column in part.data.facts.columns)


def written_of(folder: Path, ages: list[float], data: dict[str, Any], policy: str) -> Any:
    """Return a site's part of a run over some ages, and the section of data of its model."""
    table = {"age": ages, "town": ["Bonn"] * len(ages)}
    labels = ["ill", *["well", "ill"] * len(ages)][: len(ages)]
    pd.DataFrame(table | {"y": labels}).to_csv(folder / "x.csv", index=False)
    own = {"name": "table", "path": "x.csv", "label": "y", "test_fraction": 0.0}
    stated = {"data": own, "policy": {"never_released": [policy]} if policy else {}}
    site = SiteFile(folder / "site.toml", SiteTable.model_validate(stated))
    part = site_part(run_of(data, {}), NAMES, 0, site, secret=1)
    return part, tomllib.loads(_alone(part, site).to_toml())["data"]


def test_a_sites_model_tells_no_range_where_rows_are_held_back(tmp_path: Path) -> None:
    ages = [float(age) for age in range(20, 80)]
    assert "ranges" not in written_of(tmp_path, ages, {}, "")[1]
    # seen: the largest age of a class that is never released was in the exported file
    assert written_of(tmp_path, ages, {}, "ill")[1]["ranges"] == {}


@pytest.mark.parametrize("held_back", ["", "ill"])
@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_a_sites_model_normalizes_by_the_rows_that_train(
    tmp_path: Path, held_back: str, validation: float
) -> None:
    ages = [float(age) for age in np.random.default_rng(1).integers(20, 80, 60)]
    data = {"normalize": "client", "validation": validation, "mean": (), "std": ()}
    part, written = written_of(tmp_path, ages, data, held_back)
    used = part.data.x[part.population.train[0], 0].double()
    assert len(used) == pytest.approx((30 if held_back else 60) * (1 - validation), abs=1)
    assert written["mean"] == [pytest.approx(float(used.mean()))]
    assert written["std"] == [pytest.approx(float(used.std(correction=0)), rel=1e-3)]


def test_a_server_refuses_a_range_of_no_numeric_column() -> None:
    text = run_of({"ranges": {"town": (0.0, 1.0)}}, {})
    with pytest.raises(InputError, match=r"data.ranges names 'town'; .* numeric columns age"):
        server_context(resolve(text), NAMES)
