"""A disk that is full: the file is named, and the command that goes on; then it does."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path

import pytest

import fedgist
from fedgist.errors import DiskFullError, OutputError
from fedgist.runs.files import atomic_files
from fedgist.runs.files.record import Record

from commands import call  # isort: skip
from written import write_run  # isort: skip

RECIPE = {
    "data": {"train_rows": 100},
    "clients": {"num_clients": 3},
    "train": {"num_rounds": 4},
    "engine": {"workers": 1, "cohort_size": 2, "checkpoint_every": 1},
}


class Full:
    """Stands in for a disk: so many files are flushed, then there is no room."""

    def __init__(self, files: int) -> None:
        self.left = files

    def __call__(self, _: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_file_without_room_is_named_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_room(_: int) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "file"
    atomic_files.write(path, "old")
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(DiskFullError, match=f"file cannot be written: {os.strerror(code)}"):
        atomic_files.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_lines_without_room_are_named(tmp_path: Path) -> None:
    for name in ("rounds.jsonl", "clients.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    record = Record(None)
    record.folder = tmp_path
    with pytest.raises(DiskFullError, match="jsonl cannot be written: No space left on device"):
        record.add({"round": 1}, [{"round": 1, "client": 0}])
    with pytest.raises(DiskFullError, match="/dev/full cannot be written"):
        atomic_files.write(Path("/dev/full"), "text")


@pytest.mark.slow
def test_a_run_goes_on_by_the_command_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fedgist.run(RECIPE, out=tmp_path / "whole")
    folder = tmp_path / "the run's"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Full(8))
        with pytest.raises(DiskFullError) as full:
            fedgist.run(RECIPE, out=folder)
    what, _, command = str(full.value).partition("; go on with: ")
    assert what.startswith(str(folder))
    assert what.endswith("cannot be written: No space left on device")
    assert shlex.split(command) == ["fedgist", "run", "--resume", str(folder)]
    assert (folder / "checkpoint" / "state.safetensors").exists()
    again = fedgist.run(RECIPE, out=folder, resume=True)
    assert [line["comm/up_bytes"] for line in again.rounds] == [
        line["comm/up_bytes"] for line in whole.rounds
    ]


def test_before_a_checkpoint_no_run_is_offered_to_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Full(0))
    with pytest.raises(OutputError, match=r"cannot be written: No space left on device$"):
        fedgist.run(RECIPE, out=tmp_path / "run")


LIMITED = """
import resource, sys
from fedgist.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.argv = ["fedgist", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "words", "named"),
    [
        (
            20_000,
            ("run", "demo", "--out", "a b", "--set", "train.num_rounds=2"),
            "state.safetensors",
        ),
        (200, ("report", "runs", "-o", "page.html"), "page.html"),
        (200, ("show", "runs", "--png", "p.png"), "p.png"),
        (100, ("compare", "runs", "-o", "table.txt"), "table.txt"),
    ],
)
def test_every_command_names_the_file_and_what_goes_on(
    tmp_path: Path, limit: int, words: tuple[str, ...], named: str
) -> None:
    # a limit of the size of files fails as a full disk does, at any write
    write_run(tmp_path / "runs" / "a", [0.5, 0.6])
    script = LIMITED.format(limit=limit)
    done = call([sys.executable, "-c", script, *words], tmp_path, 1)
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]  # other packages may warn of their caches
    assert named in line
    assert "cannot be written: File too large" in line
    assert line.endswith(f"go on with: {shlex.join(['fedgist', *words])}")
