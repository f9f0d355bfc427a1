"""FedLog-C against eq. 15 written as loops, FedLog, and plain gradient steps."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedgist.core import random
from fedgist.core.message import payload_bytes
from fedgist.engines.plans.plan import Plan
from fedgist.errors import MethodError
from fedgist.methods.common.conjugate_head import map_head, random_pseudo_sums
from fedgist.methods.common.sum_memory import Remembered
from fedgist.methods.fedlog_c import FedLogC, mean_distance, pull_and_push
from fedgist.testing.small_worlds import SIZES, federation, state_of, trace, world
from fedgist.world.world import World

Floats = npt.NDArray[np.float64]


def eq_15(z: Floats, y: list[int], s: Floats, cap: float = np.inf) -> tuple[float, float]:
    """Both sums of eq. 15 over n, row by row and class by class; classes without rows left out."""
    mu = {k: s[k, 1:] / s[k, 0] for k in range(len(s)) if s[k, 0] > 0}
    pull = sum(float(((phi - mu[k]) ** 2).sum()) for phi, k in zip(z, y, strict=True) if k in mu)
    push = sum(
        min(float(((phi - mu[other]) ** 2).sum()), cap)
        for phi, k in zip(z, y, strict=True)
        for other in mu
        if other != k
    )
    return pull / len(y), push / len(y)


def example() -> tuple[Floats, list[int], Floats]:
    """Features of seven rows, and sums in which class 3 has no row and class 4 a noised count."""
    draw = np.random.default_rng(0)
    z, y = draw.normal(size=(7, 3)), [0, 2, 2, 1, 0, 3, 1]
    counts = np.array([4.0, 2.0, 9.0, 0.0, -3.0])
    s = np.concatenate([counts[:, None], counts[:, None] * draw.normal(size=(5, 3))], axis=1)
    return z, y, s


def ours(z: Floats, y: list[int], s: Floats) -> tuple[float, float]:
    everybody = torch.ones(len(y), dtype=torch.bool)
    pair = pull_and_push(
        torch.from_numpy(z), torch.tensor(y), everybody, torch.from_numpy(s).to(torch.float64)
    )
    return float(pair[0]), float(pair[1])


def mean_pair_distance(s: Floats) -> float:
    mu = [row[1:] / row[0] for row in s if row[0] > 0]
    return float(np.mean([((a - b) ** 2).sum() for a, b in itertools.permutations(mu, 2)]))


def test_the_margin_is_the_mean_squared_distance_of_two_means() -> None:
    _, _, s = example()
    known = torch.from_numpy(s[:, 0] > 0)
    means = torch.from_numpy(s[:, 1:] / np.where(s[:, :1] > 0, s[:, :1], 1.0))
    assert float(mean_distance(means, known)) == pytest.approx(mean_pair_distance(s))
    for few in ([False] * 5, [False, True, False, False, False]):  # no pair, no distance
        assert float(mean_distance(means, torch.tensor(few))) == pytest.approx(0)


def test_pull_and_push_are_eq_15_up_to_the_margin() -> None:
    # rejects a push that counts the own class, and one that counts classes nobody has
    z, y, s = example()
    assert ours(z, y, s) == pytest.approx(eq_15(z, y, s, mean_pair_distance(s)))
    near = z / 100 + np.mean([row[1:] / row[0] for row in s if row[0] > 0], axis=0)
    assert ours(near, y, s) == pytest.approx(eq_15(near, y, s))  # nothing is beyond the margin
    assert eq_15(near, y, s) != pytest.approx(eq_15(z, y, s))


def test_the_push_has_a_bound_where_eq_15_has_none() -> None:
    z, y, s = example()
    pushed = ours(1e3 * z, y, s)[1]
    assert pushed <= 3 * mean_pair_distance(s)
    assert eq_15(1e3 * z, y, s)[1] > 1e5 * pushed


@pytest.mark.parametrize("rounds", [1, 20, 60])
def test_a_class_that_fades_keeps_its_mean(rounds: int) -> None:
    # seen: a remembered count below one row drew the mean to zero
    z, y, s = example()
    faded = s.copy()
    faded[1] *= 0.8**rounds
    assert ours(z, y, faded) == pytest.approx(ours(z, y, s))


def test_a_class_of_noise_neither_pulls_nor_pushes() -> None:
    # rejects any positive count under noise
    z, y, s = example()
    noisy = np.concatenate([s, [[5.9, 9.0, -9.0, 9.0]]])
    s[1, 0], noisy[1, 0] = 0, 5.9  # class 1 has a row here, and none beyond noise
    everybody = torch.ones(len(y), dtype=torch.bool)
    s[0, 0] = noisy[0, 0] = 8.0
    rows = torch.from_numpy(z), torch.tensor(y), everybody
    found = pull_and_push(*rows, torch.from_numpy(noisy), floor=6.0)
    assert [float(f) for f in found] == pytest.approx(ours(z, y, s * (s[:, :1] > 6.0)))


def test_absent_rows_neither_pull_nor_push() -> None:
    z, y, s = example()
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    seen = pull_and_push(torch.from_numpy(z), torch.tensor(y), mask, torch.from_numpy(s))
    kept = [i for i, there in enumerate(mask.tolist()) if there]
    expected = ours(z[kept], [y[i] for i in kept], s)
    assert (float(seen[0]), float(seen[1])) == pytest.approx(expected)


def test_a_total_without_rows_pulls_and_pushes_nobody_and_divides_by_nothing() -> None:
    z, y, _ = example()
    assert ours(z, y, np.zeros((5, 4))) == (0.0, 0.0)
    tiny = np.full((5, 4), 1e-9)  # counts that are noise
    assert np.isfinite(ours(z, y, tiny)).all()


def test_the_head_is_the_same_stacked_and_alone() -> None:
    totals = torch.rand(4, 3, 6, dtype=torch.float64) + torch.arange(4.0).view(4, 1, 1)
    totals[1, 2] = 0.0
    totals[3] = -totals[3]
    stacked = torch.func.vmap(lambda s: map_head(s, 1.0))(totals)
    for s, head in zip(totals, stacked, strict=True):
        torch.testing.assert_close(head, map_head(s, 1.0))
    assert not stacked[3].any()  # more than nu rows too few


@pytest.mark.parametrize(("classes", "width"), [(3, 5), (100, 4096)])
def test_a_random_pseudo_sum_has_a_random_head_and_no_rows(classes: int, width: int) -> None:
    s = random_pseudo_sums(random.key(0), (classes, width + 1), 0.5)
    assert not s[:, 0].any()
    eta = map_head(s.double(), 0.5)
    torch.testing.assert_close(eta[:, 1:].norm(dim=1), torch.full((classes,), width**0.5).double())
    torch.testing.assert_close(
        F.normalize(eta[:, 1:], dim=1), F.normalize(s[:, 1:].double(), dim=1)
    )


def test_a_random_head_needs_a_prior() -> None:
    with pytest.raises(MethodError, match=r"head_start = 'random' needs method\.nu above 0, not 0"):
        FedLogC(head_start="random", nu=0.0)


# whole runs

PLAIN = {"local_epochs": 1, "batch_size": max(SIZES), "lr": 0.1}


@pytest.mark.slow
def test_without_pull_and_push_it_is_fedlog() -> None:
    start = {"head_start": "exchange"}
    fedlog = trace(world("fedlog", options=start))
    without = trace(world("fedlog_c", options=start | {"alpha": 0.0, "beta": 0.0}))
    with_both = trace(world("fedlog_c", options=start | {"alpha": 0.1, "beta": 0.1}))
    names = [name for name in fedlog.state if name.startswith("clients/")]
    assert names
    for name in names:
        assert torch.allclose(fedlog.state[name], without.state[name], atol=1e-5)
    assert not all(torch.allclose(fedlog.state[n], with_both.state[n], atol=1e-3) for n in names)
    assert [line["comm/up_bytes"] for line in fedlog.rounds] == [
        line["comm/up_bytes"] for line in without.rounds
    ]


def body_of(small_world: World) -> nn.Sequential:
    start = small_world.server.task.starts["mlp"].params
    body = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    body.load_state_dict({f"0.{n}": start[f"1.{n}"].clone() for n in ("weight", "bias")})
    return body


def loss_of_rows(z: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Cross-entropy under the MAP head, 0.3 times the pull, minus 0.02 times the push."""
    eta = map_head(total.double(), 1.0).float()
    mu = total[:, 1:] / total[:, :1]
    margin = float(torch.stack([(a - b).square().sum() for a in mu for b in mu]).sum()) / 6
    loss = F.cross_entropy(eta[:, 0] + z @ eta[:, 1:].T, y)
    for phi, label in zip(z, y.tolist(), strict=True):
        for k in range(3):
            distance = (phi - mu[k]).square().sum()
            if k == label:
                loss = loss + 0.3 * distance / len(z)
            elif float(distance.detach()) < margin:
                loss = loss - 0.02 * distance / len(z)
    return loss


def test_a_round_is_one_step_down_the_gradient_of_eq_15_under_the_head_of_the_total() -> None:
    options = {"alpha": 0.3, "beta": 0.02}
    small_world = world("fedlog_c", options=options, train=PLAIN)
    state = trace(small_world, Plan(2), rounds=1).state
    x, y = (small_world.data.x - 0.5) / 2.0, small_world.data.y
    total = torch.zeros(3, 6)
    total.index_add_(0, y, torch.cat([torch.ones(len(y), 1), body_of(small_world)(x).detach()], 1))
    for client, rows in enumerate(small_world.population.train[i] for i in range(len(SIZES))):
        body = body_of(small_world)
        torch.autograd.backward(loss_of_rows(body(x[rows]), y[rows], total))
        for name, p in body.named_parameters():
            assert p.grad is not None
            kept = state[f"clients/mlp/net/1.{name.removeprefix('0.')}"][client]
            assert torch.allclose(kept, p.detach() - 0.1 * p.grad, atol=1e-5)


def test_the_total_comes_down_and_bodies_learn_from_a_random_head_in_round_1() -> None:
    small_world = world("fedlog_c", options={"head_start": "random"})
    fed = federation(small_world, Plan(2))
    before = small_world.server.task.starts["mlp"].params["1.weight"]
    line, _ = fed.advance()
    assert line["comm/up_bytes"] == line["comm/down_bytes"] == 3 * (5 + 1) * 4 * len(SIZES)
    assert isinstance(fed.server, Remembered)
    assert payload_bytes(fed.server) == 3 * 6 * 4
    assert fed.server.total[:, 0].tolist() == torch.bincount(small_world.data.y).tolist()
    assert not torch.allclose(state_of(fed)["clients/mlp/net/1.weight"][0], before)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 100.0])
def test_no_push_diverges_in_silence(beta: float) -> None:
    options = {"alpha": 0.0, "beta": beta}
    result = trace(world("fedlog_c", options=options, train={"lr": 0.01}), rounds=15)
    assert all(bool(torch.isfinite(array).all()) for array in result.state.values())
    assert all("refused" not in line for line in result.rounds)
