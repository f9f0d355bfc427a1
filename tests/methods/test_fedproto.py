"""FedProto against rounds written with plain modules and loops over rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.method import Batch, Nothing
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import split_head
from fedgist.core.privacy import Privacy
from fedgist.core.replies import Subtotal, gather
from fedgist.data.dataset import Dataset
from fedgist.engines.plans.plan import Plan
from fedgist.methods.common.prototypes import Prototypes
from fedgist.methods.fedproto import ClassTotals, FedProto, OwnClasses
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import SIZES, federation, law_world, trace, world, world_of
from fedgist.world.world import World
from small_tasks import recipe_of

ONE_STEP = {"local_epochs": 1, "batch_size": max(SIZES), "lr": 0.2}
Aggregate = Literal["weighted", "plain"]


def clients_of(small_world: World) -> list[tuple[nn.Sequential, nn.Linear, Tensor, Tensor]]:
    """Each client's body and head at the common start, its inputs, and its labels."""
    start = small_world.server.task.starts["mlp"].params
    x, y = (small_world.data.x - 0.5) / 2.0, small_world.data.y
    out = []
    for client in range(len(SIZES)):
        body, head = nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3)
        body.load_state_dict({f"0.{n}": start[f"1.{n}"].clone() for n in ("weight", "bias")})
        head.load_state_dict({n: start[f"4.{n}"].clone() for n in ("weight", "bias")})
        rows = small_world.population.train[client]
        out.append((body, head, x[rows], y[rows]))
    return out


def plain_rounds(
    small_world: World, rounds: int, lam: float, aggregate: Aggregate
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """FedProto with full-batch gradient steps; return the prototypes and the clients' weights."""
    clients = clients_of(small_world)
    prototypes: dict[int, Tensor] = {}
    for _ in range(rounds):
        sent: dict[int, list[tuple[int, Tensor]]] = {}
        for body, head, x, y in clients:
            z = body(x)
            loss = F.cross_entropy(head(z), y)
            for phi, k in zip(z, y.tolist(), strict=True):
                if k in prototypes:
                    loss = loss + lam * F.mse_loss(phi, prototypes[k]) / len(y)
            params = [*body.parameters(), *head.parameters()]
            grads = torch.autograd.grad(loss, params)
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p.sub_(0.2 * g)
                z = body(x)
            for k in set(y.tolist()):
                own = z[y == k]
                sent.setdefault(k, []).append((len(own), own.mean(0).detach()))
        for k, parts in sent.items():
            weights = [n if aggregate == "weighted" else 1 for n, _ in parts]
            total = sum(w * mean for w, (_, mean) in zip(weights, parts, strict=True))
            prototypes[k] = torch.as_tensor(total) / sum(weights)
    return prototypes, [next(body.parameters()).detach() for body, *_ in clients]


@pytest.mark.parametrize("aggregate", ["weighted", "plain"])
def test_rounds_are_those_of_plain_modules(aggregate: Aggregate) -> None:
    # rejects a mean over batches, prototypes of the bodies before training, and the other average
    options = {"lam": 2.0, "aggregate": aggregate}
    small_world = world("fedproto", options=options, train=ONE_STEP)
    state = trace(small_world, Plan(2), rounds=3).state
    prototypes, weights = plain_rounds(small_world, 3, 2.0, aggregate)
    assert state["server/exists"].tolist() == [1.0, 1.0, 1.0]
    for k, mean in prototypes.items():
        assert torch.allclose(state["server/mean"][k], mean, atol=1e-5)
    for client, weight in enumerate(weights):
        assert torch.allclose(state["clients/mlp/net/1.weight"][client], weight, atol=1e-5)
    other = plain_rounds(small_world, 3, 2.0, "plain" if aggregate == "weighted" else "weighted")
    assert not all(
        torch.allclose(state["server/mean"][k], other[0][k], atol=1e-3) for k in range(3)
    )
    without = plain_rounds(small_world, 3, 0.0, aggregate)[1][0]
    assert not torch.allclose(state["clients/mlp/net/1.weight"][0], without, atol=1e-3)


def test_classes_that_are_not_there_cost_one_bit() -> None:
    # rejects 4 bytes for each absent count, and a first download of zeros
    small_world = world("fedproto")
    fed = federation(small_world, Plan(2))
    first, second = fed.advance()[0], fed.advance()[0]
    rows = small_world.population.train
    classes = [len(set(small_world.data.y[rows[c]].tolist())) for c in range(len(SIZES))]
    assert sum(classes) < 3 * len(SIZES)
    assert first["comm/up_bytes"] == sum(1 + n * (4 + 5 * 4) for n in classes)
    assert first["comm/down_bytes"] == 1 * len(SIZES)
    assert second["comm/down_bytes"] == (1 + 3 * 5 * 4) * len(SIZES)


def test_the_server_keeps_the_prototype_of_a_class_that_nobody_sent() -> None:
    method = FedProto()
    before = Prototypes(torch.ones(3, 2), torch.tensor([1.0, 1.0, 0.0]))
    totals = ClassTotals(torch.tensor([[6.0, 8.0], [0, 0], [0, 0]]), torch.tensor([2.0, 0.0, 0.0]))
    replies = gather([Subtotal("mlp", (0,), 1, "train", totals)], ())
    ctx = federation(world("fedproto")).context("train", 1)
    after = method.server_update(before, replies, ctx)
    assert after.mean.tolist() == [[3.0, 4.0], [1.0, 1.0], [1.0, 1.0]]
    assert after.exists.tolist() == [1.0, 1.0, 0.0]


def prediction(method: FedProto, down: Prototypes, x: Tensor) -> tuple[Tensor, Tensor]:
    """The method's logits, and the features of the same rows."""
    fed = federation(world("fedproto"))
    net, ctx = fed.task.starts["mlp"], fed.context("evaluate", 1)
    return method.predict(net, Nothing(), down, x, ctx), net.features(x)


def test_the_nearest_prototype_decides_among_those_that_exist() -> None:
    # rejects distances to the zeros of a class without a prototype
    x = random.normal(random.key(3), (40, 6))
    mean = 0.3 * random.normal(random.key(4), (3, 5)).abs()
    logits, z = prediction(FedProto(), Prototypes(mean, torch.ones(3)), x)
    distances = ((z.numpy()[:, None] - mean.numpy()) ** 2).sum(2)
    assert logits.argmax(1).tolist() == distances.argmin(1).tolist()
    np.testing.assert_allclose(logits.numpy(), -distances, rtol=1e-5, atol=1e-6)
    assert len(set(logits.argmax(1).tolist())) == 3
    two = Prototypes(mean * torch.tensor([[1.0], [0.0], [1.0]]), torch.tensor([1.0, 0.0, 1.0]))
    logits, z = prediction(FedProto(), two, x)
    nearest = np.array([0, 2])[((z.numpy()[:, None] - mean.numpy()[[0, 2]]) ** 2).sum(2).argmin(1)]
    assert logits.argmax(1).tolist() == nearest.tolist()
    assert torch.isfinite(logits).all()


def test_the_nearest_is_sought_among_the_clients_own_classes_when_asked() -> None:
    # rejects all classes, and the classes that others have
    x = random.normal(random.key(3), (40, 6))
    fed = federation(world("fedproto"))
    net, ctx = fed.task.starts["mlp"], fed.context("evaluate", 1)
    mean = 0.3 * random.normal(random.key(4), (3, 5)).abs()
    down, own = Prototypes(mean, torch.ones(3)), OwnClasses(torch.tensor([1.0, 0.0, 1.0]))
    logits = FedProto(inference_classes="own").predict(net, own, down, x, ctx)
    distances = ((net.features(x).numpy()[:, None] - mean.numpy()[[0, 2]]) ** 2).sum(2)
    assert logits.argmax(1).tolist() == np.array([0, 2])[distances.argmin(1)].tolist()
    among_all = FedProto().predict(net, Nothing(), down, x, ctx)
    assert 1 in among_all.argmax(1)


def test_a_client_learns_its_own_classes_from_its_upload() -> None:
    small_world = world("fedproto", options={"inference_classes": "own"})
    state = trace(small_world, Plan(2), rounds=1).state
    rows, y = small_world.population.train, small_world.data.y
    for client in range(len(SIZES)):
        present = [float(k in y[rows[client]]) for k in range(3)]
        assert state["clients/mlp/own/present"][client].tolist() == present


def dropped_out() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


def test_a_row_whose_features_are_the_prototype_is_not_pulled_whatever_is_dropped_out() -> None:
    # rejects the distance of dropped-out features, which is 0 nowhere
    net = split_head(dropped_out, (6,), 3).start(0)
    x = random.normal(random.key(3), (1, 6)).expand(30, 6)
    batch = Batch(x, torch.zeros(30, dtype=torch.long), torch.ones(30, dtype=torch.bool))
    down = Prototypes(net.features(x[:3]), torch.ones(3))
    ctx = federation(world("fedproto")).context("train", 1)

    def loss(lam: float, seed: int) -> float:
        run = Pass(batch.mask, random.key(seed))
        return float(FedProto(lam=lam).loss(replace(net, run=run), batch, Nothing(), down, ctx))

    assert loss(5.0, 1) == loss(0.0, 1)
    assert loss(0.0, 1) != loss(0.0, 2)  # the head is trained under dropout


def test_a_pixel_without_a_label_is_pulled_to_no_prototype() -> None:
    # seen: it was pulled to that of class 0
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.integers(0, 256, (4, 8, 8), dtype=np.uint8))
    y = torch.from_numpy(draw.integers(-1, 2, (4, 8, 8)))
    known = y.clamp(min=0).short()
    y[0] = -1
    data = Dataset("pixels", x[:, None], known, x[:, None], known, 2, target="pixels")
    raw = recipe_of("segmentation", method={"name": "fedproto"}, data={"missing_labels": "mask"})
    raw |= {"clients": {"num_clients": 2}, "partition": {"name": "iid"}}
    ctx = federation(world_of(make(raw), Overrides(data=data))).context("train", 1)
    net = next(iter(ctx.task.starts.values()))
    batch = Batch(x[:, None].float(), y, torch.ones(4, dtype=torch.bool))
    z = net.features(batch.x)
    down = Prototypes(random.normal(random.key(1), (2, z.shape[-1])), torch.ones(2))
    pulls = [float(FedProto(lam=lam).loss(net, batch, Nothing(), down, ctx)) for lam in (0.0, 1.0)]
    far = [
        (z[i][y[i] >= 0] - down.mean[y[i][y[i] >= 0]]).square().mean(-1).mean() for i in (1, 2, 3)
    ]
    assert pulls[1] - pulls[0] == pytest.approx(float(sum(far)) / 4, rel=1e-4)


def test_before_there_are_prototypes_and_when_asked_the_head_predicts() -> None:
    x = random.normal(random.key(3), (9, 6))
    none = Prototypes(torch.zeros(3, 5), torch.zeros(3))
    some = Prototypes(torch.ones(3, 5), torch.ones(3))
    head = prediction(FedProto(inference="logits"), some, x)[0]
    assert torch.equal(prediction(FedProto(), none, x)[0], head)
    assert not torch.equal(prediction(FedProto(), some, x)[0], head)


def test_lambda_0_by_logits_is_local_training() -> None:
    local = trace(world("local"), rounds=2)
    alone = trace(world("fedproto", options={"lam": 0.0, "inference": "logits"}), rounds=2)
    names = [name for name in local.state if name.startswith("clients/")]
    assert names
    assert all(torch.allclose(local.state[n], alone.state[n], atol=1e-6) for n in names)


def test_bodies_need_one_width_and_heads_need_no_bias() -> None:
    def bare() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3, bias=False))

    task = law_world(FedProto()).server.task
    flat = task.architectures["flat"]
    FedProto().check(replace(task, architectures={"flat": flat, "bare": split_head(bare, (6,), 3)}))
    wide = split_head(lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)), (6,), 3)
    with pytest.raises(ValueError, match="fedproto shares class means, so all bodies need one fea"):
        FedProto().check(replace(task, architectures={"flat": flat, "wide": wide}))


@pytest.mark.parametrize(("where", "bound"), [("central", 6.0), ("local", 12.0)])
def test_under_noise_a_class_that_nobody_sent_keeps_its_prototype(
    where: Literal["central", "local"], bound: float
) -> None:
    # rejects any positive count: a prototype would become noise
    method = FedProto()
    ctx = federation(world("fedproto")).context("train", 1)
    noisy = Privacy("record", where, 1.0, 3.0)  # four clients: 2 * 3, or 2 * 3 * sqrt(4)
    ctx = replace(ctx, task=replace(ctx.task, privacy=noisy))
    before = Prototypes(torch.ones(3, 5), torch.ones(3))
    counts = torch.tensor([bound - 0.1, bound + 0.1, -bound])
    sums = ClassTotals(7 * torch.ones(3, 5), counts)
    replies = gather([Subtotal("mlp", (0, 1, 2, 4), 1, "train", sums)], ())
    after = method.server_update(before, replies, ctx)
    torch.testing.assert_close(after.mean[:, 0], torch.tensor([1.0, 7 / (bound + 0.1), 1.0]))
