"""SimCLR against loops in NumPy: its loss, the two views, batch norm, and the projection head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedgist
from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.nets.layers import Pass, current
from fedgist.core.nets.net import Net, split_head
from fedgist.core.objectives.simclr import SimCLR
from fedgist.data.dataset import Dataset
from fedgist.data.examples import examples
from fedgist.errors import InputError
from fedgist.methods import METHODS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.runs.round import Observer
from fedgist.testing.small_worlds import world_of
from fedgist.world.world import World
from interrupted import gets_more_rounds
from method_objects import TRAINS

Negatives = Literal["other_view", "all_views"]
BOTH: tuple[Negatives, ...] = ("other_view", "all_views")
SIDE = 8


def embeddings(rows: int, seed: int = 0) -> Tensor:
    return random.normal(random.key(seed, "embeddings"), (2 * rows, 5))


def batch_of(present: int, rows: int) -> Batch:
    mask = (torch.arange(rows) < present).repeat(2)
    return Batch(torch.zeros(2 * rows, 1), torch.zeros(2 * rows, dtype=torch.int64), mask)


def by_hand(z: Tensor, rows: int, present: int, tau: float, negatives: Negatives) -> float:
    """Return the loss of the views of the rows present, one pair at a time."""
    unit = z.double().numpy() / np.linalg.norm(z.double().numpy(), axis=1, keepdims=True)
    views = {(i, v): unit[i + v * rows] for i in range(present) for v in (0, 1)}

    def one(i: int, v: int) -> float:
        others = {
            (j, w): np.exp(views[i, v] @ other / tau)
            for (j, w), other in views.items()
            if (j, w) != (i, v) and (negatives == "all_views" or w != v)
        }
        return float(-np.log(others[i, 1 - v] / sum(others.values())))

    directions = (0, 1) if negatives == "all_views" else (0,)
    return float(np.mean([one(i, v) for i in range(present) for v in directions]))


@pytest.mark.parametrize("negatives", BOTH)
@pytest.mark.parametrize(("rows", "present"), [(4, 4), (6, 4), (3, 2), (2, 1), (1, 1)])
def test_the_loss_is_that_of_every_pair(negatives: Negatives, rows: int, present: int) -> None:
    objective = SimCLR(3, negatives=negatives, temperature=0.3)
    z = embeddings(rows)
    found = float(objective.loss(z, batch_of(present, rows)))
    assert found == pytest.approx(by_hand(z, rows, present, 0.3, negatives), abs=1e-5)
    if present == 1:  # nothing to be told from
        assert found == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("negatives", BOTH)
def test_rows_that_are_absent_change_neither_the_loss_nor_its_gradient(
    negatives: Negatives,
) -> None:
    objective = SimCLR(3, negatives=negatives)
    z, batch = embeddings(5), batch_of(3, 5)
    other = torch.where(batch.mask.unsqueeze(1), z, 100.0)
    results = []
    for values in (z, other):
        learnt = values.clone().requires_grad_()
        loss = objective.loss(learnt, batch)
        (gradient,) = torch.autograd.grad(loss, learnt)
        assert torch.isfinite(gradient).all()
        assert not gradient[~batch.mask].any()
        results += [(float(loss.detach()), gradient)]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    stacked = torch.func.vmap(objective.loss)(
        z.expand(2, -1, -1),
        Batch(batch.x.expand(2, -1, -1), batch.y.expand(2, -1), batch.mask.expand(2, -1)),
    )
    assert stacked.tolist() == pytest.approx([results[0][0]] * 2)


def small_net(*, projects: bool = True) -> Net:
    def build() -> nn.Module:
        body = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(4, 6))

    return split_head(build, (3, SIDE, SIDE), 6, projects=projects).start(0)


def test_batch_norm_can_take_each_view_by_itself() -> None:
    net, x = small_net(), random.normal(random.key(1), (6, 3, SIDE, SIDE))
    mask, key = torch.ones(6, dtype=torch.bool), random.key(2)
    together, each = Pass(mask, key), Pass(mask, key, parts=2)
    a, b = (replace(net, run=run).features(x) for run in (together, each))
    assert not torch.allclose(a, b)
    halves = [Pass(mask[:3], key) for _ in range(2)]
    alone = [
        replace(net, run=run).features(part) for run, part in zip(halves, x.chunk(2), strict=True)
    ]
    assert torch.allclose(b, torch.cat(alone))
    name = "1.running_mean"  # of one view, and then of the other
    first = halves[0].updates[name]
    after = Pass(mask[:3], key)
    replace(net.with_arrays({name: first}), run=after).features(x[3:])
    assert torch.allclose(each.updates[name], after.updates[name])


def test_batch_norm_of_a_whole_batch_is_torchs_own() -> None:
    net, x = small_net(), random.normal(random.key(1), (6, 3, SIDE, SIDE))
    mask, key = torch.ones(6, dtype=torch.bool), random.key(2)
    runs = Pass(mask, key), Pass(mask, key, whole=True)
    weights = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    found = []
    for run in runs:
        out = replace(net.with_arrays(weights), run=run)(x)
        body = [weights[name] for name in net.body]
        gradients = torch.autograd.grad(out.square().sum(), body)
        found.append((out, *gradients, *(run.updates[name] for name in sorted(run.updates))))
    assert sorted(runs[0].updates) == sorted(runs[1].updates) != []
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)
    assert not net.buffers["1.running_mean"].any()  # it changes nothing in place


def test_a_projection_is_two_layers_which_are_the_head() -> None:
    net, x = small_net(), random.normal(random.key(1), (2, 3, SIDE, SIDE))
    assert set(net.part("head")) == {
        f"5.{n}" for n in ("weight", "bias", "hidden.weight", "hidden.bias")
    }
    assert set(net.body) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 6))
    head = net.part("head")
    names = ("5.hidden.weight", "5.hidden.bias", "5.weight", "5.bias")
    for parameter, name in zip(plain.parameters(), names, strict=True):
        parameter.data = head[name]
    assert torch.allclose(net(x), plain(net.features(x)), atol=1e-6)
    assert torch.equal(net.features(x), small_net(projects=False).features(x))
    assert torch.equal(net.params["5.hidden.weight"], small_net().params["5.hidden.weight"])


def test_dropout_of_a_projecting_net_comes_before_the_hidden_layer() -> None:
    # rejects dropout between the projection's layers, and dropped features
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4))

    net = split_head(build, (6,), 4, projects=True).start(0)
    run = Pass(torch.ones(3, dtype=torch.bool), random.key(2))
    z = torch.ones(3, 5)
    found = replace(net, run=run).logits(z)
    assert net.arch.dropout is not None
    token = current.set(Pass(run.mask, random.key(2)))
    try:
        dropped = net.arch.dropout(z)
    finally:
        current.reset(token)
    assert dropped.unique().tolist() == [0.0, 2.0]
    head = net.part("head")
    hidden = dropped @ head["3.hidden.weight"].T + head["3.hidden.bias"]
    torch.testing.assert_close(found, hidden.relu() @ head["3.weight"].T + head["3.bias"])


def pictures(count: int = 24, test: int = 9) -> Dataset:
    """Return images of three classes, which differ in colour."""
    y, y_test = torch.arange(count) % 3, torch.arange(test) % 3

    def images(labels: Tensor, seed: int) -> Tensor:
        noise = random.integers(random.key(seed), (len(labels), 3, SIDE, SIDE), 100)
        own = 100 * nn.functional.one_hot(labels, 3).view(-1, 3, 1, 1)
        return (noise + own).to(torch.uint8)

    return Dataset("pictures", images(y, 0), y, images(y_test, 1), y_test, 3, scale=255.0)


AUGMENT = ["resized_crop", "flip", "color_jitter", "grayscale"]


def recipe(**sections: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data": {"augment": AUGMENT},
        "objective": {"name": "simclr", "projection": 4},
        "partition": {"name": "iid"},
        "clients": {"num_clients": 3},
        "model": {"name": "conv4", "channels": [4, 4, 4, 4]},
        "method": {"name": "fedavg"},
        "train": {"num_rounds": 2, "batch_size": 4, "lr": 0.01},
        "evaluate": {"probe": "knn"},
        "engine": {"workers": 1, "server_threads": 1, "plans": {"conv4": {"cohort_size": 3}}},
    }
    return {name: found.get(name, {}) | table for name, table in (found | sections).items()}


def views_of(**sections: Any) -> World:
    return world_of(make(recipe(**sections)), Overrides(data=pictures()))


def test_a_batch_holds_two_views_of_each_row_drawn_by_the_clients_own_key() -> None:
    on_train, _ = examples(pictures(), ("crop", "flip"))
    on_train = replace(on_train, views=2)
    rows = torch.tensor([[0, 1, 2], [5, 6, -1]])
    keys = random.fold(random.key(0), torch.arange(2))
    batch = on_train.batch(rows, keys)
    assert batch.x.shape == (2, 6, 3, SIDE, SIDE)
    assert batch.mask.tolist() == [[True] * 6, [True, True, False] * 2]
    assert torch.equal(batch.y[:, :3], batch.y[:, 3:])
    assert not torch.equal(batch.x[:, :3], batch.x[:, 3:])
    alone = on_train.batch(rows[1:], keys[1:])
    assert torch.equal(alone.x[0], batch.x[1])
    for view in range(2):
        single = replace(on_train, views=1).batch(rows, random.fold(keys, "view", view))
        assert torch.equal(batch.x[:, 3 * view : 3 * view + 3], single.x)
    assert on_train.batch(rows).x.shape == (2, 3, 3, SIDE, SIDE)  # one, where nothing is learnt


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_serves_encoders_or_refuses_them(method: str) -> None:
    asked = recipe(method={"name": method}, data={"public": {"rows": 8}})
    asked["train"] |= TRAINS.get(method, {})
    if method == "flesd":
        asked["method"]["distillation"] = {"epochs": 2, "batch_size": 4}
    if "views" not in METHODS[method].targets:
        with pytest.raises(InputError, match="needs one class for each row"):
            world_of(make(asked), Overrides(data=pictures()))
        return
    line = fedgist.run(asked, data=pictures()).rounds[-1]
    assert 0.0 <= line["eval/client/probe_min"] <= line["eval/client/probe_mean"] <= 1.0
    assert line["train/loss"] > 0


def test_codistillation_has_no_predictions_to_learn_from() -> None:
    pools = {n: {"model": "conv4", "channels": [4, 4, 4, c]} for n, c in (("a", 4), ("b", 5))}
    asked = recipe(method={"name": "merged_codist"}, clients={"num_clients": 3, "pools": pools})
    asked["data"]["public"] = {"rows": 8}
    del asked["model"], asked["engine"]
    with pytest.raises(InputError, match="objective simclr has views of rows without labels"):
        world_of(make(asked), Overrides(data=pictures()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_norm", "sizes"),
    [("together", (8, 8, 8)), ("each", (8, 8, 8)), ("together", (13, 7, 4))],
)
def test_no_stacking_changes_results(batch_norm: str, sizes: tuple[int, ...]) -> None:
    # each client's own statistics of batch norm; where sizes differ, batches are not whole
    objective = {"name": "simclr", "projection": 4, "batch_norm": batch_norm}
    given: dict[str, Any] = {
        "data": pictures(),
        "clients": torch.split(torch.arange(24), list(sizes)),
    }
    asked = recipe(objective=objective, method={"name": "local"})
    del asked["partition"]
    asked["train"] |= {"optimizer": "sgd", "lr": 0.1}  # Adam makes steps of rounding errors
    plans = ({"cohort_size": 1, "stack": False}, {"cohort_size": 3})
    runs = [
        fedgist.run(asked | {"engine": {"workers": 1, "plans": {"conv4": plan}}}, **given)
        for plan in plans
    ]
    first, second = ([line["train/loss"] for line in run.rounds] for run in runs)
    assert first == pytest.approx(second, rel=1e-4)
    nets = [[run.model(i).state_dict() for i in range(3)] for run in runs]
    for a, b in zip(*nets, strict=True):
        for name, array in a.items():
            assert torch.allclose(array, b[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(tmp_path: Any) -> None:
    gets_more_rounds(recipe(), tmp_path, data=pictures())


@pytest.mark.slow
def test_a_client_of_one_class_learns_an_encoder() -> None:
    data, asked = pictures(), recipe()
    del asked["partition"]
    clients = [torch.arange(24)[data.y == label] for label in range(3)]
    result = fedgist.run(asked, data=data, clients=clients)
    assert all(np.isfinite(line["train/loss"]) for line in result.rounds)
    assert len([line for line in result.clients if "probe" in line]) == 2 * 3


@pytest.mark.slow
def test_a_trained_encoder_gives_features() -> None:
    result = fedgist.run(recipe(), data=pictures())
    assert result.model(0)(pictures().x_test).shape == (9, 4)


def test_clients_with_fewer_than_two_rows_are_left_out_and_named() -> None:
    clients = [torch.arange(12), torch.tensor([12]), torch.arange(13, 24)]
    seen: list[str] = []

    class Watcher(Observer):
        def note(self, text: str) -> None:
            seen.append(text)

    asked = recipe()
    del asked["partition"]
    result = fedgist.run(asked, data=pictures(), clients=clients, observer=Watcher())
    assert result.rounds[-1]["clients/asked"] == 2
    assert {line["client"] for line in result.clients if "probe" in line} == {0, 2}
    assert "client 1 has too few rows for a local step: it is left out" in seen


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"objective": {"name": "simclr", "temperature": 0.0}},
            "objective.temperature = 0.0: must be",
        ),
        ({"objective": {"name": "simclr", "projection": 0}}, "objective.projection = 0: must be"),
        ({"objective": {"name": "simclr", "smooth": 1}}, "objective.smooth: unknown key of simclr"),
        ({"objective": {"name": "classes", "projection": 8}}, "projection: unknown key of classes"),
        ({"objective": {"name": "simclr", "metrics": ["accuracy"]}}, "simclr has no metric"),
        ({"train": {"class_weights": "balanced"}}, "class_weights = 'balanced' has no use"),
        ({"train": {"label_smoothing": 0.1}}, "train.label_smoothing has no use"),
        ({"train": {"batch_size": 1}}, "train.batch_size = 1 has no use"),
        ({"data": {"validation": 0.2}}, "data.validation has no use"),
        ({"evaluate": {"probe": "none"}}, "evaluate.probe = 'none': nothing else judges"),
        ({"data": {"augment": ["color_jitter"]}, "model": {"name": "mlp"}}, "three channels"),
    ],
)
def test_what_encoders_have_no_use_for_is_refused(sections: dict[str, Any], says: str) -> None:
    data = pictures()
    if "three" in says:
        data = replace(data, x=data.x[:, :1], x_test=data.x_test[:, :1])
    asked = recipe(**sections)
    if sections.get("model", {}).get("name") == "mlp":
        asked["model"] = {"name": "mlp"}
    if sections.get("objective", {}).get("name") == "classes":
        asked["evaluate"] = {}
    with pytest.raises(InputError, match=says):
        world_of(make(asked), Overrides(data=data))


@pytest.mark.slow
def test_probes_are_columns_of_any_run() -> None:
    asked = recipe(objective={"name": "classes"}, evaluate={"probe": "logistic"})
    asked["objective"] = {"name": "classes"}
    asked["method"] = {"name": "local"}
    result = fedgist.run(asked, data=pictures())
    line = result.rounds[-1]
    assert {"eval/client/accuracy_mean", "eval/client/probe_mean"} <= set(line)
    of_clients = [x for x in result.clients if x["round"] == 2 and x["split"] == "client"]
    assert len(of_clients) == 3
    assert all({"accuracy", "probe"} <= set(x) for x in of_clients)
    assert line["eval/client/probe_mean"] == pytest.approx(sum(x["probe"] for x in of_clients) / 3)
    assert line["eval/client/probe_min"] == pytest.approx(min(x["probe"] for x in of_clients))
