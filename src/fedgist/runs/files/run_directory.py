"""Run directories: only one process uses a directory, and no run is replaced by accident."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedgist.data.sources.file_sizes import MissingFileError
from fedgist.errors import InputError, RecipeError
from fedgist.runs.files.record import (
    LINES,
    METRICS_FILE,
    PARTITION,
    RECIPE,
    RECIPE_MARK,
    RELEASES,
    RESULT,
    ROUNDS,
    STATE,
    read_bytes_or_empty,
    read_lines,
    saved_arrays_in,
)

OF_A_RUN = (str(STATE), str(RELEASES), *LINES, RESULT, PARTITION, METRICS_FILE)
LOCK = STATE.with_name("lock")
PARTICIPANTS = "participants.csv"
SITES_STATE = STATE.with_name("sites.json")  # of a run with real sites
SEED_NAME = re.compile(r"seed--?[0-9]+(-division-[0-9]+)?")
PART = "clients-"  # how names of files of clients' state begin, beside the checkpoint
PATIENCE_S = 5.0  # the workers of a killed run hold its lock until they notice that it ended


def as_folder(name: str) -> str:
    """Return a folder name that is valid on every system; other characters become underscores."""
    return re.sub(r"[^\w.=,+-]+", "_", name)


def name_of_seed(seed: int, division: int | None = None) -> str:
    """Return the folder name of one run among those of several seeds, or divisions of the rows.

    An archive's file has the same name.
    """
    return f"seed-{seed}" if division is None else f"seed-{seed}-division-{division}"


def is_of_seed(name: str) -> bool:
    """Return whether a name is one that :func:`name_of_seed` gives."""
    return SEED_NAME.fullmatch(name) is not None


def locked(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """Hold the folder's lock: two processes in one run directory would write each round twice.

    Raises
    ------
    RecipeError
        If another process holds the lock.
    """
    if folder is None:
        return contextlib.nullcontext()
    return held(folder, LOCK, f"{folder}: another process is using this run directory", holds_run)


@contextlib.contextmanager
def held(
    folder: Path, lock: Path, refusal: str, is_begun: Callable[[Path], bool]
) -> Iterator[None]:
    """Hold a lock in ``folder``; raise RecipeError with ``refusal`` if another process holds it.

    The lock ends with its process. If ``is_begun`` says that nothing was written into the folder,
    what was made for the lock is removed.
    """
    path = folder / lock
    if not _can_hold(path.parent):
        yield
        return
    file = FileLock(path, timeout=PATIENCE_S)
    try:
        file.acquire()
    except Timeout as error:
        raise RecipeError(refusal) from error
    try:
        yield
    finally:
        file.release()
        if not is_begun(folder):
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()
                folder.rmdir()


def is_held(folder: Path) -> bool:
    """Return whether a process holds the folder's lock; False if that cannot be determined."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK)
    try:  # for a moment: another reader may be looking, too
        lock.acquire(timeout=0.03, poll_interval=0.01)
    except Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def _can_hold(place: Path) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # the run itself will raise an error about its folder
        return False
    return True


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run: a checkpoint, or a recipe with the mark of a run's."""
    if any((folder / name).exists() for name in (STATE, RELEASES)):
        return True
    return read_bytes_or_empty(folder / RECIPE).endswith(RECIPE_MARK.encode())


def seeds_in(folder: Path) -> list[Path]:
    """Return the folders in ``folder`` that hold runs of seeds or divisions."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if is_of_seed(path.name) and holds_run(path)]


def check_own_files(folder: Path) -> None:
    """Raise RecipeError if a run would replace files in ``folder`` that are not a run's."""
    if not holds_run(folder) and (others := _files_of_run(folder)):
        raise RecipeError(
            f"{others[-1]} is not a file of a run, and a run in {folder} would replace it; choose "
            "another folder, or move the file"
        )


def check_entry(folder: Path | None, *, resume: bool, overwrite: bool) -> bool:
    """Return whether to resume the run in ``folder``.

    Raises
    ------
    RecipeError
        If there is no run to resume, a run that may not be replaced, or a file that no run wrote.
    """
    if folder is None:
        return False
    if (folder.exists() and not folder.is_dir()) or any(p.is_file() for p in folder.parents):
        raise RecipeError(f"{folder} is not a folder")
    if resume:
        if not (folder / RECIPE).exists():
            raise RecipeError(f"{folder} holds no run to resume")
        check_own_files(folder)
        return True
    check_own_files(folder)
    if seeds_in(folder):
        raise RecipeError(
            f"{folder} holds runs of several seeds; choose another folder, or remove them"
        )
    if any((folder / name).exists() for name in (STATE, RELEASES)) and not overwrite:
        lines = read_lines(folder / ROUNDS)
        done = lines[-1]["round"] if lines else 0
        raise RecipeError(
            f"{folder} holds a run ({done} rounds done); go on with it: fedgist run --resume "
            f"{folder}; or replace it: --overwrite"
        )
    return False


@contextlib.contextmanager
def naming_folder(folder: Path | None) -> Iterator[None]:
    """If a file of the recipe of the run in ``folder`` is missing, say where it may be found.

    A recipe's paths are read from the current folder, which may not be that of the run's start.
    """
    try:
        yield
    except InputError as error:
        file = _missing_file(error)
        if folder is None or file is None:
            raise
        cure = "put it back"
        if not file.is_absolute():
            above = [place for place in folder.resolve().parents if (place / file).exists()]
            cure = f"give the command in {above[0] if above else 'the folder where it was begun'}"
        raise RecipeError(f"{error}, and the recipe of {folder} reads it: {cure}") from error


def _missing_file(error: BaseException | None) -> Path | None:
    """Return the path of the missing file that is an error's cause, if any."""
    while error is not None and not isinstance(error, MissingFileError):
        error = error.__cause__
    return None if error is None else error.path


def clear(folder: Path) -> None:
    """Remove the files of an earlier run."""
    for path in _files_of_run(folder):
        path.unlink(missing_ok=True)


def _files_of_run(folder: Path) -> list[Path]:
    """Return the paths in a folder that a run's files have; its recipe, which has the mark, last.

    A kill while they are removed then leaves what is known as a run's.
    """
    names = (*OF_A_RUN, *saved_arrays_in(folder))
    paths = [*(folder / name for name in names), *_parts_in(folder / STATE.parent)]
    return [path for path in (*paths, folder / RECIPE) if path.exists()]


def remove_parts(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove the files of clients' state from a checkpoint's folder, except those kept."""
    for path in _parts_in(folder):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def _parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PART}*.safetensors"))
