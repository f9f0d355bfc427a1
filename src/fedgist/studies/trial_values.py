"""Reproducible trial values: functions of the search's seed and of its results.

Optuna's samplers draw from one generator, so a search resumed in another process would draw other
values. Here every draw has its own generator, seeded by the search's seed, the trial's number and
the key. A trial that was running when the search was killed continues under its number, with its
values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fedgist.studies.search_space import Range


class Numbered(Protocol):
    """A trial as samplers see it: only its number."""

    @property
    def number(self) -> int:
        """Index of the trial in its search, from 0."""


class SearchTrial(Protocol):
    """A trial that requests its values."""

    def suggest_categorical(self, name: str, choices: object) -> object:
        """Return one of the choices."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> object:
        """Return an int between ``low`` and ``high``."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None, log: bool
    ) -> object:
        """Return a float between ``low`` and ``high``."""


class Draws(Protocol):
    """The methods of an Optuna sampler that draw values."""

    def infer_relative_search_space(self, study: object, trial: Numbered) -> Mapping[str, object]:
        """Return the keys that are drawn together."""

    def sample_relative(
        self, study: object, trial: Numbered, search_space: object
    ) -> Mapping[str, object]:
        """Return the values of keys that are drawn together."""

    def sample_independent(
        self, study: object, trial: Numbered, param_name: str, param_distribution: object
    ) -> object:
        """Return the value of a key that is drawn by itself."""


@dataclass(frozen=True)
class Sampler:
    """An Optuna sampler that is recreated for every draw: ``make`` creates it from a seed.

    It implements the interface of Optuna's ``BaseSampler``.
    """

    make: Callable[[int], Draws]
    seed: int

    def _of(self, trial: Numbered, key: str = "") -> Draws:
        text = f"{self.seed}/{trial.number}/{key}"
        return self.make(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]))

    def infer_relative_search_space(self, study: object, trial: Numbered) -> Mapping[str, object]:
        """Return the keys that are drawn together."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: object, trial: Numbered, search_space: object
    ) -> Mapping[str, object]:
        """Return the values of keys that are drawn together."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: object, trial: Numbered, param_name: str, param_distribution: object
    ) -> object:
        """Return the value of a key that is drawn by itself."""
        sampler = self._of(trial, param_name)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: object, trial: Numbered) -> None:
        """Do nothing: nothing is kept between draws."""

    def after_trial(self, study: object, trial: Numbered, state: object, values: object) -> None:
        """Do nothing: nothing is kept between draws."""


def suggest(trial: SearchTrial, space: Mapping[str, Range]) -> None:
    """Suggest a value of each key in a space to a trial; existing values of the trial are kept."""
    for key, values in space.items():
        if "choices" in values:
            trial.suggest_categorical(key, values["choices"])
            continue
        low, high, log = values["low"], values["high"], values.get("log", False)
        if isinstance(low, int) and isinstance(high, int):
            trial.suggest_int(key, low, high, step=int(values.get("step", 1)), log=log)
        else:
            trial.suggest_float(key, low, high, step=values.get("step"), log=log)
