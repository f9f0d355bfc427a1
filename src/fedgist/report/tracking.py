"""Send rounds to TensorBoard or MLflow, from run directories, during or after a run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from fedgist.errors import ReportError, did_you_mean, first_line, printable
from fedgist.recipe.reading import flat
from fedgist.runs.atomic_files import room_for
from fedgist.runs.finished.finished_run import FinishedRun

MOST_PARAMETER = 500  # maximal characters of a parameter in MLflow


class Tracker(Protocol):
    """A destination of rounds."""

    def send(self, run: FinishedRun) -> int:
        """Send the new rounds; return their number."""

    def close(self) -> None:
        """Finish writing; no round can be sent afterwards."""


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReportError(f"tracking needs {package}: pip install 'fedgist[track]'") from error


def _columns(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if key != "round" and isinstance(value, int | float):
            yield key, float(value)


class TensorBoard:
    """Writes event files to ``tensorboard`` below each run, or to a chosen folder."""

    def __init__(self, folder: str | None = None) -> None:
        """Write to one folder per run below ``folder``; the default is below the runs."""
        self.folder = folder
        self.module = _need("torch.utils.tensorboard", "tensorboard")
        self.writers: dict[Path, Any] = {}
        self.sent: dict[Path, int] = {}

    def send(self, run: FinishedRun) -> int:
        """Send the new rounds; return their number.

        The first call replaces the event files that an earlier process wrote for this run, which it
        recognizes by their suffix, and sends all rounds. No other file is deleted.
        """
        if run.folder not in self.writers:
            self.writers[run.folder] = self._open(run)
            self.sent[run.folder] = -1
        writer = self.writers[run.folder]
        new = [line for line in run.rounds if line["round"] > self.sent[run.folder]]
        with room_for(Path(writer.log_dir)):
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

    def _open(self, run: FinishedRun) -> Any:
        name = "-".join(run.folder.parts[-3:]).strip("/")
        if not self.folder and run.folder.is_file():
            raise ReportError(
                f"{run.folder} is a file: name a folder for its events, tensorboard:FOLDER"
            )
        folder = Path(self.folder) / name if self.folder else run.folder / "tensorboard"
        if folder.is_symlink():
            raise ReportError(
                f"{folder} is a link: event files are written into folders, never through a link"
            )
        mark = f".fedgist-{folder_digest(run.folder)[:12]}"  # suffix of the run's own event files
        for old in folder.glob(f"events.out.tfevents.*{mark}"):
            if old.is_file() and not old.is_symlink():
                old.unlink()  # all rounds are written again, and none may appear twice
        writer = self.module.SummaryWriter(str(folder), filename_suffix=mark)
        settings = "\n".join(f"    {k} = {v}" for k, v in flat(run.recipe).items())
        writer.add_text("recipe", settings)
        if run.mark:
            writer.add_text("seal", run.mark)
        return writer


class MLflow:
    """Logs to an MLflow tracking server or store."""

    def __init__(self, uri: str | None = None) -> None:
        """Log to the tracking URI ``uri``; the default is ``MLFLOW_TRACKING_URI``."""
        module = _need("mlflow", "mlflow-skinny")
        self.entities = _need("mlflow.entities", "mlflow-skinny")
        self.error: type[Exception] = _need("mlflow.exceptions", "mlflow-skinny").MlflowException
        with self._answering():
            self.client = module.MlflowClient(tracking_uri=uri)
        self.ids: dict[Path, str] = {}
        self.sent: dict[Path, int] = {}
        self.running: set[Path] = set()

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except self.error as error:
            raise ReportError(f"MLflow: {first_line(error)}") from error

    def send(self, run: FinishedRun) -> int:
        """Send the new rounds; return their number. A run is recognized by its folder."""
        with self._answering():
            return self._send(run)

    def _send(self, run: FinishedRun) -> int:
        if run.folder not in self.ids:
            self.ids[run.folder], self.sent[run.folder] = self._open(run)
        run_id = self.ids[run.folder]
        new = [line for line in run.rounds if line["round"] > self.sent[run.folder]]
        for line in new:
            columns = {name_for_mlflow(key): value for key, value in _columns(line)}
            metrics = [self.entities.Metric(k, v, 0, line["round"]) for k, v in columns.items()]
            self.client.log_batch(run_id, metrics=metrics)
            self.client.set_tag(run_id, "fedgist.round", str(line["round"]))
            self.sent[run.folder] = line["round"]
        if run.finished and run.folder in self.running:
            self.client.set_terminated(run_id)
            self.running.remove(run.folder)
        return len(new)

    def close(self) -> None:
        """Mark unfinished runs as killed, because their rounds are no longer sent."""
        with self._answering():
            for folder in self.running:
                self.client.set_terminated(self.ids[folder], "KILLED")

    def _open(self, run: FinishedRun) -> tuple[str, int]:
        """Return the id of the existing or new run in MLflow, and its last round."""
        name = str(run.recipe.get("data", {}).get("name", "fedgist"))
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        # a digest, because a path may contain quotes, which a filter cannot
        mark = folder_digest(run.folder)
        earlier = self.client.search_runs([number], f"tags.`fedgist.id` = '{mark}'")
        if earlier:
            run_id = earlier[0].info.run_id
            last = int(earlier[0].data.tags.get("fedgist.round", -1))
            if last <= run.done:
                if earlier[0].info.status != "FINISHED":
                    self.client.update_run(run_id, status="RUNNING")
                    self.running.add(run.folder)
                return run_id, last
            self.client.delete_run(run_id)  # the folder holds a newer run
        return self._create(run, number, mark), -1

    def _create(self, run: FinishedRun, experiment: str, mark: str) -> str:
        tags = {"fedgist.id": mark, "fedgist.folder": printable(str(run.folder.resolve()))}
        created = self.client.create_run(
            experiment, run_name=printable(f"{run.called} seed {run.seed}"), tags=tags
        )
        run_id = str(created.info.run_id)
        parameters = [
            self.entities.Param(name_for_mlflow(k), printable(str(v))[:MOST_PARAMETER])
            for k, v in flat(run.recipe).items()
            if not k.startswith("paper.")
        ]
        self.client.log_batch(run_id, params=parameters)
        self.running.add(run.folder)
        return run_id


def name_for_mlflow(key: str) -> str:
    """Return a column's name for MLflow, with underscores for other characters.

    >>> name_for_mlflow("server/$a//..b")
    'server/_a/..b'
    """
    parts = re.sub(r"[^\w.\- :/]", "_", key).split("/")
    return "/".join(part for part in parts if part.strip(".")) or "_"


def folder_digest(folder: Path) -> str:
    """Return a digest that identifies a run's folder."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()


TRACKERS: dict[str, Callable[[str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


def tracker(text: str) -> Tracker:
    """Return the tracker of ``tensorboard[:FOLDER]`` or ``mlflow[:URI]``."""
    name, _, target = text.partition(":")
    if name not in TRACKERS:
        raise ReportError(f"unknown tracker {name!r}{did_you_mean(name, TRACKERS)}")
    return TRACKERS[name](target or None)
