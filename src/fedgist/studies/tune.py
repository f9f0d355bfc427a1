"""Hyper-parameters by Optuna, on validation data only.

A study lies in ``study.db`` of its folder and goes on where it was killed: a trial's run stands in
a folder named by its parameters, so one that had begun is resumed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgist.errors import RecipeError
from fedgist.federation.recipe import Recipe, read
from fedgist.federation.record import ROUNDS, read_lines
from fedgist.studies.jobs import Event, Job

OBJECTIVE = "eval/validation/accuracy_mean"
FIXED = ("seed", "data.validation", "evaluate.", "engine.", "paper.", "train.num_rounds")
VALIDATION = 0.2  # share of the training rows held out where the recipe holds out none
STUDY = "study.db"


def read_space(path: Path) -> dict[str, dict[str, Any]]:
    """Read a search space: a table for each key, with ``low``, ``high``, ``log``, or ``choices``.

    Raises
    ------
    RecipeError
        If the file or a range cannot be used.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        msg = f"{path}: {error}"
        raise RecipeError(msg) from error
    space = dict(_ranges(raw, ""))
    if not space:
        example = '["train.lr"] and below it low = 1e-4, high = 1e-1, log = true'
        msg = f"{path} names no key; write {example}"
        raise RecipeError(msg)
    for key, one in space.items():
        if key.startswith(FIXED):
            msg = f"{path}: {key} cannot be searched: it is no hyper-parameter"
            raise RecipeError(msg)
        if problem := _problem(one):
            msg = f"{path}: {key}: {problem}"
            raise RecipeError(msg)
    return space


def _ranges(raw: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in raw.items():
        if not isinstance(value, Mapping):
            msg = (
                f"the search space: {prefix}{name} = {value!r}: expected a table with low and "
                "high, or choices"
            )
            raise RecipeError(msg)
        if {"low", "high", "choices"} & value.keys():
            yield prefix + name, dict(value)
        else:
            yield from _ranges(value, f"{prefix}{name}.")


def _problem(one: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a range, if anything."""
    low, high, choices = (one.get(key) for key in ("low", "high", "choices"))
    ordered = _number(low) and _number(high) and bool(low <= high)  # type: ignore[operator]  # both are numbers
    checks = [
        (
            one.keys() <= {"low", "high", "log", "step", "choices"},
            "known keys: low, high, log, step, choices",
        ),
        ("choices" not in one or len(one) == 1, "either choices, or low and high"),
        (
            "choices" not in one or (isinstance(choices, list) and choices),
            f"choices = {choices!r}: expected a list",
        ),
        (
            "choices" in one or ordered,
            f"low = {low!r}, high = {high!r}: expected two numbers in this order",
        ),
        (
            isinstance(one.get("log", False), bool),
            f"log = {one.get('log')!r}: expected true or false",
        ),
        (
            not one.get("log") or (ordered and one["low"] > 0 and "step" not in one),
            "log takes low > 0 and no step",
        ),
    ]
    return next((text for sound, text in checks if not sound), None)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass
class _Open:
    """Parameters under way.

    The trials that ask for them (Optuna may ask twice), their seeds' values so far.
    """

    trials: list[Any]
    jobs: list[Job]
    values: dict[str, float] = field(default_factory=dict)
    over: bool = False  # pruned or failed: its other seeds need not be run


class Tuner:
    """Asks Optuna for trials, hands them out as jobs, and tells it what came of them."""

    def __init__(
        self, path: Path, settings: Sequence[str], space: Path, out: Path, seeds: int
    ) -> None:
        """Open or go on with the study in ``out``.

        Raises
        ------
        RecipeError
            If the recipe, the space, or one with the other cannot be used, or Optuna is missing.
        """
        self.optuna = _optuna()
        self.path, self.settings, self.out, self.seeds = path, list(settings), out, seeds
        self.space = read_space(space)
        base = read(path, settings)
        self.held_out = base.data.validation
        if base.data.validation == 0:
            self.settings.append(f"data.validation={VALIDATION}")
        for end in ("low", "high"):
            self._try(
                space,
                {
                    k: one["choices"][0] if "choices" in one else one[end]
                    for k, one in self.space.items()
                },
            )
        for key, one in self.space.items():
            for choice in one.get("choices", ()):
                self._try(space, {key: choice})
        self.open: dict[str, _Open] = {}
        out.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{(out / STUDY).resolve()}"
        before = self._load(storage)
        self.study = self.optuna.create_study(
            storage=storage,
            study_name="fedgist",
            direction="maximize",
            load_if_exists=True,
            sampler=self.optuna.samplers.TPESampler(seed=base.seed + before),
            pruner=self.optuna.pruners.MedianPruner(
                n_startup_trials=5, n_warmup_steps=max(1, base.train.num_rounds // 4)
            ),
        )
        self._same_question()
        states = self.optuna.trial.TrialState
        for trial in self.study.get_trials(states=(states.RUNNING,)):  # of a study that was killed
            self.study.tell(trial.number, state=states.FAIL)
            self.study.enqueue_trial(trial.params)

    def _try(self, space: Path, params: Mapping[str, Any]) -> None:
        try:
            self._recipe(params)
        except RecipeError as error:
            msg = f"{space}: {str(error).removeprefix(f'{self.path}: ')}"
            raise RecipeError(msg) from error

    def _load(self, storage: str) -> int:
        """Return how many trials there are already."""
        if not (self.out / STUDY).exists():
            return 0
        return len(self.optuna.load_study(study_name="fedgist", storage=storage).trials)

    def _same_question(self) -> None:
        """Refuse to go on with a study of another recipe or space."""
        recipe = read(self.path, self.settings).model_dump(mode="json", exclude={"engine", "paper"})
        asked = json.dumps(
            {"recipe": recipe, "space": self.space, "seeds": self.seeds},
            sort_keys=True,
            default=str,
        )
        if self.study.user_attrs.get("asked", asked) != asked:
            msg = (
                f"{self.out} holds a study of another recipe, space or number of seeds; choose "
                "another --out"
            )
            raise RecipeError(msg)
        self.study.set_user_attr("asked", asked)

    @property
    def finished(self) -> int:
        """How many trials are complete or pruned."""
        states = self.optuna.trial.TrialState
        return len(self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))

    def jobs(self, trials: int) -> Iterator[Job]:
        """Yield jobs until so many trials have been begun.

        Those that earlier calls finished count.
        """
        for _ in range(trials - self.finished):
            trial = self.study.ask(_distributions(self.optuna, self.space))
            recipe = self._recipe(trial.params)
            mark = hashlib.sha256(json.dumps(trial.params, sort_keys=True).encode()).hexdigest()[
                :10
            ]
            words = " ".join(f"{key}={_short(value)}" for key, value in trial.params.items())
            mine = [
                Job(
                    f"trial {trial.number}: {words} seed {seed}",
                    recipe.model_copy(update={"seed": seed}),
                    self.out / f"trial-{mark}" / f"seed-{seed}",
                )
                for seed in range(recipe.seed, recipe.seed + self.seeds)
            ]
            twin = next(
                (
                    o
                    for o in self.open.values()
                    if o.jobs[0].folder == mine[0].folder and not o.over
                ),
                None,
            )
            if twin is not None:
                twin.trials.append(trial)
                continue
            opened = _Open([trial], mine)
            self.open |= {job.name: opened for job in mine}
            for job in mine:
                if not opened.over:
                    yield job

    def hear(self, job: Job, event: Event) -> bool:
        """Take note of a round or an end; return True if the trial is a bad one and should stop."""
        states = self.optuna.trial.TrialState
        opened = self.open[job.name]
        if opened.over:
            return True
        if (
            event.kind == "round"
            and event.line
            and OBJECTIVE in event.line
            and job is opened.jobs[0]
        ):
            opened.trials[0].report(event.line[OBJECTIVE], event.line["round"])
            if opened.trials[0].should_prune():
                self._tell(opened, state=states.PRUNED)
                return True
        elif event.kind == "failed":
            self._tell(opened, state=states.FAIL)
        elif event.kind == "done":
            opened.values[job.name] = _objective(job.folder)
            if len(opened.values) == len(opened.jobs):
                self._tell(opened, sum(opened.values.values()) / len(opened.values))
        return False

    def _tell(self, opened: _Open, value: float | None = None, state: Any = None) -> None:
        opened.over = True
        for trial in opened.trials:
            self.study.tell(trial, value, state=state)

    def best(self) -> tuple[dict[str, Any], float] | None:
        """Return the parameters and the value of the best trial, if one is complete."""
        states = self.optuna.trial.TrialState
        if not self.study.get_trials(deepcopy=False, states=(states.COMPLETE,)):
            return None
        return dict(self.study.best_trial.params), float(self.study.best_value)

    def best_recipe(self) -> Recipe | None:
        """Return the recipe with the best parameters, holding out no more than it did."""
        found = self.best()
        if found is None:
            return None
        recipe = self._recipe(found[0])
        return recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"validation": self.held_out})}
        )

    def folders(self) -> list[Path]:
        """Return the folders of the trials that have begun."""
        return sorted(path for path in self.out.glob("trial-*") if path.is_dir())

    def _recipe(self, params: Mapping[str, Any]) -> Recipe:
        return read(
            self.path,
            [*self.settings, *(f"{key}={json.dumps(value)}" for key, value in params.items())],
        )


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        msg = "tuning needs Optuna: pip install 'fedgist[tune]'"
        raise RecipeError(msg) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distributions(optuna: Any, space: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    d = optuna.distributions
    out = {}
    for key, one in space.items():
        if "choices" in one:
            out[key] = d.CategoricalDistribution(one["choices"])
        elif isinstance(one["low"], int) and isinstance(one["high"], int):
            out[key] = d.IntDistribution(
                one["low"], one["high"], log=one.get("log", False), step=one.get("step", 1)
            )
        else:
            out[key] = d.FloatDistribution(
                one["low"], one["high"], log=one.get("log", False), step=one.get("step")
            )
    return out


def _objective(folder: Path) -> float:
    """The last round's validation accuracy: never the test's, never the best round's."""
    values = [
        line[OBJECTIVE] for line in read_lines(folder / ROUNDS) if line.get(OBJECTIVE) is not None
    ]
    if not values:
        msg = (
            f"{folder} has no validation accuracy: its clients hold too few rows; raise "
            "data.validation"
        )
        raise RecipeError(msg)
    return float(values[-1])


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
