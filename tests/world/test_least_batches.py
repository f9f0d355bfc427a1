"""Batches of one row are refused or joined where batch norm sees one value per channel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedgist
from fedgist.api.result import Result
from fedgist.errors import MethodError, RecipeError
from fedgist.methods.common.server_training import check_rows
from fedgist.training import timetable

ROWS = 40
EXAMPLES = np.random.default_rng(0).normal(size=(ROWS + 20, 6)).astype(np.float32)
LABELS = (EXAMPLES[:, 0] > 0).astype(int)
pytestmark = [
    pytest.mark.filterwarnings("ignore:model model:UserWarning"),
    pytest.mark.filterwarnings("ignore:client .:UserWarning"),
    pytest.mark.filterwarnings("ignore:nothing was learned:UserWarning"),
]


def dense(_: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


def of_lines(_: tuple[int, ...], classes: int) -> nn.Module:
    """Return a net whose batch norm sees six values per channel of a row."""
    layers = nn.Unflatten(1, (1, 6)), nn.BatchNorm1d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(6, classes))


def plain(_: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes))


def run(net: Any, counts: list[int], size: int, **more: Any) -> Result:
    ends = np.cumsum([0, *counts])
    clients = [range(a, b) for a, b in itertools.pairwise(ends)]
    options = {"memory": more.pop("memory")} if "memory" in more else {}
    recipe: dict[str, Any] = {
        "method": {"name": more.pop("method", "fedavg"), **options},
        "train": {"num_rounds": 2, "batch_size": size, "lr": 0.1},
        "engine": {"workers": 1},
        **more,
    }
    data = EXAMPLES[:ROWS], LABELS[:ROWS], EXAMPLES[ROWS:], LABELS[ROWS:]
    return fedgist.run(recipe, data=data, clients=clients, model=net)


def test_batches_of_one_row_are_refused_where_torch_refuses_them() -> None:
    with pytest.raises(RecipeError, match=r"batch_size = 1: the batch norm of model sees one"):
        run(dense, [4, 5], 1)
    for net in (of_lines, plain):  # rejects a refusal of every net with batch norm
        assert run(net, [4, 5], 1).rounds[-1]["eval/client/count"] == 2
    run(dense, [4, 5], 1, model={"frozen": True})  # it uses stored statistics


@settings(max_examples=10)
@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    size=st.integers(2, 4),
    spatial=st.booleans(),
)
def test_no_batch_of_one_row_is_trained_on(*, counts: list[int], size: int, spatial: bool) -> None:
    widths: list[int] = []

    def spy(*args: Any) -> Any:
        for rows in original(*args):
            widths.extend((rows >= 0).sum(1).tolist())
            yield rows

    original = timetable.batches_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgist.training.local_training.batches_of", spy)
        result = run(of_lines if spatial else dense, counts, size)
    widths = [width for width in widths if width]
    alone = [client for client, count in enumerate(counts) if count == 1]
    joined = [count for count in counts if count % size == 1 and count > size]
    notes = " ".join(result.summary["notes"])
    if spatial:
        assert (1 in widths) == any(count % size == 1 for count in counts)
        assert "one row" not in notes
        return
    assert 1 not in widths  # rejects the last batch of a pass as it is
    for client in alone:
        assert f"client {client} has too few rows for a local step: it is left out" in notes
    text = f"a last batch of one row joins the batch before it: {len(joined)} of {len(counts)}"
    assert (text in notes) == bool(joined)
    assert result.rounds[-1]["clients/asked"] == len(counts) - len(alone)


def test_clients_with_too_few_rows_are_not_counted_as_away() -> None:
    # rejects a memory of FedLog that waits for a client that never trains
    task = run(dense, [1, 8, 8], 4, method="fedlog").server_run.task
    assert (task.num_clients, task.num_trainers) == (3, 2)
    paper, ours = (
        run(dense, [1, 8, 8], 4, method="fedlog", memory=memory).server_run.server.sums.total
        for memory in (0.0, "auto")
    )
    assert torch.equal(paper, ours)


def test_a_client_of_one_row_is_scored_with_what_it_holds() -> None:
    result = run(dense, [1, 8], 4, method="fedrep")  # which is trained again before a test
    assert result.rounds[-1]["eval/client/count"] == 2
    assert np.isfinite(result.rounds[-1]["eval/client/loss_mean"])


@given(
    public=st.integers(1, 20), size=st.integers(1, 9), rest=st.booleans(), least=st.integers(1, 2)
)
def test_a_batch_of_one_public_row_is_refused(
    *, public: int, size: int, rest: bool, least: int
) -> None:
    pieces = torch.split(torch.arange(public), size)
    sizes = {len(piece) for piece in pieces} if rest else {min(size, public)}
    nets = {"small": SimpleNamespace(least_rows=1), "net": SimpleNamespace(least_rows=least)}
    task: Any = SimpleNamespace(architectures=nets, public_rows=range(public))
    if least == 1 or 1 not in sizes:
        check_rows(task, size, rest=rest)
        return
    with pytest.raises(MethodError, match=f"batch_size = {size}: .* batch norm of net needs two"):
        check_rows(task, size, rest=rest)
