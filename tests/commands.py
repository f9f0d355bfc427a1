"""Processes in tests: how they are called, and how long one is waited for before it has hung."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pty
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

HANG_S = 1800.0  # far above what anything takes under any load: it only ends what hangs
OUT, ERR = "out", "err"
MAIN, CORES = "fedgist.cli.main", "fedgist.engines.worker_pool"

# fedgist's commands are forked from a process that has imported them, and what they load when they
# work: each is a process of its own, with signals and an end as any, but some seconds sooner
FORKS = multiprocessing.get_context("forkserver")
LOADED = ["fedgist.cli.seeded_runs", "dp_accounting.pld", "scipy.stats", "matplotlib.pyplot"]
FORKS.set_forkserver_preload([MAIN, *LOADED])


def call(
    words: Sequence[object], cwd: Path, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``code`` is the exit code it must have, None for any."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=_environment(env),
        timeout=HANG_S,
        capture_output=True,
        text=True,
        check=False,
    )
    return _checked(done, code)


def fedgist(
    *words: object, cwd: Path, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run one of fedgist's commands to its end."""
    return _checked(Command([str(word) for word in words], cwd, env).end(), code)


def python(script: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; fedgist is imported already."""
    return _checked(begin_script(script, cwd).end(), 0)


def begin_script(script: Path, cwd: Path) -> Command:
    """Begin a script; fedgist is imported already."""
    return Command([str(script)], cwd, work=_script)


class Command:
    """One of fedgist's commands, under way."""

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        work: Callable[[list[str]], None] | None = None,
    ) -> None:
        """Begin it in the folder ``cwd``; ``work`` is called with the words, by default fedgist."""
        self.words, self._said = list(words), Path(tempfile.mkdtemp(prefix="fedgist-said-"))
        self._process = FORKS.Process(
            target=_command,
            args=(work or _fedgist, self.words, cwd, _environment(env or {}), self._said),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def workers(self) -> list[psutil.Process]:
        """Return its own processes and theirs; none once it has ended."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.runs:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to its process group: begin it with ``in_own_group``."""
        assert os.getpgid(self.pid) == self.pid
        os.killpg(self.pid, number)

    @property
    def code(self) -> int | None:
        """Its exit code; None if it has not ended."""
        return self._process.exitcode

    def printed(self) -> str:
        """Return what it has printed so far."""
        paths = [self._said / name for name in (OUT, ERR)]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return its exit code and what it said."""
        self._process.join(HANG_S)
        code = self._process.exitcode
        assert code is not None, f"{self.words} hung"
        out, err = (_taken(self._said / name) for name in (OUT, ERR))
        self._said.rmdir()
        return subprocess.CompletedProcess(self.words, code, out, err)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "120", **env}


def _checked(
    done: subprocess.CompletedProcess[str], code: int | None
) -> subprocess.CompletedProcess[str]:
    assert code is None or done.returncode == code, f"{done.args}\n{done.stdout}{done.stderr}"
    return done


def _taken(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.unlink(missing_ok=True)
    return text


def _command(
    work: Callable[[list[str]], None],
    words: list[str],
    cwd: Path,
    env: Mapping[str, str],
    said: Path,
) -> None:
    """Be a command: in a process of its own, in whose streams nothing is yet."""
    for stream, name in ((1, OUT), (2, ERR)):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT), stream)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the tests may themselves be run by nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)  # as Python does when it starts
    vars(importlib.import_module(CORES))["usable_cores"] = lambda: 1  # as tests/conftest.py does
    work(words)


def _fedgist(words: list[str]) -> None:
    sys.argv = ["fedgist", *words]
    importlib.import_module(MAIN).main()


def in_own_group(words: list[str]) -> None:
    """Be a command of fedgist with a process group of its own, as a shell's job."""
    os.setpgid(0, 0)
    _fedgist(words)


def ignoring_hangups(words: list[str]) -> None:
    """Be a command as ``nohup`` starts it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    in_own_group(words)


def under_timeout(words: list[str]) -> None:
    """Be the program ``timeout``, which passes a signal on to the command and to its group."""
    os.execvp("timeout", ["timeout", str(HANG_S), *_begun_by_name(words)])


def in_terminal(words: list[str]) -> None:
    """Be a terminal with a command, and close it once the file ``closes`` is there."""
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, _begun_by_name(words))
    end = time.monotonic() + HANG_S
    while not Path("closes").exists() and time.monotonic() < end:
        if select.select([terminal], [], [], 0.01)[0]:
            os.write(1, os.read(terminal, 4096))
    os.close(terminal)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _begun_by_name(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "fedgist.cli", *words]


def _script(words: list[str]) -> None:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < end, "hung"
        time.sleep(0.005)


def lines_so_far(path: Path) -> list[str]:
    """Return the whole lines of a file that a process may be writing; none if it is not there."""
    text = path.read_text("utf-8") if path.exists() else ""
    return text.rpartition("\n")[0].splitlines()


def wait_for_ends(processes: Sequence[psutil.Process]) -> None:
    """Wait until processes have ended, be it that nobody has asked how (a killed parent cannot)."""
    wait_until(lambda: all(map(_ended, processes)))


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
