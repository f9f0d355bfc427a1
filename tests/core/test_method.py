"""What a server sees of its clients, and whom it asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core import random
from fedgist.core.message import message
from fedgist.core.method import (
    ClientInfo,
    Context,
    Count,
    Method,
    Order,
    Replies,
    Reply,
    Task,
    Training,
)
from fedgist.core.objectives.classes import Classes
from fedgist.core.replies import Subtotal, gather
from fedgist.errors import TooFewRepliesError


def count(rows: float) -> Count:
    return Count(torch.tensor(rows))


@message(reduce="sum", over="architecture")
class PerArchitecture:
    rows: torch.Tensor


def subtotals(kind: type) -> list[Subtotal]:
    parts = (("b", 3.0, (0, 1)), ("a", 5.0, (2,)), ("b", 7.0, (3, 4, 5, 6)))
    return [Subtotal(a, ids, 1, "train", kind(torch.tensor(rows))) for a, rows, ids in parts]


SUMS = gather(subtotals(Count), ())
PER_ARCHITECTURE = gather(subtotals(PerArchitecture), ())
REPLIES = [Reply(Order(i, "ab"[i % 2]), 1, "train", count(2.0**i)) for i in range(4)]
EACH = gather((), REPLIES[::-1])


def test_totals_add_all_clients_or_those_of_one_architecture() -> None:
    assert (float(SUMS.total().rows), len(SUMS)) == (15.0, 7)
    parts = PER_ARCHITECTURE
    assert (float(parts.by("b").total().rows), len(parts.by("b"))) == (10.0, 6)
    assert (float(EACH.total().rows), len(EACH)) == (15.0, 4)
    assert (float(EACH.by("b").total().rows), len(EACH.by("b"))) == (10.0, 2)
    assert parts.architectures == EACH.architectures == ("a", "b")


def test_a_sum_over_all_has_no_parts_and_one_per_architecture_no_whole() -> None:
    with pytest.raises(TypeError, match="summed over all clients"):
        SUMS.by("b")
    with pytest.raises(TypeError, match="summed per architecture"):
        PER_ARCHITECTURE.total()


def test_messages_that_sum_are_never_seen_one_by_one() -> None:
    with pytest.raises(TypeError, match="only ever seen as a total"):
        iter(SUMS)
    assert [r.order.client for r in EACH] == [0, 1, 2, 3]


def test_what_comes_from_too_few_clients_is_withheld() -> None:
    # rejects a floor that holds per architecture where the sum is over all (7 clients here)
    assert float(gather(subtotals(Count), (), 7).total().rows) == 15.0
    few = gather(subtotals(Count), (), 8)
    assert (len(few), few.withheld) == (0, (("all", 7),))
    with pytest.raises(
        TooFewRepliesError, match=r"a total over 7 replies; privacy\.min_replies is 8"
    ):
        few.total()


def test_one_pool_under_the_floor_does_not_take_the_other_with_it() -> None:
    replies = gather(subtotals(PerArchitecture), (), 2)
    assert replies.architectures == ("b",)
    assert replies.withheld == (("a", 1),)
    assert float(replies.by("b").total().rows) == 10.0
    with pytest.raises(TooFewRepliesError):
        replies.by("a").total()


def test_messages_one_by_one_are_withheld_under_the_floor_as_well() -> None:
    assert len(gather((), REPLIES, 4)) == 4
    few = gather((), REPLIES, 5)
    assert (list(few), few.withheld) == ([], (("all", 4),))
    with pytest.raises(TooFewRepliesError):  # the floor holds within an architecture too
        gather((), REPLIES, 4).by("a").total()


def test_nobody_has_no_total() -> None:
    with pytest.raises(TooFewRepliesError):
        Replies().total()
    with pytest.raises(TooFewRepliesError):
        PER_ARCHITECTURE.by("c").total()


def context(clients: int, fraction: float, key: torch.Tensor) -> Context:
    training = Training(num_rounds=1, batch_size=8, fraction_train=fraction)
    return Context(key, Task((4,), 3, clients, {}, {}, training, Classes(3)), 1, "train")


def online(ids: Sequence[int]) -> list[ClientInfo]:
    return [ClientInfo(i, ("own", "pool")) for i in ids]


@given(st.integers(1, 40), st.floats(0.01, 1.0), st.sets(st.integers(0, 39)), st.integers(0, 99))
def test_by_default_a_sorted_sample_of_those_online_is_asked_for_its_own_model(
    clients: int, fraction: float, away: set[int], seed: int
) -> None:
    ids_online = [i for i in range(clients) if i not in away]
    orders = Method().select(None, online(ids_online), context(clients, fraction, random.key(seed)))
    ids = [o.client for o in orders]
    assert ids == sorted(set(ids))
    assert set(ids) <= set(ids_online)
    assert len(ids) == min(len(ids_online), max(1, round(fraction * clients)))
    assert all(o.architecture == "own" for o in orders)


def test_every_client_is_asked_as_often_and_another_key_asks_others() -> None:
    # rejects asking always the first clients, and a draw that ignores its key
    def ask(seed: int) -> tuple[int, ...]:
        orders = Method().select(None, online(range(10)), context(10, 0.3, random.key(0, seed)))
        return tuple(o.client for o in orders)

    draws = [ask(seed) for seed in range(600)]
    assert len(set(draws)) > 90  # of 120
    assert draws[0] == ask(0)
    times = Counter(i for draw in draws for i in draw)
    assert scipy.stats.chisquare(list(times.values())).pvalue > 0.01
