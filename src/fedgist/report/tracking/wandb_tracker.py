"""Weights & Biases (W&B): one run per run, in the project of its data set."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedgist.errors import ReportError, first_line, printable
from fedgist.report.tracking.tracker import RoundLog, TrackedRun, needed, switch_off_reports

if TYPE_CHECKING:
    import wandb

ID_LENGTH = 16  # of a run's id, in hexadecimal digits
# W&B would also send the machine, its load, the program's path and arguments, git, and the output;
# without a limit, the end of a run would wait for a server that is gone
SETTINGS: dict[str, object] = {
    "silent": True,
    "host": "",
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "finish_timeout": 60.0,  # seconds
    "finish_timeout_raises": True,
}


class WandB:
    """Logs to W&B, or to files for ``wandb sync`` if ``WANDB_MODE`` is ``offline``."""

    needs_folder = False

    def __init__(self, project: str | None = None) -> None:
        """Log to the project ``PROJECT`` or ``ENTITY/PROJECT``; the default is the data's name."""
        self.entity, _, self.project = (project or "").rpartition("/")
        switch_off_reports("WANDB_ERROR_REPORTING", "false")
        self.module = needed("wandb", "wandb")
        own = needed("wandb.errors", "wandb").Error
        self.errors: tuple[type[Exception], ...] = (own, OSError, ValueError)
        with self.answering():
            self.module.Settings(project=self.project or None)  # is it a valid name?
            allowed = self.module.Settings.model_fields  # of the installed version
            self.settings = {key: value for key, value in SETTINGS.items() if key in allowed}
            general = self.module.setup().settings
            self.offline_runs = Path(general.wandb_dir) if general.mode == "offline" else None
            if general.mode == "online" and not self.module.login():
                raise ReportError("there is no API key: wandb login; or set WANDB_MODE=offline")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Turn an error of W&B into a ReportError of one line."""
        try:
            yield
        except self.errors as error:
            raise ReportError(f"W&B: {first_line(error)}") from error

    def open(self, run: TrackedRun) -> RoundLog:
        """Return the log of the run, which is recognized by its id, or a new one.

        Without a server nothing tells which rounds were sent: the log then takes all rounds, and
        replaces the files that an earlier process wrote for this run.
        """
        number = run.id[:ID_LENGTH]
        for old in self.offline_runs.glob(f"offline-run-*-{number}") if self.offline_runs else ():
            if not old.is_symlink():
                shutil.rmtree(old)
        with self.answering():
            opened = self.module.init(
                entity=self.entity or None,
                project=self.project or re.sub(r"[/\\#?%:]", "_", printable(run.data)),
                name=printable(run.name),
                id=number,
                config=dict(run.settings),
                resume="allow",
                reinit="create_new",  # a sweep has several runs at a time
                settings=self.settings,
            )
            return _WandBRun(self, opened, last=opened.step - 1)


@dataclass(frozen=True)
class _WandBRun:
    """One run of W&B."""

    tracker: WandB
    run: wandb.Run
    last: int

    def add(self, number: int, values: Mapping[str, float]) -> None:
        with self.tracker.answering():
            self.run.log(dict(values), step=number, commit=True)

    def end(self, *, finished: bool) -> None:
        with self.tracker.answering():
            self.run.finish(exit_code=0 if finished else 1)
