"""MLflow: one run per run, in the experiment of its data set."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from fedgist.errors import ReportError, first_line, printable
from fedgist.report.tracking.tracker import RoundLog, TrackedRun, needed, switch_off_reports

MOST_PARAMETER = 500  # maximal characters of a parameter
PACKAGE = "mlflow-skinny"
RUNNING, FINISHED, KILLED = "RUNNING", "FINISHED", "KILLED"  # states of a run
ID, LAST, FOLDER = "fedgist.id", "fedgist.round", "fedgist.folder"  # tags of a run


class MLflow:
    """Logs to an MLflow tracking server or store."""

    needs_folder = False

    def __init__(self, uri: str | None = None) -> None:
        """Log to the tracking URI ``uri``; the default is ``MLFLOW_TRACKING_URI``."""
        switch_off_reports("MLFLOW_DISABLE_TELEMETRY", "true")
        module = needed("mlflow", PACKAGE)
        self.entities = needed("mlflow.entities", PACKAGE)
        own = needed("mlflow.exceptions", PACKAGE).MlflowException
        database = needed("sqlalchemy.exc", "sqlalchemy").SQLAlchemyError
        self.errors: tuple[type[Exception], ...] = (own, database, OSError)
        with self.answering():
            self.client = module.MlflowClient(tracking_uri=uri)
            self.client.search_experiments(max_results=1)  # is anything there?

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Turn an error of MLflow or of its store into a ReportError of one line."""
        try:
            yield
        except self.errors as error:
            raise ReportError(f"MLflow: {first_line(error)}") from error

    def open(self, run: TrackedRun) -> RoundLog:
        """Return the log of the run, which is recognized by a tag, or a new one."""
        with self.answering():
            experiment = self.client.get_experiment_by_name(run.data)
            number = (
                experiment.experiment_id if experiment else self.client.create_experiment(run.data)
            )
            earlier = self.client.search_runs([number], f"tags.`{ID}` = '{run.id}'")
            if earlier:
                info, tags = earlier[0].info, earlier[0].data.tags
                return _MLflowRun(self, info.run_id, int(tags.get(LAST, -1)), info.status)
            return _MLflowRun(self, self._create(run, number), -1, RUNNING)

    def _create(self, run: TrackedRun, experiment: str) -> str:
        folder = {} if run.folder is None else {FOLDER: printable(str(run.folder.resolve()))}
        created = self.client.create_run(
            experiment, run_name=printable(run.name), tags={ID: run.id, **folder}
        )
        parameters = [
            self.entities.Param(name_for_mlflow(key), printable(str(value))[:MOST_PARAMETER])
            for key, value in run.settings.items()
        ]
        self.client.log_batch(created.info.run_id, params=parameters)
        return str(created.info.run_id)


class _MLflowRun:
    """One run of MLflow."""

    def __init__(self, tracker: MLflow, run_id: str, last: int, status: str) -> None:
        self.tracker, self.run_id, self.last, self.status = tracker, run_id, last, status

    def add(self, number: int, values: Mapping[str, float]) -> None:
        client = self.tracker.client
        columns = {name_for_mlflow(key): value for key, value in values.items()}
        with self.tracker.answering():
            if self.status != RUNNING:  # it was ended, and goes on
                client.update_run(self.run_id, status=RUNNING)
                self.status = RUNNING
            metrics = [self.tracker.entities.Metric(k, v, 0, number) for k, v in columns.items()]
            client.log_batch(self.run_id, metrics=metrics)
            client.set_tag(self.run_id, LAST, str(number))

    def end(self, *, finished: bool) -> None:
        status = FINISHED if finished else KILLED
        if self.status not in {status, FINISHED}:
            with self.tracker.answering():
                self.tracker.client.set_terminated(self.run_id, status)
            self.status = status


def name_for_mlflow(key: str) -> str:
    """Return a column's name for MLflow, with underscores for other characters.

    >>> name_for_mlflow("server/$a//..b")
    'server/_a/..b'
    """
    parts = re.sub(r"[^\w.\- :/]", "_", key).split("/")
    return "/".join(part for part in parts if part.strip(".")) or "_"
