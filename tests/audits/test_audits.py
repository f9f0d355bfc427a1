"""What an attacker finds at the seams is below what is claimed, above it with half the noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audits.table import AUDITS, DELTA, DRAWS, EPSILON, Audit, lower_bound
from fedgist.core import random

FEWER = 20_000  # draws, enough for the bounds; the page's numbers are of all draws
PAGE = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"


def line_of(audit: Audit) -> list[str]:
    """The cells of an audit on the page."""
    lines = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    (found,) = [cells for cells in lines if cells[0] == f"| {audit.method}"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("audit", AUDITS, ids=lambda audit: audit.method)
def test_an_attacker_finds_less_than_is_claimed_and_more_with_half_the_noise(audit: Audit) -> None:
    check_bounds(audit.found(draws=FEWER), audit.found(0.5, FEWER))


def check_bounds(found: float, weak: float) -> None:
    assert 0.5 * EPSILON < found <= EPSILON, "what is accounted for is not much too large either"
    assert weak > EPSILON


@pytest.mark.slow
@pytest.mark.parametrize(
    "audit",
    [AUDITS[0], *(pytest.param(audit, marks=pytest.mark.environment) for audit in AUDITS[1:])],
    ids=lambda audit: audit.method,
)
def test_the_page_says_what_the_attacker_finds(audit: Audit) -> None:
    found, weak = audit.found(), audit.found(0.5)
    check_bounds(found, weak)
    said = [float(cell) for cell in line_of(audit)[4:6]]
    assert said == pytest.approx([found, weak], abs=0.011)


def test_the_page_has_a_line_for_each_audit() -> None:
    for audit in AUDITS:
        _, unit, released, claimed, *_, draws = line_of(audit)
        assert (unit, released) == (audit.unit, audit.released)
        assert claimed == f"{EPSILON:g} ({DELTA:g})"
        assert draws == f"2 x {DRAWS:,} |"


def normal(count: int, seed: int) -> np.ndarray:
    return random.normal(random.key(seed), (count,)).double().numpy()


def test_a_lower_bound_is_below_the_exact_epsilon_and_near_it() -> None:
    # one Gaussian release of deviation 1 (Balle and Wang 2018, theorem 8)
    exact = 2.318
    without, present = normal(100_000, 1), normal(100_000, 2) + 1.0
    assert exact - 0.4 < lower_bound(without, present) < exact
    assert lower_bound(without, normal(100_000, 3)) < 0.1, "nothing is found where nothing is"


def test_a_canary_that_is_seen_when_it_is_absent_is_found_too() -> None:
    # rejects an attacker who only ever says that it is there: at most ln(1 / 0.9)
    without, present = normal(20_000, 1), normal(20_000, 2)
    without[::10] -= 20.0
    assert lower_bound(without, present) > 3.0
