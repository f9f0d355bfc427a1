"""Test rows are chosen within each client, stratified, in folds that cover all rows once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core import random
from fedgist.data.content_draws import split_by_content
from fedgist.data.dataset import Dataset
from fedgist.data.division import Division, OwnTestRowsError
from fedgist.data.held_out_rows import held_out
from fedgist.data.partition import hold_out
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError, RecipeError
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of

Rows = list[tuple[str, str]]  # the class and the client of each row
ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("XYZ")), min_size=1, max_size=60)


def columns(rows: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
    return [np.array(column, dtype=object) for column in zip(*rows, strict=True)]


def folds(k: int, labels: Any, clients: Any = None, groups: Any = None, **how: Any) -> np.ndarray:
    masks = [
        held_out(Division(folds=k, number=i, **how), labels, clients, groups) for i in range(k)
    ]
    return np.array(masks)


@given(ROWS, st.integers(2, 6))
def test_each_row_is_tested_once_and_folds_are_alike(rows: Rows, k: int) -> None:
    labels, clients = columns(rows)
    masks = folds(k, labels, clients)
    assert (masks.sum(0) == 1).all()
    for client in set(clients):
        of_client = masks[:, clients == client].sum(1)
        assert of_client.max() - of_client.min() <= 1
        for label in set(labels):
            of_class = masks[:, (clients == client) & (labels == label)].sum(1)
            assert of_class.max() - of_class.min() <= 1


@given(ROWS, st.integers(2, 4), st.data())
def test_groups_stay_together(rows: Rows, k: int, data: st.DataObject) -> None:
    labels, clients = columns(rows)
    names = st.lists(st.sampled_from("pqrstu"), min_size=len(rows), max_size=len(rows))
    groups = clients + np.array(data.draw(names), dtype=object)  # a group is of one client
    fraction = held_out(Division(fraction=0.4), labels, clients, groups)
    masks = folds(k, labels, clients, groups)
    assert (masks.sum(0) == 1).all()
    for mask in (*masks, fraction):
        for member in {*groups}:
            assert len(set(mask[groups == member].tolist())) == 1


@given(ROWS, st.integers(2, 4), st.data())
def test_a_group_of_several_clients_is_together_or_refused(
    rows: Rows, k: int, data: st.DataObject
) -> None:
    # seen: 13 of 18 patients with test rows in one town had training rows in another
    labels, clients = columns(rows)
    names = st.lists(st.sampled_from("pqr"), min_size=len(rows), max_size=len(rows))
    groups = np.array(data.draw(names), dtype=object)
    for mask in folds(k, labels, clients, groups, within="pooled"):
        assert all(len(set(mask[groups == group].tolist())) == 1 for group in {*groups})
    if len({*zip(groups, clients, strict=True)}) > len({*groups}):
        with pytest.raises(DataError, match=r"data\.group: [pqr] has rows of the clients"):
            folds(k, labels, clients, groups)


@given(ROWS, st.integers(0, 3), st.sampled_from([None, 3]))
def test_a_client_is_divided_as_by_itself(rows: Rows, number: int, k: int | None) -> None:
    labels, clients = columns(rows)
    division = Division(0.3, k, number, 2)
    together = held_out(division, labels, clients)
    for client in set(clients):
        own = clients == client
        assert (together[own] == held_out(division, labels[own])).all()


@given(ROWS, st.floats(0.01, 0.9))
def test_a_share_of_each_client_is_tested(rows: Rows, fraction: float) -> None:
    labels, clients = columns(rows)
    mask = held_out(Division(fraction), labels, clients)
    for client in set(clients):
        own = clients == client
        counts = Counter(labels[own])
        trained = Counter(labels[own & ~mask])
        assert all(trained[label] for label in counts)  # each keeps a training row
        spare = sum(counts.values()) - len(counts)
        assert mask[own].sum() >= min(spare, max(1, int(fraction * own.sum())))


def test_pooled_rows_are_divided_by_class_alone() -> None:
    labels, clients = columns([("ab"[i % 2], "XYZ"[i % 3]) for i in range(90)])
    pooled = Division(0.25, within="pooled")
    assert (held_out(pooled, labels, clients) == held_out(pooled, labels)).all()
    assert Counter(labels[held_out(pooled, labels)]) == {"a": 11, "b": 11}


def test_repeats_are_other_draws_and_the_same_each_time() -> None:
    labels = np.zeros(100)
    shares = [held_out(Division(0.2, number=i, repeats=5), labels) for i in range(5)]
    assert len({mask.tobytes() for mask in shares}) == 5
    assert [mask.sum() for mask in shares] == [20] * 5
    assert (shares[3] == held_out(Division(0.2, number=3, repeats=9), labels)).all()
    first, second = (
        [held_out(Division(folds=4, number=4 * repeat + i, repeats=2), labels) for i in range(4)]
        for repeat in (0, 1)
    )
    assert (np.sum(second, 0) == 1).all()
    assert any((a != b).any() for a, b in zip(first, second, strict=True))


def test_no_share_is_no_test_row() -> None:
    assert not held_out(Division(0.0), np.zeros(9)).any()
    with pytest.raises(DataError, match=r"test_fraction is 1.0; it must be at least 0 and below 1"):
        held_out(Division(1.0), np.zeros(9))


def some_rows(count: int = 60) -> Dataset:
    x = torch.arange(3.0 * count).view(count, 3)
    y = torch.arange(count) % 2
    return Dataset("rows", x, y, x[:0], y[:0], 2)


def test_private_folds_cover_all_rows_and_one_row_more_moves_none() -> None:
    data, k = some_rows(), 5
    parts = [Division(folds=k, number=i) for i in range(k)]
    held = torch.stack([split_by_content(data, part, 7)[1] for part in parts])
    assert (held.sum(0) == 1).all()
    one_less = data.only(torch.arange(59))
    again = torch.stack([split_by_content(one_less, part, 7)[1] for part in parts])
    assert torch.equal(held[:, :59], again)
    other = split_by_content(data, replace(parts[0], number=k, repeats=2), 7)[1]
    assert not torch.equal(other, held[0])


@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), max_size=4), st.data())
def test_validation_rows_are_whole_groups_as_many_as_fit(
    of_clients: list[list[int]], data: st.DataObject
) -> None:
    """``of_clients`` is the group of each row of each client."""
    share, key = data.draw(st.floats(0.05, 0.95)), random.key(data.draw(st.integers(0, 99)))
    groups = torch.tensor([group for own in of_clients for group in own], dtype=torch.int64)
    train = list(torch.split(torch.arange(len(groups)), [len(own) for own in of_clients]))
    kept, held = hold_out(train, share, key, None, groups)
    learned, validated = set[int](), set[int]()
    for client, rows in enumerate(train):
        assert torch.equal(torch.cat([kept[client], held[client]]).sort().values, rows)
        assert len(held[client]) <= share * len(rows)
        learned |= set(groups[kept[client]].tolist())
        validated |= set(groups[held[client]].tolist())
    assert not learned & validated
    for group in learned:  # none of these would have fitted as well
        left = [int(share * len(rows)) - len(held[i]) for i, rows in enumerate(train)]
        assert any(int((groups[rows] == group).sum()) > left[i] for i, rows in enumerate(train))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.integers(0, 5), st.integers(0, 99))
def test_a_site_holds_out_the_groups_that_a_simulation_does(
    own: list[int], number: int, seed: int
) -> None:
    """It knows no other site's rows, and numbers its own groups by itself."""
    key, alone = random.key(seed), torch.tensor(own)
    others = [torch.tensor([9, 9, 10, 11, 12]) + 4 * client for client in range(number)]
    groups = torch.cat([*others, alone])
    train = list(torch.split(torch.arange(len(groups)), [5] * number + [len(own)]))
    together = hold_out(train, 0.4, key, None, groups)[1][number] - 5 * number
    renumbered = torch.unique(alone, return_inverse=True)[1]
    rows = [torch.arange(len(own))]
    assert torch.equal(hold_out(rows, 0.4, key, None, renumbered, first=number)[1][0], together)


def table(folder: Path) -> dict[str, Any]:
    lines = ["age,patient,town,sick"]
    lines += [f"{i % 17},p{i // 3},{'AB'[i // 30]},{i // 3 % 2}" for i in range(60)]
    (folder / "t.csv").write_text("\n".join(lines))
    return {"path": folder / "t.csv", "label": "sick", "client": "town", "group": "patient"}


def test_patients_of_a_table_stay_together_and_are_no_input(tmp_path: Path) -> None:
    options = table(tmp_path)
    patients = []
    for number in range(4):
        data = load_data("table", division=Division(folds=4, number=number), **options)
        assert data.x.shape[1] == 1
        assert len(data.x_test) % 3 == 0
        patients.append(len(data.x_test))
    assert sum(patients) == 60
    (tmp_path / "t.csv").write_text((tmp_path / "t.csv").read_text() + "\n3,,A,1")
    with pytest.raises(DataError, match="group column 'patient' is empty in row 61"):
        load_data("table", **options)


@pytest.mark.parametrize("partition", [{"name": "natural"}, {"name": "dirichlet", "alpha": 1.0}])
def test_patients_of_a_table_stay_together_in_validation(
    tmp_path: Path, partition: dict[str, Any]
) -> None:
    data = {"name": "table", **table(tmp_path), "validation": 0.4}
    data["path"] = str(data["path"])
    raw: dict[str, Any] = {
        "data": data | {"train_rows": 47, "draw": "random"},
        "partition": partition,
        "clients": {"num_clients": 2},
        "model": {"name": "logistic"},
    }
    made = world_of(make(raw))
    groups = made.data.groups
    assert groups is not None
    assert len(groups) == 47
    learned, held = groups[made.partition.train.rows], groups[made.partition.validation.rows]
    assert len(held) > 0
    assert not set(learned.tolist()) & set(held.tolist())
    with pytest.raises(RecipeError, match=r"data\.held_out draws single rows, and data\.group"):
        world_of(make(raw | {"data": data | {"validation": 0.0, "held_out": 5}}))


@pytest.mark.parametrize("source", ["parquet", "huggingface"])
def test_other_sources_have_groups_too(tmp_path: Path, source: str) -> None:
    """The rows of a patient are tested together, within each town."""
    patient, town = np.repeat(np.arange(20), 3), np.repeat([0, 1], 30)
    columns = {"age": np.arange(60.0), "p": patient, "town": town, "sick": patient % 2}
    frame = pd.DataFrame(columns)
    if source == "parquet":
        frame.to_parquet(path := tmp_path / "t.parquet")
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_pandas(frame).save_to_disk(path := tmp_path / "saved")
    options: dict[str, Any] = {"path": path, "label": "sick", "client": "town", "group": "p"}
    if source == "huggingface":
        options["features"] = ["age"]
    tested: list[int] = []
    for number in range(5):
        data = load_data(source, division=Division(folds=5, number=number), **options)
        assert data.x.shape[1] == 1
        assert data.groups is not None
        assert torch.bincount(data.groups).tolist() == [3] * 16
        ages = data.x_test[:, 0].int().tolist()
        whole = {age // 3 for age in ages}
        assert len(ages) == 3 * len(whole)
        assert {patient // 10 for patient in whole} == {0, 1}
        tested += ages
    assert sorted(tested) == [*range(60)]
    own = {"test": "sick"} if source == "parquet" else {"train": "train", "test": "train"}
    with pytest.raises(DataError, match="group = 'p' is not read: "):
        load_data(source, **(options | own))


def test_arrays_have_groups_too(tmp_path: Path) -> None:
    x, patient = np.arange(60.0).reshape(30, 2), np.arange(30) // 5
    np.savez(tmp_path / "d.npz", x=x, y=patient % 2, group=patient)
    data = load_data("npz", path=tmp_path / "d.npz", division=Division(folds=3))
    assert len({int(row[0]) // 10 for row in data.x_test}) * 5 == len(data.x_test)
    assert data.groups is not None
    assert torch.bincount(data.groups).tolist() == [5] * 4


@pytest.mark.parametrize(
    ("division", "stated"),
    [
        (Division(folds=3), "folds = 3"),
        (Division(repeats=4), "repeats = 4"),
        (Division(0.2), "test_fraction = 0.2"),
    ],
)
def test_rows_are_not_divided_where_they_are(
    tmp_path: Path, division: Division, stated: str
) -> None:
    options = table(tmp_path) | {"test": "age", "group": None}
    del options["group"]
    if division.fraction is not None:
        options["test_fraction"] = division.fraction
    with pytest.raises(
        OwnTestRowsError, match=f"{stated} is not read: test = 'age' names the test"
    ):
        load_data("table", division=replace(division, fraction=None), **options)


def test_sources_with_test_rows_of_their_own_have_no_folds(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="folds = 3 is not read: the test rows of digits are always"
    ):
        load_data("digits", division=Division(folds=3))
    options = table(tmp_path)
    options["test"] = options["path"]
    with pytest.raises(DataError, match="group = 'patient' is not read: test = "):
        load_data("table", **options)
    del options["test"]
    with pytest.raises(DataError, match=r"privacy.unit = 'record' protects each row: leave it out"):
        load_data("table", secret=1, **options)


def test_a_division_that_there_is_not_is_named() -> None:
    data = {"name": "digits", "folds": 3, "repeats": 2, "division": 6}
    with pytest.raises(RecipeError, match="division = 6 is not below folds x repeats = 6"):
        make({"data": data})
    assert make({"data": data | {"division": 5}}).data.test_rows == Division(None, 3, 5, 2)
