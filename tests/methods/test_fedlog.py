"""FedLog's exact head against the optimality condition, scipy's optimizer and Adam."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import scipy.optimize
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor, nn

import fedgist
from fedgist.core import random
from fedgist.core.message import Nothing, payload_bytes
from fedgist.core.method import Batch, Context, Order, Task, Training
from fedgist.core.nets.net import Architecture, split_head
from fedgist.core.objectives.classes import Classes
from fedgist.core.privacy import Privacy
from fedgist.core.replies import Replies, Reply, Subtotal, gather
from fedgist.core.tree import named
from fedgist.errors import InputError, MethodError, RecipeError
from fedgist.methods.common.conjugate_head import (
    ClassSums,
    _omega,
    log_posterior,
    map_head,
)
from fedgist.methods.common.linear_head import LinearHead
from fedgist.methods.common.sum_memory import ClientSums
from fedgist.methods.fedlog import FedLog
from fedgist.methods.fedlog_c import FedLogC
from fedgist.models import MODELS
from fedgist.testing.small_worlds import federation, world

Floats = npt.NDArray[np.float64]


def class_sums(
    classes: int,
    width: int,
    rows: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    empty: tuple[int, ...] = (),
) -> Floats:
    """Return S of random rows: noisy class centres, uneven classes, the constant 1 in front."""
    draw = np.random.default_rng(seed)
    odds = draw.dirichlet(np.full(classes, 2.0))
    odds[list(empty)] = 0.0
    y = draw.choice(classes, rows, p=odds / odds.sum())
    phi = scale * (draw.normal(size=(classes, width))[y] + draw.normal(size=(rows, width)))
    s = np.zeros((classes, width + 1))
    np.add.at(s, y, np.concatenate([np.ones((rows, 1)), phi], axis=1))
    return s


def objective(eta: Floats, s: Floats, nu: float) -> float:
    """Return <eta, S> - (nu + n) ln sum_y exp(|eta_y|^2 / 4), eq. 14."""
    return float(
        (eta * s).sum() - (nu + s[:, 0].sum()) * scipy.special.logsumexp((eta**2).sum(1) / 4)
    )


def gradient(eta: Floats, s: Floats, nu: float) -> Floats:
    p = scipy.special.softmax((eta**2).sum(1) / 4)
    return np.asarray(s - (nu + s[:, 0].sum()) * p[:, None] * eta / 2)


def solved(s: Floats, nu: float) -> Floats:
    out: Floats = map_head(torch.from_numpy(s), nu).numpy()
    return out


PROBLEMS = [
    pytest.param(class_sums(3, 2, 40), 1.0, id="small"),
    pytest.param(class_sums(10, 50, 500), 1.0, id="mnist"),
    pytest.param(class_sums(10, 50, 500, empty=(0, 4, 9)), 2.5, id="empty classes"),
    pytest.param(class_sums(5, 8, 60), 0.0, id="flat prior"),
    pytest.param(class_sums(100, 100, 900), 1.0, id="cifar100"),
    pytest.param(class_sums(4, 3, 1), 1.0, id="one client with one sample"),
    pytest.param(class_sums(2, 1, 4, scale=0.0), 1.0, id="features of zero"),
    pytest.param(class_sums(1, 3, 9), 1.0, id="one class"),
]


def test_the_oracles_gradient_is_that_of_the_oracles_objective() -> None:
    s, eta = class_sums(3, 2, 40), np.random.default_rng(1).normal(size=(3, 3))

    def flat(x: Floats) -> float:
        return objective(x.reshape(3, 3), s, 1.0)

    numeric = scipy.optimize.approx_fprime(eta.ravel(), flat, 1e-6)
    np.testing.assert_allclose(gradient(eta, s, 1.0).ravel(), numeric, rtol=1e-4, atol=1e-4)
    assert float(log_posterior(torch.from_numpy(eta), torch.from_numpy(s), 1.0)) == pytest.approx(
        flat(eta.ravel())
    )


@pytest.mark.parametrize(("s", "nu"), PROBLEMS)
def test_the_head_makes_the_gradient_of_eq_14_vanish(s: Floats, nu: float) -> None:
    # rejects eta = S / (T p) without its 2, and T = n without nu (below: the oracle sees both)
    eta = solved(s, nu)
    assert abs(gradient(eta, s, nu)).max() < 1e-8 * max(1.0, abs(s).max() / 100)
    assert not eta[s[:, 0] == 0].any()


def test_the_oracle_rejects_a_head_without_its_factor_2_and_one_without_the_prior() -> None:
    s = class_sums(10, 50, 500)
    assert abs(gradient(solved(s, 1.0) / 2, s, 1.0)).max() > 1.0
    assert abs(gradient(solved(s, 0.0), s, 1.0)).max() > 0.1


@pytest.mark.parametrize(("s", "nu"), PROBLEMS[:5])
def test_the_head_is_the_optimum_that_scipy_finds(s: Floats, nu: float) -> None:
    t = nu + s[:, 0].sum()

    def loss(x: Floats) -> tuple[float, Floats]:
        eta = x.reshape(s.shape)
        return -objective(eta, s, nu) / t, -gradient(eta, s, nu).ravel() / t

    with threadpool_limits(1):  # many small products, which threads make slower
        optimum = scipy.optimize.minimize(
            loss,
            s.ravel() / t,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 1000, "ftol": 1e-15, "gtol": 1e-9},
        )
    eta = solved(s, nu)
    assert objective(eta, s, nu) / t >= -optimum.fun - 1e-12
    np.testing.assert_allclose(
        eta, optimum.x.reshape(s.shape), rtol=1e-3, atol=1e-4 * abs(eta).max()
    )


def ascended(start: Floats, s: Floats, nu: float, lr: float, steps: int) -> Floats:
    """Return eta after ascent on eq. 14, divided by nu + n, by torch's Adam: the paper's way."""
    eta, sums = torch.from_numpy(start).clone().requires_grad_(), torch.from_numpy(s)
    adam = torch.optim.Adam([eta], lr=lr)
    for _ in range(steps):
        a = torch.logsumexp(eta.square().sum(1) / 4, 0)
        (eta.grad,) = torch.autograd.grad(a - (eta * sums).sum() / (nu + s[:, 0].sum()), eta)
        adam.step()
    return eta.detach().numpy()


def test_the_exact_head_is_better_than_the_papers_thousand_steps_of_adam() -> None:
    s = class_sums(10, 20, 300, scale=0.5)
    start = random.normal(random.key(0), (10, 21)).double()
    steps = ascended(start.numpy(), s, 1.0, 1e-2, 1000)
    assert (
        objective(start.numpy(), s, 1.0)
        < objective(steps, s, 1.0)
        <= objective(solved(s, 1.0), s, 1.0)
    )
    more = ascended(steps, s, 1.0, 1e-3, 2000)
    np.testing.assert_allclose(more, solved(s, 1.0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("scale", "empty"),
    [
        (1e-3, ()),
        (1e-2, (1,)),
        (0.1, ()),
        (1.0, (1,)),
        (10.0, ()),
        (10.0, (1,)),
        (100.0, (1,)),
        (1e3, ()),
    ],
)
def test_very_small_and_very_large_features_are_solved_as_well_as_etas_rounding_allows(
    scale: float, empty: tuple[int, ...]
) -> None:
    s = class_sums(6, 20, 200, scale=scale, empty=empty)
    eta = solved(s, 1.0)
    allowed = 8 * np.finfo(np.float64).eps * max(1.0, (eta**2).sum(1).max() / 4)  # of ln p
    assert abs(gradient(eta, s, 1.0)).max() < max(1e-12, allowed) * abs(s).max()
    assert not eta[list(empty)].any()


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 300),
    st.floats(0, 10),
    st.floats(1e-3, 8.0),
    st.integers(0, 99),
)
def test_any_class_sums_are_solved(
    classes: int, width: int, rows: int, nu: float, scale: float, seed: int
) -> None:
    s = class_sums(classes, width, rows, seed=seed, scale=scale)
    eta = solved(s, nu)
    assert np.isfinite(eta).all()
    assert abs(gradient(eta, s, nu)).max() < 1e-10 * max(1.0, abs(s).max())


@pytest.mark.parametrize("nu", [0.0, 1.0])
def test_without_samples_the_head_is_zero_and_nothing_is_divided(nu: float) -> None:
    assert not solved(np.zeros((4, 3)), nu).any()


@pytest.mark.parametrize(
    "z", [np.linspace(-745, 30, 4001), np.logspace(0, 6, 500), np.linspace(0.9, 1.1, 101)]
)
def test_omega_is_scipys(z: Floats) -> None:
    w = _omega(torch.from_numpy(z)).numpy()
    expected = np.asarray(scipy.special.wrightomega(z))
    np.testing.assert_allclose(w, expected, rtol=1e-14, atol=1e-323)


def test_omega_of_nothing_is_zero() -> None:
    assert _omega(torch.tensor([-float("inf"), -800.0], dtype=torch.float64)).tolist() == [0.0, 0.0]


# the method's own functions


def make(
    method: FedLog | FedLogC, arch: Architecture, stage: str = "train", number: int = 1
) -> Context:
    training = Training(num_rounds=2, batch_size=8)
    task = Task(
        arch.input_shape,
        arch.num_classes,
        2,
        {arch.name: arch},
        {arch.name: arch.start(0)},
        training,
        Classes(arch.num_classes),
    )
    method.check(task)
    return Context(random.key(0), task, number, stage)


TOY = split_head(lambda: MODELS["mlp"]((4,), 3, hidden=[5], dropout=0.5), (4,), 3, name="toy")


def test_a_summary_is_the_sum_of_rows_by_class_absent_rows_left_out() -> None:
    # rejects counting absent rows as class 0, features with dropout, and the constant put last
    method, net = FedLog(), TOY.start(1)
    x = random.normal(random.key(1), (7, 4))
    y, mask = torch.tensor([2, 0, 0, 1, 0, 2, 0]), torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    x[~mask] = 0.0
    sums = method.summarize(
        net, Batch(x, y, mask), Nothing(), LinearHead(torch.zeros(3, 6)), make(method, TOY)
    )
    expected = np.zeros((3, 6))
    w, b = (net.params[f"1.{n}"].double().numpy() for n in ("weight", "bias"))
    for row, label, present in zip(x.double().numpy(), y.tolist(), mask.tolist(), strict=True):
        if present:
            expected[label] += [1.0, *np.maximum(w @ row + b, 0.0)]
    np.testing.assert_allclose(sums.total.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_summary_is_the_same_stacked_and_alone() -> None:
    method = FedLog()
    ctx, net, down = make(method, TOY), TOY.start(1), LinearHead(torch.zeros(3, 6))
    x = random.normal(random.key(1), (2, 4, 4))
    y, mask = (
        torch.tensor([[0, 1, 2, 0], [1, 1, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
    )

    def summarize(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> ClassSums:
        return method.summarize(net, Batch(x, y, mask), Nothing(), down, ctx)

    stacked = torch.func.vmap(summarize)(x, y, mask).total
    for i in range(2):
        torch.testing.assert_close(stacked[i], summarize(x[i], y[i], mask[i]).total)


def test_head_and_sums_of_mnist_cost_51_numbers_a_class() -> None:
    arch = split_head(
        lambda: MODELS["fedlog_mnist"]((1, 28, 28), 10), (1, 28, 28), 10, name="mnist"
    )
    method = FedLog()
    ctx = make(method, arch)
    head = method.download(method.init_server(ctx), Order(0, "mnist"), ctx)
    batch = Batch(
        torch.zeros(2, 1, 28, 28),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.bool),
    )
    sums = method.summarize(arch.start(0), batch, Nothing(), head, ctx)
    assert payload_bytes(head) == payload_bytes(sums) == 51 * 10 * 4


def test_the_server_adds_the_sums_and_solves_and_the_client_installs_the_head() -> None:
    s = torch.from_numpy(class_sums(3, 5, 40)).float()
    method = FedLog(nu=2.0)
    ctx = make(method, TOY)
    before = method.init_server(ctx)
    parts = [
        Subtotal("a", (0,), 1, "train", ClassSums(s / 4)),
        Subtotal("b", (1, 2, 3), 1, "train", ClassSums(s * 3 / 4)),
    ]
    server = method.server_update(before, gather(parts, ()), ctx)
    assert server.eta.dtype == torch.float32
    np.testing.assert_allclose(
        server.eta.numpy(), solved(s.double().numpy(), 2.0), rtol=1e-4, atol=1e-5
    )
    down = method.download(server, Order(0, "toy"), ctx)
    net, _ = method.receive(TOY.start(0), Nothing(), down, ctx)
    z = random.normal(random.key(3), (4, 5))
    torch.testing.assert_close(net.logits(z), torch.cat([torch.ones(4, 1), z], 1) @ server.eta.T)
    assert [p.learns for p in method.phases(ctx)] == [("body",)]


def test_the_exchange_is_round_0_sends_nothing_down_and_trains_nothing() -> None:
    method = FedLog(head_start="exchange")
    ctx = make(method, TOY, "exchange", 0)
    assert method.stages(ctx) == ("exchange",)
    assert FedLog().stages(ctx) == ()
    assert method.stages(replace(ctx, round=1)) == ("train",)
    assert payload_bytes(method.download(method.init_server(ctx), Order(0, "toy"), ctx)) == 0
    assert method.phases(ctx) == ()


def bare() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (split_head(bare, (4,), 3, name="bare"), "needs a head with a bias; that of bare has none"),
        (
            split_head(lambda: MODELS["mlp"]((4,), 3, hidden=[6]), (4,), 3, name="wide"),
            "one feature width; they have toy 5, wide 6",
        ),
    ],
)
def test_models_that_cannot_share_the_head_are_refused(other: Architecture, text: str) -> None:
    task = replace(make(FedLog(), TOY).task, architectures={"toy": TOY, other.name: other})
    with pytest.raises(ValueError, match=text):
        FedLog().check(task)


def test_a_negative_pseudo_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method\.nu = -1: must be at least 0"):
        FedLog(nu=-1)


def test_the_random_head_is_standard_normal_and_follows_its_key() -> None:
    arch = split_head(lambda: nn.Linear(400, 50), (400,), 50, name="wide")
    ctx = make(FedLog(), arch)
    eta: Any = FedLog().init_server(ctx).eta
    assert eta.shape == (50, 401)
    assert float(eta.std()) == pytest.approx(1.0, rel=0.02)
    assert torch.equal(eta, FedLog().init_server(ctx).eta)
    assert not torch.equal(eta, FedLog().init_server(replace(ctx, key=random.key(1))).eta)


# what the server remembers of absent clients


def answered(parts: Mapping[int, Tensor]) -> Replies:
    """Replies whose totals are of these clients' sums."""
    return gather([Subtotal("toy", (c,), 1, "train", ClassSums(s)) for c, s in parts.items()], ())


def some_sums(*classes: int) -> Tensor:
    s = torch.zeros(3, 6)
    for k in classes:
        s[k] = torch.tensor([2.0 + k, 1.0, -2.0, 3.0, k, 0.5])
    return s


@pytest.mark.parametrize("method", [FedLog(), FedLogC()], ids=["fedlog", "fedlog_c"])
def test_by_default_absent_clients_sums_are_a_prior_that_is_discounted_by_their_share(
    method: Any,
) -> None:
    # rejects a server that drops them, one that keeps them whole, and the share of those asked
    ctx = memory_context(method, clients=4)
    server = method.init_server(ctx)
    first = {c: some_sums(c % 3) for c in range(4)}
    server = method.server_update(server, answered(first), ctx)
    t = sum(first.values(), torch.zeros(3, 6))
    assert torch.equal(remembered_by(server), t)  # with everybody heard, the paper's: T = S
    server = method.server_update(server, answered({1: some_sums(1)}), ctx)
    t = some_sums(1) + (1 - 1 / 4) * t
    torch.testing.assert_close(remembered_by(server), t)
    if isinstance(method, FedLog):
        chi, nu = t.double().numpy(), 1.0
        np.testing.assert_allclose(server.eta.numpy(), solved(chi, nu), rtol=1e-4, atol=1e-5)


def test_a_number_discounts_by_itself_and_a_class_that_nobody_sent_may_keep_its_sums() -> None:
    whole, part = {0: some_sums(0, 1), 1: some_sums(2)}, {0: some_sums(0, 2)}
    expected = {
        0.5: some_sums(0, 2) + 0.5 * some_sums(0, 1, 2),
        0.0: some_sums(0, 2),
        1.0: some_sums(0, 2) + some_sums(0, 1, 2),
        "class": some_sums(0, 1, 2),
    }
    for memory, t in expected.items():
        method: Any = FedLog(memory=memory)  # type: ignore[arg-type]
        ctx = memory_context(method, clients=2)
        server = method.server_update(method.init_server(ctx), answered(whole), ctx)
        server = method.server_update(server, answered(part), ctx)
        torch.testing.assert_close(server.sums.total, t)


def test_a_client_that_answers_with_two_models_is_one_client_of_the_share() -> None:
    method = FedLog(memory="auto")
    ctx = memory_context(method, clients=2)
    both = [Subtotal(n, (0, 1), 1, "train", ClassSums(some_sums(0))) for n in ("small", "large")]
    server = method.server_update(method.init_server(ctx), answered({0: some_sums(1)}), ctx)
    server = method.server_update(server, gather(both, ()), ctx)
    # counted twice, the share would be 2 and rho -1
    torch.testing.assert_close(server.sums.total, 2 * some_sums(0))


def test_drawing_by_chance_is_no_secret_without_central_noise() -> None:
    method = FedLog(memory="auto")
    ctx = memory_context(method, clients=2, fraction=1.0)
    drawn = ctx.task.training.model_copy(update={"sampling": "poisson"})
    ctx = replace(ctx, task=replace(ctx.task, training=drawn))
    server = method.server_update(method.init_server(ctx), answered({0: some_sums(0)}), ctx)
    server = method.server_update(server, answered({1: some_sums(1)}), ctx)
    torch.testing.assert_close(server.sums.total, 0.5 * some_sums(0) + some_sums(1))


def test_the_newest_sums_of_each_client_count_once_and_can_be_forgotten() -> None:
    method = FedLog(memory="newest")
    ctx = memory_context(method, clients=3)
    assert method.accepts_late
    assert not FedLog().accepts_late

    def sent(client: int, number: int, *classes: int) -> Reply:
        return Reply(Order(client, "toy"), number, "train", ClientSums(some_sums(*classes)))

    server = method.init_server(ctx)
    for each in ([sent(0, 1, 0), sent(1, 1, 1)], [sent(0, 2, 2)], [sent(1, 1, 0)]):
        server = method.server_update(server, gather((), each), ctx)
    # the last was late, of a round that is not newer than what is kept: it takes its place
    torch.testing.assert_close(server.sums.total, some_sums(2) + some_sums(0))
    server = method.forget(server, 0, ctx)
    torch.testing.assert_close(server.sums.total, some_sums(0))
    expected = solved(some_sums(0).double().numpy(), 1.0)
    np.testing.assert_allclose(server.eta.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("memory", "fraction", "says"),
    [
        (0.8, 1.0, r"they weigh 1 % after 21 more rounds"),
        (0.9, 0.1, r"they weigh 1 % after 44 more rounds"),
        ("auto", 1.0, r"they fade with each round, by the share of the clients that answer in it"),
        (1.0, 1.0, r"they never fade"),
        ("class", 1.0, r"they stay until a client sends rows of the same classes"),
    ],
)
def test_a_sum_cannot_be_taken_back(memory: Any, fraction: float, says: str) -> None:
    # 0.8^21 = 0.0092, 0.8^20 = 0.0115; 0.9^44 = 0.0097
    methods: tuple[Any, ...] = (FedLog(memory=memory), FedLogC(memory=memory))
    for method in methods:
        ctx = memory_context(method, clients=10, fraction=fraction)
        with pytest.raises(MethodError, match=f"client 3 cannot be taken.*{says}"):
            method.forget(method.init_server(ctx), 3, ctx)


def test_single_uploads_are_refused_where_only_totals_may_be_seen() -> None:
    options = {"memory": "newest"}
    with pytest.raises(InputError, match=r"memory = 'newest' .* privacy.min_replies = 2 only"):
        world("fedlog", options=options, privacy={"min_replies": 2})
    record = {"unit": "client", "epsilon": 5.0, "delta": 1e-3, "clip": 1.0, "bodies": "fixed"}
    with pytest.raises(InputError, match=r"memory = 'newest' .* which central noise does not"):
        world("fedlog_c", options=options, privacy={**record, "where": "central"})
    world("fedlog", options=options, privacy={**record, "where": "local"})


def memory_context(method: FedLog | FedLogC, clients: int, fraction: float = 1.0) -> Context:
    ctx = make(method, TOY)
    training = ctx.task.training.model_copy(update={"fraction_train": fraction})
    return replace(ctx, task=replace(ctx.task, num_clients=clients, training=training))


def remembered_by(server: Any) -> Tensor:
    total: Tensor = server.sums.total if hasattr(server, "sums") else server.total
    return total


def test_a_round_that_is_withheld_changes_nothing_not_even_by_decay() -> None:
    clients, privacy = {"availability": 0.5}, {"min_replies": 4}
    small_world = world("fedlog", options={"memory": 0.5}, clients=clients, privacy=privacy)
    fed = federation(small_world)
    kept = 0
    for _ in range(6):
        before = {name: array.clone() for name, array in named(fed.server).items()}
        line, _ = fed.advance()
        if line["clients/replied"] < 4:
            kept += 1
            assert all(torch.equal(before[n], a) for n, a in named(fed.server).items())
    assert 0 < kept < 6


def test_the_expected_share_discounts_where_it_is_a_secret_who_was_drawn() -> None:
    # rejects the number that answered, which noise is there to hide, and the share of those asked
    method: Any = FedLog()
    ctx = memory_context(method, clients=4, fraction=0.25)
    secret = ctx.task.training.model_copy(update={"sampling": "poisson"})
    hidden = Privacy("client", "central", 1.0, 0.0)
    ctx = replace(ctx, task=replace(ctx.task, training=secret, privacy=hidden))
    server = method.server_update(method.init_server(ctx), answered({0: some_sums(0, 1)}), ctx)
    server = method.server_update(server, answered({1: some_sums(1)}), ctx)
    expected = some_sums(1) + 0.75 * some_sums(0, 1)
    torch.testing.assert_close(server.sums.total, expected)


NOISY = {  # deviation, clients, and a client's counts with what is kept: the bound is 4, and 6
    "local": (1.0, 4, ((5.0, 20.0), (1.1, 4.4), (0.9, 4.4))),
    "central": (3.0, 1, ((20.0, 20.0), (5.9, 20.0), (6.1, 6.1))),
}


@pytest.mark.parametrize("where", ["local", "central"])
def test_a_class_counts_as_sent_above_the_noise_of_a_total(
    where: Literal["local", "central"],
) -> None:
    # rejects the noise of one reply, one that grows with their number and not its root, and none
    method: Any = FedLog(memory="class")
    deviation, clients, counts = NOISY[where]
    ctx = memory_context(method, clients=4)
    noisy = Privacy("record", where, 1.0, deviation)
    ctx = replace(ctx, task=replace(ctx.task, privacy=noisy))
    server = method.init_server(ctx)
    for of_each, kept in counts:
        parts = {client: of_each * torch.eye(3, 6) for client in range(clients)}
        server = method.server_update(server, answered(parts), ctx)
        assert float(server.sums.total[0, 0]) == pytest.approx(kept)


def test_sums_of_single_labels_are_not_kept_beside_those_of_other_rows() -> None:
    # seen: rows without a label were counted as fewer than none
    about: dict[str, Any] = {"objective": {"name": "multilabel"}}
    world("fedlog", options={"memory": "auto"}, **about)
    with pytest.raises(RecipeError, match=r"memory = 'class' keeps earlier sums of a label"):
        world("fedlog", options={"memory": "class"}, **about)


def private_run(method: dict[str, Any], x: Tensor, y: Tensor) -> Any:
    """Return a run over rows without a body, with so much budget that noise changes nothing."""
    recipe = {
        "data": {"normalize": "none"},
        "model": {"name": "logistic"},
        "method": {"name": "fedlog"} | method,
        "clients": {"num_clients": 3},
        "partition": {"name": "iid"},
        "privacy": {"unit": "record", "epsilon": 1e4, "delta": 1e-5, "clip": 2.5},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1},
    }
    with pytest.warns(UserWarning, match=r"\w"):
        return fedgist.run(recipe, data=(x, y))


def test_a_private_cosine_head_has_the_directions_of_rows_of_one_length() -> None:
    x, y = torch.randn(400, 5, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 4
    x = x * torch.linspace(0.1, 20, 400).unsqueeze(1)
    result = private_run({"private_head": "cosine"}, x, y)
    unit = torch.nn.functional.normalize(x, dim=1)
    sums = torch.stack([unit[y == k].sum(0) for k in range(4)])
    expected = torch.nn.functional.normalize(sums, dim=1) * 10 / 2.5
    eta = result.server_run.server.eta
    torch.testing.assert_close(eta[:, 1:], expected, rtol=1e-2, atol=1e-2)
    assert not bool(eta[:, 0].any())


def test_a_private_cosine_head_is_for_frozen_bodies_and_private_rows() -> None:
    rows = torch.randn(60, 3), torch.arange(60) % 3
    recipe: dict[str, Any] = {
        "model": {"name": "mlp"},
        "method": {"name": "fedlog", "private_head": "cosine"},
        "train": {"num_rounds": 1},
        "clients": {"num_clients": 2},
        "engine": {"workers": 1},
    }
    with pytest.raises(InputError, match="is for frozen bodies: use 'exact'"):
        fedgist.run(recipe, data=rows)
    with pytest.warns(UserWarning, match="is read with privacy.unit = 'record' alone"):
        fedgist.run(recipe | {"model": {"name": "logistic"}}, data=(*rows, *rows))
