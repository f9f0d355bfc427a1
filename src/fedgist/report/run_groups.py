"""Group runs by their settings: runs of a group differ only in the seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.core.metrics import PROBE
from fedgist.recipe.reading import defaults, flat, role_of
from fedgist.runs.columns import TRAIN_LOSS
from fedgist.runs.finished.finished_run import FinishedRun

Settings = Mapping[str, Any]  # by dotted key
BEFORE = "before correction"  # marks runs that lack a correction: they form their own group
BROKEN = "seal"  # marks runs that do not match their seal: they form their own group
MARKS = (BEFORE, BROKEN)


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, sorted by seed."""

    label: str
    settings: Settings
    runs: tuple[FinishedRun, ...]

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.settings["method.name"])


def group(runs: Sequence[FinishedRun]) -> tuple[list[Group], list[str]]:
    """Return the groups, and a note on each run that repeats the settings and seed of another."""
    settings_by_text: dict[str, Settings] = {}
    members: dict[str, dict[int, FinishedRun]] = {}
    notes = []
    for run in runs:
        stated = {**defaults(), **flat(run.recipe)}
        settings = {k: v for k, v in stated.items() if role_of(k) is None}
        settings.setdefault("method.name", run.name)
        if run.rounds and run.result:
            settings |= {BEFORE: run.before} if run.before else {}
        settings |= {BROKEN: run.mark} if run.mark else {}
        text = json.dumps(settings, sort_keys=True, default=str)
        settings_by_text.setdefault(text, settings)
        first = members.setdefault(text, {}).setdefault(run.seed, run)
        if first is not run:
            notes.append(
                f"{run.folder} repeats {first.folder} (same settings and seed) and is left out"
            )
    names = labels(list(settings_by_text.values()))
    groups = [
        Group(label, settings, tuple(by_seed[seed] for seed in sorted(by_seed)))
        for label, settings, by_seed in zip(
            names, settings_by_text.values(), members.values(), strict=True
        )
    ]
    return groups, notes


def labels(groups: Sequence[Settings]) -> list[str]:
    """Label each group by its method and the settings that differ between groups of the method."""
    short = [_label(settings, groups, briefly=True) for settings in groups]
    return [
        label if short.count(label) == 1 else _label(settings, groups, briefly=False)
        for label, settings in zip(short, groups, strict=True)
    ]


def _label(settings: Settings, groups: Sequence[Settings], *, briefly: bool) -> str:
    same_method = [other for other in groups if other["method.name"] == settings["method.name"]]
    differing = [
        key
        for key in settings
        if key not in MARKS and any(other.get(key) != settings[key] for other in same_method)
    ]
    last_words = [key.removesuffix(".name").rpartition(".")[2] for key in differing]
    words = [settings["method.name"]]
    for key, last in zip(differing, last_words, strict=True):
        value = settings[key]
        text = f"{value:.3g}" if briefly and isinstance(value, float) else str(value)
        words.append(f"{last if briefly and last_words.count(last) == 1 else key}={text}")
    return " ".join([*words, *(settings[mark] for mark in MARKS if mark in settings)])


def common_metric(runs: Sequence[FinishedRun]) -> str:
    """Return the metric that most runs have: an objective's first metric, or a probe's accuracy."""
    names = dict.fromkeys([*(run.first for run in runs), PROBE.name])
    had = {name: [run.last(run.column_of(name)) is not None for run in runs] for name in names}
    return max(names, key=lambda name: sum(had[name]))


def common_column(runs: Sequence[FinishedRun]) -> str:
    """Return the common metric's column that most runs have; before evaluations, the loss."""
    metric = common_metric(runs)
    columns = dict.fromkeys(run.column_of(metric) for run in runs)
    had = {name: sum(run.last(name) is not None for run in runs) for name in columns}
    column = max(columns, key=had.__getitem__)
    learning = any(run.last(TRAIN_LOSS) is not None for run in runs)
    return TRAIN_LOSS if learning and not had[column] else column
