"""What a total of sums says of the rows of all sites, and how a site's own rows differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgist.core.tree import map_leaves
from fedgist.errors import FederationError, listed
from fedgist.world.facts.question import COLUMNS, Filling, Number, Plan, Question
from fedgist.world.facts.sums import FARTHEST, FactsSums, ScaleSums, deviation

LEAST_SPREAD = 1e-4  # of asinh(x): a smaller spread of such sums is rounding
DIGITS = 3  # of a centre and a unit that were found
ROUNDED = 1e-13  # of the mean square: a smaller variance is rounding
STEP = 2.0**-31  # of each site's numbers in a secure total
OTHER_UNIT = 10.0  # times another deviation, or another size: another unit, probably
MOST_NOISE = 0.5  # of a correlation: more hides it
LEAST_COUNT = 0.5  # rows: less is none
UNKNOWN = math.nan


@dataclass(frozen=True)
class NumberFacts:
    """Facts about one number: rows that have it, mean, deviation, bins and quantiles.

    If noise hides the deviation, the unit of the question stands in its place. ``quantiles`` holds
    the text of each quantile: one outside the edges is known by an edge only.
    """

    name: str
    present: float
    missing: float
    mean: float
    std: float
    edges: tuple[float, ...] = ()
    bins: tuple[float, ...] = ()
    quantiles: tuple[str, ...] = ()
    std_known: bool = True


@dataclass(frozen=True)
class PooledFacts:
    """Facts about the rows of all sites together. ``noise`` is the deviation of each count."""

    rows: float
    classes: Mapping[str, float]
    numbers: tuple[NumberFacts, ...]
    categories: Mapping[str, Mapping[str, float]]
    correlations: Tensor | None = None
    noise: float = 0.0
    notes: tuple[str, ...] = ()


def scales(question: Question, sums: ScaleSums, sites: int) -> tuple[tuple[float, float], ...]:
    """Return a centre and a unit for each number, with three digits.

    Raises
    ------
    FederationError
        If no site has the number.
    """
    bound = FARTHEST if question.epsilon is not None else 1.0
    noise = 2 * deviation(question, sums) * math.sqrt(sites)
    least, found = max(LEAST_COUNT, noise), []
    for place, (name, _) in enumerate(question.asked):
        count = float(sums.present[place])
        if count < least:
            raise FederationError(f"{name}: too few rows have it to find a centre and a unit")
        mean = bound * float(sums.total[place]) / count
        square = bound**2 * float(sums.squares[place]) / count
        error = noise * (bound**2 + 2 * bound * abs(mean)) / count  # a spread that noise hides
        spread = max(math.sqrt(max(0.0, square - mean**2) + error), LEAST_SPREAD)
        centre = _rounded(math.sinh(mean))
        unit = _rounded((math.sinh(mean + spread) - math.sinh(mean - spread)) / 2)
        found.append((centre, unit))
    return tuple(found)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def pooled(plan: Plan, sums: FactsSums, sites: int = 1) -> PooledFacts:
    """Return what a total over some sites says of their rows."""
    question, rows = plan.question, float(sums.rows)
    noise = deviation(question, sums) * math.sqrt(sites)
    if rows <= 2 * noise:
        raise FederationError(
            f"the noise of a count has a deviation of {noise:.3g}, and {rows:.0f} rows were "
            "counted: a larger epsilon, or fewer figures"
        )
    notes, numbers, at = list[str](), list[NumberFacts](), 0
    for place, number in enumerate(plan.numbers):
        width = len(number.edges) + 1 if number.edges else 0
        bins = tuple(sums.histograms[at : at + width].tolist())
        at += width
        facts = _number(plan, place, sums, noise, sites)
        texts = tuple(_quantile(number.edges, bins, q) for q in question.quantiles if bins)
        numbers.append(replace(facts, edges=number.edges, bins=bins, quantiles=texts))
        notes += _notes_on(facts, number)
    counts, start, categories = sums.categories.tolist(), 0, dict[str, Mapping[str, float]]()
    for name, kinds in plan.categories.items():
        here = counts[start : start + len(kinds)]
        categories[name] = dict(zip(kinds, here, strict=True))
        start += len(kinds)
    together = None
    if question.correlations:
        together = _correlations(plan, sums, noise, sites)
        notes += [] if together is not None else ["too few rows have all numbers to correlate them"]
    if noise:
        notes.append(f"each count has noise of deviation {noise:.3g}")
    return PooledFacts(
        rows,
        dict(zip(plan.counted, sums.classes.tolist(), strict=True)),
        tuple(numbers),
        categories,
        together,
        noise,
        tuple(notes),
    )


def _lost(plan: Plan, square: float, rows: float, sites: int) -> float:
    """Return the variance, in units, below which sums hold nothing but rounding."""
    step = STEP * sites / rows if plan.question.sums == "secure" else 0.0
    return ROUNDED * square + step * (1 + 2 * math.sqrt(max(0.0, square)))


def _number(plan: Plan, place: int, sums: FactsSums, noise: float, sites: int) -> NumberFacts:
    """Return the facts about a number; its mean is NaN if too few rows have it.

    A variance that rounding could have made is 0.
    """
    number, clip = plan.numbers[place], plan.clip
    present = float(sums.present[place])
    missing = max(0.0, float(sums.rows) - present)
    if present <= max(LEAST_COUNT, 2 * noise):
        return NumberFacts(number.name, present, missing, UNKNOWN, UNKNOWN)
    mean = clip * float(sums.total[place]) / present
    square = clip**2 * float(sums.squares[place]) / present
    variance = square - mean**2
    if variance <= _lost(plan, square, present, sites):
        variance = 0.0
    known = not noise or variance >= 2 * noise * (clip**2 + 2 * clip * abs(mean)) / present
    std = number.unit * (math.sqrt(variance) if known else 1.0)
    mean = number.centre + number.unit * mean
    return NumberFacts(number.name, present, missing, mean, std, std_known=known)


def _notes_on(facts: NumberFacts, number: Number) -> Iterator[str]:
    if math.isnan(facts.mean):
        yield f"{number.name}: too few rows have it: its mean and deviation are not known"
    elif not facts.std_known:
        yield f"{number.name}: noise hides its deviation: its unit {number.unit:g} stands for it"
    elif facts.std == 0.0:
        yield (
            f"{number.name}: it is constant, or varies too little beside its centre "
            f"{number.centre:g} and its unit {number.unit:g} for these sums"
        )


def _quantile(edges: tuple[float, ...], bins: tuple[float, ...], share: float) -> str:
    """Return a quantile: the place in its bin as if its rows were evenly spread."""
    counts = [max(0.0, count) for count in bins]
    wanted, below = share * sum(counts), 0.0
    for place, count in enumerate(counts):
        if below + count >= wanted and count > 0:
            if place == 0:
                return f"< {edges[0]:g}"
            if place == len(edges):
                return f"> {edges[-1]:g}"
            low, high = edges[place - 1], edges[place]
            return f"{low + (high - low) * (wanted - below) / count:.4g}"
        below += count
    return "-"


def _correlations(plan: Plan, sums: FactsSums, noise: float, sites: int) -> Tensor | None:
    """Return the correlations over rows that have all numbers: (numbers, numbers).

    One that rounding or noise hides is NaN.
    """
    rows, count = float(sums.complete), len(plan.numbers)
    if rows <= max(1.0, 2 * noise):
        return None
    mean = sums.complete_total / rows
    square = torch.zeros(count, count, dtype=torch.float64)
    upper = torch.triu_indices(count, count)
    square[upper[0], upper[1]] = sums.products / rows
    square = square + square.triu(1).T
    covariance = square - torch.outer(mean, mean)
    lost = torch.tensor(
        [_lost(plan, s, rows, sites) for s in square.diagonal().tolist()], dtype=torch.float64
    )
    variance = torch.where(covariance.diagonal() > lost, covariance.diagonal(), torch.nan)
    spread = torch.outer(variance.sqrt(), variance.sqrt())
    hidden = 2 * noise * (1 + 2 * mean.abs().max()) / rows > MOST_NOISE * spread
    return torch.where(hidden, torch.nan, (covariance / spread).clamp(-1.0, 1.0))


def as_recipe(plan: Plan, facts: PooledFacts) -> dict[str, dict[str, object]]:
    """Return the sections of a recipe: the form of the rows, the classes, means and deviations.

    Raises
    ------
    FederationError
        If a mean is not known.
    """
    question, inputs = plan.question, len(plan.question.asked)
    inputs -= len(plan.classes) if question.target == "numbers" else 0
    if unknown := [n.name for n in facts.numbers if math.isnan(n.mean)]:
        raise FederationError(f"the mean is not known of {listed(unknown)}: leave them out")
    form: dict[str, object] = {"element": question.element, "scale": question.divisor}
    if question.columns:
        form["columns"] = plan.columns
    else:
        form["input_shape"] = list(question.input_shape)
    data: dict[str, object] = {"classes": list(plan.classes)}
    moments = _moments(facts.numbers[:inputs])
    recipe = {"facts": form, "data": data | (moments if inputs else {"normalize": "none"})}
    if question.target == "numbers":
        recipe["objective"] = {"name": "regression", **_moments(facts.numbers[inputs:])}
    return recipe


def made_up(question: Question) -> dict[str, dict[str, object]]:
    """Return the sections of a recipe in their form, before anybody has answered."""
    plan = Plan(question, Filling(names=dict.fromkeys(question.unnamed, ("a", "b"))))
    numbers = tuple(NumberFacts(number.name, 1.0, 0.0, 0.0, 1.0) for number in plan.numbers)
    return as_recipe(plan, PooledFacts(1.0, {}, numbers, {}))


def _moments(numbers: tuple[NumberFacts, ...]) -> dict[str, object]:
    """Return means and deviations; a constant number has deviation 1, which changes nothing."""
    return {
        "mean": [number.mean for number in numbers],
        "std": [number.std or 1.0 for number in numbers],
    }


def differences(plan: Plan, own: FactsSums, total: FactsSums, sites: int) -> list[str]:
    """Return in sentences how a site's rows differ from those of the others, if they do.

    The others' sums are the total without the site's own.
    """
    others = map_leaves(lambda whole, mine: whole - mine, total, own)
    noise = deviation(plan.question, total) * math.sqrt(sites)
    return [
        *_other_units(plan, own, others, noise, sites),
        *_alone("classes", plan.counted, own.classes, others.classes, noise),
        *_alone_in_columns(plan, own, others, noise),
    ]


def _other_units(
    plan: Plan, own: FactsSums, others: FactsSums, noise: float, sites: int
) -> Iterator[str]:
    for place, number in enumerate(plan.numbers):
        mine = _number(plan, place, own, 0.0, 1)
        theirs = _number(plan, place, others, noise, sites)
        if math.isnan(theirs.mean):
            continue
        if math.isnan(mine.mean):
            yield f"{number.name}: no row has it here, and {theirs.present:.0f} rows elsewhere"
        elif theirs.std_known and _is_far(mine.std, theirs.std):
            yield _as_other_unit(number.name, "deviation", mine.std, theirs.std)
        elif _is_far(abs(mine.mean), abs(theirs.mean)) and not _overlap(mine, theirs):
            yield _as_other_unit(number.name, "mean", mine.mean, theirs.mean)


def _is_far(here: float, there: float) -> bool:
    return here > 0 and there > 0 and not 1 / OTHER_UNIT < here / there < OTHER_UNIT


def _as_other_unit(name: str, what: str, here: float, there: float) -> str:
    return f"{name}: its {what} is {here:.4g} here and {there:.4g} elsewhere: another unit?"


def _overlap(mine: NumberFacts, theirs: NumberFacts) -> bool:
    """Return whether two means are no further apart than the larger deviation."""
    return abs(mine.mean - theirs.mean) <= max(mine.std, theirs.std)


def _alone(
    what: str, names: tuple[str, ...], own: Tensor, others: Tensor, noise: float
) -> Iterator[str]:
    """Yield what has rows here and none elsewhere, or the other way round."""
    least = max(LEAST_COUNT, 2 * noise)
    pairs = list(zip(names, own.tolist(), others.tolist(), strict=True))
    if here := [name for name, mine, theirs in pairs if mine > 0 and theirs < least]:
        yield f"{what}: rows here alone are of {listed(here)}"
    if there := [name for name, mine, theirs in pairs if mine <= 0 and theirs >= least]:
        yield f"{what}: no rows here, and some elsewhere, are of {listed(there)}"


def _alone_in_columns(plan: Plan, own: FactsSums, others: FactsSums, noise: float) -> Iterator[str]:
    at = 0
    for name, kinds in plan.categories.items():
        part = slice(at, at + len(kinds))
        at += len(kinds)
        yield from _alone(
            f"{COLUMNS}{name}", kinds, own.categories[part], others.categories[part], noise
        )
