"""The sums of an exchange of facts: what a site computes of its rows, and what is added up.

A number x of a row counts as ``z = (x - centre) / unit``. A channel of an image counts as the mean
over its pixels, so each row adds at most 1 to a count. Under a budget, each number of a row's term
lies between -1 and 1 on a grid, so that sums are exact and noise is that of one Gaussian mechanism
(docs/decisions/0038-noise-on-a-grid.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from fedgist.core.message import message, total
from fedgist.core.privacy import noised, on_grid
from fedgist.core.tree import Tree, map_leaves
from fedgist.world.accounting import ReleaseSchedule, multiplier
from fedgist.world.facts.question import Plan, Question

GROUP = "facts"  # the sites of a total, in place of an architecture
SCALES, FACTS, COMPARE = "scales", "facts", "compare"
ROUNDS = MappingProxyType({SCALES: 0, FACTS: 1, COMPARE: 2})  # the stages, and their rounds
GRID = 2.0**-30  # of a term under a budget
MOST_PRIVATE = 1 << 23  # rows, whose sums on the grid are exact in float64
FARTHEST = 16.0  # of asinh(x) under a budget: x up to 4.4 million
AT_ONCE = 1 << 22  # numbers of one array
_KEY = 0  # noise comes from the operating system, whatever the key


@message(reduce="sum")
class ScaleSums:
    """Of each number (numbers,): rows that have it, and sums of ``asinh(x)`` and its square.

    ``asinh`` is linear near 0 and a logarithm far away, so that no column is too large for a sum.
    """

    present: Tensor
    total: Tensor
    squares: Tensor


@message(reduce="sum")
class FactsSums:
    """Sums over rows.

    ``rows`` () counts them, and ``classes`` (classes,) those of each class or label. ``present``,
    ``total`` and ``squares`` are of each number (numbers,). ``histograms`` holds the bins of all
    numbers with edges, one number after the other, and ``categories`` the counts of all columns of
    categories. For correlations, ``complete`` () counts rows that have all numbers,
    ``complete_total`` (numbers,) adds them up, and ``products`` (pairs,) adds up the products of
    all pairs, the squares among them, by rows of the upper triangle.
    """

    rows: Tensor
    classes: Tensor
    present: Tensor
    total: Tensor
    squares: Tensor
    histograms: Tensor
    categories: Tensor
    complete: Tensor
    complete_total: Tensor
    products: Tensor


@message(reduce="each")
class Told:
    """A text in UTF-8 (bytes,): the filling of a question, in JSON."""

    text: Tensor

    @staticmethod
    def of(text: str) -> Told:
        """Return the message of a text."""
        return Told(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))

    def read(self) -> str:
        """Return the text."""
        return self.text.numpy().tobytes().decode()


@message(reduce="each")
class Answered:
    """The total of all sites, and the filling that it was computed by."""

    text: Tensor
    total: FactsSums


@message(reduce="each")
class Compared:
    """A site has compared itself with the total."""


@dataclass(frozen=True)
class Piece:
    """A few rows as numbers: ``values`` (rows, numbers, pixels), float64, NaN where one is missing.

    ``classes`` (rows, classes) and ``categories`` (rows, categories of all columns) are 0 and 1.
    """

    values: Tensor
    classes: Tensor
    categories: Tensor

    def split(self, width: int) -> Iterator[Piece]:
        """Yield fewer rows at a time, so that ``width`` numbers of each fit into the memory."""
        count = max(1, AT_ONCE // max(1, width))
        parts = (torch.split(part, count) for part in (self.values, self.classes, self.categories))
        yield from (Piece(*each) for each in zip(*parts, strict=True))


def scale_sums(plan: Plan, pieces: Iterable[Piece]) -> ScaleSums:
    """Return the sums by which centres and units are found."""
    private, count = plan.question.epsilon is not None, len(plan.question.asked)
    found = [ScaleSums(*(torch.zeros(count, dtype=torch.float64) for _ in range(3)))]
    for piece in _split(pieces, count):
        here, z = piece.values.isfinite(), torch.asinh(piece.values.nan_to_num(0.0, 0.0, 0.0))
        z = z.clamp(-FARTHEST, FARTHEST) / FARTHEST if private else z
        terms = (here.double(), z * here, z.square() * here)
        found.append(ScaleSums(*(_added(term.mean(2), private=private) for term in terms)))
    return total(found)


def facts_sums(plan: Plan, pieces: Iterable[Piece]) -> FactsSums:
    """Return the sums of a site's rows."""
    pairs = _pairs(plan)
    width = max(1, sum(len(n.edges) + 1 for n in plan.numbers), pairs.shape[1])
    return total([_none(plan), *(_of_piece(plan, p, pairs) for p in _split(pieces, width))])


def _split(pieces: Iterable[Piece], width: int) -> Iterator[Piece]:
    for some in pieces:
        yield from some.split(width * some.values.shape[2])


def _none(plan: Plan) -> FactsSums:
    """Return sums over no rows."""
    count, pairs = len(plan.numbers), _pairs(plan).shape[1]
    bins = sum(len(n.edges) + 1 for n in plan.numbers if n.edges)
    listed = sum(map(len, plan.categories.values()))
    lengths = {"classes": len(plan.counted), "histograms": bins, "categories": listed}
    lengths |= dict.fromkeys(("present", "total", "squares"), count)
    lengths |= {"complete_total": count * bool(pairs), "products": pairs}
    arrays = {name: torch.zeros(size, dtype=torch.float64) for name, size in lengths.items()}
    nothing = torch.zeros((), dtype=torch.float64)
    return FactsSums(rows=nothing, complete=nothing, **arrays)


def _pairs(plan: Plan) -> Tensor:
    """Return the pairs whose products are added up: (2, pairs)."""
    count = len(plan.numbers) if plan.question.correlations else 0
    return torch.triu_indices(count, count)


def _of_piece(plan: Plan, rows: Piece, pairs: Tensor) -> FactsSums:
    private, clip = plan.question.epsilon is not None, plan.question.clip
    centre, unit = (
        torch.tensor([getattr(n, name) for n in plan.numbers], dtype=torch.float64).view(-1, 1)
        for name in ("centre", "unit")
    )
    here = rows.values.isfinite()
    z = torch.where(here, (rows.values - centre) / unit, 0.0)
    z = z.clamp(-clip, clip) / clip if private else z
    complete = here.flatten(1).all(1).double() * plan.question.correlations
    whole = z * complete.view(-1, 1, 1) if pairs.numel() else z[:, :0]
    terms = FactsSums(
        rows=torch.ones(len(z), dtype=torch.float64),
        classes=rows.classes.double(),
        present=here.double().mean(2),
        total=z.mean(2),
        squares=z.square().mean(2),
        histograms=_histograms(plan, rows.values, here),
        categories=rows.categories.double(),
        complete=complete,
        complete_total=whole.mean(2),
        products=(whole[:, pairs[0]] * whole[:, pairs[1]]).mean(2),
    )
    return map_leaves(lambda term: _added(term, private=private), terms)


def _histograms(plan: Plan, values: Tensor, here: Tensor) -> Tensor:
    """Return the share of each row's pixels in each bin: (rows, bins of all numbers)."""
    parts = [torch.zeros(len(values), 0, dtype=torch.float64)]
    for place, number in enumerate(plan.numbers):
        if not number.edges:
            continue
        edges = torch.tensor(number.edges, dtype=torch.float64)
        of_pixel = torch.bucketize(values[:, place].contiguous(), edges, right=True)
        bins = torch.zeros(len(values), len(edges) + 1, dtype=torch.float64)
        parts.append(bins.scatter_add_(1, of_pixel, here[:, place].double()) / values.shape[2])
    return torch.cat(parts, 1)


def _added(terms: Tensor, *, private: bool) -> Tensor:
    """Return the sum over rows of terms (rows, ...), on the grid under a budget."""
    return (on_grid(terms, GRID) if private else terms).sum(0)


def sensitivity(question: Question, sums: Tree) -> float:
    """Return the largest change of a site's sums, in L2, when a row is added or removed."""
    count = len(question.asked)
    if isinstance(sums, ScaleSums):
        return math.sqrt(3 * count)
    bins = sum(bool(about.edges) for _, about in question.asked)
    listed = sum(isinstance(kind, tuple) for kind in question.columns.values())
    classes = len(question.classes) if question.target == "labels" else 1
    pairs = 1 + count + count * (count + 1) / 2 if question.correlations else 0
    return math.sqrt(1 + classes + 3 * count + bins + listed + pairs)


def deviation(question: Question, sums: Tree) -> float:
    """Return the standard deviation of each site's noise on each number; 0 without a budget."""
    if question.epsilon is None:
        return 0.0
    noise = multiplier(ReleaseSchedule((0, 1)), question.epsilon, question.delta)
    return noise * sensitivity(question, sums)


def with_noise(question: Question, sums: Tree) -> Tree:
    """Return a site's sums with its noise, from the operating system, if there is a budget."""
    if question.epsilon is None:
        return sums
    return noised(sums, deviation(question, sums), torch.tensor(_KEY), GRID)
