"""The grid of noise from the system: sums of numbers on the grid are exact (decision 0038)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedgist.core.privacy import Privacy, grid_of
from fedgist.errors import RecipeError
from fedgist.recipe.privacy_section import PrivacySection

SUM_DIGITS = 24  # of float32, in which messages and their totals are
STEP_DIGITS = 40  # of a step's sums, which are float64 and get noise before they are rounded
COARSEST = 64.0  # steps of the grid in a deviation, at least: coarser noise tells more
FINEST = 2.0**48  # and at most: then noise has more digits than float64


def grids(section: PrivacySection, sizes: Sequence[int]) -> tuple[float, float]:
    """Return the grid sizes of releases and of private steps; 0 if the seed makes the noise.

    ``sizes`` holds the clients' numbers of rows. Their sum or maximum is rounded up to a power of
    two. The number of rows, up to a factor of 2, is therefore treated as public.
    """
    if section.noise == "seed":
        return 0.0, 0.0
    assert section.clip is not None  # a complete section has one
    central, largest = section.where == "central", max(1, *sizes)
    if section.unit == "client":
        return grid_of(section.clip * (len(sizes) if central else 1), SUM_DIGITS), 0.0
    rows = _power(max(1, sum(sizes)) if central else largest)
    grid = grid_of(max(1.0, section.clip) * rows, SUM_DIGITS)
    if grid > 1:
        raise RecipeError(
            f"privacy.clip = {section.clip:g}: sums over {rows} rows of this norm are not exact "
            "with privacy.noise = 'system': use a smaller one"
        )
    if section.gradient_clip is None:
        return grid, 0.0
    return grid, grid_of(section.gradient_clip * _power(largest), STEP_DIGITS)


def check_noise(privacy: Privacy) -> None:
    """Raise RecipeError if noise of the system is too coarse or too fine for its grid."""
    steps = privacy.steps
    pairs = [(privacy.deviation, privacy.grid)]
    pairs += [(steps.deviation, steps.grid)] if steps else []
    for deviation, grid in pairs:
        if grid and deviation < COARSEST * grid:
            raise RecipeError(
                f"privacy.epsilon: noise of deviation {deviation:.3g} is coarse beside sums in "
                f"steps of {grid:.3g} (privacy.noise = 'system'): use less"
            )
        if grid and deviation > FINEST * grid:
            raise RecipeError(
                f"privacy.epsilon: noise of deviation {deviation:.3g} has more digits than "
                f"numbers, in steps of {grid:.3g}: use more"
            )


def _power(count: int) -> int:
    return 1 << math.ceil(math.log2(count))
