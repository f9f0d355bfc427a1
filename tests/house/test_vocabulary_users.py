"""Every function and every field of the vocabulary has a user: a method, or one of the laws'."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import pytest

import fedgist.core
from fedgist.core.exchange import Silence
from fedgist.core.method import Context, Method, Phase
from fedgist.engines.method_check import check_method
from fedgist.recipe.method_loading import VOCABULARY
from fedgist.testing.small_worlds import federation, law_world
from method_objects import METHOD_OBJECTS


def says(method: Method, name: str) -> bool:
    """Whether a method says something of its own here, or its exchange does."""
    by_exchange = hasattr(Silence, name) and type(method.exchange) is not Silence
    return name in vars(type(method)) or by_exchange


@pytest.mark.parametrize("name", [*VOCABULARY, "keeps", "merges_clients", "accepts_late"])
def test_every_function_and_constant_has_a_user(name: str) -> None:
    assert [user for user, method in METHOD_OBJECTS.items() if says(method, name)]


def phases() -> Iterator[Phase]:
    for method in METHOD_OBJECTS.values():
        fed = federation(law_world(method))
        said = check_method(method, fed.task, fed.server, fed.context("").key)
        assert said == [*method.notes(fed.task)]
        for number in range(3):
            for stage in method.stages(fed.context("", number)):
                ctx: Context = fed.context(stage, number)
                yield from (*method.phases(ctx), *method.before_test(ctx))


def test_every_field_of_a_phase_has_a_user() -> None:
    seen = list(phases())
    for field in dataclasses.fields(Phase):
        values = [getattr(phase, field.name) for phase in seen]
        assert any(value != field.default for value in values), field.name
    assert {phase.remembers for phase in seen} == {None, "epoch", "run"}


def test_what_core_lists_for_authors_of_methods_is_there() -> None:
    table = fedgist.core.__doc__.split("=\n")[2]
    rows = [line.split("``")[1::2] for line in table.splitlines() if line.startswith("``")]
    assert len(rows) == 14
    for module, *names in rows:
        found = importlib.import_module(f"fedgist.{module}")
        assert [name for name in names if not hasattr(found, name)] == [], module
