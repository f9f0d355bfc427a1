"""An archive of finished runs: a small CSV file for each, by experiment, cell and seed.

It is what is committed of long tables and what their pages are made from. A job found there is not
done again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedgist.errors import DataError, InputError, RecipeError
from fedgist.recipe.reading import make
from fedgist.runs import atomic_files
from fedgist.runs.archived_run import of_directory, read_csv, to_csv
from fedgist.runs.corrections import computed_by, lacking
from fedgist.studies.job import Job, difference


@dataclass(frozen=True)
class Archive:
    """A folder of files, laid out as the run directories below ``runs``.

    ``command`` is written into each file that is added.
    """

    folder: Path
    runs: Path
    command: str = ""

    def place(self, job: Job) -> Path:
        """Return the file of a job, which need not be there."""
        inside = job.folder.relative_to(self.runs)
        return self.folder / inside.with_name(f"{inside.name}.csv")

    def holds(self, job: Job) -> bool:
        """Return whether the job's finished run is there, and lacks no correction."""
        path = self.place(job)
        if not path.exists():
            return False
        run = read_csv(path)
        if lacking(run.recipe, computed_by(run.result)):
            return False  # it will be replaced, whatever its settings
        recorded = dict(run.recipe)
        try:
            kept = make(recorded)
        except InputError as error:
            raise RecipeError(f"{path}: {error}") from error
        if change := difference(job.recipe, kept):
            raise RecipeError(
                f"{path} holds a run with {change}; choose another --archive, or remove the file"
            )
        return True

    def fault(self, job: Job) -> str:
        """Return why a job's file cannot be used, if it is there; nothing if it can."""
        try:
            if self.place(job).exists():
                read_csv(self.place(job))
        except DataError as error:
            return str(error)
        return ""

    def add(self, job: Job) -> None:
        """Write the file of a job whose run in its folder is finished, whole or not at all."""
        atomic_files.write(self.place(job), to_csv(of_directory(job.folder, self.command)))

    def found(self, job: Job) -> Path:
        """Return where a job's run is to be read: its file here, or else its folder."""
        return self.place(job) if self.place(job).exists() else job.folder
