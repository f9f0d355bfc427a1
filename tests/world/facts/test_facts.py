"""Facts before training: totals of any division of the rows are the pooled rows' own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from facts_tables import CLASSES, EDGES, NUMBERS, TOWNS, Oracle, data_of, question, tables
from fedgist.core.message import Form, total
from fedgist.core.tree import leaves, named
from fedgist.data.dataset import Dataset
from fedgist.data.sources.loading import load_data
from fedgist.errors import FederationError, InputError, MessageError
from fedgist.options import checked
from fedgist.recipe.reading import make
from fedgist.wire.secure.ring import decoded, encoded
from fedgist.world.declared import columns_of
from fedgist.world.facts.pooled import PooledFacts, as_recipe, differences, pooled, scales
from fedgist.world.facts.question import Filling, Plan, Question, read_question
from fedgist.world.facts.rows import rows_of
from fedgist.world.facts.sums import (
    GRID,
    FactsSums,
    ScaleSums,
    deviation,
    facts_sums,
    scale_sums,
    sensitivity,
    with_noise,
)


def asked(**changes: Any) -> Question:
    made: Question = checked(Question, question(**changes))
    return made


def read(path: Path, about: Question, *, closed: bool = True) -> Dataset:
    options: dict[str, Any] = data_of(path)
    columns = {
        name: list(kind) if isinstance(kind, tuple) else kind if kind == "categories" else "number"
        for name, kind in about.columns.items()
    }
    return load_data(options.pop("name"), columns=columns, unlisted="keep", **options)


def parts(tmp_path: Path, seed: int, sites: int, about: Question) -> tuple[list[Dataset], Oracle]:
    every = tables(seed, sites)
    out = []
    for number, table in enumerate(every):
        table.to_csv(tmp_path / f"{number}.csv", index=False)
        out.append(read(tmp_path / f"{number}.csv", about))
    return out, Oracle.of(every)


def every_row(data: Dataset) -> torch.Tensor:
    return torch.arange(len(data.y))


def exchange(
    about: Question, datas: list[Dataset], *, ring: bool = False
) -> tuple[Plan, FactsSums]:
    """Return the plan and the total of an exchange, in the ring of secure sums or not."""

    def added(sums: list[Any]) -> Any:
        if not ring:
            return total(sums)
        whole = sum((encoded(s, len(sums)) for s in sums[1:]), encoded(sums[0], len(sums)))
        return decoded(whole, Form.of(sums[0]))

    plan = Plan(about, Filling())
    first = added([scale_sums(plan, rows_of(plan, d, every_row(d))) for d in datas])
    plan = Plan(about, Filling(scales=scales(about, first, len(datas))))
    return plan, added([facts_sums(plan, rows_of(plan, d, every_row(d))) for d in datas])


def check(facts: PooledFacts, plan: Plan, oracle: Oracle, near: float) -> None:
    """Compare facts with the oracle's, in units."""
    assert facts.rows == pytest.approx(len(oracle.rows), abs=near)
    for number, of_plan in zip(facts.numbers, plan.numbers, strict=True):
        count, mean, std = oracle.moments(number.name)
        assert number.present == pytest.approx(count, abs=near)
        assert number.missing == pytest.approx(len(oracle.rows) - count, abs=near)
        assert abs(number.mean - mean) / of_plan.unit < near
        assert abs(number.std - std) / of_plan.unit < near
    assert [*facts.numbers[0].bins] == pytest.approx(oracle.bins("age"), abs=near)
    for name, rows in facts.classes.items():
        assert rows == pytest.approx((oracle.rows["state"] == name).sum(), abs=near)
    for name, rows in facts.categories["town"].items():
        assert rows == pytest.approx((oracle.rows["town"] == name).sum(), abs=near)
    assert facts.correlations is not None
    np.testing.assert_allclose(facts.correlations.numpy(), oracle.correlations(), atol=1e3 * near)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sums", ["plain", "secure"])
def test_totals_are_those_of_the_pooled_rows(tmp_path: Path, seed: int, sums: str) -> None:
    """To 1e-9 of a unit plain, and to 2^-31 for each site in the ring of secure sums."""
    ring = sums == "secure"
    sites = 1 + 2 * seed
    datas, oracle = parts(tmp_path, seed, sites, about := asked())
    plan, added = exchange(about, datas, ring=ring)
    check(pooled(plan, added, sites), plan, oracle, sites * 2.0**-31 if ring else 1e-9)


def test_a_written_recipe_is_whole(tmp_path: Path) -> None:
    datas, oracle = parts(tmp_path, 3, 2, about := asked())
    plan, sums = exchange(about, datas)
    recipe = make(as_recipe(plan, pooled(plan, sums, 2)))
    assert recipe.facts is not None
    assert recipe.data.classes == CLASSES
    assert recipe.data.mean == pytest.approx([oracle.moments(n)[1] for n in NUMBERS])
    assert recipe.data.std == pytest.approx([oracle.moments(n)[2] for n in NUMBERS])
    assert [c.name for c in columns_of(recipe.facts)] == [*NUMBERS, "town"]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40),
    st.integers(-9, 9),
    st.integers(1, 39),
)
def test_a_scale_is_found_for_numbers_of_any_size(
    values: list[float], power: int, cut: int
) -> None:
    """Then a number's place on its scale is small, so that no secure sum is too large."""
    x = torch.tensor(values, dtype=torch.float64).unsqueeze(1) * 10.0**power
    about: Question = checked(Question, {"input_shape": [1], "classes": ["a"]})
    plan = Plan(about, Filling())
    cut = min(cut, len(x) - 1)
    sites = [array_data(part) for part in (x[:cut], x[cut:])]
    first = total([scale_sums(plan, rows_of(plan, d, every_row(d))) for d in sites])
    ((centre, unit),) = scales(about, first, 2)
    z = (x - centre) / unit
    assert math.isfinite(centre)
    assert float(z.abs().max()) < 2.0**30 / len(x) ** 0.5
    plan = Plan(about, Filling(scales=((centre, unit),)))
    sums = total([facts_sums(plan, rows_of(plan, d, every_row(d))) for d in sites])
    (number,) = pooled(plan, sums, 2).numbers
    assert abs(number.mean - float(x.mean())) <= 1e-9 * max(unit, abs(centre), float(x.abs().max()))


def array_data(x: torch.Tensor, y: torch.Tensor | None = None, classes: int = 1) -> Dataset:
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    names = tuple("abcdefgh"[:classes])
    return Dataset("rows", x, labels, x[:0], labels[:0], classes, classes=names)


@pytest.mark.parametrize("seed", range(3))
def test_channels_of_images_are_those_of_all_pixels(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (30, 3, 5, 4), generator=generator, dtype=torch.uint8)
    about: Question = checked(
        Question,
        {
            "input_shape": [3, 5, 4],
            "element": "uint8",
            "classes": ["a"],
            "inputs": {"edges": [0.25, 0.5]},
        },
    )
    plan, sums = exchange(about, [array_data(x[:11]), array_data(x[11:])])
    facts = pooled(plan, sums, 2)
    pixels = x.double().transpose(0, 1).flatten(1) / 255
    for channel, number in enumerate(facts.numbers):
        assert number.mean == pytest.approx(float(pixels[channel].mean()), abs=1e-12)
        assert number.std == pytest.approx(float(pixels[channel].std(correction=0)), abs=1e-12)
        share = [(pixels[channel] < 0.25), (pixels[channel] >= 0.5)]
        assert [number.bins[0], number.bins[2]] == pytest.approx(
            [float(part.double().mean()) * 30 for part in share]
        )
    section = as_recipe(plan, facts)
    assert section["facts"] == {"element": "uint8", "scale": 255.0, "input_shape": [3, 5, 4]}


def test_numbers_to_predict_have_moments_for_the_objective() -> None:
    y = torch.tensor([[1.0, 20.0], [3.0, torch.nan], [5.0, 60.0]])
    x = torch.arange(3.0).unsqueeze(1)
    data = Dataset("t", x, y, x[:0], y[:0], 2, classes=("low", "high"), target="numbers")
    about: Question = checked(
        Question, {"target": "numbers", "classes": ["high", "low"], "input_shape": [1]}
    )
    plan, sums = exchange(about, [data])
    objective = as_recipe(plan, pooled(plan, sums, 1))["objective"]
    assert objective["mean"] == pytest.approx([40.0, 3.0])
    assert objective["std"] == pytest.approx([20.0, math.sqrt(8 / 3)])


def test_labels_of_which_a_row_has_several_are_counted() -> None:
    y = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [torch.nan, 1.0, 1.0]])
    x = torch.arange(3.0).unsqueeze(1)
    data = Dataset("t", x, y, x[:0], y[:0], 3, classes=("a", "b", "c"), target="labels")
    about: Question = checked(
        Question, {"target": "labels", "classes": ["c", "a", "none"], "input_shape": [1]}
    )
    plan, sums = exchange(about, [data])
    assert pooled(plan, sums, 1).classes == {"c": 3.0, "a": 1.0, "none": 0.0}


@pytest.mark.parametrize("share", [0.05, 0.5, 0.75])
def test_a_quantile_is_in_its_bin(share: float) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(50, 10, 500)
    edges = [*np.arange(20.0, 81.0, 2.0)]
    about: Question = checked(
        Question,
        {
            "classes": ["a"],
            "input_shape": [1],
            "inputs": {"edges": edges},
            "quantiles": [share, 1e-6, 1 - 1e-6],
        },
    )
    plan, sums = exchange(about, [array_data(torch.from_numpy(values).unsqueeze(1))])
    found, first, last = pooled(plan, sums, 1).numbers[0].quantiles
    assert abs(float(found) - np.quantile(values, share)) <= 2.0
    assert first.startswith(("<", "2", "3"))
    assert last.startswith((">", "7", "8"))


def test_a_row_changes_private_sums_by_no_more_than_the_sensitivity(tmp_path: Path) -> None:
    """And all terms are on the grid, so that sums are exact."""
    about = asked(epsilon=1.0, delta=1e-6, clip=3.0)
    (data, *_), _ = parts(tmp_path, 5, 2, about)
    wild = data.x.clone()
    wild[0, :3] = torch.tensor([1e30, -1e30, torch.nan])
    data = data.with_inputs(wild, data.x_test)
    plan = Plan(about, Filling(scales=((50.0, 20.0), (3000.0, 4000.0), (0.0, 1e-4))))
    for make_sums in (scale_sums, facts_sums):
        whole = make_sums(plan, rows_of(plan, data, every_row(data)))
        most = sensitivity(about, whole)
        for row in range(len(data.y)):
            others = every_row(data)[every_row(data) != row]
            less = make_sums(plan, rows_of(plan, data, others))
            change = torch.cat(
                [(a - b).flatten() for a, b in zip(leaves(whole), leaves(less), strict=True)]
            )
            assert float(change.norm()) <= most * (1 + 1e-12)
        for array in leaves(whole):
            torch.testing.assert_close((array / GRID).round() * GRID, array, rtol=0, atol=0)


def test_noise_has_the_stated_deviation(tmp_path: Path) -> None:
    about = asked(epsilon=2.0, delta=1e-6)
    (data,), _ = parts(tmp_path, 5, 1, about)
    plan = Plan(about, Filling(scales=((50.0, 20.0), (3000.0, 4000.0), (0.0, 1e-4))))
    sums = facts_sums(plan, rows_of(plan, data, every_row(data)))
    draws = [
        torch.cat([array.flatten() for array in leaves(with_noise(about, sums))])
        for _ in range(200)
    ]
    flat = torch.cat([array.flatten() for array in leaves(sums)])
    noise = torch.stack(draws) - flat
    expected = deviation(about, sums)
    assert float(noise.std()) == pytest.approx(expected, rel=0.05)
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(noise.numel())
    with pytest.raises(FederationError, match="a larger epsilon"):
        pooled(plan, sums, 100)  # two dozen rows are fewer than the noise of so many sites


def test_budgets_of_many_rows_give_usable_facts() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 60 + 15 * torch.randn(20_000, 1, generator=generator)
    about: Question = checked(
        Question,
        {
            "classes": ["a"],
            "input_shape": [1],
            "epsilon": 1.0,
            "inputs": {"centre": 50, "unit": 20},
        },
    )
    plan = Plan(about, Filling())
    sums = with_noise(about, facts_sums(plan, rows_of(plan, d := array_data(x), every_row(d))))
    assert isinstance(sums, FactsSums)
    (number,) = pooled(plan, sums, 1).numbers
    assert number.mean == pytest.approx(60, abs=1)
    assert number.std == pytest.approx(15, abs=1)


def test_a_site_sees_what_is_its_alone(tmp_path: Path) -> None:
    """A unit off by a thousand, a class and a category that it has alone or lacks."""
    every = tables(7, 4)
    every[0]["dose"] = every[0]["dose"] * 1000
    every[1]["town"] = "Ulm"
    for table in every[:3]:
        table["state"] = "well"
    about, datas = asked(), []
    for number, table in enumerate(every):
        table.to_csv(tmp_path / f"{number}.csv", index=False)
        datas.append(read(tmp_path / f"{number}.csv", about))
    plan, sums = exchange(about, datas)
    own = [facts_sums(plan, rows_of(plan, d, every_row(d))) for d in datas]
    said = [differences(plan, each, sums, 4) for each in own]
    assert any("dose" in text and "another unit?" in text for text in said[0])
    assert not any("age" in text or "level" in text for texts in said for text in texts)
    assert any("columns.town: no rows here" in text and "Bonn" in text for text in said[1])
    assert any(text == "classes: rows here alone are of ill" for text in said[3])
    assert any(text.startswith("classes: no rows here") and "ill" in text for text in said[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"columns": {}}, "give columns, or input_shape"),
        ({"columns": {"a": []}}, "list of its different categories"),
        ({"columns": {"a": "text"}}, "columns.a"),
        ({"columns": {"a": {"edges": [2, 1]}}}, "edges must ascend"),
        ({"columns": {"a": {"unit": 0}}}, "unit"),
        ({"classes": ["a", "a"]}, "names one twice"),
        ({"classes": [], "sums": "secure"}, "so list them: classes = [...]"),
        ({"columns": {"a": "categories"}, "epsilon": 1.0}, "so list them: columns.a = [...]"),
        ({"target": "numbers", "classes": []}, "name the numbers to predict"),
        ({"surprise": 1}, "surprise"),
        ({"quantiles": [0.0]}, "quantiles"),
        ({"input_shape": [3], "columns": {"a": "number"}}, "give columns, or input_shape"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = tmp_path / "question.toml"
    path.write_text(tomli_w.dumps(question(**changes)))
    with pytest.raises(InputError, match=r"question\.toml") as error:
        read_question(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_filling_must_fit_its_question() -> None:
    open_one = asked(classes=[], columns={"town": "categories", "age": "number"})
    good = {"names": {"classes": ("a",), "columns.town": TOWNS}, "scales": ((1.0, 2.0),)}
    Plan(open_one, Filling.model_validate(good))
    for bad in (
        {"names": {"classes": ("a",)}},
        {"names": {"classes": (), "columns.town": TOWNS}},
        {"names": {"classes": ("a", "a"), "columns.town": TOWNS}},
        good | {"scales": ((1.0, 2.0), (1.0, 2.0))},
        good | {"scales": ((1.0, 0.0),)},
        good | {"scales": ((math.inf, 1.0),)},
    ):
        with pytest.raises((MessageError, ValueError)):
            Plan(open_one, Filling.model_validate(bad))


def test_what_a_column_lacks_everywhere_is_said() -> None:
    about: Question = checked(Question, {"classes": ["a"], "input_shape": [2]})
    x = torch.tensor([[1.0, torch.nan], [2.0, torch.inf]], dtype=torch.float64)
    plan = Plan(about, Filling())
    first = scale_sums(plan, rows_of(plan, d := array_data(x), every_row(d)))
    assert isinstance(first, ScaleSums)
    with pytest.raises(FederationError, match=r"^1: too few rows have it"):
        scales(about, first, 1)
    plan = Plan(about, Filling(scales=((0.0, 1.0), (0.0, 1.0))))
    facts = pooled(plan, facts_sums(plan, rows_of(plan, d, every_row(d))), 1)
    assert facts.numbers[1].missing == 2
    assert any(note.startswith("1: too few rows") for note in facts.notes)
    with pytest.raises(FederationError, match="the mean is not known of 1"):
        as_recipe(plan, facts)


def test_all_arrays_are_in_order() -> None:
    """A message's arrays are what a site's audit log names."""
    plan = Plan(asked(), Filling(scales=((0.0, 1.0),) * 3))
    shapes = {name: list(a.shape) for name, a in named(facts_sums(plan, ())).items()}
    assert shapes["histograms"] == [len(EDGES["age"]) + 1]
    assert shapes["categories"] == [len(TOWNS)]
    assert shapes["products"] == [6]


@pytest.mark.parametrize("sums", ["plain", "secure"])
@given(st.floats(-1e7, 1e7), st.integers(2, 60))
def test_a_constant_number_has_deviation_1_and_no_correlation(
    sums: str, value: float, count: int
) -> None:
    """Rounding is no deviation, and no correlation."""
    x = torch.stack([torch.full((count,), value), torch.arange(count)], 1).double()
    about: Question = checked(
        Question, {"input_shape": [2], "classes": ["a"], "correlations": True, "sums": sums}
    )
    plan, added = exchange(about, [array_data(x[:1]), array_data(x[1:])], ring=sums == "secure")
    facts = pooled(plan, added, 2)
    assert facts.numbers[0].std == 0.0
    assert any(note.startswith("0: it is constant") for note in facts.notes)
    assert as_recipe(plan, facts)["data"]["std"][0] == 1.0  # type: ignore[index]
    assert facts.correlations is not None
    assert facts.correlations.isnan().tolist() == [[True, True], [True, False]]
    assert float(facts.correlations[1, 1]) == pytest.approx(1.0)


def test_noise_that_hides_a_correlation_is_said() -> None:
    x = 0.1 * torch.randn(300, 2, generator=torch.Generator().manual_seed(1))
    inputs = {"centre": 0.0, "unit": 1.0}
    about: Question = checked(
        Question,
        {
            "input_shape": [2],
            "classes": ["a"],
            "correlations": True,
            "epsilon": 0.5,
            "inputs": inputs,
        },
    )
    plan = Plan(about, Filling())
    sums = with_noise(about, facts_sums(plan, rows_of(plan, d := array_data(x), every_row(d))))
    assert isinstance(sums, FactsSums)
    facts = pooled(plan, sums, 1)
    assert facts.correlations is None or math.isnan(float(facts.correlations[0, 1]))
    assert any("noise" in note for note in facts.notes)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x = { center = 0 }", "columns.x.center: unknown key; did you mean 'centre'?"),
        ("x = { edges = [3, 1] }", "edges must ascend"),
        ("x = true", "columns.x is True; it must be 'number', 'categories', the list"),
        ('x = "numbers"', "columns.x is 'numbers'; it must be"),
    ],
)
def test_a_column_that_is_asked_wrongly_is_named(tmp_path: Path, line: str, says: str) -> None:
    (path := tmp_path / "q.toml").write_text(f'classes = ["a"]\n[columns]\n{line}\n')
    with pytest.raises(InputError, match=r"q\.toml: columns\.x") as error:
        read_question(path)
    assert says in str(error.value)
    (path := tmp_path / "q.toml").write_text('classes = ["a"]\n')
    with pytest.raises(InputError, match=r"q\.toml: give columns, or input_shape"):
        read_question(path)
