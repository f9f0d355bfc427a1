"""A server without rows and sites with their own give the numbers of the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedgist.federation.agreement.server_setup import server_context
from fedgist.federation.site.file import SiteFile, SiteTable
from fedgist.federation.site.setup import SitePart, site_part
from fedgist.recipe.resolve import resolve
from fedgist.runs.round import ServerRun, start_server
from fedgist.wire.remote_engine import RemoteEngine
from fedgist.wire.site import Site
from fedgist.wire.wire import LoopbackWire
from three_sites import ARCHITECTURES, NAMES, parsed, recipe, simulated, write_rows

RUN = "r"


def site_file(folder: Path, name: str, **table: Any) -> SiteFile:
    given = {"data": {"name": "npz", "path": f"{name}.npz"}, **table}
    return SiteFile(folder / "site.toml", SiteTable.model_validate(given))


def parts_of(raw: dict[str, Any], folder: Path, **table: Any) -> list[SitePart]:
    text = parsed(raw)
    return [
        site_part(text, NAMES, number, site_file(folder, name, **table), secret=number)
        for number, name in enumerate(NAMES)
    ]


def federation_of(raw: dict[str, Any], parts: list[SitePart]) -> ServerRun:
    side = server_context(resolve(parsed(raw)), NAMES)
    sites = {
        part.population.clients[0].id: Site(
            part.side.method, part.task, part.population, part.settings, run=RUN
        )
        for part in parts
    }
    wire = LoopbackWire({number: site.handle for number, site in sites.items()})
    return ServerRun(side, RemoteEngine(side.method, wire, run=RUN), start_server(side))


def test_a_site_that_keeps_its_scores_is_named_beside_the_mean(tmp_path: Path) -> None:
    # seen: the mean over two of three sites was the result, and nothing said so
    write_rows(tmp_path)
    raw = recipe("fedavg", model={"name": "mlp", "hidden": [8]})
    parts = parts_of(raw, tmp_path)[:2]
    parts.append(parts_of(raw, tmp_path, policy={"scores_leave": False})[2])
    line, details = federation_of(raw, parts).advance()
    assert (line["eval/client/count"], line["eval/client/missing"]) == (2, 1)
    reason = "policy: this site keeps its scores to itself"
    assert line["unscored"] == [{"client": 2, "name": "ulm", "reason": reason}]
    mean = sum(entry["accuracy"] for entry in details) / 2  # rejects a zero for the third
    assert line["eval/client/accuracy_mean"] == pytest.approx(mean)


CASES: dict[str, dict[str, Any]] = {
    "fedlog": {"clients": {"architectures": ARCHITECTURES}},
    "fedavg": {"model": {"name": "mlp", "hidden": [24]}},
    "repshare": {"clients": {"architectures": ARCHITECTURES}},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CASES)
def test_the_sites_give_the_numbers_of_the_simulation(method: str, tmp_path: Path) -> None:
    write_rows(tmp_path)
    raw = recipe(method, **CASES[method])
    fed = federation_of(raw, parts_of(raw, tmp_path))
    expected = simulated(raw)
    lines = [fed.advance()[0] for _ in range(3)]
    for ours, theirs in zip(lines, [r for r in expected.rounds if r["round"]], strict=True):
        assert ours["clients/replied"] == 3
        compared = [
            name
            for name in theirs
            if name.startswith(("eval/client", "train/", "comm/")) and "confusion" not in name
        ]
        assert len(compared) > 5
        for name in compared:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
