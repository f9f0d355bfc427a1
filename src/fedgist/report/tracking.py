"""Runs into TensorBoard and MLflow: from the files, so live, afterwards, and for any engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from fedgist.errors import ReportError, one_of
from fedgist.report.comparison import flat
from fedgist.report.run_files import RunFiles

MOST_PARAMETER = 500  # characters of a parameter that MLflow keeps


class Tracker(Protocol):
    """Where rounds are sent."""

    def send(self, run: RunFiles) -> int:
        """Send the rounds that are not there yet; return how many."""

    def close(self) -> None:
        """Write what is left."""


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
    """Writes event files: in ``tensorboard`` below each run, or in a folder of one's own."""

    def __init__(self, where: str | None = None) -> None:
        """``where`` is a folder; each run gets one below it."""
        self.where = where
        self.module = _need("torch.utils.tensorboard", "tensorboard")
        self.writers: dict[Path, Any] = {}
        self.sent: dict[Path, int] = {}

    def send(self, run: RunFiles) -> int:
        """Send the rounds that are new.

        The first time all of them, over what an earlier call wrote.
        """
        if run.folder not in self.writers:
            name = "-".join(run.folder.parts[-3:]).strip("/")
            folder = Path(self.where) / name if self.where else run.folder / "tensorboard"
            for old in folder.glob("events.out.tfevents.*"):
                # of an earlier call: everything is written anew, so nothing stands there twice
                old.unlink()
            self.writers[run.folder] = self.module.SummaryWriter(str(folder))
            self.sent[run.folder] = -1
            settings = "\n".join(f"    {k} = {v}" for k, v in flat(run.recipe).items())
            self.writers[run.folder].add_text("recipe", settings)
        new = [line for line in run.rounds if line["round"] > self.sent[run.folder]]
        for line in new:
            for key, value in _columns(line):
                self.writers[run.folder].add_scalar(key, value, line["round"])
            self.sent[run.folder] = line["round"]
        self.writers[run.folder].flush()
        return len(new)

    def close(self) -> None:
        """Write what is left."""
        for writer in self.writers.values():
            writer.close()


class MLflow:
    """Logs to an MLflow tracking server or store: ``MLFLOW_TRACKING_URI`` or ``where``."""

    def __init__(self, where: str | None = None) -> None:
        """``where`` is a tracking URI."""
        module = _need("mlflow", "mlflow-skinny")
        self.entities = _need("mlflow.entities", "mlflow-skinny")
        errors = _need("mlflow.exceptions", "mlflow-skinny")
        try:
            self.client = module.MlflowClient(tracking_uri=where)
        except errors.MlflowException as error:
            msg = f"MLflow: {str(error).splitlines()[0]}"
            raise ReportError(msg) from error
        self.ids: dict[Path, str] = {}
        self.sent: dict[Path, int] = {}
        self.running: set[Path] = set()

    def send(self, run: RunFiles) -> int:
        """Send the rounds that are new: the run is known again by its folder."""
        if run.folder not in self.ids:
            self.ids[run.folder], self.sent[run.folder] = self._open(run)
        number = self.ids[run.folder]
        new = [line for line in run.rounds if line["round"] > self.sent[run.folder]]
        for line in new:
            metrics = [self.entities.Metric(k, v, 0, line["round"]) for k, v in _columns(line)]
            self.client.log_batch(number, metrics=metrics)
            self.client.set_tag(number, "fedgist.round", str(line["round"]))
            self.sent[run.folder] = line["round"]
        if run.finished and run.folder in self.running:
            self.client.set_terminated(number)
            self.running.remove(run.folder)
        return len(new)

    def close(self) -> None:
        """Mark runs that are not finished: nobody watches them any more, until the next call."""
        for folder in self.running:
            self.client.set_terminated(self.ids[folder], "KILLED")

    def _open(self, run: RunFiles) -> tuple[str, int]:
        name = str(run.recipe.get("data", {}).get("name", "fedgist"))
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        folder = str(run.folder.resolve()).replace("'", "")
        known = self.client.search_runs([number], f"tags.`fedgist.folder` = '{folder}'")
        if known:
            tags = known[0].data.tags
            if int(tags.get("fedgist.round", -1)) <= run.done:
                if known[0].info.status != "FINISHED":
                    self.client.update_run(known[0].info.run_id, status="RUNNING")
                    self.running.add(run.folder)
                return known[0].info.run_id, int(tags.get("fedgist.round", -1))
            self.client.delete_run(known[0].info.run_id)  # the folder holds another, younger run
        made = self.client.create_run(
            number, run_name=f"{run.name} seed {run.seed}", tags={"fedgist.folder": folder}
        )
        parameters = [
            self.entities.Param(k, str(v)[:MOST_PARAMETER])
            for k, v in flat(run.recipe).items()
            if not k.startswith("paper.")
        ]
        self.client.log_batch(made.info.run_id, params=parameters)
        self.running.add(run.folder)
        return made.info.run_id, -1


TRACKERS: dict[str, Callable[[str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


def tracker(text: str) -> Tracker:
    """Return the tracker of ``tensorboard[:FOLDER]`` or ``mlflow[:URI]``."""
    name, _, where = text.partition(":")
    try:
        return TRACKERS[one_of(name, TRACKERS, "tracker")](where or None)
    except ValueError as error:
        raise ReportError(str(error)) from error
