"""FedKD beside NumPy: mutual losses, factors of changes, and who needs the whole mentee."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from drifting_clients import (
    CLASSES,
    DECAY,
    LR,
    Clients,
    Floats,
    personal,
    run,
    shared,
    start_of,
    with_one,
)
from fedgist.core.batch import Batch
from fedgist.core.message import payload_bytes
from fedgist.core.method import Context, Count, Order
from fedgist.core.nets.layers import Pass
from fedgist.engines.plans.plan import Plan
from fedgist.methods.fedkd import Factors, FedKD, Server
from fedgist.testing.small_worlds import SIZES, trace, world


def truncated(matrix: Floats, energy: float) -> Floats:
    """Return a matrix with the fewest singular values that have more than this share of squares.

    It is unchanged where its factors are not smaller.
    """
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    part = np.cumsum(s**2) / max(float(np.sum(s**2)), 1e-300)
    count = min(int(np.sum(part <= energy)) + 1, int(np.sum(s > 0)))
    if count * sum(matrix.shape) >= matrix.size:
        return matrix
    kept: Floats = (u[:, :count] * s[:count]) @ v[:count]
    return kept


def by_hand(
    clients: Clients, start: Floats, rounds: int, steps: int, energies: tuple[float, float]
) -> tuple[Floats, list[Floats]]:
    """All clients, full batches and plain steps: the shared mentee, and the mentors."""
    count = len(clients.x)
    mentors, shared_one = [start] * count, start
    share = [len(x) / sum(map(len, clients.x)) for x in clients.x]

    def compressed(change: Floats, energy: float) -> Floats:
        return np.concatenate([truncated(change[:-1].T, energy).T, change[-1:]])

    for number in range(rounds):
        energy = float(np.interp(number, [0, rounds - 1], energies))
        mean = np.zeros_like(start)
        for i, (x, y) in enumerate(zip(map(with_one, clients.x), clients.y, strict=True)):
            w, v, labels = mentors[i], shared_one, np.eye(CLASSES)[y]
            for _ in range(steps):
                p, q = softmax(x @ w, axis=1), softmax(x @ v, axis=1)
                both = -sum(float(np.log((a * labels).sum(1)).mean()) for a in (p, q))
                w = w - LR * (x.T @ (p - labels + (p - q) / both) / len(x) + DECAY * w)
                v = v - LR * (x.T @ (q - labels + (q - p) / both) / len(x) + DECAY * v)
            mentors[i] = w
            mean = mean + share[i] * compressed(v - shared_one, energy)
        shared_one = shared_one + compressed(mean, energy)
    return shared_one, mentors


@pytest.mark.parametrize("energies", [(1.0, 1.0), (0.3, 0.9)])
def test_rounds_are_those_of_the_paper(energies: tuple[float, float]) -> None:
    # rejects one loss without the other's, mean losses as denominators, and means of factors
    clients = Clients.drawn(9, 14, 20)
    first, last = energies
    options = {"name": "fedkd", "first_energy": first, "last_energy": last}
    done = run(options, clients, 4, local_epochs=3)
    expected, mentors = by_hand(clients, start_of(done), 4, 3, energies)
    np.testing.assert_allclose(shared(done), expected, atol=5e-6)
    for client, mentor in enumerate(mentors):
        np.testing.assert_allclose(personal(done, client), mentor, atol=5e-6)
    exact, _ = by_hand(clients, start_of(done), 4, 3, (1.0, 1.0))
    assert (abs(exact - expected).max() > 1e-3) == (first < 1)


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(shapes, st.floats(0.0, 1.0), st.integers(0, 3), st.integers(0, 99))
def test_factors_have_the_energy_and_no_more(
    shape: tuple[int, ...], energy: float, rank: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    flat = (shape[0], int(np.prod(shape[1:])))
    array = draw.normal(size=shape)
    if rank and len(shape) > 1:
        a, b = draw.normal(size=(flat[0], rank)), draw.normal(size=(rank, flat[1]))
        array = (a @ b).reshape(shape)
    numbers = torch.from_numpy(array).float()
    found = Factors.of({"x": numbers}, energy)
    back = found.change()["x"].double().numpy().reshape(flat)
    assert found.change()["x"].shape == shape
    if len(shape) == 1 or found.unfactored["x"][0]:
        np.testing.assert_array_equal(back.reshape(shape), numbers.double().numpy())
    if len(shape) == 1:
        return
    count = int(found.kept["x"].sum())
    if not found.unfactored["x"][0]:
        s = np.linalg.svd(array.reshape(flat), compute_uv=False) ** 2
        assert s[:count].sum() >= energy * s.sum() * (1 - 1e-5)
        assert s[: count - 1].sum() <= energy * s.sum() * (1 + 1e-5)
        assert count * sum(flat) < array.size
        left = np.linalg.norm(back - array.reshape(flat)) ** 2
        np.testing.assert_allclose(left, s[count:].sum(), atol=1e-5 * s.sum())


def test_what_is_not_a_number_is_sent_whole_and_refused() -> None:
    found = Factors.of({"x": torch.full((8, 9), torch.nan)}, 0.9)
    assert found.change()["x"].isnan().all()


def test_a_client_with_other_features_learns_as_torch_would() -> None:
    tables = {"small": {"model": "mlp", "hidden": [4], "share": 0.4}, "mlp": {"share": 0.6}}
    task = world("fedkd", architectures=tables).server.task
    net, other, mask = task.starts["mlp"], task.starts["small"], torch.ones(5, dtype=torch.bool)
    batch = Batch(torch.randn(5, *task.input_shape), torch.arange(5) % 3, mask)
    method, ctx = FedKD(), Context(torch.tensor(3), task, 1, "train", architecture="mlp")
    own = method.init_client(net, ctx)
    assert own.transform.shape == (net.arch.feature_width, 4)
    sides = {"net": net.params, "mentee": own.mentee.params, "map": {"w": own.transform}}
    sides = {s: {k: p.clone().requires_grad_() for k, p in a.items()} for s, a in sides.items()}
    learned = replace(
        own, mentee=replace(own.mentee, params=sides["mentee"]), transform=sides["map"]["w"]
    )
    run_of_step = Pass(mask, ctx.key)
    placed = replace(net.with_arrays(sides["net"]), run=run_of_step)
    value = method.loss(placed, batch, learned, None, ctx)  # type: ignore[arg-type]
    flat = [p for side in sides.values() for p in side.values()]
    found = torch.autograd.grad(value, flat)

    mentor, mentee = net.with_arrays(sides["net"]), other.with_arrays(sides["mentee"])
    mine, theirs = mentor(batch.x), mentee(batch.x)
    labels = F.cross_entropy(mine, batch.y) + F.cross_entropy(theirs, batch.y)
    log_p, log_q = mine.log_softmax(-1), theirs.log_softmax(-1)
    mutual = F.kl_div(log_p, log_q.exp().detach(), reduction="batchmean")
    mutual = mutual + F.kl_div(log_q, log_p.exp().detach(), reduction="batchmean")
    hidden = F.linear(mentee.features(batch.x), sides["map"]["w"])
    mutual = mutual + F.mse_loss(hidden, mentor.features(batch.x))
    expected = labels + mutual / labels.detach()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, flat))


def test_who_holds_the_mentee_gets_factors_and_trains_as_if_it_got_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # rejects a change that is applied twice, to an older mentee, or not to the server's own
    train = {"fraction_train": 0.6, "num_rounds": 6}
    small = world("fedkd", train=train, options={"first_energy": 0.5, "last_energy": 0.7})
    factored = trace(small, Plan(2), rounds=6)
    updated = FedKD.server_update

    def nobody_holds(self: FedKD, server: Server, replies: object, ctx: Context) -> Server:
        after = updated(self, server, replies, ctx)  # type: ignore[arg-type]
        return replace(after, hold=torch.zeros_like(after.hold))

    monkeypatch.setattr(FedKD, "server_update", nobody_holds)
    whole = trace(small, Plan(2), rounds=6)
    for key, array in whole.state.items():
        if key != "server/hold":
            torch.testing.assert_close(factored.state[key], array, atol=2e-6, rtol=1e-5)
    assert 0 < float(factored.state["server/hold"].sum()) < len(small.server.clients)


def test_a_change_counts_once_and_an_older_mentee_makes_no_upload() -> None:
    small = world("fedkd")
    task, method = small.server.task, FedKD(0.5, 0.5)
    (net,) = task.starts.values()
    ctx = Context(torch.tensor(3), task, 1, "train", architecture=net.arch.name)
    first = method.init_server(ctx)
    order = Order(0, net.arch.name)
    _, own = method.receive(
        net, method.init_client(net, ctx), method.download(first, order, ctx), ctx
    )
    assert float(own.version) == 0.0
    change = Factors.of({k: torch.ones_like(a) for k, a in own.held.items()}, 0.5)
    second = replace(first, sent=change, hold=torch.ones(len(SIZES)), version=first.version + 1)
    down = method.download(second, order, ctx)
    _, once = method.receive(net, own, down, ctx)
    _, twice = method.receive(net, once, down, ctx)
    for name, array in own.held.items():
        torch.testing.assert_close(once.held[name], array + 1)
        assert torch.equal(twice.held[name], once.held[name])
        assert torch.equal(twice.mentee.params[name], once.held[name])
    third = method.download(replace(second, version=second.version + 1), order, ctx)
    _, lost = method.receive(net, own, third, ctx)
    sent, _ = method.upload(net, lost, Count(torch.ones(())), third, ctx)
    assert all(array.isnan().all() for array in sent.change.change().values())


def test_factors_take_fewer_bytes_than_the_mentee() -> None:
    small = world(
        "fedkd",
        model={"name": "mlp", "hidden": [30, 20]},
        options={"first_energy": 0.5, "last_energy": 0.5},
    )
    task, method = small.server.task, FedKD(0.5, 0.5)
    ctx = Context(torch.tensor(3), task, 1, "train")
    server = method.init_server(ctx)
    change = {name: torch.randn_like(array) for name, array in server.sent.change().items()}
    server = replace(server, sent=Factors.of(change, 0.5), hold=torch.tensor([1.0, 0, 0, 0, 0]))
    factors, all_of_it = (
        payload_bytes(method.download(server, Order(c, "mlp"), ctx)) for c in (0, 1)
    )
    numbers = sum(array.numel() for array in change.values())
    assert all_of_it < 4 * numbers + 40
    assert factors < 0.6 * all_of_it
