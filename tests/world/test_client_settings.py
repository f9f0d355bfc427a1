"""What clients set for themselves, in a recipe and in a site's own file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core import random
from fedgist.errors import RecipeError
from fedgist.methods.repshare import Release
from fedgist.testing.small_worlds import PAIRS, federation, loopback, trace, world
from fedgist.world.client_settings import client_settings, settings_in
from fedgist.world.world import World

WIDTH = 5


def settled(tables: Mapping[str, Any], **options: Any) -> World:
    return world("repshare", options=options, clients={"settings": tables})


def test_clients_release_what_they_set() -> None:
    tables = {
        "silent": {"clients": [0], "m_up": 0},
        "careful": {"clients": [2, 4], "m_up": 1, "classes": [1, 2]},
    }
    small_world = settled(tables, m_up=2, wishes=False)
    assert small_world.hosting.own[4].method == Release(m_up=1, classes=(1, 2))
    fed = federation(small_world)
    fed.advance()
    rows = fed.server.newest.arrays["rows"] > 0  # (clients, 1 + M_up, classes)
    fed.engine.close()
    assert rows[0, 0].any()
    assert not rows[0, 1:].any()
    for client in (2, 4):
        assert not rows[client, :, 0].any()
        assert not rows[client, 2].any()
    assert rows[1, 2].any()
    assert rows[3, 2].any()


def test_bytes_are_those_of_what_is_released() -> None:
    lines = {}
    for name, tables in {"all": {}, "no class 0": {"a": {"share": 1.0, "classes": [1, 2]}}}.items():
        fed = federation(settled(tables))
        lines[name] = fed.advance()[0]["comm/up_bytes"]
        counts = fed.server.newest.arrays["rows"]
        fed.engine.close()
        sent = int((counts > 0).sum())
        assert lines[name] == sent * 4 * (WIDTH + 1) + 5 * math.ceil(counts[0].numel() / 8)
    assert lines["no class 0"] < lines["all"]


@pytest.mark.parametrize("make_engine", [None, loopback])
def test_a_client_hears_whom_it_names_and_as_many_as_it_wants(make_engine: Any) -> None:
    tables = {
        "choosy": {"clients": [1], "hears": [3]},
        "quiet": {"clients": [2], "m_down": 0},
    }
    small_world = settled(tables, m_down=2, wishes=True)
    fed = federation(small_world, PAIRS, make_engine) if make_engine else federation(small_world)
    fed.advance()
    orders, downs, _ = fed.downloads(1)
    down = {order.client: message for order, message in zip(orders, downs, strict=True)}
    kept = fed.server.newest.arrays
    assert kept["gets"].flatten().tolist() == [2, 2, 0, 2, 2]
    assert kept["hears"][1].tolist() == [0, 0, 0, 1, 0]
    fed.engine.close()
    assert not down[2].there.any()
    assert down[2].known.any()
    assert down[1].there[0].any()
    assert not down[1].there[1].any()  # there is but one that it hears
    mean = kept["total"][3, 1] / kept["rows"][3, 1].clamp(min=1).unsqueeze(1)
    assert torch.equal(down[1].seen[0], mean)


@pytest.mark.slow
def test_settings_do_not_depend_on_stacks() -> None:
    tables = {"some": {"share": 0.4, "m_up": 1}, "more": {"share": 0.4, "classes": [0]}}
    first = trace(settled(tables, m_up=2), PAIRS)
    for other in (trace(settled(tables, m_up=2), make_engine=loopback),):
        assert first.rounds[-1]["comm/up_bytes"] == other.rounds[-1]["comm/up_bytes"]


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4).filter(lambda s: sum(s) <= 1.0),
    st.integers(1, 40),
)
def test_shares_are_of_all_clients(shares: list[float], count: int) -> None:
    side = WORLD.server
    tables = {str(i): {"share": share, "m_up": i % 2} for i, share in enumerate(shares)}
    given = client_settings(tables, side.method, side.task, count, random.key(1))
    assert set(given) <= set(range(count))
    assert abs(len(given) - sum(shares) * count) <= 1.0


WORLD = world("repshare")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"a": {"m_up": 1}}, "clients.settings.a: give share or clients"),
        ({"a": {"clients": [0], "share": 0.1}}, "clients.settings.a: give share or clients"),
        ({"a": {"clients": [0], "n_up": 1}}, "clients.settings.a.n_up: unknown key"),
        ({"a": {"clients": [0], "m_up": 2}}, "clients.settings.a: m_up must be from 0 to 1"),
        ({"a": {"clients": [0], "m_up": "x"}}, "clients.settings.a.m_up"),
        ({"a": {"clients": [0], "classes": [3]}}, r"clients.settings.a: classes has \[3\]"),
        ({"a": {"clients": [0], "hears": [1]}}, "need method.wishes = true"),
        ({"a": {"clients": [5]}}, "clients.settings.a: client 5 does not exist"),
        ({"a": {"clients": [1]}, "b": {"clients": [1]}}, "b: client 1 has other settings"),
        ({"a": {"share": 0.7}, "b": {"share": 0.6}}, "client|add up to 1.3"),
        ({"a": {"share": 0.0}}, "clients.settings.a.share"),
    ],
)
def test_impossible_settings_are_refused(tables: Mapping[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        settled(tables)


def test_a_method_without_such_settings_refuses_them() -> None:
    with pytest.raises(RecipeError, match="clients of FedAvg have no settings of their own"):
        world("fedavg", clients={"settings": {"a": {"clients": [0], "m_up": 1}}})


def test_a_client_that_hears_itself_alone_is_refused() -> None:
    for tables in ({"a": {"clients": [1], "hears": [1]}}, {"a": {"share": 1.0, "hears": [4]}}):
        with pytest.raises(RecipeError, match="hears names nobody but the client"):
            settled(tables, wishes=True)
    settled({"a": {"clients": [1, 4], "hears": [1, 4]}}, wishes=True)


def test_a_site_states_its_own() -> None:
    about = 3, WORLD.server.method, WORLD.server.task, "site.toml: settings"
    stated = settings_in({"m_up": 0, "classes": [1]}, *about)
    assert stated.method == Release(m_up=0, classes=(1,))
    with pytest.raises(RecipeError, match=r"site.toml: settings: m_up must be from 0"):
        settings_in({"m_up": 9}, *about)


@pytest.mark.slow
def test_sites_with_files_of_their_own_do_as_clients_of_the_recipe() -> None:
    texts = {1: "m_up = 0", 3: "classes = [0, 2]\nm_down = 0", 4: "hears = [0, 2]"}
    plain = settled({}, m_up=2, m_down=2, wishes=True)
    own = {}
    for client, text in texts.items():
        about = client, plain.server.method, plain.server.task, "site.toml"
        own[client] = settings_in(tomllib.loads(text), *about)
    tables = {f"t{c}": {"clients": [c], **tomllib.loads(text)} for c, text in texts.items()}
    of_recipe = trace(settled(tables, m_up=2, m_down=2, wishes=True), make_engine=loopback)
    of_files = trace(replace(plain, hosting=replace(plain.hosting, own=own)), make_engine=loopback)
    assert of_files.rounds == of_recipe.rounds
    assert all(torch.equal(of_files.state[n], a) for n, a in of_recipe.state.items())
    without = trace(plain, make_engine=loopback)
    assert without.rounds[-1]["comm/up_bytes"] > of_files.rounds[-1]["comm/up_bytes"]
    assert without.rounds[-1]["comm/down_bytes"] > of_files.rounds[-1]["comm/down_bytes"]
