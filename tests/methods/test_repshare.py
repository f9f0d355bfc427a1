"""Representation sharing against plain modules, and its relay against what it may not do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedgist
from fedgist.core import random
from fedgist.core.losses import contrast
from fedgist.core.method import ClientInfo, Context, Labels, Order, Reply
from fedgist.core.privacy import Privacy
from fedgist.core.replies import gather
from fedgist.core.sampling import drawn_of_each_class
from fedgist.engines.engine import Simulation
from fedgist.engines.plans.plan import Plan
from fedgist.errors import InputError
from fedgist.methods.common.latest_messages import LatestMessages
from fedgist.methods.repshare import PeerRepresentations, Relay, Released, RepShare
from fedgist.runs.files.record import read_lines
from fedgist.runs.round import ServerRun
from fedgist.testing.small_worlds import CLASSES, SIZES, blobs, federation, trace, world
from fedgist.world.world import World

WHOLE = {"local_epochs": 1, "batch_size": 32, "lr": 0.2}


def two_clients(**options: Any) -> World:
    """Two clients, so that whose observation is heard is no matter of chance."""
    rows = [list(range(14)), list(range(10, 32))]
    given = {"clients": rows, "clients_test": [[0, 1], [2, 3]]}
    return world("repshare", options=options, given=given, train=WHOLE)


def plain_rounds(small_world: World, rounds: int, method: RepShare) -> list[Tensor]:
    """Two clients by full-batch gradient steps, with observations over all rows of a class."""
    start = small_world.server.task.starts["mlp"].params
    x, y = (small_world.data.x - 0.5) / 2.0, small_world.data.y
    clients = []
    for client in range(2):
        body, head = nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3)
        body.load_state_dict({f"0.{n}": start[f"1.{n}"].clone() for n in ("weight", "bias")})
        head.load_state_dict({n: start[f"4.{n}"].clone() for n in ("weight", "bias")})
        own = small_world.population.train[client]
        clients.append((body, head, x[own], y[own]))
    average = method.reduction == "mean"
    sums: list[dict[int, tuple[Tensor, int]]] = [{}, {}]
    for _ in range(rounds):
        told = list(sums)
        for number, (body, head, rows_x, rows_y) in enumerate(clients):
            z = body(rows_x)
            logits = head(z)
            loss = F.cross_entropy(logits, rows_y)
            for phi, out, k in zip(z, logits, rows_y.tolist(), strict=True):
                parts = [of[k] for of in told if k in of]
                if parts:
                    mean = sum(s for s, _ in parts) / sum(n for _, n in parts)
                    far = (phi - mean).square()
                    kd = far.mean() if average else far.sum()
                    loss = loss + method.lambda_kd * kd / len(z)
                disc = torch.zeros(())
                for c, (total, n) in told[1 - number].items():
                    h = (out.softmax(0) * head(total / n).softmax(0)).sum()
                    disc = disc - (h.log() if c == k else (1 - h).log())
                disc = disc / CLASSES if average else disc
                loss = loss + method.lambda_disc * disc / len(z)
            params = [*body.parameters(), *head.parameters()]
            grads = torch.autograd.grad(loss, params)
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p.sub_(0.2 * g)
                z = body(rows_x)
            sums[number] = {
                k: (z[rows_y == k].sum(0), int((rows_y == k).sum())) for k in set(rows_y.tolist())
            }
    return [next(body.parameters()).detach() for body, *_ in clients]


@pytest.mark.parametrize("reduction", ["mean", "paper"])
def test_rounds_are_those_of_plain_modules(reduction: str) -> None:
    # rejects means weighted by clients, observations of oneself, a detached classifier on t, a
    # contrast without the other classes, and the other reduction
    weights = {"lambda_kd": 0.7, "lambda_disc": 0.6, "n_avg": 100, "reduction": reduction}
    small_world = two_clients(**weights)
    state = trace(small_world, Plan(2), rounds=3).state
    method = small_world.server.method
    assert isinstance(method, RepShare)
    expected = torch.stack(plain_rounds(small_world, 3, method))
    assert torch.allclose(state["clients/mlp/net/1.weight"], expected, atol=1e-5)
    other = replace(method, reduction="paper" if reduction == "mean" else "mean")
    assert not torch.allclose(torch.stack(plain_rounds(small_world, 3, other)), expected, atol=1e-3)


def test_the_first_round_is_local_training() -> None:
    shared, alone = (
        trace(world(name, train=WHOLE), Plan(5), rounds=1).state for name in ("repshare", "local")
    )
    assert torch.equal(shared["clients/mlp/net/1.weight"], alone["clients/mlp/net/1.weight"])
    begun = trace(world("repshare", options={"start": "random"}, train=WHOLE), Plan(5), rounds=1)
    assert not torch.equal(
        begun.state["clients/mlp/net/1.weight"], alone["clients/mlp/net/1.weight"]
    )


def test_the_contrast_is_the_papers() -> None:
    h = torch.tensor([[0.9, 0.2, 0.4], [0.3, 0.6, 0.5]], dtype=torch.float64)
    terms = contrast(h.log(), torch.tensor([0, 2]))
    expected = -torch.log(torch.tensor([[0.9, 0.8, 0.6], [0.7, 0.4, 0.5]], dtype=torch.float64))
    assert torch.allclose(terms, expected)
    sure = contrast(torch.zeros(1, 2), torch.tensor([0]))  # h = 1 at a negative: no infinity
    assert torch.isfinite(sure).all()


ROWS = st.lists(st.integers(-1, CLASSES - 1), min_size=1, max_size=30)  # -1: absent


@given(ROWS, st.integers(1, 6), st.integers(0, 99))
def test_observations_are_of_exactly_so_many_rows(labels: list[int], size: int, seed: int) -> None:
    present = [label for label in labels if label >= 0]
    y = torch.tensor([*present, *(0 for _ in range(len(labels) - len(present)))])
    mask = torch.arange(len(y)) < len(present)
    key = random.key(seed)
    picked = drawn_of_each_class(key, Labels(y, mask), CLASSES, size)
    counts = Counter(y[picked > 0].tolist())
    assert not picked[~mask].any()
    for label, count in Counter(present).items():
        assert counts[label] == min(size, count)
    longer = Labels(F.pad(y, (0, 5)), F.pad(mask, (0, 5)))
    wider = drawn_of_each_class(key, longer, CLASSES, size)
    assert torch.equal(wider[: len(y)], picked)  # padding changes no draw


@pytest.mark.slow
def test_every_row_is_picked_alike() -> None:
    y, mask = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.bool)
    counts = sum(drawn_of_each_class(random.key(s), Labels(y, mask), 1, 3) for s in range(4000))
    # 4000 draws of 3 of 8: 1500 each, deviation 31
    assert isinstance(counts, Tensor)
    assert (counts - 1500).abs().max() < 5 * 31


def test_under_privacy_of_records_picks_follow_rows_wherever_they_stand() -> None:
    # rejects picks by place, with which one row more picked others
    ctx = Context(random.key(3), world("repshare").server.task, 1, "train")

    def picks(fates: Tensor) -> Tensor:
        y, mask = torch.zeros(len(fates), dtype=torch.int64), torch.ones(len(fates)).bool()
        own: Any = None  # nothing of it is read
        return RepShare(pick_rate=0.5, m_up=2).pick(Labels(y, mask, {}, fates), own, ctx)

    fates = random.integers(random.key(5), (200,), 1 << 30)
    order = random.permutation(random.key(6), 200)
    assert torch.equal(picks(fates)[order], picks(fates[order]))
    assert 60 < int(picks(fates)[:, 0].sum()) < 140
    assert not torch.equal(picks(fates)[:, 0], picks(fates)[:, 1])


# the relay

WIDTH = 2


def released(client: int, classes: dict[int, int], m_up: int = 1) -> Released:
    """A release whose observations say whose they are: client + 1, and which observation."""
    rows = torch.zeros(1 + m_up, CLASSES)
    total = torch.zeros(1 + m_up, CLASSES, WIDTH)
    for label, count in classes.items():
        rows[:, label] = count
        for m in range(1 + m_up):
            total[m, label] = count * torch.tensor([client + 1.0, float(m)])
    return Released(total, rows, torch.zeros(0), torch.zeros(0))


def heard(method: RepShare, messages: dict[int, Released], rounds: dict[int, int]) -> Any:
    """A relay that has heard these clients of five, and a context."""
    small_world = world(
        "repshare", options={"m_up": method.m_up}, model={"name": "mlp", "hidden": [2]}
    )
    ctx = Context(random.key(3), small_world.server.task, 1, "train")
    replies = [
        Reply(Order(c, "mlp"), rounds.get(c, 1), "train", message)
        for c, message in messages.items()
    ]
    relay = method.init_server(ctx)
    return (method.server_update(relay, gather([], replies), ctx) if replies else relay), ctx


ALL = dict.fromkeys(range(CLASSES), 4)


def owners(down: PeerRepresentations) -> set[int]:
    return {int(v) - 1 for v in down.seen[..., 0][down.there > 0].tolist()}


@pytest.mark.parametrize("draw", ["client", "class"])
def test_a_client_gets_all_others_in_turn_and_never_its_own(draw: Any) -> None:
    method = RepShare(draw=draw, m_down=2)
    relay, ctx = heard(method, {c: released(c, ALL) for c in range(4)}, {})
    counts: Counter[int] = Counter()
    for number in range(300):
        at = replace(ctx, key=random.key(number))
        down = method.download(relay, Order(1, "mlp"), at)
        assert down.there.all()
        assert not torch.equal(down.seen[0], down.seen[1])  # without replacement
        whose = owners(down)
        if draw == "client":  # each observation is of one client in all classes
            assert all(len(set(line.tolist())) == 1 for line in down.seen[..., 0])
        counts.update(whose)
    assert set(counts) == {0, 2, 3}
    if draw == "client":  # 2 of 3, 300 times: 200 each, deviation 8
        assert all(abs(count - 200) < 5 * 8 for count in counts.values())


def test_class_by_class_each_class_is_drawn_by_itself() -> None:
    method = RepShare(draw="class")
    relay, ctx = heard(method, {c: released(c, ALL) for c in range(4)}, {})
    downs = [
        method.download(relay, Order(1, "mlp"), replace(ctx, key=random.key(n))) for n in range(50)
    ]
    assert any(len(set(down.seen[0, :, 0].tolist())) > 1 for down in downs)


def test_observations_of_a_class_come_from_who_has_it() -> None:
    method = RepShare(draw="class", m_down=3)
    relay, ctx = heard(method, {0: released(0, {0: 2}), 2: released(2, {0: 5, 1: 1})}, {})
    down = method.download(relay, Order(4, "mlp"), ctx)
    assert down.there.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert {int(v) for v in down.seen[:2, 0, 0]} == {1, 3}
    assert down.seen[0, 1, 0] == 3
    assert down.known.tolist() == [1, 1, 0]
    # the mean of class 0 is over rows: (2 * 1 + 5 * 3) / 7
    assert down.mean[0, 0] == pytest.approx(17 / 7)


def test_who_releases_nothing_or_is_forgotten_is_not_heard() -> None:
    method = RepShare()
    both = {0: released(0, ALL), 1: released(1, ALL)}
    for silent in ("release", "forget"):
        relay, ctx = heard(method, both, {})
        if silent == "forget":
            relay = method.forget(relay, 1, ctx)
        else:
            nothing = Reply(Order(1, "mlp"), 2, "train", released(1, {}))
            relay = method.server_update(relay, gather([], [nothing]), ctx)
        down = method.download(relay, Order(3, "mlp"), ctx)
        assert owners(down) == {0}
        assert down.mean[0, 0] == 1.0
        assert not method.download(relay, Order(0, "mlp"), ctx).there.any()


def test_a_global_mean_is_known_above_the_noise_of_all_clients_together() -> None:
    # rejects the noise of one client, and a deviation that grows with their number, not its root
    _, ctx = heard(RepShare(), {0: released(0, ALL)}, {})
    noisy = Privacy("record", "local", 1.0, 1.0)
    ctx = replace(ctx, task=replace(ctx.task, privacy=noisy))
    bound = 2 * ctx.task.num_clients**0.5
    for rows, known in ((bound + 0.1, 1.0), (bound - 0.1, 0.0)):
        parts = {"total": torch.ones(1, 2, 3, 5), "rows": torch.full((1, 2, 3), rows)}
        relay = Relay.of(LatestMessages(parts, torch.ones(1)), ctx)
        assert relay.known.tolist() == [known] * 3


def test_late_messages_count_unless_a_newer_one_is_there() -> None:
    method = RepShare()
    relay, ctx = heard(method, {0: released(0, ALL)}, {0: 5})
    for number, kept in ((4, 1.0), (6, 3.0)):
        late = Reply(Order(0, "mlp"), number, "train", released(2, ALL))
        after = method.server_update(relay, gather([], [late]), ctx)
        assert method.download(after, Order(3, "mlp"), ctx).mean[0, 0] == kept


def test_several_observations_are_told_apart() -> None:
    method = RepShare(m_up=3, m_down=2)
    relay, ctx = heard(method, {0: released(0, ALL, 3)}, {})
    seen: set[int] = set()
    for number in range(40):
        down = method.download(relay, Order(1, "mlp"), replace(ctx, key=random.key(number)))
        which = down.seen[:, 0, 1].tolist()
        assert len(set(which)) == 2
        seen |= {int(w) for w in which}
    assert seen == {1, 2, 3}  # never the mean over all rows


@pytest.mark.parametrize("m_up", [0, 2])
def test_without_observations_the_means_alone_are_learned_from(m_up: int) -> None:
    small_world = world("repshare", options={"m_up": m_up, "m_down": 3}, train=WHOLE)
    lines = trace(small_world, Plan(2), rounds=2).rounds
    labels = torch.split(blobs().y, list(SIZES))
    there = sum(len(set(own.tolist())) for own in labels)
    bits = -(-(1 + m_up) * CLASSES // 8)
    # a row of 5 features and a count for each class that is there, and bits that say which
    assert lines[0]["comm/up_bytes"] == (1 + m_up) * there * (5 + 1) * 4 + 5 * bits


# clients that come and go


def only(fed: ServerRun, ids: list[int]) -> None:
    some = [ClientInfo(c, ("mlp",)) for c in ids]
    object.__setattr__(fed.side, "online", lambda _: some)


@pytest.mark.slow
def test_all_but_two_are_away_for_long_and_are_still_heard() -> None:
    fed = federation(world("repshare", train={"num_rounds": 60}, evaluate={"every": 60}))
    fed.advance()
    before = {name: array.clone() for name, array in fed.server.newest.arrays.items()}
    only(fed, [0, 4])
    for _ in range(20):
        fed.advance()
    relay: Relay = fed.server
    assert relay.newest.round.tolist() == [21, 1, 1, 1, 21]
    for name, array in relay.newest.arrays.items():
        assert torch.equal(array[1:4], before[name][1:4])
    rows = relay.newest.arrays["rows"][:, 0].sum(0)
    assert torch.equal(rows, torch.bincount(blobs().y).float())  # all of them are in the mean
    fed.engine.close()


@pytest.mark.slow
def test_one_joins_late_and_learns_from_what_is_there() -> None:
    fed = federation(world("repshare", train={"num_rounds": 60}, evaluate={"every": 60}))
    only(fed, [0, 2])
    for _ in range(49):
        fed.advance()
    assert fed.server.newest.round.tolist() == [49, -1, 49, -1, -1]
    down = fed.method.download(fed.server, Order(3, "mlp"), fed.context("train", 50))
    assert down.known.any()
    assert down.there.any()
    only(fed, [0, 2, 3])
    line, _ = fed.advance()
    assert line["clients/replied"] == 3
    assert fed.server.newest.round.tolist() == [50, -1, 50, 50, -1]
    fed.engine.close()


def test_a_federation_of_one_client_is_local_training() -> None:
    rows = {"clients": [list(range(20))], "clients_test": [[0, 1, 2]]}
    shared, alone = (
        trace(world(name, options=options, given=rows, train=WHOLE), Plan(1), rounds=3).state[
            "clients/mlp/net/1.weight"
        ]
        for name, options in (("repshare", {"lambda_kd": 0.0}), ("local", {}))
    )
    assert torch.equal(shared, alone)  # it hears nobody; the global mean is its own


def test_a_learned_discriminator_learns() -> None:
    small_world = world("repshare", options={"discriminator": "learned"}, train=WHOLE)
    first, third = (trace(small_world, Plan(2), rounds=n).state for n in (1, 3))
    name = "clients/mlp/own/form"
    assert torch.equal(first[name][0], torch.eye(5) / 5**0.5)  # nothing to learn from yet
    assert not torch.allclose(third[name][0], first[name][0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_avg": 0}, "method.n_avg"),
        ({"m_down": 0}, "method.m_down"),
        ({"lambda_kd": -1.0}, "method.lambda_kd"),
        ({"draw": "user"}, "method.draw"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        world("repshare", options=options)


def weighted(weights: list[float], **more: Any) -> World:
    data = replace(blobs(), annotations={"weight": torch.tensor(weights)})
    options = {"release_weight": "weight", **more.pop("options", {})}
    return world("repshare", options=options, given={"data": data}, **more)


def test_a_row_weighs_in_what_is_released_what_its_annotation_says() -> None:
    weights = [0.25 * (row % 5) for row in range(sum(SIZES))]
    small_world = weighted(weights, options={"n_avg": 100}, train=WHOLE)
    fed = federation(small_world)
    fed.advance()
    ctx, released = fed.context("train", 2), fed.server.released
    assert isinstance(fed.engine, Simulation)  # for the type checker
    rows = small_world.population.train
    for client in range(len(SIZES)):
        down = fed.method.download(fed.server, Order(client, "mlp"), ctx)
        net = fed.engine.client(ctx, Order(client, "mlp"), down).net
        batch = small_world.population.examples.batch(rows[client].unsqueeze(0))
        z, y, w = net.features(batch.x[0]), batch.y[0], torch.tensor(weights)[rows[client]]
        for label in range(CLASSES):
            total = (w * (y == label)) @ z
            assert torch.allclose(released.total[client, 0, label], total, atol=1e-5)
            assert torch.allclose(released.total[client, 1, label], total, atol=1e-5)
            assert released.rows[client, 0, label] == pytest.approx(
                float((w * (y == label)).sum()), abs=1e-6
            )
    fed.engine.close()


def test_rows_of_weight_zero_take_no_place_in_an_observation() -> None:
    weights = [float(row % 3 == 0) for row in range(sum(SIZES))]
    small_world = weighted(weights, options={"n_avg": 2})
    fed = federation(small_world)
    fed.advance()
    observed = fed.server.released.rows[:, 1]
    fed.engine.close()
    for client in range(len(SIZES)):
        rows = small_world.population.train[client]
        y, kept = small_world.data.y[rows], torch.tensor(weights)[rows] > 0
        for label in range(CLASSES):
            assert observed[client, label] == min(2, int((kept & (y == label)).sum()))


def test_weights_do_not_depend_on_stacks() -> None:
    weights = [0.1 * (row % 7) for row in range(sum(SIZES))]
    one, two = (trace(weighted(weights), plan).state for plan in (Plan(3), Plan(1, stack=False)))
    assert torch.allclose(one["server/mean"], two["server/mean"], atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "name", "words"),
    [
        ([-0.1] * 32, "weight", "goes from -0.1 to -0.1; a row weighs from 0"),
        ([1.5] * 32, "weight", "goes from 1.5 to 1.5"),
        ([1.0] * 32, "budget", "rows have no such annotation; they have: weight"),
    ],
)
def test_impossible_weights_are_refused(weights: list[float], name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        weighted(weights, options={"release_weight": name})


MODELS = {
    "wide": {"model": "mlp", "hidden": [7], "share": 0.5},
    "thin": {"model": "mlp", "hidden": [4], "share": 0.5},
}


@pytest.mark.slow
def test_widths_that_differ_are_refused_unless_a_part_is_shared() -> None:
    with pytest.raises(InputError, match="one feature width"):
        world("repshare", architectures=MODELS)
    with pytest.raises(InputError, match=r"shared_width = 5: the body of thin ends in 4 features"):
        world("repshare", options={"shared_width": 5}, architectures=MODELS)
    options = {"shared_width": 3, "discriminator": "learned"}
    for discriminator in ("learned", "classifier"):
        options["discriminator"] = discriminator
        one, two = (
            trace(world("repshare", options=options, architectures=MODELS), plan)
            for plan in (Plan(2), Plan(1, stack=False))
        )
        assert one.state["server/mean"].shape == (CLASSES, 3)
        assert torch.allclose(one.state["server/mean"], two.state["server/mean"], atol=1e-5)


@pytest.mark.slow
def test_all_features_are_the_shared_ones_where_they_are_as_many() -> None:
    whole, part = (
        trace(world("repshare", options=options), Plan(2)).state
        for options in ({}, {"shared_width": 5})
    )
    assert torch.equal(whole["clients/mlp/net/1.weight"], part["clients/mlp/net/1.weight"])


def test_the_nearest_observations_are_those_of_alike_clients() -> None:
    method = RepShare(draw="nearest", m_down=2)
    # client c's features are c + 1; client 4 has no class in common with anybody
    messages = {0: released(0, {0: 2, 1: 2}), 1: released(1, {0: 3}), 3: released(3, {0: 1, 1: 9})}
    messages[4] = released(4, {2: 5})
    relay, ctx = heard(method, messages, {})
    for client, nearest in {0: [1, 3], 1: [0, 3], 3: [1, 0]}.items():
        down = method.download(relay, Order(client, "mlp"), ctx)
        assert [int(line.max()) - 1 for line in down.seen[..., 0]] == nearest
    newcomers = {
        int(method.download(relay, Order(2, "mlp"), replace(ctx, key=random.key(n))).seen[0].max())
        for n in range(40)
    }
    assert newcomers == {1, 2, 4, 5}  # of whom nothing is known, any will do


@pytest.mark.slow
def test_late_uploads_are_heard_a_round_later(tmp_path: Path) -> None:
    recipe = {
        "method": {"name": "repshare"},
        "clients": {"num_clients": 6, "delay": 0.4},
        "data": {"train_rows": 120},
        "train": {"num_rounds": 8},
        "engine": {"workers": 1, "cohort_size": 3},
    }
    result = fedgist.run(recipe, out=tmp_path / "run")
    lines = read_lines(tmp_path / "run" / "rounds.jsonl")
    absent = sum(len(line.get("absent", [])) for line in lines)
    assert absent > 5
    assert not any("late" in line for line in lines)  # none is dropped
    rounds = result.server_run.server.newest.round.tolist()
    away = {entry["client"] for entry in lines[-1].get("absent", [])}
    assert away
    for client, number in enumerate(rounds):
        assert number < 8 if client in away else number == 8


@pytest.mark.parametrize("draw", ["client", "class", "nearest"])
@pytest.mark.parametrize("discriminator", ["classifier", "learned"])
def test_clients_without_a_class_in_common_learn_all_the_same(
    draw: str, discriminator: str
) -> None:
    # three clients of one class each, a fourth class that nobody has
    data = replace(blobs(), num_classes=4)
    rows = [(data.y == label).nonzero().flatten().tolist() for label in range(CLASSES)]
    tests = [(data.y_test == label).nonzero().flatten().tolist() for label in range(CLASSES)]
    given = {"data": data, "clients": rows, "clients_test": tests}
    options = {"draw": draw, "discriminator": discriminator, "m_up": 2, "m_down": 2}
    small_world = world("repshare", options=options, given=given, train=WHOLE)
    run = trace(small_world, Plan(2), rounds=4)
    assert all(torch.isfinite(array).all() for array in run.state.values())
    assert run.state["server/known"].tolist() == [1, 1, 1, 0]
    assert not run.state["server/mean"][3].any()
    losses = [line["train/loss"] for line in run.rounds]
    assert losses[3] < losses[0]


def test_in_the_control_zeros_are_shared_and_counts_stay() -> None:
    plain, control = (
        federation(world("repshare", options={"n_avg": 100, "control": control}, train=WHOLE))
        for control in (False, True)
    )
    for fed in (plain, control):
        fed.advance()
        fed.engine.close()
    assert not bool(control.server.released.total.any())
    assert bool(plain.server.released.total.any())
    assert torch.equal(control.server.released.rows, plain.server.released.rows)
