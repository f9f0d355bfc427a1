"""Runs that are interrupted, or end and get more rounds: they must go on with the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedgist
from fedgist.core.method import Context, Method, Replies
from fedgist.errors import Stopped
from fedgist.runs.files import checkpoint
from fedgist.runs.round import Observer, ServerRun
from fedgist.testing.small_worlds import without_times

CTRL_C, KILL = "Ctrl-C", "kill"


class StopAfter(Observer):
    """An observer that stops a run at once after a round, which is not saved any more."""

    def __init__(self, last: int) -> None:
        self.last = last

    def finished_round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.last:
            raise KeyboardInterrupt


def bare(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of a record without the columns of time."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def goes_on(
    method: Method,
    how: str,
    place: tuple[int, str],
    recipe: dict[str, Any],
    given: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> checkpoint.Checkpoint:
    """Interrupt a run before a stage of a round, go on, and compare it with an uninterrupted one.

    Return what was saved when it was interrupted.
    """
    parts = given | {"method": method}
    whole = fedgist.run(recipe, out=folder / "whole", **parts)
    update = type(method).server_update

    def interrupted(self: Method, server: Any, replies: Replies, ctx: Context) -> Any:
        if (ctx.round, ctx.stage) == place:
            if how == CTRL_C:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise KeyboardInterrupt
        return update(self, server, replies, ctx)

    with monkeypatch.context() as patched:
        patched.setattr(type(method), "server_update", interrupted)
        with pytest.raises(Stopped if how == CTRL_C else KeyboardInterrupt):
            fedgist.run(recipe, out=folder / "cut", **parts)
    saved = checkpoint.load(folder / "cut")
    assert saved is not None
    assert saved.round == place[0] - 1
    again = fedgist.run(recipe, out=folder / "cut", resume=True, **parts)
    for name, array in whole.server_run.checkpoint().server.items():
        assert torch.equal(array, again.server_run.checkpoint().server[name]), name
    for line, other in zip(whole.rounds, again.rounds, strict=True):
        assert without_times(line) == without_times(other)
        assert list(line) == list(other), "the record's bytes are the same, but for times"
    return saved


def gets_more_rounds(recipe: dict[str, Any], folder: Path, **given: Any) -> None:
    """Run one round, raise the rounds to the recipe's, and compare with a run that had them all."""
    whole = fedgist.run(recipe, out=folder / "whole", **given)
    rounds = recipe["train"]["num_rounds"]
    short = recipe | {"train": recipe["train"] | {"num_rounds": 1}}
    fedgist.run(short, out=folder / "cut", **given)
    again = fedgist.run(recipe, out=folder / "cut", resume=True, rounds=rounds, **given)
    assert len(again.rounds) == rounds
    for line, other in zip(whole.rounds, again.rounds, strict=True):
        found = without_times(other)
        found.pop("events", None)  # says that it went on
        assert without_times(line) == found


def killed_in_round(number: int, recipe: dict[str, Any], folder: Path, **how: Any) -> None:
    """Run a recipe as if it were killed at the begin of a round: nothing is saved then."""
    advance = ServerRun.advance

    def go(self: ServerRun, pauses: Any) -> Any:
        if self.round + 1 == number:
            raise KeyboardInterrupt
        return advance(self, pauses)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(ServerRun, "advance", go)
        fedgist.run(recipe, out=folder, **how)
