"""The laws that every method obeys, by registration alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedgist.core.message import pack, payload_bytes, reduction, refuse, shapes, unpack
from fedgist.core.method import Context, Order, Replies
from fedgist.core.tree import build, map_leaves, named
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.engines import message_form as gate
from fedgist.engines import trainer
from fedgist.engines.engine import Answer
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.stacking_plan import Plan
from fedgist.errors import TooFewRepliesError
from fedgist.federation.round_loop import Federation
from fedgist.federation.world import World
from fedgist.methods import METHODS

from worlds import blobs, federation, trace, two_architectures, world  # isort: skip

EVERY = pytest.mark.parametrize("name", METHODS)
ALONE = Plan(1, stack=False)


def here(name: str, **sections: Any) -> World:
    return world(name, architectures=two_architectures(name), **sections)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[k].double(), b[k].double(), rtol=0, atol=tolerance) for k in a
    )


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def first_stage(fed: Federation) -> tuple[Context, list[Order], list[Any]]:
    ctx = fed.context(fed.method.stages(fed.context("", 1))[0], 1)
    orders = fed.method.select(fed.server, fed.world.online(1), ctx)
    return ctx, orders, [fed.method.download(fed.server, o, ctx) for o in orders]


def uploads(fed: Federation) -> list[tuple[Order, Any]]:
    """Each client's own upload of the first stage, whatever the engine would add up."""
    ctx, orders, downs = first_stage(fed)
    assert isinstance(fed.engine, LocalEngine)
    out = []
    for order, down in zip(orders, downs, strict=True):
        cohort, clients = fed.engine.trial(ctx, [order], [down])
        clients, _ = trainer.train(cohort, clients, fed.method.phases(cohort.ctx))
        message, _ = trainer.upload(cohort, clients)
        out.append((order, map_leaves(lambda leaf: leaf[0], message)))
    return out


@EVERY
def test_1_stacked_and_one_by_one_agree(name: str) -> None:
    alone = trace(here(name), ALONE)
    for size in (2, 3, 5):
        together = trace(here(name), Plan(size))
        assert close(alone.state, together.state)
        assert [r.get("eval/client/accuracy_mean") for r in alone.rounds] == [
            r.get("eval/client/accuracy_mean") for r in together.rounds
        ]


class _Shuffled(LocalEngine):
    """Orders arrive in another order."""

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any]) -> Answer:
        return super().ask(ctx, list(orders)[::-1], list(downs)[::-1])


@EVERY
def test_2_order_of_clients_and_replies_does_not_matter(name: str) -> None:
    straight, shuffled = federation(here(name)), federation(here(name), engine=_Shuffled)
    for _ in range(2):
        one, other = straight.advance(), shuffled.advance()
        assert drop_times(one[0]) == drop_times(other[0])
        assert one[1] == other[1]
    assert equal(named(straight.server), named(shuffled.server))
    assert equal(straight.engine.state(), shuffled.engine.state())


def drop_times(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if not k.startswith("time/")}


class _Padded(Rows):
    """Rows whose tables are wider than they need be."""

    def table(self, clients: Sequence[int]) -> torch.Tensor:
        tight = super().table(clients)
        return torch.cat([tight, tight.new_full((len(tight), 9), -1)], dim=1)


@EVERY
def test_3_padding_changes_nothing(name: str) -> None:
    tight = here(name)
    rows = tight.population.train
    padded = replace(
        tight, population=replace(tight.population, train=_Padded(rows.rows, rows.offsets))
    )
    assert close(trace(tight).state, trace(padded).state, 1e-6)


@EVERY
@pytest.mark.parametrize("keep", [[0], [1, 3], [4], [0, 1, 2, 3, 4]])
def test_4_any_non_empty_subset_of_replies_is_accepted(name: str, keep: list[int]) -> None:
    fed = federation(here(name))
    ctx, orders, downs = first_stage(fed)
    some = [i for i in range(len(orders)) if i in keep] or [0]
    answer = fed.engine.ask(ctx, [orders[i] for i in some], [downs[i] for i in some])
    server = fed.method.server_update(fed.server, answer.replies, ctx)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in named(server).values())
    assert shapes(server) == shapes(fed.server)


@EVERY
def test_5_messages_survive_the_wire_and_cost_their_declared_fields(name: str) -> None:
    fed = federation(here(name))
    ctx, orders, downs = first_stage(fed)
    answer = fed.engine.ask(ctx, orders, downs)
    sent = [message for _, message in uploads(fed)]
    assert answer.upload_bytes == sum(payload_bytes(m) for m in sent)
    for message in [*downs, *sent]:
        back = unpack(type(message), pack(message))
        assert equal(named(back), named(message))
        arrays = named(message).values()
        assert payload_bytes(message) == sum(a.numel() * a.element_size() for a in arrays)


@EVERY
def test_6_a_sum_is_only_ever_seen_as_a_total_over_enough_clients(name: str) -> None:
    fed = federation(here(name))
    ctx, orders, downs = first_stage(fed)
    replies = fed.engine.ask(ctx, orders, downs).replies
    if reduction(type(uploads(fed)[0][1])) != "sum":
        pytest.skip(f"{name} sends one message a client by design")
    with pytest.raises(TypeError, match="only ever seen as a total"):
        iter(replies)
    few = Replies(replies.parts, replies.each, min_replies=len(replies) + 1)
    with pytest.raises(TooFewRepliesError, match=f"min_replies is {len(replies) + 1}"):
        few.total()


@EVERY
def test_7_same_seed_same_result_another_seed_another(name: str) -> None:
    first, again, other = (trace(here(name, seed=seed)) for seed in (3, 3, 4))
    assert equal(first.state, again.state)
    assert first.rounds == again.rounds
    assert not close(first.state, other.state)


@EVERY
def test_8_inputs_are_not_mutated(name: str) -> None:
    fed = federation(here(name))
    ctx, orders, downs = first_stage(fed)
    before = (
        copy.deepcopy([named(d) for d in downs]),
        {k: v.clone() for k, v in named(fed.server).items()},
    )
    starts = {
        a: {k: v.clone() for k, v in net.params.items()} for a, net in fed.task.starts.items()
    }
    answer = fed.engine.ask(ctx, orders, downs)
    fed.method.server_update(fed.server, answer.replies, ctx)
    assert all(equal(named(d), b) for d, b in zip(downs, before[0], strict=True))
    assert equal(named(fed.server), before[1])
    assert all(equal(net.params, starts[a]) for a, net in fed.task.starts.items())


@EVERY
def test_9_restored_from_a_checkpoint_equals_uninterrupted(name: str) -> None:
    whole = trace(here(name), rounds=4)
    first = federation(here(name))
    for _ in range(2):
        first.advance()
    saved = first.checkpoint()
    copied = replace(saved, clients={k: v.clone() for k, v in saved.clients.items()})
    second = federation(here(name))
    second.restore(copied)
    lines = [drop_times(second.advance()[0]) for _ in range(2)]
    assert lines == whole.rounds[-2:]
    end = second.checkpoint()
    assert equal(
        {k: v for k, v in whole.state.items() if k.startswith("clients/")},
        {f"clients/{k}": v for k, v in end.clients.items()},
    )
    assert equal(
        {k: v for k, v in whole.state.items() if k.startswith("server/")},
        {f"server/{k}": v for k, v in end.server.items()},
    )


@EVERY
def test_9_server_state_is_a_tree_that_can_be_read_back(name: str) -> None:
    server = federation(here(name)).server
    assert equal(named(build(type(server), named(server))), named(server))


def canaries() -> Dataset:
    data = blobs()
    x = data.x.clone()
    x[:, 0] = 1e4 + torch.arange(len(x)) * 7.25  # a number that only this row has
    return replace(data, x=x, mean=(0.0,) * 6, std=(1.0,) * 6)


@EVERY
def test_10_no_raw_example_appears_in_a_message(name: str) -> None:
    data = canaries()
    fed = federation(world(name, architectures=two_architectures(name), given={"data": data}))
    for _, message in uploads(fed):
        for array in named(message).values():
            assert not torch.isin(data.x[:, 0], array.flatten().to(data.x.dtype)).any()


def spoil(message: Any, how: str) -> Any:
    def change(leaf: torch.Tensor) -> torch.Tensor:
        if how == "wrong shape":
            return leaf.unsqueeze(0)
        if how == "oversized":
            return torch.cat([leaf.flatten()] * 1000)
        if how == "wrong type":
            return leaf.to(torch.float64)
        return torch.full_like(leaf, float(how))

    return map_leaves(change, message)


@EVERY
@pytest.mark.parametrize("how", ["nan", "inf", "-inf", "wrong shape", "oversized", "wrong type"])
def test_11_bad_uploads_are_refused_by_name(name: str, how: str) -> None:
    fed = federation(here(name))
    order, message = uploads(fed)[0]
    ctx, orders, downs = first_stage(fed)
    down = downs[orders.index(order)]
    expected = gate.template(fed.method, ctx, order.architecture, down)
    assert refuse(message, expected) is None
    if named(message):
        reason = refuse(spoil(message, how), expected)
        assert reason is not None
        assert next(iter(named(message))) in reason


@EVERY
def test_11_the_round_goes_on_without_a_client_whose_data_are_broken(name: str) -> None:
    data = blobs()
    x = data.x.clone()
    x[12:19] = float("nan")  # all rows of client 2
    sick = here(name)
    examples = replace(sick.population.examples, x=x)
    fed = federation(replace(sick, population=replace(sick.population, examples=examples)))
    for _ in range(2):
        line, _ = fed.advance()
    assert all(bool(torch.isfinite(leaf).all()) for leaf in named(fed.server).values())
    sends = payload_bytes(uploads(federation(here(name)))[0][1]) > 0
    if sends:
        assert [r["client"] for r in line["refused"]] == [2]
        assert "not finite" in line["refused"][0]["reason"]
