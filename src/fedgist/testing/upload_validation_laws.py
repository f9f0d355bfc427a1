"""Laws 10 and 11: no raw example leaves a client, and no invalid upload reaches the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.counts import CountRange, count_fields
from fedgist.core.message import refuse
from fedgist.core.tree import Tree, map_leaves, named
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import held
from fedgist.testing.method_under_test import MethodUnderTest
from fedgist.testing.small_worlds import FEATURES, blobs, federation
from fedgist.testing.stages import stages

BROKEN = (12, 19)  # rows of client 2


def canaries() -> Dataset:
    """Return a data set in which each example holds a unique number."""
    data = blobs()
    x = data.x.clone()
    x[:, 0] = 1e4 + torch.arange(len(x)) * 7.25
    return replace(data, x=x, mean=(0.0,) * FEATURES, std=(1.0,) * FEATURES)


def no_example_leaves(subject: MethodUnderTest) -> None:
    """Look for raw numbers of examples in every upload."""
    data = canaries()
    for stage in stages(federation(subject.world(given={"data": data}))):
        for order, message in stage.uploads:
            for name, array in named(message).items():
                leaked = torch.isin(data.x[:, 0], array.flatten().to(data.x.dtype)).any()
                assert not leaked, f"{name} of client {order.client} holds an example's number"


def spoiled(message: Tree, how: str) -> Any:
    """Return a message with all its arrays corrupted in one way."""

    def change(leaf: Tensor) -> Tensor:
        if how == "wrong shape":
            return leaf.unsqueeze(0)
        if how == "oversized":
            return torch.cat([leaf.flatten()] * 1000)
        if how == "wrong type":
            return leaf.to(torch.float32 if leaf.dtype == torch.float64 else torch.float64)
        return torch.full_like(leaf, float(how)) if leaf.is_floating_point() else leaf

    return map_leaves(change, message)


def bad_uploads_are_refused(subject: MethodUnderTest) -> None:
    """Validate corrupted uploads of every stage, which must be refused."""
    for stage in subject.walk:
        (_, message), form = stage.uploads[0], stage.form(0)
        assert refuse(message, form) is None, f"a good upload is refused: {refuse(message, form)}"
        arrays = named(message)
        numbers = any(a.is_floating_point() for a in arrays.values())
        hows = ["nan", "inf", "-inf", "wrong shape", "oversized", "wrong type"]
        hows += ["-1"] if form.counts == CountRange() and count_fields(form.kind) else []
        for how in hows:
            if not arrays or (how in {"nan", "inf", "-inf"} and not numbers):
                continue
            reason = refuse(spoiled(message, how), form)
            names_array = reason is not None and any(name in reason for name in arrays)
            assert names_array, f"an upload that is {how} was not refused by name: {reason}"


def broken_data_stop_nobody(subject: MethodUnderTest) -> None:
    """Run three rounds with one client whose rows are not finite."""
    healthy = subject.world()
    x = held(healthy.population.examples.x, "rows").clone()
    x[slice(*BROKEN)] = float("nan")
    examples = replace(healthy.population.examples, x=x)
    sick = replace(healthy, population=replace(healthy.population, examples=examples))
    fed = federation(sick)
    for number in range(3):
        line, _ = fed.do_round(number)
        refused = {entry["client"] for entry in line.get("refused", ())}
        assert refused <= {2}, f"clients {sorted(refused - {2})} were refused as well"
    finite = all(bool(torch.isfinite(leaf).all()) for leaf in named(fed.server).values())
    assert finite or subject.method.merges_clients, "the server's state is no longer finite"


GATE_LAWS: Mapping[str, Callable[[MethodUnderTest], None]] = {
    "10 no raw example appears in a message": no_example_leaves,
    "11 bad uploads are refused by name": bad_uploads_are_refused,
    "11b broken data of one client stop nobody": broken_data_stop_nobody,
}
