"""Rounds sent to TensorBoard and MLflow: read from run directories, during a run or afterwards."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from fedgist.errors import ReportError, did_you_mean, first_line
from fedgist.federation.recipe import flat
from fedgist.report.run_files import RunFiles

MOST_PARAMETER = 500  # characters of a parameter that MLflow keeps


class Tracker(Protocol):
    """Where rounds are sent."""

    def send(self, run: RunFiles) -> int:
        """Send the rounds that were not sent yet; return how many."""

    def close(self) -> None:
        """Finish writing; nothing can be sent afterwards."""


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"tracking needs {package}: pip install 'fedgist[track]'"
        raise ReportError(msg) from error


def _columns(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if key != "round" and isinstance(value, int | float):
            yield key, float(value)


class TensorBoard:
    """Writes event files: into ``tensorboard`` below each run, or into a folder of choice."""

    def __init__(self, where: str | None = None) -> None:
        """Write below ``where``, a folder for each run; without it, below the runs."""
        self.where = where
        self.module = _need("torch.utils.tensorboard", "tensorboard")
        self.writers: dict[Path, Any] = {}
        self.sent: dict[Path, int] = {}

    def send(self, run: RunFiles) -> int:
        """Send the rounds that are new; return how many.

        The first call replaces what an earlier process wrote, and sends all rounds.
        """
        if run.folder not in self.writers:
            self.writers[run.folder] = self._open(run)
            self.sent[run.folder] = -1
        writer = self.writers[run.folder]
        new = [line for line in run.rounds if line["round"] > self.sent[run.folder]]
        for line in new:
            for key, value in _columns(line):
                writer.add_scalar(key, value, line["round"])
            self.sent[run.folder] = line["round"]
        writer.flush()
        return len(new)

    def close(self) -> None:
        """Finish writing."""
        for writer in self.writers.values():
            writer.close()

    def _open(self, run: RunFiles) -> Any:
        name = "-".join(run.folder.parts[-3:]).strip("/")
        folder = Path(self.where) / name if self.where else run.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()  # all rounds are written again: none may be in the log twice
        writer = self.module.SummaryWriter(str(folder))
        settings = "\n".join(f"    {k} = {v}" for k, v in flat(run.recipe).items())
        writer.add_text("recipe", settings)
        return writer


class MLflow:
    """Logs to an MLflow tracking server or store."""

    def __init__(self, where: str | None = None) -> None:
        """Log to the tracking URI ``where``; without it, to ``MLFLOW_TRACKING_URI``."""
        module = _need("mlflow", "mlflow-skinny")
        self.entities = _need("mlflow.entities", "mlflow-skinny")
        errors = _need("mlflow.exceptions", "mlflow-skinny")
        try:
            self.client = module.MlflowClient(tracking_uri=where)
        except errors.MlflowException as error:
            msg = f"MLflow: {first_line(error)}"
            raise ReportError(msg) from error
        self.ids: dict[Path, str] = {}
        self.sent: dict[Path, int] = {}
        self.running: set[Path] = set()

    def send(self, run: RunFiles) -> int:
        """Send the rounds that are new; return how many. A run is recognized by its folder."""
        if run.folder not in self.ids:
            self.ids[run.folder], self.sent[run.folder] = self._open(run)
        run_id = self.ids[run.folder]
        new = [line for line in run.rounds if line["round"] > self.sent[run.folder]]
        for line in new:
            metrics = [self.entities.Metric(k, v, 0, line["round"]) for k, v in _columns(line)]
            self.client.log_batch(run_id, metrics=metrics)
            self.client.set_tag(run_id, "fedgist.round", str(line["round"]))
            self.sent[run.folder] = line["round"]
        if run.finished and run.folder in self.running:
            self.client.set_terminated(run_id)
            self.running.remove(run.folder)
        return len(new)

    def close(self) -> None:
        """Mark unfinished runs as killed, as nobody sends their rounds until the next call."""
        for folder in self.running:
            self.client.set_terminated(self.ids[folder], "KILLED")

    def _open(self, run: RunFiles) -> tuple[str, int]:
        """Return the id of the run in MLflow, an earlier one or a new one, and its last round."""
        name = str(run.recipe.get("data", {}).get("name", "fedgist"))
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        folder = str(run.folder.resolve()).replace("'", "")
        earlier = self.client.search_runs([number], f"tags.`fedgist.folder` = '{folder}'")
        if earlier:
            run_id = earlier[0].info.run_id
            last = int(earlier[0].data.tags.get("fedgist.round", -1))
            if last <= run.done:
                if earlier[0].info.status != "FINISHED":
                    self.client.update_run(run_id, status="RUNNING")
                    self.running.add(run.folder)
                return run_id, last
            self.client.delete_run(run_id)  # the folder holds another, younger run
        return self._create(run, number, folder), -1

    def _create(self, run: RunFiles, experiment: str, folder: str) -> str:
        created = self.client.create_run(
            experiment, run_name=f"{run.name} seed {run.seed}", tags={"fedgist.folder": folder}
        )
        run_id = str(created.info.run_id)
        parameters = [
            self.entities.Param(k, str(v)[:MOST_PARAMETER])
            for k, v in flat(run.recipe).items()
            if not k.startswith("paper.")
        ]
        self.client.log_batch(run_id, params=parameters)
        self.running.add(run.folder)
        return run_id


TRACKERS: dict[str, Callable[[str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


def tracker(text: str) -> Tracker:
    """Return the tracker of ``tensorboard[:FOLDER]`` or ``mlflow[:URI]``.

    Raises
    ------
    ReportError
        If the name is unknown, the tracker's package is missing, or its URI cannot be used.
    """
    name, _, where = text.partition(":")
    if name not in TRACKERS:
        msg = f"unknown tracker {name!r}{did_you_mean(name, TRACKERS)}"
        raise ReportError(msg)
    return TRACKERS[name](where or None)
