"""TensorBoard: event files below each run, or in a chosen folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedgist.errors import ReportError
from fedgist.report.tracking.tracker import RoundLog, TrackedRun, needed
from fedgist.runs.files.atomic_files import room_for

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """Writes event files to ``tensorboard`` below each run, or to a chosen folder."""

    def __init__(self, folder: str | None = None) -> None:
        """Write to one folder per run below ``folder``; the default is below the runs."""
        self.folder = None if folder is None else Path(folder)
        if self.folder and self.folder.exists() and not self.folder.is_dir():
            raise ReportError(f"tensorboard:{folder} is not a folder")
        self.module = needed("torch.utils.tensorboard", "tensorboard")

    @property
    def needs_folder(self) -> bool:
        """Whether runs that are kept in memory only cannot be tracked."""
        return self.folder is None

    def open(self, run: TrackedRun) -> RoundLog:
        """Return a log that starts anew and takes all rounds of the run.

        The event files that an earlier process wrote for this run are recognized by their suffix
        and deleted. No other file is deleted.
        """
        folder = self._folder_of(run)
        if folder.is_symlink():
            raise ReportError(
                f"{folder} is a link: event files are written into folders, never through a link"
            )
        mark = f".fedgist-{_mark(run)}"  # suffix of the run's own event files
        for old in folder.glob(f"events.out.tfevents.*{mark}"):
            if old.is_file() and not old.is_symlink():
                old.unlink()  # all rounds are written again, and none may appear twice
        writer = self.module.SummaryWriter(str(folder), filename_suffix=mark)
        text = "\n".join(f"    {key} = {value}" for key, value in run.settings.items())
        writer.add_text("run", run.name)
        writer.add_text("recipe", text)
        return _Events(writer)

    def _folder_of(self, run: TrackedRun) -> Path:
        if self.folder is None:
            if run.folder is None or run.folder.is_file():
                raise ReportError(
                    f"{run.folder or run.name} is no run directory: name a folder for its events, "
                    "tensorboard:FOLDER"
                )
            return run.folder / "tensorboard"
        parts = run.folder.parts[-3:] if run.folder else (run.name.replace(" ", "-"), run.id[:12])
        return self.folder / "-".join(parts).strip("/")


@dataclass(frozen=True)
class _Events:
    """The event file of one run."""

    writer: SummaryWriter
    last: int = -1

    def add(self, number: int, values: Mapping[str, float]) -> None:
        with room_for(Path(self.writer.log_dir)):
            for key, value in values.items():
                self.writer.add_scalar(key, value, number)
            self.writer.flush()

    def end(self, *, finished: bool) -> None:
        del finished  # event files have no state
        self.writer.close()


def _mark(run: TrackedRun) -> str:
    """Return a text that identifies the run's folder, also if another run replaces the run."""
    if run.folder is None:
        return run.id[:12]
    return hashlib.sha256(os.fsencode(run.folder.resolve())).hexdigest()[:12]
