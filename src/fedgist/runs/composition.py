"""Composition: the privacy that several private runs on the same rows spend together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedgist.recipe.reading import Recipe
from fedgist.world.accounting import composed

PUBLIC_NOISE = "; simulated: noise from seeds, which anyone can subtract"


@dataclass(frozen=True)
class Composition:
    """The joint promise of ``count`` runs, and its unit: one ``record`` or one ``client``."""

    unit: str
    count: int
    epsilon: float
    delta: float
    simulated: bool

    def described(self) -> str:
        """Return the promise in a sentence."""
        return (
            f"privacy: {self.count} run{'s' * (self.count > 1)} on the same rows compose to "
            f"epsilon {self.epsilon:.4g}, delta {self.delta:.4g} for one {self.unit} more or less"
        )


def compositions(recipes: Sequence[Recipe]) -> list[Composition]:
    """Return the joint promise of the runs of each unit of privacy.

    Gaussian mechanisms are composed exactly (:func:`fedgist.world.accounting.composed`). A run with
    amplification by sampling, or with noise by FedLog's theorem 4, is not equal to one Gaussian
    mechanism. Then epsilons and deltas are added (Dwork and Roth 2014, theorem 3.16).
    """
    units = dict.fromkeys(r.privacy.unit for r in recipes if r.privacy.unit != "none")
    return [_of([r for r in recipes if r.privacy.unit == unit]) for unit in units]


def _of(recipes: Sequence[Recipe]) -> Composition:
    budgets = []
    for section in (recipe.privacy for recipe in recipes):
        assert section.epsilon is not None  # a complete section has one
        assert section.delta is not None  # the same
        budgets.append((section.epsilon, section.delta))
    if all(map(_is_gaussian, recipes)):
        epsilon, delta = composed(budgets)
    else:
        epsilon, delta = sum(e for e, _ in budgets), min(1.0, sum(d for _, d in budgets))
    simulated = any(recipe.privacy.noise == "seed" for recipe in recipes)
    return Composition(recipes[0].privacy.unit, len(recipes), epsilon, delta, simulated)


def _is_gaussian(recipe: Recipe) -> bool:
    section = recipe.privacy
    plain = section.accounting == "tight" and section.bodies == "fixed"
    return plain and recipe.train.sampling != "poisson"


def notes_on(recipes: Sequence[Recipe]) -> list[str]:
    """Return notes for the user on the privacy that several runs spend together.

    The note counts the runs without privacy, because all runs together then promise nothing.
    """
    if len(recipes) <= 1:
        return []
    joint_promises = compositions(recipes)
    open_runs = len(recipes) - sum(composition.count for composition in joint_promises)
    beside = f"; {open_runs} more without privacy promise nothing" if open_runs else ""
    return [
        composition.described() + beside + (PUBLIC_NOISE if composition.simulated else "")
        for composition in joint_promises
    ]
