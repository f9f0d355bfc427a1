"""A private site without its network: its plans, its requests, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgist.core.method import Order
from fedgist.federation.agreement.server_setup import server_context
from fedgist.federation.network.invitation import Invitation, digest_of_recipe, recipe_text
from fedgist.federation.site.file import SiteFile, SiteTable
from fedgist.recipe.resolve import resolve
from fedgist.runs.round import context, start_server
from fedgist.wire.envelope import Header, seal
from fedgist.world.server_context import ServerContext
from three_sites import NAMES, parsed

RUN, LIMIT = "0123456789abcdef", 6.0
ANY_SIZE = 1 << 30
PRIVATE: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [8]},
    "clients": {"max_rows": 2000},
    "privacy": {
        "unit": "record",
        "epsilon": 4.0,
        "delta": 1e-5,
        "clip": 1.0,
        "where": "local",
        "noise": "system",
    },
}


def side_of(raw: dict[str, Any]) -> ServerContext:
    return server_context(resolve(parsed(raw)), NAMES)


def plan_of(side: ServerContext, run: str = RUN, **changes: Any) -> dict[str, Any]:
    text = side.recipe
    plan = Invitation(
        run=run,
        recipe=recipe_text(text),
        digest=digest_of_recipe(text),
        number=0,
        names=NAMES,
        certificate="",
        last=None,
        state_lost="refuse",
    )
    return plan.model_copy(update=changes).model_dump(mode="json")


def request(side: ServerContext, number: int, run: str = RUN) -> bytes:
    (stage,) = [s for s in side.method.stages(context(side, number, "")) if s]
    ctx = context(side, number, stage)
    name = side.clients[0].architectures[0]
    down = side.method.download(start_server(side), Order(0, name), ctx)
    header = Header(
        purpose="train", run=run, round=number, stage=stage, client=0, architecture=name
    )
    return seal(header, {"download": down})


def site_file(folder: Path, **policy: Any) -> SiteFile:
    data = {"name": "npz", "path": "berlin.npz"}
    table = {"data": data, "policy": {"epsilon": LIMIT, "max_rows": 2000, **policy}}
    return SiteFile(folder / "site.toml", SiteTable.model_validate(table))
