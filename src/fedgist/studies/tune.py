"""Hyper-parameters by Optuna, on validation data only.

A study is kept in ``study.db`` of its folder and goes on where it was killed. The folder of a
trial's run is named by its parameters, so that a run that had begun is resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgist.errors import DiskFullError, OutputError, RecipeError, first_line
from fedgist.federation.columns import VALIDATION_ACCURACY
from fedgist.federation.recipe import Recipe, read
from fedgist.federation.record import ROUNDS, read_lines
from fedgist.studies.job import Event, Job, jobs_of_seeds
from fedgist.studies.search_space import Range, extremes, own_values, read_space

OBJECTIVE = VALIDATION_ACCURACY
VALIDATION = 0.2  # share of the training rows held out where the recipe holds out none
STUDY = "study.db"


@dataclass
class _OpenTrial:
    """Parameters that are being run: the trials that asked for them, a job for each seed.

    Optuna may ask for the same parameters twice.
    """

    trials: list[Any]
    jobs: list[Job]
    values: dict[str, float] = field(default_factory=dict)  # of the jobs that are done
    over: bool = False  # pruned or failed: its other seeds need not be run


class Tuner:
    """Asks Optuna for trials, hands them out as jobs, and reports their results to it."""

    def __init__(
        self, path: Path, settings: Sequence[str], space: Path, out: Path, seeds: int
    ) -> None:
        """Begin the study in ``out``, or go on with it.

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
        if base.data.validation == 0 and not base.data.held_out:
            self.settings.append(f"data.validation={VALIDATION}")
        for params in extremes(self.space):
            self._check(space, params)
        self.open: dict[str, _OpenTrial] = {}
        out.mkdir(parents=True, exist_ok=True)
        self.study = self._open_study(base)
        self._check_same_question()
        if not self.study.trials:  # so that the best is never worse than what the recipe says
            self.study.enqueue_trial(own_values(base.settings(), self.space))
        self._ask_again_for_killed()

    def _check(self, space: Path, params: Mapping[str, Any]) -> None:
        try:
            self._recipe(params)
        except RecipeError as error:
            msg = f"{space}: {str(error).removeprefix(f'{self.path}: ')}"
            raise RecipeError(msg) from error

    def _open_study(self, base: Recipe) -> Any:
        begun = (self.out / STUDY).exists()
        # without a pool: a connection kept open in one would be closed by nobody
        pool = importlib.import_module("sqlalchemy.pool").NullPool
        storage = self.optuna.storages.RDBStorage(
            f"sqlite:///{(self.out / STUDY).resolve()}", engine_kwargs={"poolclass": pool}
        )
        trials = 0  # of earlier calls: each call has a sampler seed of its own
        if begun:
            trials = len(self.optuna.load_study(study_name="fedgist", storage=storage).trials)
        return self.optuna.create_study(
            storage=storage,
            study_name="fedgist",
            direction="maximize",
            load_if_exists=True,
            sampler=self.optuna.samplers.TPESampler(seed=base.seed + trials),
            pruner=self.optuna.pruners.MedianPruner(
                n_startup_trials=5, n_warmup_steps=max(1, base.train.num_rounds // 2)
            ),
        )

    def _check_same_question(self) -> None:
        """Refuse to go on with a study of another recipe or space."""
        recipe = read(self.path, self.settings).settings()
        question = json.dumps(
            {"recipe": recipe, "space": self.space, "seeds": self.seeds},
            sort_keys=True,
            default=str,
        )
        if self.study.user_attrs.get("asked", question) != question:
            msg = (
                f"{self.out} holds a study of another recipe, space or number of seeds; choose "
                "another --out"
            )
            raise RecipeError(msg)
        self.study.set_user_attr("asked", question)

    def _ask_again_for_killed(self) -> None:
        """Close the trials that were running when the study was killed, and queue them again."""
        states = self.optuna.trial.TrialState
        for trial in self.study.get_trials(states=(states.RUNNING,)):
            self.study.tell(trial.number, state=states.FAIL)
            self.study.enqueue_trial(trial.params)

    @property
    def finished(self) -> int:
        """The number of trials that are complete or pruned."""
        states = self.optuna.trial.TrialState
        return len(self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))

    def jobs(self, trials: int) -> Iterator[Job]:
        """Yield jobs until ``trials`` trials have been begun, those that are finished included."""
        for _ in range(trials - self.finished):
            trial = self.study.ask(_distributions(self.optuna, self.space))
            jobs = self._jobs_of(trial)
            twin = self._open_trial_in(jobs[0].folder)
            if twin is not None:
                twin.trials.append(trial)
                continue
            opened = _OpenTrial([trial], jobs)
            self.open |= {job.name: opened for job in jobs}
            for job in jobs:
                if not opened.over:
                    yield job

    def _jobs_of(self, trial: Any) -> list[Job]:
        text = json.dumps(trial.params, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        words = " ".join(f"{key}={_short(value)}" for key, value in trial.params.items())
        name, folder = f"trial {trial.number}: {words}", self.out / f"trial-{digest}"
        return jobs_of_seeds(name, self._recipe(trial.params), self.seeds, folder)

    def _open_trial_in(self, folder: Path) -> _OpenTrial | None:
        """Return the trial that is not over and whose first job has this folder, if any."""
        trials = (opened for opened in self.open.values() if opened.jobs[0].folder == folder)
        return next((opened for opened in trials if not opened.over), None)

    def listen(self, job: Job, event: Event) -> bool:
        """Take note of a round or an end; return True if the trial is a bad one and should stop."""
        states = self.optuna.trial.TrialState
        opened = self.open[job.name]
        if opened.over:
            return True
        if event.kind == "round":
            line = event.line or {}
            if job is opened.jobs[0] and OBJECTIVE in line:
                opened.trials[0].report(line[OBJECTIVE], line["round"])
                if opened.trials[0].should_prune():
                    self._close(opened, state=states.PRUNED)
                    return True
        elif event.kind == "failed":
            self._close(opened, state=states.FAIL)
        elif event.kind == "done":
            opened.values[job.name] = _objective(job.folder)
            if len(opened.values) == len(opened.jobs):
                self._close(opened, sum(opened.values.values()) / len(opened.values))
        return False

    def _close(self, opened: _OpenTrial, value: float | None = None, state: Any = None) -> None:
        opened.over = True
        for trial in opened.trials:
            self.study.tell(trial, value, state=state)

    def best(self) -> tuple[dict[str, Any], float] | None:
        """Return the parameters and the value of the best trial, or None if none is complete.

        Of trials that tie it is the first.
        """
        complete = self._complete()
        return (dict(complete[0].params), float(complete[0].value)) if complete else None

    def ties(self) -> list[dict[str, Any]]:
        """Return the parameters of other trials that are as good as the best one."""
        best, *others = self._complete() or [None]
        tied = [trial.params for trial in others if math.isclose(trial.value, best.value)]
        different: list[dict[str, Any]] = []
        for params in tied:
            if params not in (best.params, *different):
                different.append(dict(params))
        return different

    def _complete(self) -> list[Any]:
        """Return the trials that are complete, the best one first, of equal ones the earliest."""
        states = self.optuna.trial.TrialState
        complete = self.study.get_trials(deepcopy=False, states=(states.COMPLETE,))
        return sorted(complete, key=lambda trial: (-trial.value, trial.number))

    def best_recipe(self) -> Recipe | None:
        """Return the recipe with the best parameters, holding out no more rows than it did."""
        best = self.best()
        if best is None:
            return None
        recipe = self._recipe(best[0])
        data = recipe.data.model_copy(update={"validation": self.held_out})
        return recipe.model_copy(update={"data": data})

    def folders(self) -> list[Path]:
        """Return the folders of the trials that have begun."""
        return sorted(path for path in self.out.glob("trial-*") if path.is_dir())

    def _recipe(self, params: Mapping[str, Any]) -> Recipe:
        parameters = [f"{key}={json.dumps(value)}" for key, value in params.items()]
        return read(self.path, [*self.settings, *parameters])


@contextlib.contextmanager
def storing(out: Path) -> Iterator[None]:
    """Use the study in ``out`` inside; where its database cannot be written, the error names it.

    Raises
    ------
    OutputError
        If the database cannot be written; DiskFullError if there is no room.
    """
    optuna, alchemy = _optuna(), importlib.import_module("sqlalchemy.exc")
    try:
        yield
    except (optuna.exceptions.StorageInternalError, alchemy.SQLAlchemyError) as error:
        reason = first_line(error.__cause__ or error)
        kind = DiskFullError if "disk is full" in reason else OutputError
        msg = f"{out / STUDY} cannot be written: {reason}"
        raise kind(msg) from error


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        msg = "tuning needs Optuna: pip install 'fedgist[tune]'"
        raise RecipeError(msg) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distributions(optuna: Any, space: Mapping[str, Range]) -> dict[str, Any]:
    return {key: _distribution(optuna.distributions, values) for key, values in space.items()}


def _distribution(distributions: Any, values: Range) -> Any:
    if "choices" in values:
        return distributions.CategoricalDistribution(values["choices"])
    low, high, log = values["low"], values["high"], values.get("log", False)
    if isinstance(low, int) and isinstance(high, int):
        return distributions.IntDistribution(low, high, log=log, step=int(values.get("step", 1)))
    return distributions.FloatDistribution(low, high, log=log, step=values.get("step"))


def _objective(folder: Path) -> float:
    """Return the last round's validation accuracy: never the test's, never the best round's."""
    lines = read_lines(folder / ROUNDS)
    values = [line[OBJECTIVE] for line in lines if line.get(OBJECTIVE) is not None]
    if not values:
        msg = (
            f"{folder} has no validation accuracy: its clients hold too few rows; raise "
            "data.validation"
        )
        raise RecipeError(msg)
    return float(values[-1])


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
