"""FedBN beside plain torch modules: what is averaged, and what stays with each client."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import fedgist
from drifting_clients import LR, Clients, batch_normed
from fedgist.core.nets.net import split_head
from fedgist.methods.fedavg import FedAvg
from fedgist.methods.fedbn import FedBN
from fedgist.testing import check_reduces_to
from fedgist.testing.small_worlds import world

ROUNDS, EPOCHS = 4, 2
MODEL = {"name": "drifting_clients:batch_normed"}
NORM = "2."  # the batch norm of the net


def by_torch(nets: list[nn.Module], clients: Clients) -> None:
    """Train modules in rounds; average all but batch norm, weighted by rows."""
    sizes = torch.tensor([float(len(x)) for x in clients.x])
    for _ in range(ROUNDS):
        for net, x, y in zip(nets, clients.x, clients.y, strict=True):
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            for _ in range(EPOCHS):
                optimizer.zero_grad()
                loss = F.cross_entropy(net(torch.from_numpy(x).float()), torch.from_numpy(y))
                torch.autograd.backward(loss)
                optimizer.step()
        states = [net.state_dict() for net in nets]
        for name in states[0]:
            if not name.startswith(NORM):
                mean = sum(n * s[name] for n, s in zip(sizes, states, strict=True)) / sizes.sum()
                for state in states:
                    state[name].copy_(mean)


def test_rounds_are_those_of_plain_modules() -> None:
    # rejects an average of weights of batch norm, of its statistics, and one without weights
    clients = Clients.drawn(9, 14, 20, seed=5)
    data, rows = clients.data()
    recipe = {
        "method": {"name": "fedbn"},
        "model": MODEL,
        "data": {"normalize": "none"},
        "train": {
            "num_rounds": ROUNDS,
            "local_epochs": EPOCHS,
            "lr": LR,
            "optimizer": "sgd",
            "batch_size": 20,
        },
        "engine": {"workers": 1, "cohort_size": 3},
    }
    tests = [torch.arange(6)] * 3
    done = fedgist.run(recipe, data=data, clients=rows, clients_test=tests)
    (start,) = done.server_run.side.task.starts.values()
    nets = []
    for _ in range(3):
        net = batch_normed((3,), 3)
        net.load_state_dict(start.params | start.buffers, strict=False)
        nets.append(net)
    before = copy.deepcopy(nets)
    by_torch(nets, clients)
    for client, net in enumerate(nets):
        with torch.no_grad():
            x = data.x[:8]
            torch.testing.assert_close(done.model(client)(x), net.eval()(x), atol=2e-5, rtol=1e-4)
            assert not torch.allclose(net(x), before[client].eval()(x), atol=1e-2)
    own = [dict(net.named_buffers())["2.running_mean"] for net in nets]
    assert not torch.allclose(own[0], own[1], atol=1e-2)


def test_without_batch_norm_it_is_fedavg_and_says_so() -> None:
    check_reduces_to(FedBN(), FedAvg(), model={"name": "mlp", "hidden": [6]})
    task = world("fedbn").server.task
    assert FedBN().notes(task) == ("without batch norm FedBN is FedAvg: mlp",)


def test_all_of_batch_norm_and_nothing_else_stays() -> None:
    arch = split_head(lambda: batch_normed((3,), 3), (3,), 3)
    net = arch.start(0)
    assert {name for name in net.state() if arch.layers.holds(FedBN.keeps, name)} == {
        f"{NORM}{array}" for array in ("weight", "bias", "running_mean", "running_var")
    }
    assert net.state("batch_norm").keys() | net.state("but_batch_norm").keys() == net.state().keys()
