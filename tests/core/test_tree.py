"""Trees: named arrays and back, and what vmap sees of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgist.core.message import message
from fedgist.core.tree import (
    STATIC,
    below,
    build,
    leaves,
    map_leaves,
    named,
    same,
    stack,
    take,
    tree,
    under,
)
from fedgist.errors import MethodError


@tree
class Inner:
    weights: dict[str, Tensor]
    bias: Tensor


@tree
class Outer:
    x: Tensor
    inner: Inner
    pools: dict[str, dict[str, Tensor]]
    label: str = field(default="unset", metadata=STATIC)


@tree
class Perhaps:
    x: Tensor
    y: Tensor | None = None


def example(scale: float = 1.0, *, label: str = "unset") -> Outer:
    return Outer(
        x=scale * torch.arange(3.0),
        inner=Inner(
            {"conv1.weight": scale * torch.ones(2, 2), "b": torch.tensor(scale)},
            scale * torch.ones(1),
        ),
        pools={"p": {"q": scale * torch.arange(4)}},
        label=label,
    )


def test_a_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().x = torch.zeros(1)  # type: ignore[misc]


def test_names_join_fields_and_keys() -> None:
    value = example()
    arrays = named(value)
    assert set(arrays) == {
        "x",
        "inner/weights/conv1.weight",
        "inner/weights/b",
        "inner/bias",
        "pools/p/q",
    }
    assert arrays["pools/p/q"] is value.pools["p"]["q"]
    assert [id(a) for a in arrays.values()] == [id(a) for a in leaves(value)]


def test_build_is_the_inverse_of_named_under_any_order_of_the_arrays() -> None:
    value = example()
    arrays = named(value)
    assert same(build(Outer, arrays), value)
    assert same(build(Outer, dict(reversed(arrays.items()))).inner.bias, value.inner.bias)
    for both in (Perhaps(torch.ones(1), torch.ones(2)), Perhaps(torch.ones(1))):
        assert build(Perhaps, named(both)) == both
    assert build(dict[str, Tensor], {}) == {}


@pytest.mark.parametrize("name", ["x", "inner/bias"])
def test_a_missing_array_is_named(name: str) -> None:
    arrays = named(example())
    del arrays[name]
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        build(Outer, arrays)


@pytest.mark.parametrize("name", ["y", "inner/extra", "x/deep", "label", "pools/p/q/r"])
def test_an_array_that_no_field_wants_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"Outer has no field for '{name}'"):
        build(Outer, named(example()) | {name: torch.zeros(1)})


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (Inner({"a/b": torch.zeros(1)}, torch.zeros(1)), ValueError, "'a/b'"),
        ({"": {"x": torch.zeros(1)}, "x": torch.ones(1)}, ValueError, "''"),
        (Inner({"a": 3}, torch.zeros(1)), TypeError, "weights/a holds a int"),  # type: ignore[dict-item]
        ([torch.zeros(1)], TypeError, "a tree holds a list"),
    ],
)
def test_what_cannot_travel_is_named(value: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        named(value)


class Plain:
    pass


@dataclasses.dataclass
class Bare:
    x: Tensor


DECORATORS: dict[str, Callable[[Any], Any]] = {
    "tree": tree,
    "sums": message(reduce="sum"),
    "each": message(reduce="each"),
}
LEAVES: list[Any] = [Tensor, Tensor | None, Inner, dict[str, Tensor], Mapping[str, Inner]]
NO_LEAVES: list[tuple[Any, str]] = [
    (int, "int"),
    (float | None, "float"),
    (str, "str"),
    (list[Tensor], r"list\[torch.Tensor\]"),
    (tuple[Tensor, Tensor], "tuple"),
    (dict[int, Tensor], r"dict\[int, torch.Tensor\]"),
    (dict, "dict"),
    (dict[str, int], "int"),
    (dict[str, dict[str, np.ndarray]], "ndarray"),
    (Tensor | Inner, "torch.Tensor | .*Inner"),
    (Plain, "Plain"),
    (Bare, "Bare, which lacks @tree"),
    (nn.Parameter, "Parameter"),
]


@pytest.mark.parametrize("decorator", DECORATORS)
@given(
    before=st.lists(st.sampled_from(LEAVES), max_size=3),
    wrong=st.sampled_from(NO_LEAVES),
    after=st.lists(st.sampled_from(LEAVES), max_size=3),
)
@settings(max_examples=30, deadline=None)
def test_a_field_that_cannot_be_of_a_tree_is_named_at_the_decorator(
    decorator: str, before: list[Any], wrong: tuple[Any, str], after: list[Any]
) -> None:
    kind, shown = wrong
    good = {f"a{i}": each for i, each in enumerate([*before, *after])}
    kinds = dict(itertools.islice(good.items(), len(before))) | {"wrong": kind} | good
    with pytest.raises(
        MethodError, match=rf"^Mine\.wrong is {shown}.*: use Tensor, dict\[str"
    ) as e:
        DECORATORS[decorator](type("Mine", (), {"__annotations__": kinds}))
    assert e.value.__cause__ is None
    # the same fields are fine without it, and as a constant
    DECORATORS[decorator](type("Mine", (), {"__annotations__": good}))
    static = {"__annotations__": kinds, "wrong": field(metadata=STATIC, default=None)}
    last = {n: field(default=None) for n in list(kinds)[len(before) + 1 :]}
    tree(type("Mine", (), static | last))


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"total": torch.zeros(2)}, r"^Mine.total has no type: write total: Tensor$"),
        ({"__annotations__": {"a": Tensor, "b": Tensor}, "a": None}, "^Mine: non-default .*b"),
        ({"__annotations__": {"a": dict[str, Tensor]}, "a": {}}, "^Mine: mutable default .* a "),
    ],
)
def test_a_class_that_is_no_tree_is_named_at_the_decorator(
    decorator: str, body: dict[str, Any], says: str
) -> None:
    with pytest.raises(MethodError, match=says):
        DECORATORS[decorator](type("Mine", (), dict(body)))


def test_a_type_that_cannot_be_found_is_named_when_it_is_needed() -> None:
    kinds = {"a": "Tensor", "late": "dict[str, Undefined]"}
    mine: type = tree(type("Mine", (), {"__annotations__": kinds, "__module__": __name__}))
    with pytest.raises(MethodError, match=r"^Mine.late: Undefined is not defined in .*outside of"):
        build(mine, {"a": torch.zeros(1)})


def test_build_names_a_type_that_is_no_tree() -> None:
    with pytest.raises(TypeError, match="int is not a tree"):
        build(int, {})


def test_trees_pass_through_vmap_with_their_static_fields() -> None:
    values = [example(scale, label="kept") for scale in (1.0, 2.0, 3.0)]

    def double(value: Outer, factor: Tensor) -> Outer:
        assert value.label == "kept"
        assert value.x.shape == (3,)
        return map_leaves(lambda leaf: leaf * 2 * factor, value)

    out = torch.func.vmap(double)(stack(values), torch.ones(3))
    assert isinstance(out, Outer)
    assert out.label == "kept"
    for i, value in enumerate(values):
        assert torch.equal(out.inner.weights["b"][i], 2 * value.inner.weights["b"])
        assert torch.equal(out.pools["p"]["q"][i], 2 * value.pools["p"]["q"])


def test_vmap_sees_a_broadcast_tree_whole() -> None:
    shared = example()
    out = torch.func.vmap(lambda a, b: a.x + b, in_dims=(None, 0))(shared, torch.arange(2.0))
    assert torch.equal(out, shared.x + torch.arange(2.0).unsqueeze(1))


def test_stack_and_take_are_inverses() -> None:
    values = [example(s) for s in (1.0, 2.0, 3.0)]
    together = stack(values)
    for i, value in enumerate(values):
        pairs = zip(leaves(take(together, i)), leaves(value), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert take(together, slice(0, 2)).x.shape == (2, 3)
    assert torch.equal(
        take(together, torch.tensor([2, 0])).x, torch.stack([values[2].x, values[0].x])
    )


def test_a_field_that_is_none_is_no_leaf() -> None:
    value = Perhaps(torch.arange(3.0))
    assert map_leaves(lambda leaf: leaf + 1, value).y is None
    assert stack([value, value]).y is None
    out = torch.func.vmap(lambda v: Perhaps(2 * v.x))(value)
    assert (out.x.tolist(), out.y) == ([0.0, 2.0, 4.0], None)


def test_same_is_identity_of_tensors_not_equality() -> None:
    value = example()
    assert same(value, dataclasses.replace(value))
    assert not same(value, example())
    assert not same(value.inner, value)
    other: Any = Inner(value.inner.weights, value.inner.bias.clone())
    assert not same(value.inner, other)


def test_trees_are_equal_where_they_hold_the_same() -> None:
    other: Any = "a tree"
    # seen: on Python 3.13 a dataclass compares field by field, and a tensor has no one truth value
    value = example()
    assert value == example()
    assert value != other
    other = Perhaps(torch.ones(1))
    assert value != example(label="other")
    assert value != example(scale=2.0)
    assert value.inner != other
    assert Perhaps(torch.ones(2)) != Perhaps(torch.ones(2), torch.ones(2))
    assert Perhaps(torch.ones(2)) != Perhaps(torch.ones(1))
    assert Perhaps(torch.ones(2)) != Perhaps(torch.ones(2, dtype=torch.float64))
    assert Perhaps(torch.tensor([1.0, 2.0])) != Perhaps(torch.tensor([1.0, 3.0]))


def test_the_order_of_a_dictionary_does_not_matter_to_equality() -> None:
    a, b = torch.arange(2), torch.arange(3)
    assert Inner({"a": a, "b": b}, a) == Inner({"b": b, "a": a}, a)
    assert Inner({"a": a, "b": b}, a) != Inner({"a": a}, a)


def test_equality_is_of_a_tree_not_of_its_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(example())


@given(
    st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=5),
    st.text(min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=5),
)
def test_what_is_put_below_a_prefix_comes_back_without_the_rest(
    own: dict[str, int], prefix: str, others: dict[str, int]
) -> None:
    mine, rest = ({n: torch.tensor(v) for n, v in table.items()} for table in (own, others))
    stored = under(prefix, mine)
    assert below(prefix, stored) == mine
    apart = {n: a for n, a in rest.items() if not n.startswith(prefix)}
    assert below(prefix, {**apart, **stored}) == mine
