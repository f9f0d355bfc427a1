"""Privacy accounting: the epsilon that a run spends, and the noise that keeps it within its budget.

``"tight"`` is the exact privacy of composed Gaussian mechanisms (Balle and Wang 2018, theorem 8;
Dong, Roth, Su 2022, corollary 3.3). With amplification by sampling it uses privacy loss
distributions (Koskela et al. 2020). Google's dp-accounting computes both. ``"paper"`` is theorem 4
of FedLog, the theorem of Kairouz, Oh, Viswanath 2015 for k-fold adaptive composition.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from fedgist.errors import RecipeError
from fedgist.recipe.privacy_section import Accounting

# of amplified releases: below, nearly nothing is hidden, accounting would take minutes, and they
# are counted as if nothing amplified them
LEAST_NOISE = 0.3
LITTLE_NOISE = 0.7  # below, epsilons are above 10: they are worked out in larger steps
MUCH_NOISE = 100.0  # from here on, epsilons may be below 0.05: the steps are smaller than losses
LEAST_SHARE = 0.01  # smaller chances and rates have the steps of this one, which bounds the time
PATIENCE_S = 5.0  # between two messages of a long search
BISECTIONS = 9  # halvings of a factor of 2: noise to a thousandth


@dataclass(frozen=True)
class ReleaseSchedule:
    """The numbers of releases and of private steps in each round of a run, from round 0.

    ``chance`` is the probability that a client, sampled independently, takes part in a round; 1
    without such sampling. ``rate`` is the probability that a row takes part in a private step. Both
    kinds of mechanism have the same noise multiplier: the standard deviation of their noise,
    divided by their sensitivity. All releases of a round are of the same clients.
    """

    releases: tuple[int, ...]
    steps: tuple[int, ...] = ()
    chance: float = 1.0
    rate: float = 1.0
    accounting: Accounting = "tight"

    def until(self, number: int) -> tuple[int, int]:
        """Return the numbers of releases and private steps up to a round."""
        return sum(self.releases[: number + 1]), sum(self.steps[: number + 1])

    def epsilon(self, number: int, noise: float, delta: float) -> float:
        """Return the exact epsilon spent up to a round with a noise multiplier."""
        rounds = sorted(count for count in self.releases[: number + 1] if count)
        return _epsilon(tuple(rounds), self.until(number)[1], self.chance, self.rate, noise, delta)


def multiplier(
    schedule: ReleaseSchedule,
    epsilon: float,
    delta: float,
    say: Callable[[str], None] = lambda _: None,
) -> float:
    """Return the smallest noise multiplier with which all rounds together spend ``epsilon``.

    For ``"paper"`` it is sigma of theorem 4, divided by the sensitivity. ``say`` is called with the
    progress of a long search every few seconds.
    """
    last = len(schedule.releases)
    releases, steps = schedule.until(last)
    if schedule.accounting == "paper":
        return math.sqrt(8 * releases * math.log(math.e + epsilon / delta)) / epsilon
    if schedule.chance == 1 and not steps:
        return _gaussian("sigma", epsilon, delta) * math.sqrt(releases)
    # without amplification more noise is needed: an upper end
    most = _gaussian("sigma", epsilon, delta) * math.sqrt(releases + steps)

    def enough(noise: float) -> bool:
        return schedule.epsilon(last, noise, delta) <= epsilon

    return _searched(enough, most, say)


def spent(schedule: ReleaseSchedule, noise: float, delta: float, number: int) -> float:
    """Return the epsilon spent up to a round with a noise multiplier."""
    releases, steps = schedule.until(number)
    if not releases and not steps:
        return 0.0
    if schedule.accounting == "paper":
        return _paper_epsilon(releases, noise, delta)
    if schedule.chance == 1 and not steps:
        return _gaussian("epsilon", noise / math.sqrt(releases), delta)
    return schedule.epsilon(number, noise, delta)


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Return the exact delta of one Gaussian release (Balle and Wang 2018, theorem 8).

    ``noise`` is the noise multiplier.
    """
    log_ndtr = importlib.import_module("scipy.special").log_ndtr  # it takes 0.3 s to load
    far, near = 1 / (2 * noise) - epsilon * noise, -1 / (2 * noise) - epsilon * noise
    return math.exp(log_ndtr(far)) - math.exp(epsilon + log_ndtr(near))


def composed(budgets: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the joint epsilon and delta of runs on the same rows with these budgets.

    The noise of each run must be calibrated exactly, without amplification by sampling. Then run i
    equals one Gaussian mechanism of standard deviation sigma_i that spends the run's whole budget.
    All runs together equal one mechanism with 1 / sigma^2 = sum_i 1 / sigma_i^2 (Dong, Roth, Su
    2022, corollary 3.3), also if later runs depend on earlier ones. The returned delta is the
    largest delta of the runs.
    """
    delta = max(delta for _, delta in budgets)
    precision = sum(_gaussian("sigma", *budget) ** -2 for budget in budgets)
    return _gaussian("epsilon", 1 / math.sqrt(precision), delta), delta


def _paper_epsilon(releases: int, noise: float, delta: float) -> float:
    """Return the epsilon for which theorem 4 requires this noise; sigma falls as epsilon grows."""
    from scipy.optimize import brentq

    def excess(log_epsilon: float) -> float:
        epsilon = math.exp(log_epsilon)
        return math.sqrt(8 * releases * math.log(math.e + epsilon / delta)) / epsilon - noise

    root: float = brentq(excess, -40.0, 40.0)
    return math.exp(root)


def _gaussian(quantity: str, given: float, delta: float) -> float:
    """Return the ``"sigma"`` of one release for an epsilon, or the ``"epsilon"`` for a sigma."""
    with _without_warnings():
        value: float = getattr(_library(), f"get_{quantity}_gaussian")(given, delta)
    return value


def _without_warnings() -> np.errstate:
    """Return a context without numpy's range warnings: the library expects extreme values."""
    return np.errstate(over="ignore", under="ignore", divide="ignore")


@functools.lru_cache(maxsize=1024)
def _epsilon(
    rounds: tuple[int, ...], steps: int, chance: float, rate: float, noise: float, delta: float
) -> float:
    """Return the epsilon of rounds with so many releases each, and of private steps."""
    without_amplification = _gaussian("epsilon", noise / math.sqrt(sum(rounds) + steps), delta)
    least = noise / math.sqrt(max(rounds, default=1))  # of the releases of a round together
    if least < LEAST_NOISE:
        return without_amplification
    share = min(chance if rounds else 1.0, rate if steps else 1.0)
    accountant = _library().pld.PLDAccountant(value_discretization_interval=_step(least, share))
    accountant.compose(_event(rounds, steps, chance, rate, noise))
    with _without_warnings():
        epsilon: float = accountant.get_epsilon(delta)
    return min(epsilon, without_amplification)  # steps round up: they may lose the amplification


def _step(noise: float, share: float) -> float:
    """Return the step in which privacy losses are rounded up, which makes epsilons too large.

    One loss is of the order of ``share / noise``.
    """
    if noise < LITTLE_NOISE:
        return 1e-2
    return 1e-3 if noise < MUCH_NOISE else 0.1 * max(share, LEAST_SHARE) / noise


def _searched(enough: Callable[[float], bool], most: float, say: Callable[[str], None]) -> float:
    """Return the smallest sufficient noise, at most ``most``, to a relative precision of 0.001."""
    if most <= LEAST_NOISE:
        return most
    last_message_at = time.monotonic()
    least = most / 2
    while least > LEAST_NOISE and enough(least):
        most, least = least, least / 2
    for step in range(BISECTIONS):
        if time.monotonic() - last_message_at > PATIENCE_S:
            last_message_at = time.monotonic()
            say(
                f"privacy: the noise multiplier is from {least:.4g} to {most:.4g}; "
                f"steps of the search left: {BISECTIONS - step}"
            )
        middle = math.sqrt(least * most)
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most


def _event(rounds: tuple[int, ...], steps: int, chance: float, rate: float, noise: float) -> object:
    dp = _library()

    def repeated(count: int, share: float, together: int = 1) -> object:
        """Return ``count`` mechanisms, each of releases ``together`` of one sample."""
        gaussian = dp.GaussianDpEvent(noise / math.sqrt(together))
        once = gaussian if share == 1 else dp.PoissonSampledDpEvent(share, gaussian)
        return dp.SelfComposedDpEvent(once, count)

    parts = [repeated(count, chance, together) for together, count in Counter(rounds).items()]
    parts += [repeated(steps, rate)] if steps else []
    return dp.ComposedDpEvent(parts)


@functools.cache
def _library() -> ModuleType:
    """Return dp-accounting, an extra."""
    try:
        importlib.import_module("dp_accounting.pld")
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise RecipeError(
            "privacy.unit needs dp-accounting: pip install 'fedgist[privacy]'"
        ) from error
