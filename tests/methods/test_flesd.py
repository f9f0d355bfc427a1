"""FLESD against dense NumPy: similarities, targets, queue, what is sent, resuming, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.core import random
from fedgist.core.message import payload_bytes
from fedgist.core.method import Context, Count, Nothing, Order, Replies
from fedgist.core.nets.net import Net
from fedgist.data.dataset import Dataset
from fedgist.engines.message_form import upload_form
from fedgist.engines.plans.plan import Plan
from fedgist.errors import InputError, MethodError
from fedgist.methods import flesd as flesd_file
from fedgist.methods.flesd import (
    FLESD,
    Ensemble,
    PublicRepresentations,
    Quantized,
    SimilarityDistillation,
    Student,
    representations,
)
from fedgist.recipe.reading import read
from fedgist.runs import run_rounds as rounds
from fedgist.runs.round import ServerRun, start_server
from fedgist.testing.small_worlds import (
    ALONE,
    SIZES,
    blobs,
    federation,
    loopback,
    public_rows,
    trace,
    world,
)
from fedgist.wire.envelope import seal, unseal
from fedgist.wire.wire import LoopbackWire
from fedgist.world.world import World
from interrupted import CTRL_C, KILL, goes_on

Array = npt.NDArray[np.float64]
PLAN = Plan(5)
ENGINE: dict[str, Any] = {"workers": 1, "server_threads": 1}
FEW = SimilarityDistillation(epochs=3, batch_size=40, queue=50, momentum=0.7, lr=0.01)
TWO = {
    "wide": {"model": "mlp", "hidden": [8, 7], "share": 0.4},
    "flat": {"model": "mlp", "hidden": [5], "share": 0.6},
}


def flesd(**options: Any) -> FLESD:
    method: FLESD = replace(FLESD(of="features", distillation=FEW), **options)
    return method


def after_train(small_world: World) -> tuple[ServerRun, Context]:
    """Return a federation whose clients of round 1 have been heard, and the next stage."""
    fed = federation(small_world, PLAN)
    ctx = fed.context("train", 1)
    orders = fed.method.orders(
        fed.server, fed.method.select(fed.server, small_world.server.clients, ctx), ctx
    )
    assert orders is not None
    downs = [fed.method.download(fed.server, order, ctx) for order in orders]
    answer = fed.engine.ask(ctx, orders, downs)
    fed.server = fed.method.server_update(fed.server, Replies(each=answer.each), ctx)
    return fed, fed.context("distill-0", 1)


def dense(r: list[Tensor], tau: float) -> Array:
    """Return M (N, N) of equations 4 to 6, from whole matrices."""
    exact = [x.double().numpy() for x in r]
    found: Array = np.mean([np.exp((x @ x.T - 1.0) / tau) for x in exact], axis=0)
    return found


@pytest.mark.parametrize("tau", [0.1, 0.01, 0.002])
def test_the_targets_are_rows_of_the_dense_ensemble_over_the_queue(tau: float) -> None:
    fed, ctx = after_train(world(flesd(), architectures=TWO))
    ensemble: Ensemble = fed.server.ensemble
    n = len(public_rows())
    assert ensemble.count() == len(SIZES)
    sent = [normalize(x, dim=1) for x in ensemble.slots]  # zeros beside change no length
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(sent, ensemble.slots, strict=True))
    m = dense(sent, tau)
    rows, places = torch.arange(7), torch.tensor([3, 50, 0, 99, 6, 120])
    settings = replace(FEW, target_temperature=tau, own_anchor=False)
    p = settings.target(ensemble, rows, places, settings.hidden(rows, places))
    weights = m[rows][:, places] * (rows.unsqueeze(1) != places).numpy()
    # numbers of float32 are wrong by 1e-7: over tau, that is what can be asked of logarithms
    far = max(1e-6, 1e-7 / tau)
    assert p.numpy() == pytest.approx(weights / weights.sum(1, keepdims=True), abs=far)
    assert p[3, 0] == p[0, 2] == p[6, 4] == 0.0  # a row is none of its own anchors
    assert ensemble.slots.shape == (5, n, 7)
    assert ctx.stage == "distill-0"


def test_the_loss_is_the_divergence_of_equations_8_and_9() -> None:
    made = normalize(random.normal(random.key(0), (4, 5)), dim=1)
    anchors = normalize(random.normal(random.key(1), (6, 5)), dim=1)
    rows, places = torch.tensor([2, 9, 4, 7]), torch.tensor([9, 1, 2, 30, 31, 32])
    weights = random.uniform(random.key(2), (4, 6)).masked_fill(rows.unsqueeze(1) == places, 0.0)
    target = weights / weights.sum(1, keepdim=True)
    settings = SimilarityDistillation(temperature=0.3)
    hidden = rows.unsqueeze(1) == places
    found = float(settings.divergence(made, anchors, hidden, target))
    total = 0.0
    for i in range(4):
        z = {j: float(made[i] @ anchors[j]) / 0.3 for j in range(6) if places[j] != rows[i]}
        norm = math.log(sum(math.exp(value) for value in z.values()))
        total += sum(
            float(target[i, j]) * (math.log(float(target[i, j])) - (value - norm))
            for j, value in z.items()
        )
    assert found == pytest.approx(total / 4, abs=1e-6)


def test_without_own_anchors_a_step_is_adams_on_that_loss_and_the_anchors_follow() -> None:
    settings = replace(FEW, own_anchor=False)
    fed, ctx = after_train(world(flesd(distillation=settings), architectures=TWO))
    ensemble, start = fed.server.ensemble, fed.task.starts["wide"]
    student = settings.begin(start, "features", ctx)
    assert sorted(student.queue.places.tolist()) == sorted(set(student.queue.places.tolist()))
    assert torch.allclose(
        student.queue.anchors,
        normalize(start.features(seen(student.queue.places)), dim=1),
        atol=1e-6,
    )
    weights = {n: p.clone().requires_grad_() for n, p in start.params.items()}
    order = random.permutation(random.fold(student.order, 0), len(public_rows()))
    rows, places = order[:40], student.queue.places
    made = normalize(start.with_arrays(weights).features(seen(rows)), dim=1)
    logits = made @ student.queue.anchors.T / 0.1
    hidden = rows.unsqueeze(1) == places
    logits = logits.masked_fill(hidden, -1e9)
    p = settings.target(ensemble, rows, places, hidden)
    loss = (p * (torch.where(p > 0, p, 1.0).log() - logits.log_softmax(1))).sum(1).mean()
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    for w, gradient in zip(weights.values(), found, strict=True):
        w.grad = gradient
    optimizer.step()
    # one step alone: of an epoch that is one batch long
    (lesson,) = settings.lessons(student, [0], ctx)
    after = settings.step(student, ensemble, start, "features", lesson)
    for name, w in weights.items():
        assert torch.allclose(after.arrays[name], w.detach(), atol=1e-6), name
        follows = 0.7 * start.params[name] + 0.3 * w.detach()
        assert torch.allclose(after.momentum[name], follows, atol=1e-6)
    assert float(after.losses) == pytest.approx(float(loss.detach()), abs=1e-5)
    assert after.queue.places.tolist() == [*places.tolist(), *rows.tolist()][-50:]
    newest = normalize(start.with_arrays(dict(after.momentum)).features(seen(rows)), dim=1)
    assert torch.allclose(after.queue.anchors[-40:], newest, atol=1e-6)
    assert torch.equal(after.queue.anchors[:-40], student.queue.anchors[40:])


def test_each_row_is_its_own_anchor_and_older_copies_of_it_are_hidden() -> None:
    # rejects a queue that takes the batch after the loss, anchors by the student itself, and two
    # anchors of one row
    settings = replace(FEW, queue=1000, momentum=0.7)
    fed, ctx = after_train(world(flesd(distillation=settings), architectures=TWO))
    ensemble, start = fed.server.ensemble, fed.task.starts["wide"]
    n = len(public_rows())
    assert settings.anchors(fed.task) == n  # one for each row at most
    student = settings.begin(start, "features", ctx)
    for lesson in settings.lessons(student, range(3), ctx):
        before, rows = student, lesson.rows
        follower = start.with_arrays(before.momentum)
        own = normalize(follower.features(seen(rows)), dim=1)
        anchors = torch.cat([before.queue.anchors, own])[-n:]
        places = [*before.queue.places.tolist(), *rows.tolist()][-n:]
        learning = start.with_arrays(before.arrays)
        made = normalize(learning.features(seen(rows)), dim=1)
        r = ensemble.slots.double().numpy()
        total = 0.0
        for i, row in enumerate(rows.tolist()):
            kept = [j for j in range(n) if places[j] != row or j >= n - len(rows)]
            assert [places[j] for j in kept].count(row) == 1
            at = [places[j] for j in kept]
            m = sum(np.exp((x[at] @ x[row] - 1) / 0.1) for x in r)
            p = m / m.sum()
            z = (anchors[kept] @ made[i]).double().detach().numpy() / 0.1
            total += float((p * (np.log(p) - (z - np.log(np.exp(z).sum())))).sum())
        student = settings.step(student, ensemble, start, "features", lesson)
        value = float(student.losses - before.losses)
        assert value == pytest.approx(total / len(rows), abs=1e-4)
        assert student.queue.places.tolist() == places
        assert torch.allclose(student.queue.anchors, anchors, atol=1e-6)


def seen(rows: Tensor) -> Tensor:
    """Return public rows as models see them."""
    return (public_rows()[rows] - 0.5) / 2.0


def test_each_epoch_goes_through_all_public_rows() -> None:
    student = Student({}, None, {}, None, random.key(4), None, None)  # type: ignore[arg-type]
    ctx = Context(random.key(0), world(flesd()).server.task, 1, "distill-0")
    steps = range(FEW.steps(ctx.task))
    assert len(steps) == 3 * 4
    rows = [lesson.rows.tolist() for lesson in FEW.lessons(student, steps, ctx)]
    for epoch in range(3):
        of_epoch = [row for piece in rows[4 * epoch : 4 * epoch + 4] for row in piece]
        assert sorted(of_epoch) == list(range(len(public_rows())))
    assert rows[0] != rows[4]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 4 * 160 * 7 + 8),
        ({"wire": "float16"}, 2 * 160 * 7 + 8),
        ({"wire": "int8"}, 160 * 7 + 4 * 160 + 8),
        ({"sends": "similarities"}, 4 * 160 * 160 + 8),
        ({"sends": "similarities", "top": 0.1}, (4 + 4) * 160 * 16 + 8),
        ({"of": "projection"}, 4 * 160 * 3 + 8),
    ],
)
def test_what_is_sent_is_what_is_booked(options: dict[str, Any], size: int) -> None:
    small = world(flesd(**options), model={"name": "mlp", "hidden": [7]})
    line = federation(small, PLAN).advance()[0]
    assert line["comm/up_bytes"] == size * len(SIZES)


@pytest.mark.slow
def test_rounded_representations_and_sent_similarities_say_the_same() -> None:
    ensembles = {}
    for name, options in {
        "exact": {},
        "half": {"wire": "float16"},
        "bytes": {"wire": "int8"},
        "similarities": {"sends": "similarities"},
    }.items():
        fed, _ = after_train(world(flesd(**options), architectures=TWO))
        everything = torch.arange(160)
        ensemble: Ensemble = fed.server.ensemble
        ensembles[name] = torch.exp(ensemble.logarithms(everything, everything, 0.1) - 10.0) / 5
    exact = ensembles.pop("exact")
    assert float(exact.max()) == pytest.approx(1.0, abs=1e-5)  # over what 1 comes to
    for name, far in {"half": 0.01, "bytes": 0.1, "similarities": 1e-5}.items():
        assert torch.allclose(ensembles[name], exact, atol=far), name


@pytest.mark.parametrize("options", [{}, {"wire": "int8"}, {"sends": "similarities", "top": 0.1}])
def test_the_form_of_a_message_costs_no_look_at_the_public_rows(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = world(flesd(**options), architectures=TWO)
    fed = federation(small, PLAN)
    ctx, looked = fed.context("train", 1), []
    down = fed.method.download(fed.server, Order(0, "wide"), ctx)

    def counted(net: Net, *rest: Any) -> Tensor:
        looked.append(next(iter(net.params.values())).is_meta)
        return representations(net, *rest)

    monkeypatch.setattr("fedgist.methods.flesd.representations", counted)
    upload_form(fed.method, ctx, "wide", down)
    assert looked == [True]


def test_of_the_nearest_alone_only_the_largest_similarities_count() -> None:
    whole, _ = after_train(world(flesd(sends="similarities"), architectures=TWO))
    some, _ = after_train(world(flesd(sends="similarities", top=0.1), architectures=TWO))
    total, kept = (torch.exp(fed.server.ensemble.total - 10.0) for fed in (whole, some))
    assert bool((kept <= total + 1e-6).all())
    counts = (kept > 0).sum(1)
    assert int(counts.min()) >= 16  # of one client; of five, not all the same
    assert int(counts.max()) <= 5 * 16
    exact, _ = after_train(world(flesd(), architectures=TWO))
    largest = np.zeros(160)
    for r in exact.server.ensemble.slots.double().numpy():
        near = np.sort(np.exp((r @ r.T - 1.0) / 0.1), axis=1)
        largest += near[:, -16:].sum(1)
    assert kept.sum(1).numpy() == pytest.approx(largest, abs=1e-3)


def test_clients_of_the_global_architecture_start_from_it_others_go_on() -> None:
    small = world(flesd(student="flat"), architectures=TWO)
    fed = federation(small, PLAN)
    fed.advance()
    ctx = fed.context("train", 2)
    of = {c.architectures[0]: c.id for c in small.server.clients}
    downs = {n: fed.method.download(fed.server, Order(c, n), ctx) for n, c in of.items()}
    assert downs["wide"].arrays == {}
    assert payload_bytes(downs["wide"]) == 0
    (name,) = fed.method.models(fed.server, ctx)
    assert name == "flat"
    start = fed.task.starts["flat"].params
    moved = {n for n, a in downs["flat"].arrays.items() if not torch.equal(a, start[n])}
    assert moved == set(fed.task.starts["flat"].body)  # the head is no part of features
    held = fed.engine.client(ctx, Order(of["flat"], "flat"), downs["flat"])  # type: ignore[attr-defined]
    assert all(torch.equal(held.net.params[n], a) for n, a in downs["flat"].arrays.items())


def test_the_server_can_have_an_architecture_that_no_client_has() -> None:
    three = TWO | {"own": {"model": "mlp", "hidden": [9], "share": 0.0}}
    sections: dict[str, Any] = {"architectures": three, "evaluate": {"probe": "knn"}}
    small = world(flesd(student="own"), **sections)
    assert {c.architectures[0] for c in small.server.clients} == {"wide", "flat"}
    trace(small, PLAN, rounds=1)
    with pytest.raises(InputError, match="no client has own, and nothing looks at it"):
        world(flesd(student="own"), architectures=three)


def test_bytes_are_off_by_half_a_step_of_127_at_most() -> None:
    fed = federation(world(flesd(), model={"name": "mlp", "hidden": [7]}), PLAN)
    ctx, order = fed.context("train", 1), Order(0, "mlp")
    net, down = fed.task.starts["mlp"], fed.method.download(fed.server, order, ctx)
    nothing = Count(torch.zeros(()))
    exact, _ = fed.method.upload(net, Nothing(), nothing, down, ctx)
    sent, _ = flesd(wire="int8").upload(net, Nothing(), nothing, down, ctx)
    assert isinstance(sent, Quantized)
    far = (sent.values * sent.scales.unsqueeze(1) - exact.values).abs()
    step = exact.values.abs().amax(1, keepdim=True) / 127
    assert float((far / step).max()) <= 0.5 + 1e-4
    assert int(sent.values.abs().max()) == 127


@pytest.mark.parametrize("public", [None, 0, 3])
def test_the_client_whose_rows_are_public_is_not_selected(public: int | None) -> None:
    fed = federation(world(flesd()), PLAN)
    ctx = fed.context("train", 1)
    ctx = replace(ctx, task=replace(ctx.task, public_client=public))
    orders = fed.method.select(fed.server, fed.side.clients, ctx)
    assert {order.client for order in orders} == set(range(len(SIZES))) - {public}


@pytest.mark.slow
def test_the_client_whose_rows_are_public_is_not_asked() -> None:
    public = {"data": {"public": {"client": 0}}}
    recipe = {
        "clients": {"num_clients": 4},
        "method": {
            "name": "flesd",
            "of": "features",
            "distillation": {"epochs": 1, "batch_size": 4},
        },
        "partition": {"name": "iid"},
        "model": {"name": "mlp"},
        "train": {"num_rounds": 1},
        "engine": ENGINE | {"plans": {"mlp": {"cohort_size": 4}}},
    }
    result = fedgist.run(recipe | public, data=blobs())
    assert result.rounds[0]["clients/asked"] == 3
    ordinary = fedgist.run(recipe | public | {"method": {"name": "fedavg"}}, data=blobs())
    assert ordinary.rounds[0]["clients/asked"] == 4


def test_other_public_rows_than_the_servers_are_named() -> None:
    fed = federation(world(flesd()), PLAN)
    ctx, n = fed.context("train", 1), len(public_rows())
    digest = torch.tensor(fed.task.public_digest)
    values = normalize(random.normal(random.key(0), (n, 5)), dim=1)
    for other in (digest, digest + 1):
        for message in (
            PublicRepresentations(values, other),
            Quantized((127 * values).to(torch.int8), torch.ones(n) / 127, other),
        ):
            objection = fed.method.objection(message, ctx)
            assert objection.startswith("" if other is digest else "it has other public data than")
            assert bool(objection) == (other is not digest)
    turned = world(flesd(), given={"public": public_rows().flip(0)})
    assert turned.server.task.public_digest != fed.task.public_digest


def test_a_site_with_other_public_rows_is_refused_and_the_others_go_on() -> None:
    # seen: one such site ended the run for all
    class Other(LoopbackWire):
        def exchange(self, envelopes: Any, deadline_s: Any, largest: int) -> Any:
            replies = super().exchange(envelopes, deadline_s, largest)
            return ((client, change(blob) if client == 2 else blob) for client, blob in replies)

    def change(blob: bytes) -> bytes:
        header, messages = unseal(blob, 1 << 30)
        if "upload" in messages:
            sent = messages["upload"]
            messages["upload"] = replace(sent, digest=sent.digest + 1)
        return seal(header, messages)

    small_world, wire = world(flesd()), Other({})
    engine = loopback(small_world, ALONE, wire)
    wire.clients = {client: site.handle for client, site in engine.sites.items()}
    fed = ServerRun(small_world.server, engine, start_server(small_world.server))
    line, _ = fed.advance()
    (refused,) = line["refused"]
    assert refused["client"] == 2
    assert "it has other public data than the server" in refused["reason"]
    assert line["clients/replied"] == line["clients/asked"] - 1
    assert torch.isfinite(torch.tensor(line["server/distillation"]))


def test_nothing_of_a_client_is_kept_after_a_round_or_when_it_is_forgotten() -> None:
    fed, ctx = after_train(world(flesd(), architectures=TWO))
    assert fed.server.ensemble.slots.any()
    assert not fed.method.forget(fed.server, 1, ctx).ensemble.slots.any()
    whole = federation(world(flesd(), architectures=TWO), PLAN)
    whole.advance()
    assert not whole.server.ensemble.slots.any()
    assert whole.server.ensemble.count() == 0


def test_a_distillation_that_diverges_is_an_error_that_names_the_setting() -> None:
    fed = federation(world(flesd(distillation=replace(FEW, lr=1e30)), architectures=TWO), PLAN)
    with pytest.raises(MethodError, match=r"round 1: the student came to .*distillation\.lr may"):
        fed.advance()


def test_a_round_that_nobody_answers_distills_nothing() -> None:
    small = world(flesd(), clients={"availability": 0.0})
    fed = federation(small, PLAN)
    before = {n: a.clone() for n, a in fed.server.student.arrays.items()}
    line = fed.advance()[0]
    assert "server/distillation" not in line
    assert all(torch.equal(a, before[n]) for n, a in fed.server.student.arrays.items())
    fed.side = replace(fed.side, online=lambda _: list(small.server.clients))
    assert "server/distillation" in fed.advance()[0]
    fed.side = replace(fed.side, online=lambda _: [])
    assert "server/distillation" not in fed.advance()[0]  # not that of the round before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"distillation": SimilarityDistillation(batch_size=160, own_anchor=False)},
            "leaves no anchors: there are 160",
        ),
        (
            {"distillation": SimilarityDistillation(batch_size=60, queue=59)},
            "queue = 59 must hold a batch of 60 rows",
        ),
        ({"student": "deep"}, "method.student = 'deep' is no architecture; there are: mlp"),
        ({"top": 0.5}, "method.top is read only with"),
        ({"sends": "similarities", "top": 0.006}, "0.006 of 160 rows is a row itself alone"),
        ({"sends": "similarities", "wire": "int8"}, "method.wire is read only with"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        world(flesd(**options))
    assert "\n" not in str(caught.value)


def test_without_public_rows_it_is_refused() -> None:
    with pytest.raises(InputError, match="flesd needs public data"):
        world(flesd(), given={"public": None})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stopping when")  # that is how a notebook is told
@pytest.mark.parametrize("how", [CTRL_C, pytest.param(KILL, marks=pytest.mark.environment)])
def test_stopped_within_a_distillation_it_goes_on_with_the_same_bits(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {
        "clients": {"num_clients": 4},
        "model": {"name": "mlp"},
        "train": {"num_rounds": 3},
        "engine": ENGINE | {"checkpoint_every": 1, "plans": {"mlp": {"cohort_size": 4}}},
    }
    method = flesd(distillation=replace(FEW, epochs=8))
    parts: dict[str, Any] = {"data": blobs(), "public": public_rows()}
    place = (2, "distill-0")
    saved = goes_on(method, how, place, recipe, parts, tmp_path, monkeypatch)
    if how == CTRL_C:  # of train, distill-0, distill-1
        assert saved.under_way is not None
        assert saved.under_way["done"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stopping when")
def test_an_encoder_with_batch_norm_goes_on_within_a_distillation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (36, 3, 8, 8), generator=draw, dtype=torch.uint8)
    y = torch.arange(36) % 3
    data = Dataset("images", x[:24], y[:24], x[24:], y[24:], 3, scale=255.0)
    recipe = {
        "data": {"augment": ["flip", "color_jitter"]},
        "objective": {"name": "simclr", "projection": 4},
        "partition": {"name": "iid"},
        "clients": {"num_clients": 3},
        "model": {"name": "conv4", "channels": [4, 4, 4, 4]},
        "train": {"num_rounds": 2, "batch_size": 4},
        "evaluate": {"probe": "knn"},
        "engine": ENGINE | {"checkpoint_every": 1, "plans": {"conv4": {"cohort_size": 3}}},
    }
    monkeypatch.setattr(rounds, "SAVE_AFTER_S", 0.0)  # after every stage
    method = FLESD(distillation=replace(FEW, batch_size=4, queue=8, epochs=5))
    parts: dict[str, Any] = {"data": data, "public": x[:24].numpy()}
    saved = goes_on(method, KILL, (2, "distill-1"), recipe, parts, tmp_path, monkeypatch)
    assert saved.under_way is not None
    assert saved.under_way["done"] == 2


def test_representations_are_those_of_the_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small = world(flesd())
    net = small.server.task.starts["mlp"]
    whole = flesd_file.representations(net, small.server.task, "features")
    monkeypatch.setattr(flesd_file, "ENCODED_AT_ONCE", 7)
    pieces = flesd_file.representations(net, small.server.task, "features")
    assert torch.allclose(whole, pieces, atol=1e-6)
    everything = seen(torch.arange(160))
    assert torch.allclose(whole, normalize(net.features(everything), dim=1), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_imagenet", "imagenet100"])
def test_recipes_of_image_folders_run_on_miniatures(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for part, count in (("train", 18), ("val", 4)):
        for label, color in (("n01", (200, 40, 40)), ("n02", (40, 40, 200))):
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            for i in range(count):
                noise = draw.integers(0, 50, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(noise + np.array(color, np.uint8)).save(folder / f"{i}.JPEG")
    small = {
        "data.path": f'"{tmp_path}"',
        "data.image_size": 16,
        "partition.name": "iid",
        "clients.num_clients": 3,
        "model.name": "conv4",
        "model.channels": [4, 4, 4, 4],
        "method.distillation.epochs": 2,
        "method.distillation.batch_size": 4,
        "train.num_rounds": 1,
        "train.local_epochs": 1,
        "train.batch_size": 8,
        "engine.workers": 1,
        "engine.server_threads": 1,
    }
    recipe = read(find_recipe(f"flesd/{name}"), [f"{k}={v}" for k, v in small.items()])
    line = fedgist.run(recipe).rounds[-1]
    assert line["clients/asked"] == 2
    assert line["server/distillation"] > 0
    assert line["eval/global/probe"] == line["eval/client/probe_mean"]


def test_supervised_and_self_supervised_training_are_variants_of_one_recipe() -> None:
    recipes = [
        read(find_recipe("flesd/robustness"), [f"method.name=local@{name}"])
        for name in ("simclr", "supervised")
    ]
    assert [recipe.objective.name for recipe in recipes] == ["simclr", "classes"]
    assert [recipe.evaluate.probe for recipe in recipes] == ["logistic", "logistic"]
    assert [recipe.evaluate.probes_beside for recipe in recipes] == [("sgd",), ("sgd",)]
