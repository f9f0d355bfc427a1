"""All rounds of a run at its server: they are recorded, saved regularly, and can be stopped.

The rounds need only the server's context and an engine, which simulates the clients or reaches them
over a network. A run directory written here is complete.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedgist.core.tree import Tree
from fedgist.data.sources.file_sizes import in_words
from fedgist.engines.engine import EVALUATE, Engine, SpreadSimulation, metrics_of
from fedgist.engines.stop_signals import stoppable
from fedgist.errors import (
    DiskFullError,
    RecipeError,
    Stopped,
    WorkerError,
    listed,
    resume_command,
)
from fedgist.runs.best_round import selection_notes, selection_of
from fedgist.runs.divergence import divergence_notes
from fedgist.runs.evaluation import not_scored, not_scored_notes, with_names
from fedgist.runs.files import checkpoint as checkpoints
from fedgist.runs.files.checkpoint import Binding, Checkpoint
from fedgist.runs.files.columns import UNSCORED, described, is_count, of_main, tuned_over_clients
from fedgist.runs.files.record import (
    FORMAT,
    FORMAT_KEY,
    METRICS_FILE,
    RECIPE,
    RECIPE_MARK,
    RELEASES,
    RESULT,
    ROUNDS,
    STATE,
    Line,
    Record,
    read_lines,
    saved_arrays_in,
    summary,
    to_json,
    totals,
)
from fedgist.runs.files.releases import Releases, read_releases
from fedgist.runs.files.run_directory import PARTICIPANTS
from fedgist.runs.files.seals import DIGESTS, of_files, sealed
from fedgist.runs.resuming import binding_of, check_binding, check_features, of_server
from fedgist.runs.round import Observer, ServerRun, context, start_server
from fedgist.runs.round_record import PausedError
from fedgist.runs.versions import versions
from fedgist.world.server_context import ServerContext

SAVE_AFTER_S = 60.0  # within a round with long work of the server's own


STOPPING = (
    "stopping when this stage or round is finished and saved; press Ctrl-C again to stop at once"
)


@dataclass(frozen=True)
class Place:
    """The place of a run: its folder, or None for memory, and the checkpoint that it resumes.

    ``files`` holds further texts to write by name, such as a simulation's class counts. ``inputs``
    holds digests of the run's inputs besides its recipe; None stands for the server's inputs.
    ``notes`` are shown before the run's own notes. ``named`` is the folder that a user knows, if it
    is another one until the run is complete. ``raising`` says that the user raised the number
    of rounds.
    """

    folder: Path | None = None
    saved: Checkpoint | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()
    raising: bool = False
    named: Path | None = None


def run_server(
    side: ServerContext,
    engine: Engine,
    place: Place,
    observer: Observer,
    *,
    state: Tree = None,
    probe: Callable[[ServerRun], tuple[Line, list[Line]]] | None = None,
    save_arrays: Callable[[ServerRun, int | None], None] = lambda _, __: None,
    stop: threading.Event | None = None,
) -> tuple[ServerRun, Record, dict[str, Any]]:
    """Do the remaining rounds; return the federation, its record, and the run's result.

    Parameters
    ----------
    state
        The server's state before round 1. If None, it is made here.
    probe
        Trains probes on the features of models, if the recipe asks for it.
    save_arrays
        Called after each round with its number, and with None before the result is written.
    stop
        Set at the first Ctrl-C, SIGTERM or SIGHUP. Others may set it, too, to stop the run.
    """
    began = time.perf_counter()
    with contextlib.closing(engine), _naming_resume_command(place.folder):
        inputs = of_server(side) if place.inputs is None else place.inputs
        if place.saved and place.folder:
            check_binding(side, inputs, place.saved, place.folder, raising=place.raising)
        binding = binding_of(side, inputs, place.saved)
        releases = _releases(side, place)  # before later lines are cut off
        record = _open_record(side, place, binding)
        state = start_server(side) if state is None else state
        server_run = ServerRun(side, engine, state, releases=releases, probe=probe)
        costs = _begin(server_run, place)
        observer.began(side, str(place.named or place.folder or ""), server_run.round)
        notes = [*place.notes, *start_notes(side), *costs]
        _show_notes(observer, notes)
        switch = stop or threading.Event()
        _do_rounds(server_run, record, observer, binding, save_arrays, switch)
        if server_run.best is not None:
            server_run.restore(server_run.best)
        save_arrays(server_run, None)
        notes += _end_notes(server_run, record, observer)
        end = _result_of(side, record, notes, binding, time.perf_counter() - began)
        record.write(RESULT, json.dumps(sealed(json.loads(to_json(end))), indent=2) + "\n")
    return server_run, record, end


def _releases(side: ServerContext, place: Place) -> Releases | None:
    """Return the earlier releases of the run; None if repeated rounds have the same noise.

    If the file of releases is lost, all rounds after the checkpoint are charged, and one further
    round, which may have been killed after its release.
    """
    if side.task.privacy is None or side.task.privacy.source == "seed":
        return None
    if place.folder is None:
        return Releases(None)
    earlier, saved = read_releases(place.folder, side.setup.device), place.saved
    if earlier is not None:
        return earlier
    lines = read_lines(place.folder / ROUNDS)
    if saved is None and not lines and not (place.folder / RELEASES).exists():  # a new run
        return Releases(place.folder)
    before, done = (saved.binding.again, saved.round) if saved else (0, -1)
    later = sum(line["round"] > done for line in lines)
    return Releases(place.folder, again=before + 1 + later)


def _begin(server_run: ServerRun, place: Place) -> list[str]:
    """Start the engine with the saved state, if any; return notes on what checkpoints will cost."""
    engine, notes = server_run.engine, []
    if place.folder and isinstance(engine, SpreadSimulation) and engine.state_bytes:
        folder = place.folder / STATE.parent
        folder.mkdir(parents=True, exist_ok=True)
        if engine.shares(folder):
            server_run.parts_folder = folder
        else:
            size = in_words(engine.state_bytes)
            notes.append(
                f"the cluster's machines do not share {folder}: at each checkpoint the clients' "
                f"state, {size}, is sent to this process, which keeps it in memory"
            )
    if place.saved:
        server_run.restore(place.saved)
    if callable(start := getattr(engine, "start", None)):
        start()  # workers are forked before anything else starts a thread
    return notes


def _spent_budget_notes(server_run: ServerRun) -> list[str]:
    """Return a note if the run ends early because its privacy budget is spent."""
    planned, done = server_run.task.training.num_rounds, server_run.round
    if done == planned or not server_run.is_spent:
        return []
    if not done:
        raise RecipeError(
            f"privacy: the budget is spent, and no round is finished: {server_run.repeated_rounds} "
            "were begun again with other noise; what they released stays released"
        )
    note = f"privacy: the budget is spent, so the run ends after {done} of {planned} rounds: "
    note += f"{server_run.repeated_rounds} were done again with other noise (privacy.repeats pays)"
    return [note]


@contextlib.contextmanager
def _naming_resume_command(folder: Path | None) -> Iterator[None]:
    """If the disk is full or a worker died, and a checkpoint exists, name the command to resume."""
    try:
        yield
    except (DiskFullError, WorkerError) as error:
        if folder is None or not (folder / STATE).exists():
            raise
        command = resume_command(folder)
        if isinstance(error, DiskFullError):
            raise DiskFullError(error.reason, command) from error
        raise WorkerError(f"{str(error).rstrip()}; go on with: {command}") from error


def start_notes(side: ServerContext) -> list[str]:
    """Return the server's notes, and the notes on execution plans."""
    noted = [f"{name} {plan.note}" for name, plan in side.plans.items() if plan.note]
    return [*side.notes, *noted]


def _open_record(side: ServerContext, place: Place, binding: Binding) -> Record:
    """Open the run's record, and write the files that are complete before round 1."""
    saved = place.saved
    if place.folder:
        place.folder.mkdir(parents=True, exist_ok=True)
        check_features(place.folder, saved)
    record = Record(place.folder, *((saved.round, saved.binding.lines) if saved else ()))
    if place.folder and not binding.over:  # it is of an end with fewer rounds
        (place.folder / RESULT).unlink(missing_ok=True)
    record.write(RECIPE, side.recipe.to_toml() + RECIPE_MARK)
    measured = metrics_of(side.method, side.task)
    metrics = {metric.name: metric for metric in measured}
    record.write(METRICS_FILE, to_json(described(metrics)) + "\n")
    for name, text in place.files.items():
        record.write(name, text)
    if place.folder and saved:
        _seal_again(place.folder, record, saved, binding)
    return record


def _seal_again(folder: Path, record: Record, saved: Checkpoint, binding: Binding) -> None:
    """Bind the checkpoint to the files as they are now: the recipe may have more rounds."""
    before = saved.binding
    files = _files(folder, record)
    if (files, binding.over) != (before.files, before.over):
        now = replace(binding, lines=record.seal(), files=files, again=before.again)
        checkpoints.save(folder, replace(saved, binding=now))


def _files(folder: Path, record: Record) -> dict[str, str]:
    """Return the digests of the run's files, except the files of lines."""
    beside = [name for name in (PARTICIPANTS,) if (folder / name).exists()]
    return {**record.files, **of_files(folder, [*saved_arrays_in(folder), *beside])}


def _do_rounds(
    server_run: ServerRun,
    record: Record,
    observer: Observer,
    binding: Binding,
    save_arrays: Callable[[ServerRun, int | None], None],
    stop: threading.Event,
) -> None:
    """Do the rounds; raise Stopped after a signal, or an exception that the observer raised."""

    def signaled() -> None:
        stop.set()
        observer.note(STOPPING)

    with stoppable(signaled):
        rounds = _Rounds(server_run, record, observer, binding, save_arrays, stop.is_set)
        whole = rounds.do_all()
    if rounds.problems:
        raise rounds.problems[0]
    if not whole:
        raise Stopped(record.folder)


@dataclass
class _Rounds:
    """The remaining rounds of a run: each is recorded, and the run is saved regularly.

    ``problems`` holds exceptions of the observer. They are raised after the round is saved.
    """

    server_run: ServerRun
    record: Record
    observer: Observer
    binding: Binding
    save_arrays: Callable[[ServerRun, int | None], None]
    asked_to_stop: Callable[[], bool]
    problems: list[Exception] = field(default_factory=list)
    saved: float = field(default_factory=time.monotonic)

    def do_all(self) -> bool:
        """Go through the remaining rounds; return False if asked to stop before the last one.

        A checkpoint is saved every ``engine.checkpoint_every`` rounds, when the run is stopped, and
        at its end. Early stopping or a spent privacy budget ends the run early.
        """
        server_run = self.server_run
        begins = server_run.round == 0 and server_run.under_way is None  # not amid round 1
        if begins and server_run.method.stages(server_run.context("", 0)):
            self._keep(*server_run.do_round(0))
        finished = self._is_over()
        while not finished:
            try:
                lines = server_run.advance(self._pauses)
            except PausedError:
                self._save()
                return False
            self._keep(*lines)
            finished = self._is_over()
            ending = self._stops() and not finished
            every = server_run.side.setup.recipe.engine.checkpoint_every
            if ending or finished or server_run.round % every == 0:
                self._save()
            if ending:
                return False
        return True

    def _keep(self, line: Line, details: Sequence[Line]) -> None:
        """Record a round."""
        server_run, selection = self.server_run, selection_of(self.server_run.side)
        named = with_names(details, server_run.side)
        before = divergence_notes(self.record.rounds)
        self.record.add(self.binding.with_events(line), named, server_run.edges)
        if not before:
            _show_notes(self.observer, divergence_notes([line]))
        self.save_arrays(server_run, server_run.round)
        if selection and selection.keeps and selection.best(self.record.rounds) is line:
            server_run.keep_this_round()
        try:
            self.observer.finished_round(copy.deepcopy(line))  # it may be changed
        except Exception as problem:  # noqa: BLE001  # it is raised again when the round is saved
            self.problems.append(problem)

    def _pauses(self, text: str) -> bool:
        """Show the progress within a round, and save regularly; return whether to pause."""
        self.observer.working(text)
        stopping = self._stops()
        if not stopping and time.monotonic() - self.saved > SAVE_AFTER_S:
            self._save()
        return stopping

    def _stops(self) -> bool:
        return bool(self.problems) or self.asked_to_stop()

    def _is_over(self) -> bool:
        server_run, selection = self.server_run, selection_of(self.server_run.side)
        if server_run.round == server_run.task.training.num_rounds or server_run.is_spent:
            return True
        return selection is not None and selection.stops(self.record.rounds)

    def _save(self) -> None:
        """Write a checkpoint into the folder, if there is one."""
        self.saved = time.monotonic()
        server_run, record, folder = self.server_run, self.record, self.record.folder
        if not folder:
            return
        over = server_run.under_way is None and self._is_over()
        now = replace(self.binding, lines=record.seal(), files=_files(folder, record), over=over)
        now = replace(now, again=server_run.repeated_rounds)
        checkpoints.save(folder, replace(server_run.checkpoint(), binding=now))


def _show_notes(observer: Observer, notes: Sequence[str]) -> None:
    for note in notes:
        observer.note(note)


def _end_notes(server_run: ServerRun, record: Record, observer: Observer) -> list[str]:
    """Return the notes on how the run ended, and show them."""
    lines = record.rounds
    problems = [*_emptiness_notes(server_run.side, lines), *_spent_budget_notes(server_run)]
    problems += divergence_notes(lines)
    problems += _early_end_notes(server_run.side, lines[-1]["round"])
    problems += not_scored_notes(_not_scored(server_run.side, record))
    _show_notes(observer, problems)
    choice = selection_notes(server_run.side, lines)
    for text in choice:
        observer.chose(text)
    return problems + choice


def _early_end_notes(side: ServerContext, number: int) -> list[str]:
    """Return a note if a run ended before its last round, whose tests would have been more."""
    last, every = side.task.training.num_rounds, side.setup.recipe.evaluate.trained_every
    ends = [context(side, n, EVALUATE) for n in (number, last)]
    before, planned = (
        [
            side.method.before_test(replace(ctx, architecture=name))
            for name in side.task.architectures
        ]
        for ctx in ends
    )
    lacking = [f"fine-tuned by {side.setup.recipe.method.name}"] * (before != planned)
    lacking += ["trained (evaluate.trained_every)"] * bool(every and number % every)
    if number == last or not lacking:
        return []
    how = f"{listed(lacking)}, as they are after the last round"
    return [f"the run ended after {number} of {last} rounds: its models were not tested {how}"]


def _result_of(
    side: ServerContext, record: Record, notes: Sequence[str], binding: Binding, seconds: float
) -> dict[str, Any]:
    """Return a run's result: main metric, bytes sent, notes, and versions of packages."""
    selection, planned = selection_of(side), side.task.training.num_rounds
    outcome = selection.outcome(record.rounds, planned) if selection else {}
    main = side.task.objective.metrics[0]
    kept = outcome.get("kept_round")
    name = main.name
    columns = [*of_main(name), tuned_over_clients(name)]
    recorded = [c for c in columns if any(c in line for line in record.rounds)]
    if record.rounds[-1]["round"] < planned:
        outcome = {**outcome, "stopped_early": True}
    return {
        "status": "finished",
        "seed": side.setup.recipe.seed,
        "method": side.setup.recipe.method.name,
        "rounds": record.rounds[-1]["round"],
        **outcome,
        **{c: end for c in recorded if (end := summary(record.rounds, c, main.better, kept))},
        **({UNSCORED: missing} if (missing := _not_scored(side, record)) else {}),
        "communication": totals(record.rounds),
        "notes": list(notes),
        "versions": versions(side.setup.method),
        **({"privacy": side.spending.described()} if side.spending else {}),
        **({FORMAT_KEY: FORMAT} if record.folder else {}),
        DIGESTS: record.seal() | _files(record.folder, record) if record.folder else {},
        **({"rounds_raised": binding.raised} if binding.raised else {}),
        "time/total_s": seconds,
    }


def _not_scored(side: ServerContext, record: Record) -> list[Line]:
    """Return the clients that are in no mean of the run's result."""
    selection, planned = selection_of(side), side.task.training.num_rounds
    outcome = selection.outcome(record.rounds, planned) if selection else {}
    return not_scored(record.rounds, record.clients, outcome.get("kept_round"))


def _emptiness_notes(side: ServerContext, lines: Sequence[Line]) -> list[str]:
    """Return a note if a run trained no client or evaluated nothing."""
    trained = [line for line in lines if line["round"] > 0]
    notes = []
    if not any(line.get("clients/replied") for line in trained):
        num_asked = sum(line.get("clients/asked", 0) for line in trained)
        why = "each is in the record with its reason" if num_asked else "nobody was online"
        notes.append(f"nothing was learned: no reply of a client was used in any round ({why})")
    expected = (
        side.setup.recipe.privacy.share_measurements
    )  # else clients keep their scores on purpose
    columns = {column for line in lines for column in line if column.startswith("eval/")}
    if expected and all(map(is_count, columns)):
        notes.append("nothing was measured: no model was scored in any round")
    return notes
