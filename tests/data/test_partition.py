"""Partitions: every row once, sizes, classes, keys, and the published shards in plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.core import random
from fedgist.data import PARTITIONS
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.partition import Partition, partition
from fedgist.data.partition_rules import generator
from fedgist.errors import DataError, InputError
from fedgist.recipe.reading import make

few = settings(max_examples=30)


def labelled(rows: int, test: int, classes: int, seed: int = 0) -> Dataset:
    """Labels in random order; class 0 is twice as common."""
    draw = np.random.default_rng(seed)

    def labels(count: int) -> Tensor:
        return torch.from_numpy(np.maximum(draw.integers(-1, classes, count), 0))

    y, y_test = labels(rows), labels(test)
    return Dataset("toy", torch.zeros(rows, 1), y, torch.zeros(test, 1), y_test, classes)


def lists(rows: Rows) -> list[list[int]]:
    return [rows[i].tolist() for i in range(len(rows))]


def flat(rows: Rows) -> list[int]:
    return [r for line in lists(rows) for r in line]


def mixture(rows: Tensor, y: Tensor, classes: int) -> Tensor:
    return torch.bincount(y[rows], minlength=classes) / len(rows)


BIG = labelled(3000, 900, 6)
ABOVE = (0, 1, 0, 1, 2, 2)  # the superclass of each class
NATURAL = replace(
    BIG, clients=torch.arange(3000) % 5, clients_test=torch.arange(900) % 5, superclasses=ABOVE
)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("iid", {}),
    ("dirichlet", {"alpha": 0.3}),
    ("dirichlet", {"alpha": 0.3, "alpha_sizes": 0.7}),
    ("size", {"alpha": 0.7}),
    ("shards", {"classes_per_client": 6}),
    ("pathological", {"classes_per_client": 2}),
    ("pathological", {"classes_per_client": 2, "alpha_sizes": 5.0}),
    ("natural", {}),
    ("pachinko", {"alpha_coarse": 0.3}),
]
EVERY = pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])


def test_every_partition_is_tried_here() -> None:
    assert {name for name, _ in CASES} == set(PARTITIONS)


@EVERY
def test_every_row_belongs_to_exactly_one_client_in_both_splits(
    name: str, options: dict[str, Any]
) -> None:
    divided = partition(NATURAL, name, 5, random.key(0), **options)
    assert sorted(flat(divided.train)) == list(range(3000))
    assert sorted(flat(divided.test)) == list(range(900))
    assert not flat(divided.validation)
    assert len(divided.train) == len(divided.test) == len(divided.validation) == 5


@EVERY
def test_the_key_decides_and_global_generators_do_not(name: str, options: dict[str, Any]) -> None:
    def divide(seed: int, noise: int) -> Partition:
        torch.manual_seed(noise)
        np.random.seed(noise)  # noqa: NPY002
        return partition(NATURAL, name, 5, random.key(seed), validation=0.2, **options)

    first, again, other = divide(1, 1), divide(1, 2), divide(2, 1)
    for split in ("train", "validation", "test"):
        assert lists(getattr(first, split)) == lists(getattr(again, split))
    assert lists(first.train) != lists(other.train)


@EVERY
def test_clients_are_tested_on_the_classes_that_they_train_on(
    name: str, options: dict[str, Any]
) -> None:
    # rejects test rows shared out by draws of their own
    divided = partition(NATURAL, name, 5, random.key(3), **options)
    for i in range(5):
        train = mixture(divided.train[i], NATURAL.y, 6)
        test = mixture(divided.test[i], NATURAL.y_test, 6)
        assert (
            len(divided.test[i]) < 60 or float((train - test).abs().sum()) < 0.35
        )  # fewer rows say little
        if name == "pathological":
            assert torch.equal(train > 0, test > 0)


@EVERY
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_validation_holds_out_a_share_of_each_clients_training_rows(
    name: str, options: dict[str, Any], share: float
) -> None:
    whole = partition(NATURAL, name, 5, random.key(0), **options)
    cut = partition(NATURAL, name, 5, random.key(0), validation=share, **options)
    assert lists(cut.test) == lists(whole.test)
    for kept, held, both in zip(
        lists(cut.train), lists(cut.validation), lists(whole.train), strict=True
    ):
        assert sorted(kept + held) == sorted(both)
        assert len(held) == int(share * len(both))


@few
@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 60), st.integers(0, 99))
def test_iid_parts_are_equal_but_for_one_row(rows: int, test: int, clients: int, seed: int) -> None:
    clients = min(clients, rows)
    divided = partition(labelled(rows, test, 3, seed), "iid", clients, random.key(seed))
    assert sorted(flat(divided.train)) == list(range(rows))
    assert sorted(flat(divided.test)) == list(range(test))
    for counts in (divided.train.counts, divided.test.counts):
        assert int(counts.max() - counts.min()) <= 1


@few
@given(
    st.integers(1, 80),
    st.integers(0, 60),
    st.integers(1, 20),
    st.floats(0.05, 100),
    st.integers(0, 99),
)
def test_sizes_leave_nobody_without_a_row(
    rows: int, test: int, clients: int, alpha: float, seed: int
) -> None:
    clients = min(clients, rows)
    divided = partition(
        labelled(rows, test, 3, seed), "size", clients, random.key(seed), alpha=alpha
    )
    assert sorted(flat(divided.train)) == list(range(rows))
    assert sorted(flat(divided.test)) == list(range(test))
    assert int(divided.train.counts.min()) >= 1
    assert test < clients or int(divided.test.counts.min()) >= 1


def test_sizes_differ_but_mixtures_do_not() -> None:
    divided = partition(BIG, "size", 5, random.key(0), alpha=1.0)
    counts = divided.train.counts.double()
    assert float(counts.max() / counts.min()) > 2
    overall = torch.bincount(BIG.y, minlength=6) / 3000
    for i in range(5):
        if len(divided.train[i]) > 300:
            assert float((mixture(divided.train[i], BIG.y, 6) - overall).abs().max()) < 0.08


@few
@given(
    st.integers(20, 200),
    st.integers(1, 6),
    st.floats(0.05, 100),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_dirichlet_uses_every_row_once_and_keeps_its_least_size(
    rows: int, clients: int, alpha: float, least: int, seed: int
) -> None:
    data = labelled(rows, 50, 4, seed)
    try:
        divided = partition(
            data, "dirichlet", clients, random.key(seed), alpha=alpha, min_size=least
        )
    except DataError as error:
        assert "was not reached in 100 draws" in str(error)  # noqa: PT017  # a small alpha may have no such draw
        return
    assert sorted(flat(divided.train)) == list(range(rows))
    assert sorted(flat(divided.test)) == list(range(50))
    assert int(divided.train.counts.min()) >= least


def test_dirichlet_goes_from_one_holder_of_a_class_to_equal_parts() -> None:
    # rejects alpha upside down, and proportions over classes instead of over clients
    def largest(alpha: float) -> float:
        divided = partition(BIG, "dirichlet", 5, random.key(0), alpha=alpha)
        held = torch.stack(
            [torch.bincount(BIG.y[divided.train[i]], minlength=6) for i in range(5)]
        ).double()
        return float((held / held.sum(0)).max(0).values.mean())

    assert largest(0.01) > 0.9
    assert 0.4 < largest(0.5) < 0.8
    assert largest(1e6) == pytest.approx(0.2, abs=0.01)


@few
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.integers(0, 99))
def test_shards_are_those_of_lg_fedavg(
    classes: int, clients: int, per_client: int, seed: int
) -> None:
    data = labelled(300, 100, classes, seed)
    per_class = int(per_client * clients / classes)
    if per_class < 1 or per_class * classes % clients:
        with pytest.raises(DataError, match="cannot be divided evenly"):
            partition(data, "shards", clients, random.key(seed), classes_per_client=per_client)
        return
    divided = partition(data, "shards", clients, random.key(seed), classes_per_client=per_client)
    classes_of_clients = []
    for rows, labels in ((divided.train, data.y), (divided.test, data.y_test)):
        shards = _lg_fedavg_shards(labels.tolist(), classes, per_class)
        given = [_whole_shards(of_client, shards) for of_client in lists(rows)]
        if all(shards):
            # every shard is given away, once
            assert Counter(shard for of_client in given for shard in of_client) == Counter(shards)
            assert {len(of_client) for of_client in given} == {per_class * classes // clients}
        known = [{int(labels[shard[0]]) for shard in of_client} for of_client in given]
        assert all(len(classes_known) <= per_client for classes_known in known)
        classes_of_clients.append(known)
    if len(data.y_test) >= 20 * classes * per_class:
        assert classes_of_clients[0] == classes_of_clients[1]


def _lg_fedavg_shards(labels: list[int], classes: int, per_class: int) -> list[tuple[int, ...]]:
    """Cut each label's rows as LG-FedAvg's code does: equally, leftovers one each to the first."""
    shards = []
    for label in range(classes):
        of_label = [i for i, y in enumerate(labels) if y == label]
        left = len(of_label) % per_class
        even, leftover = (of_label[:-left], of_label[-left:]) if left else (of_label, [])
        size = len(even) // per_class
        of_equal_size = [even[k * size : (k + 1) * size] for k in range(per_class)]
        for k, row in enumerate(leftover):
            of_equal_size[k].append(row)
        shards += [tuple(shard) for shard in of_equal_size]
    return shards


def _whole_shards(rows: list[int], shards: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Read a client's rows as whole shards, one after the other."""
    by_first_row = {shard[0]: shard for shard in shards if shard}
    given = []
    while rows:
        shard = by_first_row[rows[0]]
        assert tuple(rows[: len(shard)]) == shard
        given.append(shard)
        rows = rows[len(shard) :]
    return given


def test_shards_of_the_fedlog_paper_are_twenty_a_class_for_a_hundred_clients_of_two() -> None:
    y = torch.arange(6000) % 10
    data = Dataset("mnist", torch.zeros(6000, 1), y, torch.zeros(1000, 1), y[:1000], 10)
    divided = partition(data, "shards", 100, random.key(0))
    assert divided.train.counts.tolist() == [60] * 100
    assert divided.test.counts.tolist() == [10] * 100
    known = [set(y[divided.train[i]].tolist()) for i in range(100)]
    assert {len(k) for k in known} == {1, 2}  # a client may draw one class twice
    assert known == [set(y[divided.test[i]].tolist()) for i in range(100)]


@few
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 6), st.integers(0, 99))
def test_pathological_clients_have_exactly_so_many_classes(
    classes: int, clients: int, per_client: int, seed: int
) -> None:
    per_client = min(per_client, classes)
    data = labelled(60 * classes, 30 * classes, classes, seed)
    divided = partition(
        data, "pathological", clients, random.key(seed), classes_per_client=per_client
    )
    rows = flat(divided.train)
    assert len(rows) == len(set(rows))
    known = [set(data.y[divided.train[i]].tolist()) for i in range(clients)]
    assert {len(k) for k in known} == {per_client}
    holders = Counter(c for k in known for c in k)
    held = [holders.get(c, 0) for c in range(classes)]
    assert max(held) - min(held) <= 1
    assert set(rows) == {i for i, y in enumerate(data.y.tolist()) if holders[y]}


@pytest.mark.parametrize(
    ("name", "options"),
    [("dirichlet", {"alpha": 1e6}), ("pathological", {"classes_per_client": 6})],
)
def test_sizes_multiply_the_shares_of_classes(name: str, options: dict[str, Any]) -> None:
    # rejects sizes that change which classes a client has, and sizes drawn for each class
    def counts(alpha: float | None) -> Tensor:
        sizes: dict[str, Any] = {} if alpha is None else {"alpha_sizes": alpha}
        divided = partition(BIG, name, 5, random.key(4), **options, **sizes)
        rows = [torch.bincount(BIG.y[divided.train[i]], minlength=6) for i in range(5)]
        return torch.stack(rows).double()

    plain, alike, mixed = counts(None), counts(1e9), counts(0.6)
    assert (plain - alike).abs().max() <= 2
    assert float(mixed.sum(1).max() / mixed.sum(1).min()) > 3
    shares = mixed / mixed.sum(0)
    assert (shares - shares.mean(1, keepdim=True)).abs().max() < 0.02  # one size in all classes
    expected = generator(random.key(4), *SIZE_DRAWS[name]).dirichlet(np.full(5, 0.6))
    np.testing.assert_allclose(shares.mean(1).numpy(), expected, atol=0.02)


SIZE_DRAWS: dict[str, tuple[Any, ...]] = {"dirichlet": ("sizes", 0), "pathological": ("sizes",)}


def test_natural_clients_keep_their_own_rows_in_order() -> None:
    divided = partition(NATURAL, "natural", 5, random.key(0))
    assert all(line == list(range(i, 3000, 5)) for i, line in enumerate(lists(divided.train)))
    assert all(line == list(range(i, 900, 5)) for i, line in enumerate(lists(divided.test)))
    shared = partition(replace(NATURAL, clients_test=None), "natural", 5, random.key(0))
    assert sorted(flat(shared.test)) == list(range(900))
    assert shared.test.counts.tolist() == [180] * 5


SMALL = labelled(50, 20, 5)


@pytest.mark.parametrize(
    ("name", "clients", "options", "text"),
    [
        (
            "dirichlett",
            5,
            {},
            r"unknown partition 'dirichlett'; did you mean 'dirichlet'\?.*known: iid, dirichlet",
        ),
        ("iid", 60, {}, "clients.num_clients = 60, but toy has only 50 training samples"),
        ("iid", 0, {}, "clients.num_clients must be at least 1, not 0"),
        ("dirichlet", 5, {"alpha": 0.0}, "partition.alpha must be greater than 0, not 0"),
        ("size", 5, {"alpha": -1.0}, "partition.alpha must be greater than 0, not -1"),
        (
            "dirichlet",
            5,
            {"alpha": float("nan")},
            "partition.alpha must be greater than 0, not nan",
        ),
        ("dirichlet", 5, {"min_size": 40}, "partition.min_size = 40 was not reached in 100 draws"),
        ("shards", 7, {"classes_per_client": 2}, "makes 2 shards of each of 5 classes"),
        ("shards", 2, {"classes_per_client": 2}, "makes 0 shards of each of 5 classes"),
        (
            "pathological",
            5,
            {"classes_per_client": 6},
            r"partition\.classes_per_client must be 1\.\.5, not 6",
        ),
        (
            "pathological",
            5,
            {"classes_per_client": 0},
            r"partition\.classes_per_client must be 1\.\.5, not 0",
        ),
        ("natural", 5, {}, "needs the client of each row, which toy does not have"),
    ],
)
def test_what_cannot_be_divided_is_said(
    name: str, clients: int, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        partition(SMALL, name, clients, random.key(0), **options)


def test_a_wrong_number_of_natural_clients_is_said() -> None:
    with pytest.raises(DataError, match=r"clients\.num_clients = 4, but toy has 5 natural clients"):
        partition(NATURAL, "natural", 4, random.key(0))


def test_a_client_without_rows_is_named() -> None:
    data = replace(SMALL, clients=torch.arange(50) % 2 * 2)
    with pytest.raises(DataError, match="'natural' leaves client 1 of 3 without training rows"):
        partition(data, "natural", 3, random.key(0))


def test_an_unknown_name_without_a_near_one_reads_well() -> None:
    with pytest.raises(DataError, match=r"unknown partition 'zzz'; known: iid"):
        partition(SMALL, "zzz", 5, random.key(0))


@pytest.mark.slow
def test_pachinko_draws_superclasses_and_then_classes_in_them() -> None:
    many = replace(labelled(6000, 600, 6, seed=1), superclasses=ABOVE)
    # one superclass each as long as there is any; its classes alike
    found = partition(many, "pachinko", 60, random.key(0), alpha_coarse=0.01, alpha_fine=1e6)
    shares = torch.stack(
        [mixture(rows, many.y, 6) for rows in map(found.train.__getitem__, range(20))]
    )
    groups = torch.zeros(20, 3).index_add_(1, torch.tensor(ABOVE), shares)
    assert float(groups.max(1).values.mean()) > 0.95
    halves = shares[:, 4][groups[:, 2] > 0.9]  # of superclass 2 about half is class 4
    assert len(halves) > 2
    assert bool(((halves - 0.5).abs() < 0.2).all())
    sizes = found.train.counts
    assert int(sizes.min()) == int(sizes.max()) == 100
    # large concentrations: every client alike, as long as there are rows of all classes
    alike = partition(many, "pachinko", 60, random.key(0), alpha_coarse=1e6, alpha_fine=1e6)
    first = torch.zeros(3).index_add_(0, torch.tensor(ABOVE), mixture(alike.train[0], many.y, 6))
    assert float((first - 1 / 3).abs().max()) < 0.15


def test_pachinko_needs_superclasses() -> None:
    with pytest.raises(DataError, match="needs superclasses, which toy does not name"):
        partition(BIG, "pachinko", 5, random.key(0))
    for bad in ({"alpha_coarse": 0.0}, {"alpha_fine": -1.0}):
        recipe = {"partition": {"name": "pachinko", **bad}}
        with pytest.raises(InputError, match=r"partition.alpha_"):
            make(recipe)
