"""Hyper-parameter search with Optuna, on validation data only.

A study is stored in ``study.db`` of its folder and can be resumed after a kill. Trials that were
running continue under their numbers, and later trials get the same values as in an uninterrupted
search (:mod:`fedgist.studies.trial_values`). The folder of a trial's run is named by its
parameters, so a run that was started is resumed. Under privacy, the choice of the best trial costs
epsilon (:mod:`fedgist.studies.private_choice`).
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
from fedgist.recipe.reading import Recipe, check_parts, first_metric, read
from fedgist.runs.files.columns import ends_lost, over_clients
from fedgist.runs.files.record import ROUNDS, Line, read_lines
from fedgist.runs.files.run_directory import held
from fedgist.studies.job import Event, Job, jobs_of_seeds
from fedgist.studies.private_choice import (
    Choice,
    check_search,
    mean_correct_rows,
    noisy_max,
    promise,
    source_of_bits,
)
from fedgist.studies.search_space import extremes, notes_on_moved, own_values, read_space
from fedgist.studies.trial_values import Sampler, suggest

VALIDATION = 0.2  # share of the training rows to hold out if the recipe holds out none
STUDY, NAME = "study.db", "fedgist"
LOCK = Path("study.lock")
BEST = "best.toml"  # the recipe with the best settings
WORST = 1e30  # the size of the score of a trial that diverged, if its metric has no bound
CHOICES = "choices"  # attribute of the study: the choices made under privacy


@dataclass
class _OpenTrial:
    """Parameters that are running: the trials that share them, and a job for each seed.

    Optuna may suggest the same parameters twice.
    """

    trials: list[Any]
    jobs: list[Job]
    reported: set[int] = field(default_factory=set)  # rounds reported to Optuna
    values: dict[str, float] = field(default_factory=dict)  # scores of the finished jobs
    over: bool = False  # pruned, failed or complete: no other seed has to run


class Tuner:
    """Requests trials from Optuna, turns them into jobs, and reports their results to Optuna."""

    def __init__(
        self, path: Path, settings: Sequence[str], space: Path, out: Path, seeds: int
    ) -> None:
        """Create the study in ``out``, or resume it."""
        self.optuna = _optuna()
        self.path, self.settings, self.out, self.seeds = path, list(settings), out, seeds
        self.space = read_space(space)
        base = read(path, settings)
        self.metric = first_metric(base)
        self.column = over_clients("validation", self.metric.name)
        self.held_out = base.data.validation
        if base.data.validation == 0 and not base.data.held_out:
            self.settings.append(f"data.validation={VALIDATION}")
        check_search(base)
        self.base = base
        for params in extremes(self.space):
            self._check(space, params)
        self.open: dict[str, _OpenTrial] = {}
        out.mkdir(parents=True, exist_ok=True)
        self.storage = self._open_storage()
        self.study = self._open_study(base)
        self._check_same_question()
        self.notes: list[str] = []
        if not self.study.trials:  # the recipe's own values are the first trial
            self.notes = notes_on_moved(base.settings(), self.space)
            self.study.enqueue_trial(own_values(base.settings(), self.space))

    def _check(self, space: Path, params: Mapping[str, Any]) -> None:
        try:
            self._recipe(params)
        except RecipeError as error:
            raise RecipeError(f"{space}: {str(error).removeprefix(f'{self.path}: ')}") from error

    def _open_storage(self) -> Any:
        # without a pool: nobody would close a pooled connection
        pool = importlib.import_module("sqlalchemy.pool").NullPool
        return self.optuna.storages.RDBStorage(
            f"sqlite:///{(self.out / STUDY).resolve()}", engine_kwargs={"poolclass": pool}
        )

    def _open_study(self, base: Recipe) -> Any:
        samplers, pruners = self.optuna.samplers, self.optuna.pruners
        sampler, pruner = (
            samplers.TPESampler,
            pruners.MedianPruner(
                n_startup_trials=5, n_warmup_steps=max(1, base.train.num_rounds // 2)
            ),
        )
        if self.private:  # TPE and median pruning would read scores, which costs epsilon
            sampler, pruner = samplers.RandomSampler, pruners.NopPruner()
        return self.optuna.create_study(
            storage=self.storage,
            study_name=NAME,
            direction="maximize" if self.metric.better == "higher" else "minimize",
            load_if_exists=True,
            sampler=Sampler(lambda seed: sampler(seed=seed), base.seed),
            pruner=pruner,
        )

    @property
    def private(self) -> bool:
        """Whether the trials run under privacy. Choosing one then costs epsilon, too."""
        return self.base.privacy.unit != "none"

    def _check_same_question(self) -> None:
        """Raise RecipeError if the study has another recipe, space or number of seeds."""
        recipe = read(self.path, self.settings).settings()
        question = json.dumps(
            {"recipe": recipe, "space": self.space, "seeds": self.seeds},
            sort_keys=True,
            default=str,
        )
        if self.study.user_attrs.get("asked", question) != question:
            raise RecipeError(
                f"{self.out} holds a study of another recipe, space or number of seeds; choose "
                "another --out"
            )
        self.study.set_user_attr("asked", question)

    def _trials(self, count: int) -> Iterator[Any]:
        """Yield ``count`` trials with their values: first the trials that ran when a kill came."""
        running, trial_of = self.optuna.trial.TrialState.RUNNING, self.optuna.trial.Trial
        killed = [trial.number for trial in self.study.get_trials(states=(running,))]
        for place in range(count):
            if place < len(killed):
                study = self.storage.get_study_id_from_name(NAME)
                number = self.storage.get_trial_id_from_study_id_trial_number(study, killed[place])
                trial = trial_of(self.study, number)
            else:
                trial = self.study.ask()
            suggest(trial, self.space)
            yield trial

    @property
    def finished(self) -> int:
        """Number of complete or pruned trials."""
        return len(self.study.get_trials(deepcopy=False, states=self._ends))

    @property
    def _ends(self) -> tuple[object, ...]:
        """The states of complete and pruned trials."""
        states = self.optuna.trial.TrialState
        return states.COMPLETE, states.PRUNED

    def jobs_before(self) -> list[Job]:
        """Return the jobs of the trials that were complete or pruned when the search began."""
        ended = self.study.get_trials(deepcopy=False, states=self._ends)
        return [job for trial in ended for job in self._jobs_of(trial)]

    def jobs(self, trials: int) -> Iterator[Job]:
        """Yield jobs until ``trials`` trials were started, including the finished ones."""
        for trial in self._trials(trials - self.finished):
            jobs = self._jobs_of(trial)
            twin = self._open_trial_in(jobs[0].folder)
            if twin is not None:
                twin.trials.append(trial)
                continue
            reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
            opened = _OpenTrial([trial], jobs, set(reported))
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
        """Return the open trial whose first job has this folder, or None."""
        trials = (opened for opened in self.open.values() if opened.jobs[0].folder == folder)
        return next((opened for opened in trials if not opened.over), None)

    def listen(self, job: Job, event: Event) -> bool:
        """Record an event of a job; return True if its trial is pruned and the job should stop."""
        states = self.optuna.trial.TrialState
        opened = self.open[job.name]
        if opened.over:
            return True
        rounds = _rounds_told(opened, job, event)
        lines = [line for line in rounds if line.get(self.column) is not None]
        if any(self._is_bad(opened, line) for line in lines):
            self._close(opened, state=states.PRUNED)
            return True
        if event.kind == "failed":
            self._close(opened, state=states.FAIL)
        elif event.kind == "done":
            opened.values[job.name] = self._score(job.folder)
            if len(opened.values) == len(opened.jobs):
                self._close(opened, sum(opened.values.values()) / len(opened.values))
        return False

    def _is_bad(self, opened: _OpenTrial, line: Line) -> bool:
        """Report a round of a trial, unless it was reported earlier; return whether to prune."""
        trial = opened.trials[0]
        if line["round"] not in opened.reported:
            opened.reported.add(line["round"])
            trial.report(line[self.column], line["round"])
        stop: bool = trial.should_prune()
        return stop

    def _score(self, folder: Path) -> float:
        """Return the last round's validation score, not the test's or the best round's."""
        lines = read_lines(folder / ROUNDS)
        scores = [value for line in lines if (value := line.get(self.column)) is not None]
        if ends_lost(lines, self.column):  # it is no worse than the search can tell
            higher = self.metric.better == "higher"
            bound = self.metric.least if higher else self.metric.most
            return WORST * (-1.0 if higher else 1.0) if bound is None else bound
        if not scores:
            title = self.metric.title.lower()
            raise RecipeError(
                f"{folder} has no {title} on validation rows: its clients hold too few; raise "
                "data.validation"
            )
        return float(scores[-1])

    def _close(self, opened: _OpenTrial, value: float | None = None, state: Any = None) -> None:
        opened.over = True
        for trial in opened.trials:
            self.study.tell(trial, value, state=state)

    def best(self) -> tuple[dict[str, Any], float] | None:
        """Return the parameters and the score of the best trial, or None if none is complete.

        The first of several tied trials wins. Under privacy, report noisy max chooses the trial.
        """
        complete = self._complete()
        if self.private and complete:
            complete = [self._chosen(sorted(complete, key=lambda trial: trial.number))]
        return (dict(complete[0].params), float(complete[0].value)) if complete else None

    def _chosen(self, complete: list[Any]) -> Any:
        """Return the complete trial that report noisy max chooses.

        A choice is stored before it is shown, and a choice among the same trials is never drawn
        twice, because a second draw would cost epsilon again.
        """
        numbers, made = [trial.number for trial in complete], self._choices()
        if not made or made[-1]["among"] != numbers:
            runs = [[job.folder for job in self._jobs_of(trial)] for trial in complete]
            epsilon = self.base.tune.epsilon
            assert epsilon is not None  # checked at the start
            bits = source_of_bits(self.base, len(made))
            place = noisy_max([mean_correct_rows(folders) for folders in runs], epsilon, bits)
            made = [*made, Choice(among=numbers, trial=numbers[place], epsilon=epsilon)]
            self.study.set_user_attr(CHOICES, made)
        return next(trial for trial in complete if trial.number == made[-1]["trial"])

    def _choices(self) -> list[Choice]:
        return list(self.study.user_attrs.get(CHOICES, []))

    def promise(self) -> str:
        """Return the privacy budget that the search has spent, including every started trial."""
        waiting = self.optuna.trial.TrialState.WAITING
        begun = [t for t in self.study.get_trials(deepcopy=False) if t.state != waiting]
        runs = {job.folder: job.recipe for trial in begun for job in self._jobs_of(trial)}
        return promise(list(runs.values()), self._choices())

    def ties(self) -> list[dict[str, Any]]:
        """Return the parameters of other trials that score as high as the best one."""
        best, *others = self._complete() or [None]
        tied = [trial.params for trial in others if math.isclose(trial.value, best.value)]
        different: list[dict[str, Any]] = []
        for params in tied:
            if params not in (best.params, *different):
                different.append(dict(params))
        return different

    def _complete(self) -> list[Any]:
        """Return the complete trials, the best first; ties are ordered by their numbers."""
        states = self.optuna.trial.TrialState
        complete = self.study.get_trials(deepcopy=False, states=(states.COMPLETE,))
        sign = -1 if self.metric.better == "higher" else 1
        return sorted(complete, key=lambda trial: (sign * trial.value, trial.number))

    def best_recipe(self) -> Recipe | None:
        """Return the recipe with the best parameters and its original share of validation rows."""
        best = self.best()
        if best is None:
            return None
        recipe = self._recipe(best[0])
        return recipe.changed({"data.validation": self.held_out})

    def folders(self) -> list[Path]:
        """Return the folders of the started trials."""
        return sorted(path for path in self.out.glob("trial-*") if path.is_dir())

    def _recipe(self, params: Mapping[str, Any]) -> Recipe:
        parameters = [f"{key}={json.dumps(value)}" for key, value in params.items()]
        recipe = read(self.path, [*self.settings, *parameters])
        check_parts(recipe)  # a mistake is found before any run
        return recipe


@contextlib.contextmanager
def storing(out: Path) -> Iterator[None]:
    """Let no other process search in ``out``, and name its database in errors of the database.

    To a second search, running trials would be those of a killed one.
    """
    optuna, alchemy = _optuna(), importlib.import_module("sqlalchemy.exc")
    if (out / BEST).exists() and not _is_begun(out):
        raise RecipeError(f"{out / BEST} is of no search in {out}, and would be replaced: move it")
    try:
        with held(out, LOCK, f"another fedgist tune is using {out}", _is_begun):
            yield
    except (optuna.exceptions.StorageInternalError, alchemy.SQLAlchemyError) as error:
        reason = first_line(error.__cause__ or error)
        kind = DiskFullError if "disk is full" in reason else OutputError
        raise kind(f"{out / STUDY} cannot be written: {reason}") from error


def _is_begun(out: Path) -> bool:
    return (out / STUDY).exists()


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise RecipeError("tuning needs Optuna: pip install 'fedgist[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _rounds_told(opened: _OpenTrial, job: Job, event: Event) -> list[Line]:
    """Return the newly scored rounds of a trial's first job that an event announces.

    A resumed run announces all recorded rounds, because a kill may have come before Optuna got
    them or judged them. A finished run announces only the rounds that were not reported.
    """
    lines: list[Line] = []
    if job is not opened.jobs[0]:
        return lines
    if event.kind == "round" and event.line:
        lines = [event.line]
    elif event.kind == "began" and event.line:
        done = event.line["round"]
        lines = [line for line in read_lines(job.folder / ROUNDS) if line["round"] <= done]
    elif event.kind == "done":
        lines = read_lines(job.folder / ROUNDS)
        lines = [line for line in lines if line["round"] not in opened.reported]
    return lines


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
