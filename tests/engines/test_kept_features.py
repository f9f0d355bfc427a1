"""Rows over a frozen body are encoded once, and nothing else about a run changes."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedgist
from fedgist.core import random
from fedgist.core.nets.net import Net
from fedgist.data.sources.file_sizes import in_words
from fedgist.engines import kept_features
from fedgist.engines.client_host import ClientHost
from fedgist.engines.kept_features import KeptFeatures, _cut
from fedgist.errors import InputError
from fedgist.methods.fedavg import FedAvg
from fedgist.recipe.overrides import ClientGroup
from fedgist.testing.small_worlds import (
    ALONE,
    CLASSES,
    FEATURES,
    Trace,
    local_engine,
    loopback,
    sections,
    trace,
    world,
)
from fedgist.world.world import World

FROZEN = {"name": "mlp", "hidden": [5], "frozen": True}
ADAPTED = {"name": "mlp", "hidden": [7, 6], "adapters": {"rank": 2, "layers": ["3"]}}


def frozen_world(model: dict[str, Any] | None = None, **about: Any) -> World:
    return world("fedavg", model=model or FROZEN, given={"public": None}, **about)


def with_features(small: World, **hosting: Any) -> World:
    return replace(small, hosting=replace(small.hosting, **hosting))


def kept_of(small: World) -> dict[str, KeptFeatures]:
    return local_engine(small).host.features


def is_same(a: Trace, b: Trace) -> bool:
    return a.rounds == b.rounds and all(torch.equal(a.state[n], b.state[n]) for n in a.state)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The row numbers (rows,) of each piece that a body has encoded."""
    seen: list[Tensor] = []
    plain = kept_features._encode

    def counted(encoder: Net, examples: Any, rows: Tensor) -> Tensor:
        seen.append(rows)
        return plain(encoder, examples, rows)

    monkeypatch.setattr(kept_features, "_encode", counted)
    return seen


def once(small: World) -> Tensor:
    """How often each row number is encoded, if each training and each test row is, once."""
    train, test = small.population.train.rows, small.population.test.rows
    most = int(max(train.max(), test.max())) + 1
    return train.bincount(minlength=most) + test.bincount(minlength=most)


@pytest.mark.parametrize("model", [FROZEN, ADAPTED])
def test_each_row_is_encoded_once_in_a_run(model: Any, encoded: list[Tensor]) -> None:
    trace(frozen_world(model), rounds=4)
    assert torch.equal(torch.cat(encoded).bincount(), once(frozen_world(model)))


@pytest.mark.parametrize("model", [FROZEN, ADAPTED])
@pytest.mark.parametrize("engine", [local_engine, loopback])
def test_memory_file_and_again_give_the_same_bits(
    model: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ways: tuple[dict[str, Any], ...] = ({}, {"features": "anew"}, {"feature_memory": 0})
    small = frozen_world(model)
    traces = [trace(with_features(small, **way), ALONE, make_engine=engine) for way in ways]
    assert is_same(traces[0], traces[1])
    assert is_same(traces[0], traces[2])
    (file,) = {path.parent.parent for path in tmp_path.rglob("values")}
    assert file.stat().st_mode & 0o077 == 0, "only its owner can read the user's cache of features"


def test_a_later_run_reads_the_file_and_other_weights_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[Tensor]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = trace(with_features(frozen_world(), feature_memory=0))
    done = len(encoded)
    again = trace(with_features(frozen_world(), feature_memory=0))
    first_rows = len(list(tmp_path.rglob("values")))  # of each file
    assert done > 2 * first_rows > 0
    assert len(encoded) == done + first_rows
    assert is_same(first, again)
    trace(with_features(frozen_world(seed=1), feature_memory=0))
    assert len(encoded) > done + 2 * first_rows


class Outside(nn.Module):
    """A body whose numbers are no parameters, such as those of a program in another format."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.numbers).tanh()


def outside_world(numbers: Tensor, layers: Sequence[int] = ()) -> World:
    """A world with such a body: ``numbers`` (6, features), and linear layers of these widths."""
    widths = [numbers.shape[1], *layers, CLASSES]

    def build() -> nn.Module:
        linear = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        return nn.Sequential(Outside(numbers), *linear)

    given = {"public": None, "groups": {"mine": ClientGroup(build)}}
    return world("fedavg", model={"frozen": True}, given=given)


def test_a_body_without_parameters_encodes_each_row_once(encoded: list[Tensor]) -> None:
    small = outside_world(torch.ones(FEATURES, 2))
    trace(small, rounds=3)
    assert torch.equal(torch.cat(encoded).bincount(), once(small))


@settings(max_examples=5, phases=[Phase.generate])
@given(st.integers(0, 2**31), st.integers(1, 6), st.lists(st.integers(1, 4), max_size=2), st.data())
def test_a_body_is_known_by_what_it_does(
    seed: int, width: int, layers: list[int], data: Any
) -> None:
    """Other numbers or other code give other features, whatever a module shows of them."""
    numbers = random.normal(random.key(seed), (FEATURES, width))
    changed = numbers.clone()
    changed[data.draw(st.integers(0, FEATURES - 1)), data.draw(st.integers(0, width - 1))] += 0.5
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        for of in (numbers, changed):
            small = outside_world(of, layers)
            in_file = trace(with_features(small, feature_memory=0), ALONE, rounds=1)
            assert is_same(in_file, trace(with_features(small, features="anew"), ALONE, rounds=1))


def test_a_full_or_unwritable_cache_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fedgist").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"raise engine\.feature_memory, or use"):
        kept_of(with_features(frozen_world(), feature_memory=0))


class Augmenting(FedAvg):
    """A method that changes its inputs."""

    alters_inputs = True


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"model": {"name": "mlp", "hidden": [5]}}, "a body that learns"),
        ({"model": {"name": "logistic", "frozen": True}}, "no body at all"),
        ({"given": {}}, "public rows, which have no features"),
        ({"method": Augmenting()}, "a method that reads rows"),
    ],
)
def test_rows_stay_rows_where_features_cannot_stand_for_them(
    about: dict[str, Any], why: str
) -> None:
    options: dict[str, Any] = {"model": FROZEN, "given": {"public": None}} | about
    assert not kept_of(world(options.pop("method", "fedavg"), **options)), why


def test_a_run_says_where_large_features_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = kept_of(with_features(frozen_world(), feature_memory=0))["mlp"]
    rows, size = sum(bank.shape[0] for bank in kept.banks.values()), 62 * 5 * 4
    assert rows == 62
    assert kept.note.startswith(f"features of 62 rows by mlp ({in_words(size)}) are kept in ")
    assert str(tmp_path) in kept.note
    assert not kept_of(frozen_world())["mlp"].note


def noted_run(recipe: dict[str, Any], data: Any) -> Any:
    with pytest.warns(UserWarning, match="the frozen body has random weights"):
        return fedgist.run(recipe, data=data)


def test_augmented_images_stay_images() -> None:
    x, y = torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8), torch.arange(24) % 2
    recipe: dict[str, Any] = {
        "method": {"name": "fedavg"},
        "model": {"name": "conv4", "frozen": True},
        "clients": {"num_clients": 2},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1},
    }
    for augment, kept in (([], True), (["flip"], False)):
        recipe["data"] = {"augment": augment}
        result = noted_run(recipe, (x, y, x, y))
        assert bool(result.server_run.engine.host.features) == kept


def test_rows_of_several_clients_are_encoded_once(encoded: list[Tensor]) -> None:
    shared = [torch.arange(5), torch.arange(3, 9), torch.arange(8)]
    about = {"clients": shared, "clients_test": [torch.arange(4)] * 3, "public": None}
    small = world("fedavg", model=FROZEN, given=about, clients={"num_clients": 3})
    first = trace(small, ALONE)
    counts = torch.cat([rows for rows in encoded if len(rows) == 9]).bincount()
    assert counts.tolist() == [1] * 9
    assert is_same(first, trace(with_features(small, features="anew"), ALONE))


def test_a_model_has_its_body_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes rows, and is that of a run whose clients read rows."""
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    recipe: dict[str, Any] = {
        "method": {"name": "fedavg"},
        "model": FROZEN,
        "clients": {"num_clients": 2},
        "train": {"num_rounds": 2},
        "engine": {"workers": 1},
    }
    kept = noted_run(recipe, (x, y, x, y))
    monkeypatch.setattr(FedAvg, "alters_inputs", True)
    plain = noted_run(recipe, (x, y, x, y))
    assert bool(kept.server_run.engine.host.features) != bool(plain.server_run.engine.host.features)
    torch.testing.assert_close(kept.model(0)(x), plain.model(0)(x))


@given(st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_chain_in_two_parts_is_the_chain(seed: int, widths: list[int], data: Any) -> None:
    """Wherever the learned layers are, in chains within chains."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in zip([3, *widths], widths, strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    at = data.draw(st.integers(0, len(layers)))
    chain = nn.Sequential(nn.Flatten(), nn.Sequential(*layers[:at]), *layers[at:])
    names = [name for name, _ in chain.named_parameters()]
    learned = data.draw(st.lists(st.sampled_from(names), unique=True))
    first, rest = _cut(chain, learned)
    x = random.normal(random.key(seed), (2, 3))
    assert torch.equal(rest(first(x)), chain(x))
    assert not [name for name, _ in first.named_parameters() if name in learned]
    assert {name for name, _ in rest.named_parameters()} >= set(learned)


def test_every_architecture_has_its_own_features() -> None:
    about = sections(FedAvg(), model=None, architectures=2, frozen=True)
    host: ClientHost = local_engine(world("fedavg", given={"public": None}, **about)).host
    assert {name: kept.arch.input_shape for name, kept in host.features.items()} == {
        "wide": (5,),
        "flat": (5,),
    }
    start: Net = host.task.starts["wide"]
    table = host.population.train.table([0])
    kept = host.features["wide"].examples("train", table).batch(table).x[0]
    plain = host.population.examples.batch(table).x[0]
    torch.testing.assert_close(kept, start.features(plain))
