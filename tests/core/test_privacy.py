"""Sensitivity by brute force, and noise that an attacker cannot see through."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fedgist.core import random
from fedgist.core.counts import CountRange
from fedgist.core.message import Nothing
from fedgist.core.method import Batch, Context, Labels, Method, Order
from fedgist.core.peer_method import PeerMethod
from fedgist.core.privacy import (
    Privacy,
    bounded,
    clipped_message,
    count_range,
    noised,
    sensitivity,
    with_central_noise,
)
from fedgist.core.replies import Count, Replies, Subtotal
from fedgist.core.system_noise import FARTHEST
from fedgist.core.tree import leaves, map_leaves, named
from fedgist.methods import METHODS
from fedgist.methods.common.averaging import Weights
from fedgist.testing.small_worlds import PAIRS, blobs, federation, trace, world

CLIP = 1.5
RECORD = {"unit": "record", "epsilon": 1.0, "delta": 0.01, "clip": CLIP}
RECORD_METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name, cls in METHODS.items() if cls().record_terms},
    "repshare": {"pick_rate": 0.5, "m_up": 2},
}


def norm(message: object) -> float:
    return math.sqrt(math.fsum(float(leaf.double().square().sum()) for leaf in leaves(message)))


def upload(
    method: Method,
    x: Tensor,
    y: Tensor,
    ctx: Context,
    *,
    without: int | None = None,
    beside: dict[str, Tensor] | None = None,
) -> object:
    """What one client with these rows would send, by the method's own functions."""
    order, mask = Order(0, "mlp"), torch.arange(len(y)) != (-1 if without is None else without)
    net = ctx.task.starts["mlp"]
    down = method.download(method.init_server(ctx), order, ctx)
    net, own = method.receive(net, method.init_client(net, ctx), down, ctx)
    y = torch.where(mask, y, 0)
    rows = Labels(y, mask, beside or {})
    picks = method.pick(rows, own, ctx) if isinstance(method, PeerMethod) else None
    batch = Batch(x, y, mask, picks=picks, annotations=beside or {})
    sums = method.summarize(net, batch, own, down, ctx)
    return method.upload(net, own, sums, down, ctx)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORD_METHODS)
def test_a_row_more_or_less_moves_a_release_by_the_sensitivity_at_most(name: str) -> None:
    # rejects sums whose terms are not clipped, and a sensitivity without the constant's 1
    where = "local" if name == "repshare" else "central"
    clip = 1.0 if name == "analytic" else CLIP  # which brings rows to length 1
    privacy = {**RECORD, "where": where, "clip": clip}
    small = world(name, options=RECORD_METHODS[name], privacy=privacy)
    ctx = Context(random.key(3), small.server.task, 1, small.server.method.stages(_ctx(small))[0])
    data, method = blobs(), small.server.method
    bound = math.sqrt(method.record_terms) * sensitivity("record", clip)
    x, y = 5 * data.x, data.y  # features that need clipping
    whole = upload(method, x, y, ctx)
    moved = []
    for row in range(len(y)):
        without = upload(method, x, y, ctx, without=row)
        moved.append(norm(map_leaves(torch.sub, whole, without)))
    assert max(moved) <= bound * (1 + 1e-5)
    assert max(moved) > 0.99 * bound, "the bound is reached: noise is not larger than it must be"
    assert math.sqrt(method.record_terms * (1 + clip**2)) == pytest.approx(bound)


def test_a_row_of_half_the_weight_moves_a_release_half_as_far() -> None:
    # and so the noise that hides it is as good as noise twice as large
    weights = torch.where(torch.arange(32) % 2 == 0, 1.0, 0.5)
    data = replace(blobs(), annotations={"weight": weights})
    options = {"pick_rate": 0.5, "m_up": 2, "release_weight": "weight"}
    privacy = {**RECORD, "where": "local"}
    small = world("repshare", options=options, given={"data": data}, privacy=privacy)
    ctx = Context(random.key(3), small.server.task, 1, "train")
    method, x, y = small.server.method, 5 * data.x, data.y
    whole = upload(method, x, y, ctx, beside={"weight": weights})
    moved = torch.tensor(
        [
            norm(
                map_leaves(
                    torch.sub,
                    whole,
                    upload(method, x, y, ctx, without=row, beside={"weight": weights}),
                )
            )
            for row in range(len(y))
        ]
    )
    bound = math.sqrt(3) * sensitivity("record", CLIP)
    assert (moved <= weights * bound * (1 + 1e-5)).all()
    assert moved[weights == 1.0].max() > 0.99 * bound
    assert moved[weights == 0.5].max() > 0.99 * bound / 2


def _ctx(small: object) -> Context:
    return Context(random.key(0), small.server.task, 1, "")  # type: ignore[attr-defined]


def test_a_body_that_learned_from_the_row_moves_further() -> None:
    # why a promise to records is conditional: with the row, all rows have other features
    def total(without: int | None) -> Tensor:
        rows = torch.arange(32)
        mine = rows if without is None else rows[rows != without]
        quiet = world(
            "fedlog",
            privacy=RECORD | {"clip": 50.0},
            train={"lr": 0.3, "local_epochs": 20, "batch_size": 32},
            clients={"num_clients": 1},
            given={"clients": [mine], "clients_test": [torch.arange(30)]},
        )
        fed = federation(quiet)
        ctx = fed.context("train", 1)
        orders = fed.method.select(fed.server, fed.side.online(1), ctx)
        downs = [fed.method.download(fed.server, order, ctx) for order in orders]
        (part,) = fed.engine.ask(ctx, orders, downs).subtotals
        return named(part.message)["total"].double()

    whole = total(None)
    moved = [float((whole - total(row)).norm()) for row in (0, 12, 31)]
    features = float(whole.norm()) / 32  # of a row, about
    assert max(moved) > 2 * math.sqrt(1 + features**2)


def test_one_client_moves_a_total_by_the_clip_at_most() -> None:
    small = world("fedlog", privacy=RECORD | {"unit": "client", "clip": 0.7})
    fed = federation(small, PAIRS)
    ctx = fed.context("train", 1)
    orders = fed.method.select(fed.server, fed.side.online(1), ctx)
    downs = [fed.method.download(fed.server, order, ctx) for order in orders]
    for order, down in zip(orders, downs, strict=True):
        (alone,) = fed.engine.ask(ctx, [order], [down]).subtotals
        assert 0.69 < norm(alone.message) <= 0.7


def test_clipping_keeps_what_is_small_and_rows_that_are_not_finite_are_zeros() -> None:
    small, whole = Count(torch.tensor(0.5)), Privacy("client", "central", 1.0, 0.0)
    assert clipped_message(small, whole) == small
    assert clipped_message(Count(torch.tensor(-8.0)), whole).rows == pytest.approx(-1.0, abs=1e-5)
    for value in (torch.inf, torch.nan, 3e38):  # the square of the last is not finite
        assert clipped_message(Count(torch.tensor(value)), whole).rows == 0.0
    privacy = Privacy("record", "central", 1.0, 0.0)
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.nan, 0.0]])
    out = bounded(z, privacy)
    assert torch.allclose(out[:2], torch.tensor([[0.6, 0.8], [0.3, 0.4]]), atol=1e-5)
    assert torch.equal(out[2], torch.zeros(2))
    assert bounded(z, None) is z


@pytest.mark.parametrize("grid", [0.0, 2.0**-20])
def test_a_message_is_clipped_by_the_norm_of_all_its_arrays(grid: float) -> None:
    # rejects a clip of each array by itself, and one by the largest of their norms
    privacy = Privacy("client", "central", 1.0, 0.0, grid=grid)
    sent = clipped_message(
        Weights({"a": torch.tensor([3.0]), "b": torch.tensor([-4.0])}), privacy
    ).arrays
    assert torch.allclose(torch.cat([sent["a"], sent["b"]]), torch.tensor([0.6, -0.8]), atol=1e-5)


def test_noise_is_normal_of_the_deviation_and_its_own_for_every_array_and_key() -> None:
    message = {"a": torch.zeros(20_000), "b": torch.zeros(20_000)}
    noisy = [named(_noised(message, 3.0, random.key(i))) for i in range(2)]
    draws = [noisy[i][f"arrays/{name}"].double() / 3 for i in range(2) for name in "ab"]
    for draw in draws:
        assert stats.kstest(draw.numpy(), "norm").pvalue > 1e-3
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.05


def _noised(arrays: dict[str, Tensor], deviation: float, key: Tensor) -> object:
    from fedgist.methods.common.averaging import Weights  # noqa: PLC0415  # a message of many arrays

    return noised(Weights(arrays), deviation, key)


def test_two_totals_of_a_stage_have_noise_of_their_own() -> None:
    # rejects one key for all totals: their difference would be without noise
    nothing = Count(torch.zeros(20_000))
    totals = tuple(Subtotal(name, (0,), 1, "train", nothing) for name in ("few", "many"))
    privacy = Privacy("client", "central", 1.0, 3.0)
    noisy = with_central_noise(Replies(totals=totals), privacy, random.key(5)).totals
    draws = torch.stack([total.message.rows for total in noisy]).double() / 3
    assert float(torch.corrcoef(draws)[0, 1]) == pytest.approx(0.0, abs=0.05)
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3


def test_local_noise_is_each_clients_own() -> None:
    keys = random.fold(random.key(0), "client", torch.arange(5000))
    sent = noised(Count(torch.zeros(5000)), 2.0, keys).rows
    alone = torch.vmap(lambda key: noised(Count(torch.zeros(())), 2.0, key).rows)(keys)
    assert torch.equal(sent, alone)
    assert stats.kstest((sent.double() / 2).numpy(), "norm").pvalue > 1e-3


@pytest.mark.slow
def test_local_noise_of_many_clients_adds_up_and_central_noise_is_added_once() -> None:
    def spread(where: str) -> float:
        totals = []
        for seed in range(12):
            section = RECORD | {"where": where}
            frozen = {"lr": 1e-12, "num_rounds": 1}
            state = trace(world("fedlog", privacy=section, train=frozen, seed=seed), rounds=1).state
            totals.append(state["server/eta"])
        return float(torch.stack(totals).double().std(0).mean())

    assert spread("local") > 1.2 * spread("central")


def test_counts_may_be_off_by_a_clients_own_noise_in_both_directions() -> None:
    # rejects an upper bound without the noise, or less it: good uploads would be refused
    assert count_range(None, 10) == CountRange(0.0, 10)
    assert count_range(Privacy("client", "central", CLIP, 2.0), 10) == CountRange(0.0, 10)
    # one row more may leave out nobody
    assert count_range(Privacy("record", "central", CLIP, 2.0), 10) == CountRange()
    noisy = count_range(Privacy("record", "local", CLIP, 2.0), 10)
    assert -noisy.least == noisy.most - 10 == FARTHEST * 2.0


def test_nothing_is_sent_where_there_is_nothing() -> None:
    assert noised(Nothing(), 2.0, random.key(0)) == Nothing()
