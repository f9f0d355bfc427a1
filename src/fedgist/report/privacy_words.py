"""What a privacy budget means in words, for those who must decide about one."""

from __future__ import annotations

import math

from fedgist.report.formatting import Sheet

SHOWN = (0.1, 0.5, 1.0, 3.0, 8.0)
USUAL = (
    ("at most 1", "a strong promise", "Ponomareva et al. 2023, How to DP-fy ML, tier 1"),
    ("at most 10", "a reasonable promise, the aim of most models", "the same, tier 2"),
    ("19.61", "the US Census of 2020, for all its redistricting tables", "US Census Bureau 2021"),
)
QUESTIONS = (
    (
        "delta: the chance with which the promise may fail. Usual: below 1 / number of rows, and "
        "never above."
    ),
    (
        "clip: the largest norm of a row's features. Do not measure it on private rows: that would "
        "be a release. With model.last = 'clamp' and a bound b it is b times the square root of "
        "the number of features; else choose it on public or made-up rows of the same form."
    ),
    (
        "data.mean and data.std: do not measure them on private rows either. Take them from "
        "published reference ranges (mean: the middle; std: a quarter of the range) or from an "
        "earlier, public cohort. fedgist init TABLE --private writes measured ones, to be replaced."
    ),
    (
        "What it covers: the noisy sums alone, as if the trained body did not know the rows. "
        "privacy.bodies = 'dp_sgd' covers the body as well."
    ),
    "Several runs on the same rows add up, and so do the points of --epsilons on real rows.",
)


def chance(epsilon: float) -> float:
    """Return the largest chance of being right for an attacker who guesses at even odds.

    The attacker knows all other rows, and guesses whether one was there: ``e^epsilon / (1 +
    e^epsilon)`` (Kasiviswanathan and Smith 2014), beside a chance of delta.
    """
    return 1 / (1 + math.exp(-epsilon))


def in_words(epsilon: float, unit: str) -> str:
    """Return what a budget means for one record or client."""
    return (
        f"Epsilon {epsilon:.3g} for one {unit} more or less: an attacker who knows all other rows, "
        f"and guesses whether this {unit} was among them, is right in at most "
        f"{100 * chance(epsilon):.2f} % of cases (50 % is a coin), but for a chance of delta."
    )


def screen(unit: str = "record") -> list[Sheet]:
    """Return the tables of what epsilons mean, and which are usual."""
    meaning = tuple((f"{e:g}", f"{100 * chance(e):.2f} %") for e in SHOWN)
    return [
        Sheet(
            "What epsilon means",
            ("epsilon", "an attacker is right in at most"),
            meaning,
            f"guessing whether one {unit} was among the rows, knowing all others; 50 % is a coin",
        ),
        Sheet("Usual values", ("epsilon", "what", "source"), USUAL),
    ]
