"""A run as its files describe it: the one value that tables, pictures and pages are made from.

It is read from a run folder, also while the run is in progress, or from an archived run's file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.core.objectives.metrics import Metric
from fedgist.errors import DataError
from fedgist.runs.files.columns import (
    ends_lost,
    is_of_server,
    models_of,
    of_all,
    over_clients,
    over_models,
    read_described,
)
from fedgist.runs.files.file_checks import fault_of_split
from fedgist.runs.files.prediction_file import Predictions, read_predictions
from fedgist.runs.files.record import (
    CLIENTS,
    PARTITION,
    Line,
    Lines,
    is_over,
    read_table,
    read_usable_lines,
)
from fedgist.runs.files.seals import SEALED, Seal
from fedgist.runs.versions import Computed

OLD = "of an earlier version"


@dataclass(frozen=True)
class FinishedRun:
    """A run read from its folder, with the rounds done so far, or from its archived file."""

    folder: Path  # or the archived run's file
    recipe: dict[str, Any]
    rounds: list[Line]
    result: dict[str, Any]
    described: Mapping[str, object]  # the metrics of its objective
    command: str = ""  # that makes the run, if it is archived
    problems: tuple[str, ...] = ()  # sentences about unreadable content
    seal: Seal = SEALED
    trusted: bool = False  # show the run although its files do not match its seal
    label: str = ""  # name of its row, if the reader gave one

    @property
    def usable(self) -> bool:
        """Whether the run is shown: it has a recipe, and its seal is unbroken or ignored."""
        return bool(self.recipe) and (self.trusted or not self.seal.is_broken)

    @property
    def mark(self) -> str:
        """A mark for output about a run whose files do not match its seal."""
        return "(seal broken)" if self.seal.is_broken else ""

    @property
    def called(self) -> str:
        """The reader's name of its row, or the name of the method, followed by the run's mark."""
        return f"{self.label or self.name} {self.mark}".rstrip()

    @property
    def name(self) -> str:
        """Name of the method."""
        method: str = self.recipe.get("method", {}).get("name", self.folder.name)
        return method

    @property
    def seed(self) -> int:
        """Seed of all the run's random numbers."""
        seed: int = self.recipe.get("seed", 0)
        return seed

    @property
    def division(self) -> int:
        """The division of its rows into training and test rows."""
        division: int = self.recipe.get("data", {}).get("division", 0)
        return division

    @property
    def fold(self) -> int:
        """The fold of its test rows; 0 without folds, where divisions overlap."""
        return self.division % (self.recipe.get("data", {}).get("folds") or 1)

    @functools.cached_property
    def clients(self) -> Lines:
        """Lines for each client and evaluation, read at first use because the file may be long."""
        return read_usable_lines(self.folder / CLIENTS)

    @functools.cached_property
    def predictions(self) -> Predictions | None:
        """Predictions of the clients' own rows, or None if there are none that can be used."""
        try:
            return read_predictions(self.folder)
        except DataError:
            return None

    @property
    def public_noise(self) -> int | None:
        """Seed of the run's noise, which anyone can subtract; None: no noise, or the system's."""
        privacy = self.recipe.get("privacy", {})
        simulated = privacy.get("unit", "none") != "none" and privacy.get("noise", "seed") == "seed"
        return self.seed if simulated else None

    @property
    def done(self) -> int:
        """Number of the last completed round, or 0."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def planned(self) -> int:
        """Number of rounds in the recipe."""
        planned: int = self.recipe.get("train", {}).get("num_rounds", self.done)
        return planned

    @property
    def age(self) -> str:
        """A mark for a run with a result that does not say by which version it was computed."""
        return OLD if self.rounds and self.result and self.computed.method == 0 else ""

    @property
    def computed(self) -> Computed:
        """The versions of the method and of the shared arithmetic, by the run's result."""
        return Computed.of_result(self.result)

    @property
    def finished(self) -> bool:
        """Whether all planned rounds are done, or the run stopped early."""
        return bool(self.rounds) and is_over(self.planned, self.done, self.result)

    @property
    def kept(self) -> int | None:
        """The round whose models were kept, if the best round is kept instead of the last one."""
        kept = self.result.get("kept_round")
        return kept if isinstance(kept, int) and self.finished else None

    @functools.cached_property
    def split(self) -> dict[str, Any] | None:
        """Names of ``classes`` and ``clients``, and ``train`` rows by client and class.

        None if the file is missing or unusable.
        """
        return self._split[0] or None

    @property
    def split_problems(self) -> list[str]:
        """Problems of the partition's file, if the file exists."""
        return self._split[1] if (self.folder / PARTITION).exists() else []

    @functools.cached_property
    def _split(self) -> tuple[dict[str, Any], list[str]]:
        problems: list[str] = []
        return read_table(self.folder / PARTITION, json.loads, problems, fault_of_split), problems

    @functools.cached_property
    def metrics(self) -> dict[str, Metric]:
        """Metrics described by the run's objective; without a description, the built-in ones."""
        return read_described(self.described)

    @property
    def first(self) -> str:
        """Name of the objective's first metric."""
        return next(iter(self.described), "accuracy")

    @functools.cached_property
    def main(self) -> str:
        """Column of the first metric: the mean over clients, or the global model's score."""
        return self.column_of(self.first)

    def column_of(self, metric: str) -> str:
        """Return the column of a metric: over clients, or else of the server's models."""
        columns = [over_clients("client", metric), of_all(metric), over_models(metric)]
        last = self.rounds[-1] if self.rounds else {}
        columns += (column for column in last if is_of_server(column, metric))
        return next((column for column in columns if self.last(column) is not None), columns[0])

    def models(self, metric: str) -> list[str]:
        """Return the names of the server's models that have this metric on all test rows."""
        return models_of({name: None for line in self.rounds for name in line}, metric)

    def last(self, key: str) -> float | None:
        """Return the last value of a column up to the kept round, or None if it has no value.

        A score that models had before they diverged is not the run's.
        """
        if self.kept is None and ends_lost(self.rounds, key):
            return None
        rounds, values = self.column(key)
        pairs = zip(rounds, values, strict=True)
        return next((v for r, v in reversed([*pairs]) if self.kept is None or r <= self.kept), None)

    def total(self, key: str) -> int:
        """Return the sum of a column."""
        return sum(line.get(key) or 0 for line in self.rounds)

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Return the rounds with a value in a column, and the values."""
        pairs = [(line["round"], line[key]) for line in self.rounds if line.get(key) is not None]
        return [r for r, _ in pairs], [v for _, v in pairs]

    def sent(self) -> dict[int, tuple[int, int]]:
        """Return the cumulative bytes sent up and down by round."""
        totals, up, down = {}, 0, 0
        for line in self.rounds:
            up += line.get("comm/up_bytes") or 0
            down += line.get("comm/down_bytes") or 0
            totals[int(line["round"])] = up, down
        return totals
