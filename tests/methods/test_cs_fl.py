"""CS-FL against plain modules and NumPy, where its measurements lose nothing, and its bytes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.method import Order
from fedgist.engines.plans.plan import Plan
from fedgist.errors import MethodError, RecipeError
from fedgist.methods.cs_fl import (
    CSFL,
    Measurement,
    flat_vector,
    hard_thresholding,
    stackable_thresholding,
    unflat,
)
from fedgist.runs.round import ServerRun
from fedgist.testing import check_laws
from fedgist.testing.small_worlds import SIZES, federation, trace, world
from fedgist.world.world import World

Floats = npt.NDArray[np.float64]
NUMBERS = 128  # of the model with these layers: as many measurements are an orthogonal transform
MODEL = {"hidden": [5, 10]}
ONE_STEP = {"local_epochs": 1, "batch_size": max(SIZES), "lr": 0.3}


def cs_world(rounds: int = 3, reconstruct: str = "clients", **options: float) -> World:
    train = {**ONE_STEP, "num_rounds": rounds}
    options_of_method = {"reconstruct": reconstruct, **options}
    return world("cs_fl", options=options_of_method, train=train, model=MODEL)


def module() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3)
    )


def names(plain: nn.Module) -> list[str]:
    """The parameters' names in the order of the vector; those of the world's model are alike."""
    return sorted(name for name, _ in plain.named_parameters())


def vector(plain: nn.Module) -> Floats:
    params = dict(plain.named_parameters())
    return np.concatenate([params[n].detach().double().numpy().ravel() for n in names(plain)])


def update(small_world: World, weights: Floats, client: int) -> Floats:
    """What one step of gradient descent on all rows of a client adds to the weights."""
    plain, place = module(), 0
    params = dict(plain.named_parameters())
    for name in names(plain):
        size = params[name].numel()
        piece = torch.from_numpy(weights[place : place + size]).float()
        params[name].data.copy_(piece.view(params[name].shape))
        place += size
    rows = small_world.population.train[client]
    x, y = (small_world.data.x[rows] - 0.5) / 2.0, small_world.data.y[rows]
    torch.autograd.backward(F.cross_entropy(plain(x), y))
    grads = {name: p.grad for name, p in plain.named_parameters()}
    return np.concatenate(
        [-0.3 * torch.as_tensor(grads[n]).double().numpy().ravel() for n in names(plain)]
    )


def largest(x: Floats, count: int) -> Floats:
    out = np.zeros_like(x)
    places = np.argsort(-abs(x))[:count]
    out[places] = x[places]
    return out


def start(small_world: World) -> Floats:
    """The common start as a vector; the layers are numbered alike, so the order is the same."""
    net = small_world.server.task.starts["mlp"]
    return np.asarray(flat_vector(net.params).double().numpy())


def server_vector(state: dict[str, Tensor]) -> Floats:
    prefix = "server/averages/weights/mlp/arrays/"
    arrays = {n.removeprefix(prefix): a for n, a in state.items() if n.startswith(prefix)}
    return np.asarray(flat_vector(arrays).double().numpy())


@pytest.mark.parametrize("reconstruct", ["clients", "mean"])
def test_with_all_measurements_of_all_numbers_it_is_fedavg(reconstruct: str) -> None:
    small_world = cs_world(reconstruct=reconstruct, sparsity=1.0, dimension_reduction=1.0)
    assert len(start(small_world)) == NUMBERS
    averaged = trace(world("fedavg", train=ONE_STEP, model=MODEL), Plan(2)).state
    ours = server_vector(trace(small_world, Plan(2)).state)
    expected = flat_vector({n.rpartition("/")[2]: a for n, a in averaged.items() if "server/" in n})
    np.testing.assert_allclose(ours, expected.double().numpy(), atol=1e-5)


@pytest.mark.parametrize("reconstruct", ["clients", "mean"])
def test_a_client_sends_its_largest_numbers_and_keeps_the_others_for_later(
    reconstruct: str,
) -> None:
    # rejects dropping the residual, and an average without the clients' rows
    small_world = cs_world(reconstruct=reconstruct, sparsity=0.1, dimension_reduction=1.0)
    count, sizes = math.ceil(0.1 * NUMBERS), np.array(SIZES) / sum(SIZES)
    w, rest = start(small_world), np.zeros((len(SIZES), NUMBERS))
    without = w.copy()
    for _ in range(3):
        updates = np.stack([update(small_world, w, c) for c in range(len(SIZES))])
        sent = np.stack([largest(u, count) for u in updates + rest])
        rest = updates + rest - sent
        forgetful = np.stack(
            [largest(update(small_world, without, c), count) for c in range(len(SIZES))]
        )
        mean = sizes @ sent
        w = w + (mean if reconstruct == "clients" else largest(mean, count))
        mean = sizes @ forgetful
        without = without + (mean if reconstruct == "clients" else largest(mean, count))
    state = trace(small_world, Plan(2)).state
    np.testing.assert_allclose(server_vector(state), w, atol=1e-5)
    np.testing.assert_allclose(state["clients/mlp/own/rest"].numpy(), rest, atol=1e-5)
    assert abs(without - w).max() > 1e-2
    forgetting = cs_world(
        reconstruct=reconstruct, sparsity=0.1, dimension_reduction=1.0, error_feedback=False
    )
    state = trace(forgetting, Plan(2)).state
    np.testing.assert_allclose(server_vector(state), without, atol=1e-5)
    assert not state["clients/mlp/own/rest"].any()


def reconstructed(matrix: Floats, votes: Floats, count: int, steps: int) -> Floats:
    """Binary iterative hard thresholding with the matrix itself."""
    root = np.sqrt(len(votes))
    tried = [largest(matrix.T @ votes, count) / root]
    for _ in range(steps):
        wrong = np.where(votes == 0, 0.0, votes - np.sign(matrix @ tried[-1]))
        tried.append(largest(tried[-1] + matrix.T @ wrong / root, count))
    mistakes = [(np.sign(matrix @ x) != votes)[votes != 0].sum() for x in tried]
    x = tried[int(np.argmin(mistakes))]
    return np.asarray(x * np.sqrt(count) / np.sqrt((x**2).sum()))


def test_a_round_of_signs_moves_by_what_the_majority_of_them_tells() -> None:
    small_world = cs_world(
        sparsity=0.05, dimension_reduction=0.9, first_phase=0.0, reconstruction_steps=3
    )
    fed = federation(small_world, Plan(2))
    measure = Measurement.draw(fed.server.key, NUMBERS, math.ceil(0.9 * NUMBERS))
    whole = scipy.linalg.hadamard(NUMBERS)[measure.places.numpy()]
    matrix = whole * measure.flips.numpy() / np.sqrt(len(measure.places))
    w, count = start(small_world), math.ceil(0.05 * NUMBERS)
    updates = [largest(update(small_world, w, c), count) for c in range(len(SIZES))]
    votes = np.sign(sum(np.where(matrix @ u >= 0, 1.0, -1.0) for u in updates))
    step = reconstructed(matrix, votes, count, 3)
    fed.advance()
    after = server_vector({f"server/{n}": a for n, a in fed.checkpoint().server.items()})
    np.testing.assert_allclose(after - w, 1e-3 * step, atol=1e-5)
    assert np.count_nonzero(step) == count


@pytest.mark.slow
def test_both_phases_and_totals_of_measurements_obey_the_laws() -> None:
    check_laws(CSFL(reconstruct="mean", first_phase=0.4))


def test_measurements_come_down_to_clients_of_the_round_before_and_the_model_to_others() -> None:
    # rejects a change on top of another model than the server means, and one that counts twice
    train = {**ONE_STEP, "fraction_train": 0.6, "num_rounds": 6}
    options = {"sparsity": 0.1, "dimension_reduction": 1.0, "down": "measurements"}
    small_world = world("cs_fl", options=options, train=train, model=MODEL)
    fed, measurements = federation(small_world, Plan(2)), NUMBERS
    before: set[int] = set()
    kinds = set()
    for _ in range(6):
        w = flat_vector(fed.server.averages.weights["mlp"].arrays)
        held = fed.server.sent.hold.bool().tolist()
        assert {c for c, holds in enumerate(held) if holds} == before
        line, _ = fed.advance()
        asked = [order.client for order in chosen(fed)]
        whole = [c for c in asked if c not in before]
        sizes = len(whole) * 4 * NUMBERS + (len(asked) - len(whole)) * 4 * measurements
        assert line["comm/down_bytes"] == sizes + len(asked) * (2 + 3 * 8 - 4)
        kinds.add(len(whole))
        state = fed.checkpoint().clients
        for client in asked:  # each of them trained from the server's model
            torch.testing.assert_close(state["mlp/own/held/numbers"][client], w)
        before = set(asked)
    assert len(kinds) > 1


def test_a_client_that_holds_another_version_is_refused_and_then_gets_the_model() -> None:
    # rejects training on from a change that was meant for another model
    options = {"sparsity": 0.1, "dimension_reduction": 1.0, "down": "measurements"}
    train = {**ONE_STEP, "num_rounds": 4}
    fed = federation(world("cs_fl", options=options, train=train, model=MODEL), Plan(2))
    fed.advance()
    saved = fed.checkpoint()
    saved.clients["mlp/own/held/version"][1] = 7.0  # as after a wrong restart of its own
    fed.restore(saved)
    line, _ = fed.advance()
    assert line["clients/replied"] == len(SIZES) - 1
    assert [entry["client"] for entry in line["refused"]] == [1]
    assert not fed.server.sent.hold[1]
    w = flat_vector(fed.server.averages.weights["mlp"].arrays)
    line, _ = fed.advance()
    assert line["clients/replied"] == len(SIZES)
    torch.testing.assert_close(fed.checkpoint().clients["mlp/own/held/numbers"][1], w)


def chosen(fed: ServerRun) -> list[Order]:
    """The orders of the last round."""
    ctx = fed.context("floats")
    return fed.method.select(fed.server, fed.side.online(fed.round), ctx)


def test_with_all_measurements_down_it_is_the_same_up_to_what_is_sent_later() -> None:
    small_world = cs_world(sparsity=1.0, dimension_reduction=1.0)
    compressed = world(
        "cs_fl",
        options={"sparsity": 1.0, "dimension_reduction": 1.0, "down": "measurements"},
        train={**ONE_STEP, "num_rounds": 3},
        model=MODEL,
    )
    ours, others = (server_vector(trace(w, Plan(2)).state) for w in (compressed, small_world))
    np.testing.assert_allclose(ours, others, atol=1e-5)


def test_the_stackable_search_finds_what_the_other_finds() -> None:
    measure = Measurement.draw(random.key(5), 400, 160)
    x = torch.zeros(3, 400)
    for i in range(3):
        x[i, random.permutation(random.key(i), 400)[:8]] = random.normal(random.key(9 + i), (8,))
    y = torch.stack([measure(row) for row in x])
    found = torch.func.vmap(lambda v: stackable_thresholding(measure, v, 8, 15))(y)
    torch.testing.assert_close(found, x, atol=1e-4, rtol=1e-4)
    for i in range(3):
        torch.testing.assert_close(
            hard_thresholding(measure, y[i], 8, 50), x[i], atol=1e-4, rtol=1e-4
        )


def test_fewer_measurements_find_each_clients_update_but_not_their_mean() -> None:
    # clients' largest numbers lie in different places, so their mean is not sparse
    far = {}
    for reconstruct in ("clients", "mean"):
        small_world = cs_world(reconstruct=reconstruct, sparsity=0.03, dimension_reduction=0.6)
        w, sizes = start(small_world), np.array(SIZES) / sum(SIZES)
        count = math.ceil(0.03 * NUMBERS)
        sent = [largest(update(small_world, w, c), count) for c in range(len(SIZES))]
        state = trace(small_world, Plan(2), rounds=1).state
        far[reconstruct] = abs(server_vector(state) - w - sizes @ np.stack(sent)).max()
    assert far["clients"] < 1e-5
    assert far["mean"] > 1e-3


def test_bytes_are_measurements_then_bits_and_the_model_comes_down() -> None:
    # rejects a byte or four for a sign, and a bill for what is not sent
    lines = trace(cs_world(rounds=4, dimension_reduction=0.3, first_phase=0.5), rounds=4).rounds
    measurements = math.ceil(0.3 * NUMBERS)
    up = [line["comm/up_bytes"] for line in lines]
    floats, bits = 4 * measurements + 4, math.ceil(measurements / 8)
    assert up == [len(SIZES) * size for size in (floats, floats, bits, bits)]
    assert {line["comm/down_bytes"] for line in lines} == {len(SIZES) * (4 * NUMBERS + 8)}


def test_the_order_of_arrays_does_not_matter() -> None:
    # seen: what came over a wire was ordered otherwise, and updates were differences of strangers
    arrays = {"b": torch.arange(3.0), "a": torch.ones(2, 2), "steps": torch.tensor(3)}
    turned = dict(reversed(arrays.items()))
    assert torch.equal(flat_vector(arrays), flat_vector(turned))
    assert flat_vector(arrays).tolist() == [1, 1, 1, 1, 0, 1, 2]
    back = unflat(2 * flat_vector(arrays), turned)
    assert {n: a.tolist() for n, a in back.items()} == {"a": [[2, 2], [2, 2]], "b": [0, 2, 4]}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sparsity": 0.0}, r"method\.sparsity = 0\.0: must be greater than 0"),
        ({"dimension_reduction": 1.5}, r"dimension_reduction = 1\.5: must be at most 1"),
        ({"first_phase": -0.1}, r"method\.first_phase = -0\.1: must be at least 0"),
    ],
)
def test_shares_are_shares(options: dict[str, float], text: str) -> None:
    with pytest.raises(MethodError, match=text):
        CSFL(**options)  # type: ignore[arg-type]


def test_changes_are_not_sent_to_clients_with_several_models() -> None:
    # seen: a client heard for one model got changes of another, over numbers that it did not hold
    pools = {"a": {"model": "mlp", "hidden": [5]}, "b": {"model": "logistic"}}
    clients = {"num_clients": len(SIZES), "pools": pools}
    with pytest.raises(
        RecipeError, match=r"method.down = 'measurements' is for clients of one mode"
    ):
        world("cs_fl", options={"down": "measurements"}, clients=clients, model=None)
    world("cs_fl", clients=clients, model=None)
