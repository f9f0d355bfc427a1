"""Archive of finished runs: one small CSV file per run, by experiment, cell and seed.

Long tables are committed in this form, and the results pages are made from it. A job in the
archive is not run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedgist.errors import DataError, InputError, RecipeError
from fedgist.recipe.reading import make
from fedgist.runs.files import atomic_files
from fedgist.runs.finished.archived_run import ENDING, archived_part, read_csv, to_csv
from fedgist.runs.finished.run_reader import problems_of, read_run
from fedgist.runs.versions import is_current
from fedgist.studies.job import Job, difference


@dataclass(frozen=True)
class Archive:
    """A folder of CSV files with the layout of the run directories below ``runs``.

    ``command`` is written into each added file, unless its job has its own.
    """

    folder: Path
    runs: Path
    command: str = ""

    def place(self, job: Job) -> Path:
        """Return the path of a job's file, which may not exist yet."""
        inside = job.folder.relative_to(self.runs)
        return self.folder / inside.with_name(f"{inside.name}{ENDING}")

    def holds(self, job: Job) -> bool:
        """Return whether the archive holds the job's finished run of its method's version."""
        path = self.place(job)
        if not path.exists():
            return False
        run = read_csv(path)
        if not is_current(run.name, run.result):
            return False  # a run of an earlier version is replaced, whatever its settings
        code = job.recipe.engine.code_folder  # the archive has no paths of a machine
        try:
            kept = make(dict(run.recipe), beside=Path(code) if code else None)
        except InputError as error:
            raise RecipeError(f"{path}: {error}") from error
        if change := difference(job.recipe, kept):
            raise RecipeError(
                f"{path} holds a run with {change}; choose another --archive, or remove the file"
            )
        return True

    def fault(self, job: Job) -> str:
        """Return why a job's file cannot be read; an empty text if it can, or does not exist."""
        try:
            if self.place(job).exists():
                read_csv(self.place(job))
        except DataError as error:
            return str(error)
        return ""

    def add(self, job: Job) -> None:
        """Write the file of a job with a finished run, atomically; refuse a damaged run."""
        run = read_run(job.folder)
        if problems := problems_of([run]):
            raise DataError(problems[0])
        atomic_files.write(self.place(job), to_csv(archived_part(run, job.command or self.command)))

    def found(self, job: Job) -> Path:
        """Return where to read a job's run: its file in the archive, or else its folder."""
        return self.place(job) if self.place(job).exists() else job.folder
