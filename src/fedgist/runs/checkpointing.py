"""All rounds of a run: saved now and then, stopped when asked to, gone on with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fedgist.runs.partial_round import PausedError
from fedgist.runs.record import Line
from fedgist.runs.round import Federation, Observer

SAVE_AFTER_S = 60.0  # within a round with long work of the server's own


def loop(
    federation: Federation,
    keep: Callable[[Line, Sequence[Line]], None],
    save: Callable[[], None],
    stop: Callable[[], bool],
    enough: Callable[[], bool] = lambda: False,
) -> bool:
    """Go through the remaining rounds; return False if asked to stop before the last one.

    ``keep`` takes each round's lines. ``save`` writes a checkpoint: every
    ``engine.checkpoint_every`` rounds, when stopped, and at the end, which is also reached when
    ``enough`` says so, or another round would spend more privacy than there is.
    """
    recipe = federation.side.recipe
    last = federation.task.training.num_rounds

    def is_last() -> bool:
        return federation.round == last or enough() or federation.is_spent

    if federation.round == 0 and federation.method.stages(federation.context("", 0)):
        keep(*federation.do_round(0))
    finished = is_last()
    while not finished:
        try:
            lines = federation.advance()
        except PausedError:
            save()
            return False
        keep(*lines)
        finished = is_last()
        ending = stop() and not finished
        if ending or finished or federation.round % recipe.engine.checkpoint_every == 0:
            save()
        if ending:
            return False
    return True


def pausing(
    save: Callable[[], None], stop: Callable[[], bool], observer: Observer
) -> Callable[[str], bool]:
    """Return what is done between two stages of a round: it is shown, and saved now and then."""
    saved, show = [time.monotonic()], getattr(observer, "working", None)

    def pause(text: str) -> bool:
        if callable(show):
            show(text)
        stopping = stop()
        if not stopping and time.monotonic() - saved[0] > SAVE_AFTER_S:
            save()
            saved[0] = time.monotonic()
        return stopping

    return pause
